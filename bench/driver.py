"""cuLaunchKernelEx through ctypes, with every structure built beforehand: the least a launch from Python can cost."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from bench.providers import need

_PROGRAMMATIC_STREAM_SERIALIZATION, _PREFERRED_SHARED_MEMORY_CARVEOUT = 6, 14
_TYPES = {"p": ctypes.c_void_p, "q": ctypes.c_int64}


class _AttributeValue(ctypes.Union):
    _fields_ = [("pad", ctypes.c_char * 64), ("number", ctypes.c_int)]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the id, padded to eight bytes, then a union of 64."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Facts(NamedTuple):
    """How a kernel is launched. arguments: (`p` pointer or `q` int64, value) in the kernel's order, Triton's own last. carveout: in
    percent, -1 for none asked for."""

    function: int
    grid: int
    num_warps: int
    shared: int
    pdl: bool
    arguments: list[tuple[str, int]]
    carveout: int = -1


def facts_of(launch: Any) -> Facts:
    """Of what `DecodeRope.bind` returned.

    Raises:
        AttributeError: there is no compiled kernel behind it, as on the CPU.
    """
    plan, variant = launch.plan, launch.plan.variant
    pointers = [("p", address) for address in (*launch.addresses, plan.faults.data_ptr())]
    arguments = [*variant.in_order((*pointers, *[("q", number) for number in plan.integers])), *[("p", 0)] * variant.num_scratch]
    pdl = bool(variant.options.get("launch_pdl"))
    carveout = plan.carveout if need("decode_rope.driver", "knows_carveout")() else -1
    return Facts(variant.function, plan.grid, variant.options["num_warps"], variant.shared, pdl, arguments, carveout)


def resident_programs(facts: Facts) -> int:
    """How many programs of a kernel one multiprocessor holds at once, as the driver says.

    Raises:
        RuntimeError: it would not say.
    """
    count = ctypes.c_int()
    call = ctypes.CDLL("libcuda.so.1").cuOccupancyMaxActiveBlocksPerMultiprocessor
    function, threads, shared = ctypes.c_void_p(facts.function), 32 * facts.num_warps, ctypes.c_size_t(facts.shared)
    if code := call(ctypes.byref(count), function, threads, shared):
        raise RuntimeError(f"cuOccupancyMaxActiveBlocksPerMultiprocessor: error {code}")
    return count.value


def kernel_parameters(arguments: Sequence[tuple[str, int]]) -> tuple[ctypes.Array, list[Any]]:
    """Array of pointers to the argument values, and the values, which must be kept alive."""
    values = [_TYPES[kind](value) for kind, value in arguments]
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values)), values


def launch_config(facts: Facts, stream: int) -> tuple[LaunchConfig, ctypes.Array]:
    """The configuration, and the attributes it points at, which must be kept alive."""
    wanted = [(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)] * facts.pdl
    wanted += [(_PREFERRED_SHARED_MEMORY_CARVEOUT, facts.carveout)] * (facts.carveout >= 0)
    attributes = (LaunchAttribute * 2)()
    for attribute, (kind, number) in zip(attributes, wanted, strict=False):
        attribute.id, attribute.value.number = kind, number
    config = LaunchConfig(shared=facts.shared, stream=stream, num_attributes=len(wanted))
    config.grid[:] = (facts.grid, 1, 1)
    config.block[:] = (32 * facts.num_warps, 1, 1)
    config.attributes = attributes
    return config, attributes


def raw_launch(launch: Any, stream: int) -> Callable[[], None]:
    """A bare driver launch of a bound launch's kernel, on `stream`.

    Raises:
        AttributeError: there is no compiled kernel behind `launch`.
        OSError: there is no CUDA driver.
    """
    facts = facts_of(launch)
    parameters, values = kernel_parameters(facts.arguments)
    config, attributes = launch_config(facts, stream)
    call, function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p(facts.function)
    by_reference, kept = ctypes.byref(config), (values, config, attributes, launch)

    def run(_kept: tuple = kept) -> None:
        if code := call(by_reference, function, parameters, None):
            raise RuntimeError(f"cuLaunchKernelEx: error {code}")

    return run
