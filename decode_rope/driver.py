"""A kernel launch in the CUDA driver's own form: `cuLaunchKernelEx` with arguments packed ahead.

For a kernel of 35 parameters `kernel[grid]` takes 33 µs of host time, `CompiledKernel.run` 10 and the driver call itself 4 (H200
machine, Triton 3.6). Layouts are those of cuda.h, CUDA 12.0 and later: CUlaunchConfig and CUlaunchAttribute.
"""

import ctypes
import re
import struct
from functools import cache

import torch

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


def pack(variant, grid: int, stream: int, parameters: tuple[int, ...], carveout: int = -1) -> tuple:
    """The arguments of a `cuLaunchKernelEx` call, to be passed to `launch`; they are never changed, so any thread may.

    Args:
        variant: a loaded `variants.Variant`.
        grid: number of programs.
        stream: CUstream, as an int.
        parameters: the kernel's parameters in order, in 64 bits each, of which the driver reads the lower half where a parameter
            has 32; Triton's scratch pointers, last, are null: these kernels use none.
        carveout: how much shared memory a multiprocessor should keep meanwhile, in percent of the most it can have; a hint. -1,
            and before CUDA 12.5 always, leaves that to the driver.
    """
    attributes = [(_PROGRAMMATIC_STREAM_SERIALIZATION, 1)] if variant.options.get("launch_pdl") else []
    if carveout >= 0 and knows_carveout():
        attributes.append((_PREFERRED_SHARED_MEMORY_CARVEOUT, carveout))
    count = len(parameters) + variant.num_scratch
    attribute_at = _PARAMETERS_AT + 8 * count
    buffer = ctypes.create_string_buffer(attribute_at + _ATTRIBUTE_BYTES * len(attributes))
    base = ctypes.addressof(buffer)
    struct.pack_into("=7I", buffer, 0, grid, 1, 1, 32 * variant.options["num_warps"], 1, 1, variant.shared)
    struct.pack_into("=QQI", buffer, _STREAM_AT, stream, base + attribute_at if attributes else 0, len(attributes))
    struct.pack_into(f"={len(parameters)}q", buffer, _PARAMETERS_AT, *parameters)
    for i, (kind, value) in enumerate(attributes):
        struct.pack_into("=IIi", buffer, attribute_at + _ATTRIBUTE_BYTES * i, kind, 0, value)
    pointers = (ctypes.c_void_p * count)(*[base + _PARAMETERS_AT + 8 * i for i in range(count)])
    return ctypes.byref(buffer), ctypes.c_void_p(variant.function), pointers, None


def launch(packed: tuple) -> None:
    """Launch what `pack` packed.

    Raises:
        RuntimeError: the driver refused; its own words say why.
    """
    code = cu_launch_kernel_ex()(*packed)
    if code == _INVALID_CONTEXT:  # a thread that has not touched the GPU yet
        torch.cuda.current_stream().query()
        code = cu_launch_kernel_ex()(*packed)
    if code:
        raise RuntimeError(f"decode_rope: the kernel launch failed with CUDA driver error {code}, {error_string(code)}")


def cu_launch_kernel_ex():
    """The driver's function; returns an error code, 0 for success."""
    return _library().cuLaunchKernelEx


def error_string(code: int) -> str:
    """The driver's own words for an error code."""
    text = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown error"
