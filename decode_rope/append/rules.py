"""Rules for single arguments, and for how the tensors of one call lie in memory.

Every message names the argument, what was expected, what came and what to do.
"""

import torch
from torch import Tensor

from .layout import KV_LAYOUTS, overlaps_itself, share_memory

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_TOKENS = 2**28  # a fault record keeps the row in 28 bits
MAX_AXES = 8  # the kernels read one row of the table for each


def check_tensor(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def check_bool(name: str, x) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected a bool, got {type(x).__name__}")


def check_choice(name: str, x, choices: tuple[str, ...]) -> None:
    words = " or ".join(f'"{choice}"' for choice in choices)
    if not isinstance(x, str):
        raise TypeError(f"{name}: expected {words}, got {type(x).__name__}")
    if x not in choices:
        raise ValueError(f"{name}: expected {words}, got {x!r}")


def check_integer(name: str, x, least: int) -> None:
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if not least <= x < 2**63:
        raise ValueError(f"{name}: expected at least {least} and less than 2^63, got {x}")


def check_enable_pdl(enable_pdl) -> None:
    if enable_pdl is not None and not isinstance(enable_pdl, bool):
        raise TypeError(f"enable_pdl: expected None, True or False, got {type(enable_pdl).__name__}")


def check_append_flags(call) -> None:
    check_choice("kv_layout", call.kv_layout, KV_LAYOUTS)
    check_bool("is_neox", call.is_neox)
    check_enable_pdl(call.enable_pdl)
    check_integer("tokens_per_request", call.tokens_per_request, 1)


def check_last_dim(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides {x.stride()}; "
            f"call .contiguous() on it, or slice another dimension"
        )


def check_dense(name: str, x: Tensor) -> None:
    """The rule for a tensor of one dimension."""
    if x.shape[0] > 1 and x.stride(0) != 1:
        raise ValueError(f"{name}: expected stride 1, got {x.stride(0)}; call .contiguous() on it")


def check_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype bfloat16, float16 or float32, got {x.dtype}")


def check_index_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")


def check_like(name: str, out, like_name: str, like: Tensor, *, any_dtype: bool = False) -> None:
    """The rule for an output: it has the dtype and shape of what is written to it."""
    check_tensor(name, out)
    if out.dtype != like.dtype and not any_dtype:
        raise TypeError(f"{name}: expected the dtype of {like_name}, {like.dtype}, got {out.dtype}")
    if out.shape != like.shape:
        raise ValueError(f"{name}: expected shape {tuple(like.shape)} as {like_name}, got {tuple(out.shape)}")
    check_last_dim(name, out)


def check_table(cos_sin_cache, head_dim: int) -> None:
    """The rules for a rotary table that serves heads of `head_dim` elements."""
    if isinstance(cos_sin_cache, tuple | list):
        raise TypeError(
            f"cos_sin_cache: expected one tensor, got a {type(cos_sin_cache).__name__}; "
            f"join cosines and sines of shape [max_position, rotary_dim / 2] by torch.cat([cos, sin], dim=-1), in fp32"
        )
    check_tensor("cos_sin_cache", cos_sin_cache)
    if cos_sin_cache.is_complex():
        raise ValueError(
            f"cos_sin_cache: expected float32, got {cos_sin_cache.dtype}; turn a complex table such as freqs_cis into "
            f"torch.cat([t.real, t.imag], dim=-1).float()"
        )
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError(
            f"cos_sin_cache: expected float32, got {cos_sin_cache.dtype}; a table in half precision costs up to 3e-3 rad at every "
            f"position, so rebuild it with decode_rope.RopeTable.build rather than cast it"
        )
    if cos_sin_cache.dim() != 2 or cos_sin_cache.shape[0] < 1:
        raise ValueError(
            f"cos_sin_cache: expected [max_position, rotary_dim], cos then sin, with at least one row, "
            f"got shape {tuple(cos_sin_cache.shape)}"
        )
    rotary_dim = cos_sin_cache.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"cos_sin_cache: expected an even rotary_dim of at most head_dim {head_dim}, got {rotary_dim}; "
            f"pass None if nothing rotates"
        )
    if not cos_sin_cache.is_contiguous():
        raise ValueError(
            f"cos_sin_cache: expected a contiguous table, got strides {cos_sin_cache.stride()}; "
            f"call .contiguous() once, when it is built"
        )


def check_axis_map(axis_map, cos_sin_cache) -> None:
    check_tensor("axis_map", axis_map)
    if axis_map.dtype != torch.int8:
        raise TypeError(f"axis_map: expected int8, got {axis_map.dtype}; call .to(torch.int8) on it once")
    if axis_map.dim() != 1 or (cos_sin_cache is not None and axis_map.shape[0] != cos_sin_cache.shape[1] // 2):
        pairs = "rotary_dim / 2" if cos_sin_cache is None else cos_sin_cache.shape[1] // 2
        raise ValueError(f"axis_map: expected shape [{pairs}], the axis of each pair, got {tuple(axis_map.shape)}")
    check_dense("axis_map", axis_map)


def check_axes(positions: Tensor, axis_map) -> None:
    """The rules for positions of several axes, whose first dimension is the axis."""
    if axis_map is None:
        raise ValueError(
            f"positions: expected one row, got shape {tuple(positions.shape)}, whose rows mean nothing without an "
            f"axis_map; pass axis_map (int8, the axis of each pair), or one row of positions"
        )
    if not 1 <= positions.shape[0] <= MAX_AXES:
        raise ValueError(f"positions: expected 1 to {MAX_AXES} axes, got shape {tuple(positions.shape)}")
    check_last_dim("positions", positions)


def check_own_places(name: str, out: Tensor) -> None:
    """The rule for a tensor that is written: no two of its elements share an address."""
    if overlaps_itself(out):
        raise ValueError(
            f"{name}: expected every element at its own address, got strides {out.stride()} for shape {tuple(out.shape)}; "
            f"it is written to, so it may not be an expanded view"
        )


def check_device(first: str, given: dict[str, Tensor]) -> None:
    """All tensors are where the one called `first` is."""
    device = given[first].device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"{first}: expected device cuda or cpu, got {device}")
    for name, x in given.items():
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} as {first}, got {x.device}; move it before the call")


def check_needs_no_grad(given: dict[str, Tensor]) -> None:
    if torch.is_grad_enabled():
        for name, x in given.items():
            if x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor that needs no gradient, because this call writes in place; "
                    f"wrap it in torch.no_grad() or use decode_rope.apply_rope"
                )


def check_aliasing(given: dict[str, Tensor], written: tuple[str, ...], may_be: dict[str, str]) -> None:
    """The tensors that an append writes, in so far as they are `given`, overlap neither themselves nor anything else that it reads
    or writes. `may_be`: the input that an output may be."""
    for name in written:
        out = given.get(name)
        if out is None:
            continue
        check_own_places(name, out)
        for other, x in given.items():
            if other == name or not share_memory(out, x):
                continue
            if may_be.get(name) == other and out.data_ptr() == x.data_ptr() and out.stride() == x.stride():
                continue
            shown, met = (x.replace("_scale_out", "_scale") for x in (name, other))
            raise ValueError(f"{shown}: expected memory of its own, got memory shared with {met}")
