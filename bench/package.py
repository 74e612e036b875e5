"""All that the benchmark takes from inside decode_rope. Everything else here uses its public functions."""

from typing import Any

from bench.driver import Facts
from bench.providers import need
from bench.workloads import Model

_GEOMETRY, _DRIVER = "decode_rope.launch.decode", "decode_rope.launch.driver"
DECODE_KERNEL = "rope_append_decode_kernel"  # as a profiler names it


def geometry(numbers: tuple[int, ...]) -> Any:
    """A decode geometry of these numbers, in the order of its fields."""
    return need(_GEOMETRY, "Geometry")(*numbers)


def chosen_geometry(model: Model, tokens: int) -> Any:
    """The geometry that the package chooses for a decode step."""
    return need(_GEOMETRY, "decode_geometry")(tokens, model.num_q_heads, model.num_kv_heads, model.head_dim)


def facts_of(launch: Any) -> Facts:
    """How the kernel behind what `DecodeRope.bind` returned is launched.

    Raises:
        AttributeError: there is no compiled kernel behind it, as on the CPU.
    """
    plan, compiled = launch.plan, launch.plan.compiled
    pointers = {name: ("p", address) for name, address in {**launch.addresses, "faults_ptr": plan.faults.data_ptr()}.items()}
    values = pointers | {name: ("q", number) for name, number in plan.integers.items()}
    arguments = [*[values[name] for name in compiled.parameters], *[("p", 0)] * compiled.num_scratch]
    pdl = bool(compiled.options.get("launch_pdl"))
    carveout = plan.carveout if need(_DRIVER, "knows_carveout")() else -1
    return Facts(compiled.function, plan.grid, compiled.options["num_warps"], compiled.shared, pdl, arguments, carveout)
