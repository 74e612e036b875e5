"""Quantised dtypes: which there are, and what is known of each. Semantics: `decode_rope.reference.quantise`."""

import torch

# As the kernels number them.
CODES = {torch.float8_e4m3fn: 1, torch.float8_e5m2: 2, torch.int8: 3}
DYNAMIC = (torch.float8_e4m3fn, torch.int8)  # may have a scale for each token and head
_FLOAT8 = {dtype for name in dir(torch) if name.startswith("float8_") and isinstance(dtype := getattr(torch, name), torch.dtype)}


def code_of(dtype: torch.dtype) -> int:
    """How the kernels number a quantised dtype; 0 for any other."""
    return CODES.get(dtype, 0)


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a kernel's pointer has: quantised codes are bytes to it."""
    return torch.uint8 if dtype in CODES else dtype


def is_float8(dtype: torch.dtype) -> bool:
    return dtype in _FLOAT8


def cache_dtype(call, cache: torch.Tensor) -> torch.dtype:
    """The dtype of what a cache holds: that of its tensor, or `kv_dtype` for bytes."""
    return call.kv_dtype if cache.dtype == torch.uint8 and call.kv_dtype is not None else cache.dtype
