"""All that the benchmark takes from inside decode_rope. Everything else here uses its public functions."""

from typing import Any

from bench.driver import Facts
from bench.providers import need
from bench.workloads import Model

_GEOMETRY, _DRIVER = "decode_rope.geometry", "decode_rope.driver"
DECODE_KERNEL = "decode_kernel"  # as a profiler names it


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
    plan, variant = launch.plan, launch.plan.variant
    pointers = [("p", address) for address in (*launch.addresses, plan.faults.data_ptr())]
    arguments = [*variant.in_order((*pointers, *[("q", number) for number in plan.integers])), *[("p", 0)] * variant.num_scratch]
    pdl = bool(variant.options.get("launch_pdl"))
    carveout = plan.carveout if need(_DRIVER, "knows_carveout")() else -1
    return Facts(variant.function, plan.grid, variant.options["num_warps"], variant.shared, pdl, arguments, carveout)
