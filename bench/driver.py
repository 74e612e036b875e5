"""cuLaunchKernelEx through ctypes, with every structure built beforehand: the least a launch from Python can cost."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def raw_launch(facts: Facts, stream: int, owner: object = None) -> Callable[[], None]:
    """A bare driver launch of a kernel, on `stream`. `owner` keeps its memory and is kept as long.

    Raises:
        OSError: there is no CUDA driver.
    """
    parameters, values = kernel_parameters(facts.arguments)
    config, attributes = launch_config(facts, stream)
    call, function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx, ctypes.c_void_p(facts.function)
    by_reference, kept = ctypes.byref(config), (values, config, attributes, owner)

    def run(_kept: tuple = kept) -> None:
        if code := call(by_reference, function, parameters, None):
            raise RuntimeError(f"cuLaunchKernelEx: error {code}")

    return run
