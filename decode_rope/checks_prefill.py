"""The rules of `rope_append_prefill` and `apply_rope` that differ from those of decode, in `checks.py`."""

import torch
from torch import Tensor

from .checks import (
    DTYPES,
    INDEX_DTYPES,
    MAX_TOKENS,
    _activations,
    _aliasing,
    _caches,
    _contiguous_1d,
    _flags,
    _last_dim_contiguous,
    _no_grad,
    _one_device,
    _output,
    _positions,
    _tensor,
    block_table_reach,
    check_table,
)
from .layout import overlaps_itself, share_memory

MAX_AXES = 8  # the kernels read one row of the table for each
LAYOUTS = ("NHD", "HND")


def check_prefill(call, *, block_table, slot_mapping) -> None:
    """All rules of `rope_append_prefill`, on a `PrefillCall`.

    Raises:
        TypeError: something is not a tensor, or has a dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    q, k, v = call.q, call.k, call.v
    _flags(call.tokens_per_request, call.is_neox, call.kv_layout, call.enable_pdl)
    live = k is not None and call.k_cache is None and call.v_cache is None
    if live and v is not None:
        raise ValueError("v: expected None, because k_cache and v_cache are None and nothing is done with v; leave it out")
    _activations(q, k, k if live else v)
    if call.cos_sin is not None:
        check_table(call.cos_sin, q.shape[2])
    _axis_positions(call.positions, call.axis_map, call.cos_sin, q)
    if k is None or live:
        _no_cache(call, block_table, slot_mapping, live)
    else:
        _caches(k, v, call.k_cache, call.v_cache, call.kv_layout)
    if call.cu_seqlens is not None:
        _cu_seqlens(call.cu_seqlens, call.tokens_per_request)
    if k is not None and not live:
        _prefill_index(call, block_table, slot_mapping)
        if block_table is not None:
            block_table_reach(block_table, call.k_cache, call.kv_layout)
    for name, out, like in (("q_out", call.q_out, q), ("k_out", call.k_out, k)):
        if out is not None:
            _output(name, out, like)
    given = {
        "q": q, "k": k, "v": v, "k_cache": call.k_cache if v is not None else None,
        "v_cache": call.v_cache if v is not None else None,
        "cos_sin_cache": call.cos_sin, "positions": call.positions, "block_table": block_table,
        "slot_mapping": slot_mapping, "cache_positions": call.cache_positions, "cu_seqlens_q": call.cu_seqlens,
        "axis_map": call.axis_map, "q_out": call.q_out, "k_out": call.k_out,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    _one_device(given)
    _no_grad(given)
    _aliasing(given)


def _axis_positions(positions, axis_map, cos_sin, q: Tensor) -> None:
    _tensor("positions", positions)
    if axis_map is not None:
        _axis_map(axis_map, cos_sin)
    if positions.dim() != 2:
        _positions("positions", positions, q)
        return
    _index_dtype("positions", positions)
    _needs_axis_map(positions, axis_map)
    if positions.shape[1] != q.shape[0]:
        raise ValueError(f"positions: expected shape [axes, {q.shape[0]}], one per token of q, got {tuple(positions.shape)}")
    _axes(positions)


def _needs_axis_map(positions: Tensor, axis_map) -> None:
    if axis_map is None:
        raise ValueError(
            f"positions: expected one row, got shape {tuple(positions.shape)}, whose rows mean nothing without an "
            f"axis_map; pass axis_map (int8, the axis of each pair), or one row of positions"
        )


def _axes(positions: Tensor) -> None:
    if not 1 <= positions.shape[0] <= MAX_AXES:
        raise ValueError(f"positions: expected 1 to {MAX_AXES} axes, got shape {tuple(positions.shape)}")
    _last_dim_contiguous("positions", positions)


def _axis_map(axis_map, cos_sin) -> None:
    _tensor("axis_map", axis_map)
    if axis_map.dtype != torch.int8:
        raise TypeError(f"axis_map: expected int8, got {axis_map.dtype}; call .to(torch.int8) on it once")
    if axis_map.dim() != 1 or (cos_sin is not None and axis_map.shape[0] != cos_sin.shape[1] // 2):
        pairs = "rotary_dim / 2" if cos_sin is None else cos_sin.shape[1] // 2
        raise ValueError(f"axis_map: expected shape [{pairs}], the axis of each pair, got {tuple(axis_map.shape)}")
    _contiguous_1d("axis_map", axis_map)


def _index_dtype(name: str, x: Tensor) -> None:
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")


def _no_cache(call, block_table, slot_mapping, live: bool) -> None:
    """Nothing is appended: k is None, or k and no caches."""
    for name, x in (("k_cache", call.k_cache), ("v_cache", call.v_cache)):
        if x is not None:
            _tensor(name, x)  # accepted where k is None, so that a layer may pass its cache always; never written
    why = "there are no caches" if live else "k is None"
    given = [("block_table", block_table), ("slot_mapping", slot_mapping), ("cache_positions", call.cache_positions)]
    if not live:
        given += [("k_out", call.k_out)]
    for name, x in given:
        if x is not None:
            raise ValueError(f"{name}: expected None, because {why} and nothing is appended; leave it out")
    if live and call.k_out is None:
        raise ValueError("k_out: expected a tensor (it may be k), for without caches it is all that is done with k")


def _cu_seqlens(cu_seqlens, tokens_per_request: int) -> None:
    _tensor("cu_seqlens_q", cu_seqlens)
    _index_dtype("cu_seqlens_q", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape [requests + 1], got {tuple(cu_seqlens.shape)}")
    _contiguous_1d("cu_seqlens_q", cu_seqlens)
    if tokens_per_request != 1:
        raise ValueError(
            f"tokens_per_request: expected 1 with cu_seqlens_q, which says where requests begin, got {tokens_per_request}"
        )


def _prefill_index(call, block_table, slot_mapping) -> None:
    if (block_table is None) == (slot_mapping is None):
        got = "neither" if block_table is None else "both"
        raise ValueError(f"block_table, slot_mapping: expected exactly one of them, got {got}")
    num_tokens = call.q.shape[0]
    name, index = ("block_table", block_table) if slot_mapping is None else ("slot_mapping", slot_mapping)
    _tensor(name, index)
    _index_dtype(name, index)
    if slot_mapping is not None:
        if index.dim() != 1 or index.shape[0] > num_tokens:
            raise ValueError(f"slot_mapping: expected 1 dimension of at most {num_tokens} slots, got shape {tuple(index.shape)}")
        _contiguous_1d(name, index)
        if call.cache_positions is not None:
            raise ValueError("cache_positions: expected None with slot_mapping, which already says where tokens go")
        return
    rows = call.rows_needed()
    if index.dim() != 2 or index.shape[0] < rows:
        why = "cu_seqlens_q" if call.cu_seqlens is not None else f"tokens_per_request={call.tokens_per_request}"
        raise ValueError(
            f"block_table: expected [requests, max_pages] with at least {rows} rows for {num_tokens} tokens and {why}, "
            f"got shape {tuple(index.shape)}; give cu_seqlens_q for sequences of different lengths"
        )
    _last_dim_contiguous(name, index)
    if call.cache_positions is not None:
        _positions("cache_positions", call.cache_positions, call.q)


def check_apply(x, cos_sin, positions, is_neox, axis_map, inverse, out, layout, *, float64: bool) -> None:
    """All rules of `apply_rope`. `float64`: whether that dtype is allowed, as it is where the reference runs.

    Raises:
        TypeError: something is not a tensor, or has a dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    _tensor("x", x)
    if layout not in LAYOUTS:
        raise ValueError(f'layout: expected "NHD" ([B, S, H, D]) or "HND" ([B, H, S, D]), got {layout!r}')
    for name, flag in (("is_neox", is_neox), ("inverse", inverse)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")
    if x.dtype not in DTYPES and not (float64 and x.dtype == torch.float64):
        raise TypeError(f"x: expected dtype bfloat16, float16 or float32 (float64 on the CPU), got {x.dtype}")
    if x.dim() not in (3, 4) or (x.dim() == 3 and layout == "HND"):
        raise ValueError(
            f'x: expected [B, S, H, D] or [T, H, D] (layout "NHD") or [B, H, S, D] (layout "HND"), got shape {tuple(x.shape)} '
            f"with layout {layout!r}"
        )
    heads = x.shape[1 if layout == "HND" else -2]
    if heads < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected at least one head of at least one element, got shape {tuple(x.shape)}")
    _last_dim_contiguous("x", x)
    check_table(cos_sin, x.shape[-1])
    batch, seq_len = (1, x.shape[0]) if x.dim() == 3 else (x.shape[0], x.shape[2 if layout == "HND" else 1])
    if batch * seq_len >= MAX_TOKENS:
        raise ValueError(f"x: expected fewer than {MAX_TOKENS} tokens, got {batch * seq_len}; split the call")
    if axis_map is not None:
        _axis_map(axis_map, cos_sin)
    if positions is None:
        if seq_len > cos_sin.shape[0]:
            raise ValueError(
                f"cos_sin_cache: expected at least {seq_len} rows, as positions is None and x has {seq_len} places, "
                f"got {cos_sin.shape[0]}"
            )
    else:
        _apply_positions(positions, axis_map, x, batch, seq_len)
    if out is not None:
        _apply_out(out, x)
    if x.device.type not in ("cuda", "cpu"):
        raise ValueError(f"x: expected device cuda or cpu, got {x.device}")
    given = {"x": x, "cos_sin_cache": cos_sin, "positions": positions, "axis_map": axis_map, "out": out}
    for name, tensor in given.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: expected device {x.device} as x, got {tensor.device}; move it before the call")


def check_no_grad(x, cos_sin, out) -> None:
    """With gradients wanted: those of `apply_rope` flow to x alone, and autograd must hear of writes to `out`."""
    if getattr(cos_sin, "requires_grad", False):
        raise ValueError("cos_sin_cache: expected a tensor that needs no gradient, for none is computed; call .detach() on it")
    if getattr(out, "requires_grad", False) and not x.requires_grad:
        raise ValueError("out: expected a tensor that needs no gradient, as x does not; wrap the call in torch.no_grad()")


def _apply_positions(positions, axis_map, x: Tensor, batch: int, seq_len: int) -> None:
    _tensor("positions", positions)
    _index_dtype("positions", positions)
    shape, flat = tuple(positions.shape), x.dim() == 3
    rest = shape
    if positions.dim() == x.dim() - 1:
        _needs_axis_map(positions, axis_map)
        _axes(positions)
        rest = shape[1:]
    if rest != (seq_len,) and (flat or rest not in ((1, seq_len), (batch, seq_len))):
        wanted = f"[{seq_len}], [{batch}, {seq_len}] or [axes, {batch}, {seq_len}]"
        wanted = f"[{seq_len}] or [axes, {seq_len}]" if flat else wanted
        raise ValueError(f"positions: expected shape {wanted} for x of shape {tuple(x.shape)}, got {shape}")
    _last_dim_contiguous("positions", positions)


def check_out(out, x: Tensor) -> None:
    """Is `out` a place for the result, wherever it lies? What a compiler can answer of tensors of dynamic sizes."""
    _tensor("out", out)
    if out.dtype != x.dtype:
        raise TypeError(f"out: expected the dtype of x, {x.dtype}, got {out.dtype}")
    if out.shape != x.shape:
        raise ValueError(f"out: expected shape {tuple(x.shape)} as x, got {tuple(out.shape)}")
    _last_dim_contiguous("out", out)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        _refuse_self_overlap(out)


def _refuse_self_overlap(out: Tensor) -> None:
    raise ValueError(
        f"out: expected every element at its own address, got strides {out.stride()} for shape {tuple(out.shape)}; "
        f"it is written to, so it may not be an expanded view"
    )


def _apply_out(out, x: Tensor) -> None:
    check_out(out, x)
    if overlaps_itself(out):
        _refuse_self_overlap(out)
    in_place = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    if not in_place and share_memory(out, x):
        raise ValueError("out: expected memory of its own, or x itself, got memory shared with x")
