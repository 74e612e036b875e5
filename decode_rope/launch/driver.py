"""A kernel launch in the CUDA driver's own form: `cuLaunchKernelEx` with arguments packed ahead.

For a kernel of 35 parameters `kernel[grid]` takes 33 µs of host time, `CompiledKernel.run` 10 and the driver call itself 4 (H200
machine, Triton 3.6). Layouts are those of cuda.h, CUDA 12.0 and later: CUlaunchConfig and CUlaunchAttribute.
"""

import ctypes
import re
import struct
from functools import cache

import torch
import triton

_STREAM_AT, _PARAMETERS_AT = 32, 56  # offsets in the packed buffer; CUlaunchConfig is 56 bytes
_ATTRIBUTE_BYTES = 72
_PROGRAMMATIC_STREAM_SERIALIZATION, _PREFERRED_SHARED_MEMORY_CARVEOUT = 6, 14
_CARVEOUT_SINCE = 12050  # the CUDA version whose drivers know it
_INVALID_CONTEXT = 201
_WORDS = {f"{kind}{bits}" for kind in "ubs" for bits in (32, 64)}  # of PTX; what `pack` can pass


@cache
def _library():
    return ctypes.CDLL("libcuda.so.1")


def available() -> bool:
    """Whether the driver library is here and knows `cuLaunchKernelEx`."""
    try:
        return hasattr(_library(), "cuLaunchKernelEx")
    except OSError:
        return False


@cache
def cuda_version() -> int:
    """The newest CUDA version the driver supports, as 1000 · major + 10 · minor."""
    number = ctypes.c_int()
    _library().cuDriverGetVersion(ctypes.byref(number))
    return number.value


def version() -> str:
    """The same in words, such as 13.0."""
    return f"{cuda_version() // 1000}.{cuda_version() % 1000 // 10}"


def knows_carveout() -> bool:
    """Whether a launch may ask the driver for shared memory."""
    return cuda_version() >= _CARVEOUT_SINCE


def scratch_parameters(ptx: str, given: int) -> int | None:
    """How many trailing scratch pointers Triton gave a kernel beyond its `given` parameters; None if its PTX shows anything
    else, in which case it must not be launched from here."""
    entry = re.search(r"\.entry\s+\S+\(([^)]*)\)", ptx)
    if entry is None:
        return None
    kinds = re.findall(r"\.param\s+\.(\w+)", entry[1])
    return len(kinds) - given if len(kinds) >= given and set(kinds) <= _WORDS else None


def pack(function: int, options: dict, shared: int, grid: int, stream: int, parameters: tuple[int, ...], carveout: int) -> tuple:
    """The arguments of a `cuLaunchKernelEx` call, to be passed to `launch`; they are never changed, so any thread may.

    Args:
        function: CUfunction, as an int.
        options: the kernel's compile options, for the number of warps and whether it is launched early (PDL).
        shared: bytes of shared memory a program takes.
        grid: number of programs.
        stream: CUstream, as an int.
        parameters: the kernel's parameters in order, in 64 bits each; the driver reads the lower half where a parameter has 32.
        carveout: how much shared memory a multiprocessor should keep meanwhile, in percent of the most it can have; a hint. -1
            leaves that to the driver, and so does a driver older than CUDA 12.5.
    """
    attributes = [(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)] if options.get("launch_pdl") else []
    if carveout >= 0 and knows_carveout():
        attributes.append((_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout))
    count = len(parameters)
    attribute_at = _PARAMETERS_AT + 8 * count
    buffer = ctypes.create_string_buffer(attribute_at + _ATTRIBUTE_BYTES * len(attributes))
    base = ctypes.addressof(buffer)
    struct.pack_into("=7I", buffer, 0, grid, 1, 1, 32 * options["num_warps"], 1, 1, shared)
    struct.pack_into("=QQI", buffer, _STREAM_AT, stream, base + attribute_at if attributes else 0, len(attributes))
    struct.pack_into(f"={count}q", buffer, _PARAMETERS_AT, *parameters)
    for i, (kind, value) in enumerate(attributes):
        struct.pack_into("=IIi", buffer, attribute_at + _ATTRIBUTE_BYTES * i, kind, 0, value)
    pointers = (ctypes.c_void_p * count)(*[base + _PARAMETERS_AT + 8 * i for i in range(count)])
    return ctypes.byref(buffer), ctypes.c_void_p(function), pointers, None


class Machine:
    """What a launch asks of the machine every time: one object, so that a test can put a stand-in in its place.

    Attributes:
        cu_launch: `cuLaunchKernelEx`, which returns an error code, 0 for success; None without a driver.
        stream: device index -> its current CUstream, as an int.
        device: -> index of the current device.
        hooks: a profiler that wants to see Triton's launches adds itself here. While it is not empty, launches go through Triton.
    """

    __slots__ = ("cu_launch", "device", "hooks", "stream")

    def __init__(self):
        self.cu_launch = _library().cuLaunchKernelEx if available() else None
        self.stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self.device = getattr(torch._C, "_cuda_getDevice", None)
        self.hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", ())


machine = Machine()


def launch(packed: tuple) -> None:
    """Launch what `pack` packed.

    Raises:
        RuntimeError: the driver refused; its own words say why.
    """
    code = machine.cu_launch(*packed)
    if code == _INVALID_CONTEXT:  # a thread that has not touched the GPU yet
        torch.cuda.current_stream().query()
        code = machine.cu_launch(*packed)
    if code:
        raise RuntimeError(f"decode_rope: the kernel launch failed with CUDA driver error {code}, {error_string(code)}")


def error_string(code: int) -> str:
    """The driver's own words for an error code."""
    text = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown error"
