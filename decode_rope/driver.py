"""A kernel launch in the CUDA driver's own form: `cuLaunchKernelEx` with arguments packed ahead.

`kernel[grid]` spends 40-55 µs and `CompiledKernel.run` 10 µs of host time on this package's 35 parameters (H200's host); the
driver call itself takes 4-5, and packing fourteen addresses into a prepared buffer 0.7. Layouts are those of cuda.h (CUDA 12.0
and later): CUlaunchConfig and CUlaunchAttribute.
"""

import ctypes
import re
import struct
from functools import cache

_STREAM_AT, _PARAMETERS_AT = 32, 56  # offsets in the packed buffer; CUlaunchConfig is 56 bytes
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_INVALID_CONTEXT = 201


@cache
def _library():
    return ctypes.CDLL("libcuda.so.1")


def available() -> bool:
    """Whether the driver library is here and knows `cuLaunchKernelEx`."""
    try:
        return hasattr(_library(), "cuLaunchKernelEx")
    except OSError:
        return False


def scratch_parameters(ptx: str, given: int) -> int | None:
    """How many trailing scratch pointers Triton gave a kernel beyond its `given` parameters; None if its PTX shows anything
    else, in which case it must not be launched from here."""
    entry = re.search(r"\.entry\s+\S+\(([^)]*)\)", ptx)
    kinds = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry else []
    extra = kinds[given:]
    return len(extra) if len(kinds) >= given and set(kinds) <= {"u64", "b64", "s64"} else None


class Launcher:
    """One launch of one loaded kernel, whose addresses and stream change from call to call. One thread's, for it packs in place.

    Args:
        variant: a loaded `variants.Variant`.
        grid: number of programs.
        num_addresses: how many pointers come first among the kernel's parameters; they are given at each call.
        integers: the 64-bit parameters after them. Triton's scratch pointers, last, are null: these kernels use none.
    """

    def __init__(self, variant, grid: int, num_addresses: int, integers: tuple[int, ...]):
        count = num_addresses + len(integers) + variant.num_scratch
        attribute_at = _PARAMETERS_AT + 8 * count
        self._buffer = ctypes.create_string_buffer(attribute_at + 72)
        base = ctypes.addressof(self._buffer)
        struct.pack_into("=7I", self._buffer, 0, grid, 1, 1, 32 * variant.options["num_warps"], 1, 1, variant.shared)
        struct.pack_into("=IIi", self._buffer, attribute_at, _PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        struct.pack_into(f"={len(integers)}q", self._buffer, _PARAMETERS_AT + 8 * num_addresses, *integers)
        self._parameters = (ctypes.c_void_p * count)(*(base + _PARAMETERS_AT + 8 * i for i in range(count)))
        self._function = ctypes.c_void_p(variant.function)
        self._config = ctypes.c_void_p(base)
        self._attributes = (base + attribute_at, 1) if variant.options.get("launch_pdl") else (0, 0)
        self._pack = struct.Struct(f"={3 + num_addresses}Q").pack_into
        self._launch = _library().cuLaunchKernelEx

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> None:
        self._pack(self._buffer, _STREAM_AT, stream, *self._attributes, *addresses)
        code = self._launch(self._config, self._function, self._parameters, None)
        if code:
            self._retry(code)

    def _retry(self, code: int) -> None:
        if code == _INVALID_CONTEXT:  # a thread that has not touched the GPU yet
            import torch

            torch.cuda.current_stream().query()
            code = self._launch(self._config, self._function, self._parameters, None)
        if code:
            raise RuntimeError(f"decode_rope: the kernel launch failed: CUDA driver error {code}, {error_string(code)}")


def error_string(code: int) -> str:
    """The driver's own words for an error code."""
    text = ctypes.c_char_p()
    _library().cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else "unknown error"
