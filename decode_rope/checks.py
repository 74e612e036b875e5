"""Every fault of an argument, found before anything is launched or written.

Messages name the argument, what was expected, what came and what to do.
"""

import torch
from torch import Tensor

from .layout import KV_LAYOUTS, cache_view, overlaps_itself, share_memory

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_TOKENS = 2**28  # a fault record keeps the row in 28 bits


def check_append(
    q,
    k,
    v,
    k_cache,
    v_cache,
    cos_sin,
    positions,
    block_table,
    slot_mapping,
    cache_positions,
    tokens_per_request,
    is_neox,
    kv_layout,
    q_out,
    k_out,
    enable_pdl,
) -> None:
    """All rules of `rope_append_decode`. `cos_sin` is a table's fp32 tensor or None.

    Raises:
        TypeError: something is not a tensor, or has a dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    _flags(tokens_per_request, is_neox, kv_layout, enable_pdl)
    _activations(q, k, v)
    if cos_sin is not None:
        check_table(cos_sin, q.shape[2])
    _positions("positions", positions, q)
    if k is None:
        _no_kv(k_cache, v_cache, block_table, slot_mapping, cache_positions, k_out)
    else:
        _caches(k, v, k_cache, v_cache, kv_layout)
        _index(q, block_table, slot_mapping, cache_positions, tokens_per_request)
        if block_table is not None:
            block_table_reach(block_table, k_cache, kv_layout)
    for name, out, like in (("q_out", q_out, q), ("k_out", k_out, k)):
        if out is not None:
            _output(name, out, like)
    given = {
        "q": q, "k": k, "v": v, "k_cache": k_cache if k is not None else None,
        "v_cache": v_cache if k is not None else None, "cos_sin_cache": cos_sin, "positions": positions,
        "block_table": block_table, "slot_mapping": slot_mapping, "cache_positions": cache_positions,
        "q_out": q_out, "k_out": k_out,
    }  # fmt: skip
    given = {name: x for name, x in given.items() if x is not None}
    _one_device(given)
    _no_grad(given)
    _aliasing(given)


def _tensor(name: str, x) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def _flags(tokens_per_request, is_neox, kv_layout, enable_pdl) -> None:
    if kv_layout not in KV_LAYOUTS:
        raise ValueError(f'kv_layout: expected "NHD" or "HND", got {kv_layout!r}')
    if not isinstance(is_neox, bool):
        raise TypeError(f"is_neox: expected a bool, got {type(is_neox).__name__}")
    if enable_pdl not in (None, True, False):
        raise TypeError(f"enable_pdl: expected None, True or False, got {enable_pdl!r}")
    if isinstance(tokens_per_request, bool) or not isinstance(tokens_per_request, int):
        raise TypeError(f"tokens_per_request: expected an int, got {type(tokens_per_request).__name__}")
    if not 1 <= tokens_per_request < 2**63:
        raise ValueError(f"tokens_per_request: expected at least 1 and less than 2^63, got {tokens_per_request}")


def _activation(name: str, x, heads: str) -> None:
    _tensor(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected dtype bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() != 3:
        raise ValueError(
            f"{name}: expected 3 dimensions [tokens, {heads}, head_dim], got shape {tuple(x.shape)}; "
            f"view it so, e.g. {name}.view(tokens, {heads}, head_dim)"
        )
    if x.shape[1] < 1 or x.shape[2] < 1:
        raise ValueError(f"{name}: expected at least one head of at least one element, got shape {tuple(x.shape)}")
    _last_dim_contiguous(name, x)


def _last_dim_contiguous(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(
            f"{name}: expected a contiguous last dimension (stride 1), got strides {x.stride()}; "
            f"call .contiguous() on it, or slice another dimension"
        )


def _activations(q, k, v) -> None:
    _activation("q", q, "num_q_heads")
    if q.shape[0] >= MAX_TOKENS:
        raise ValueError(f"q: expected fewer than {MAX_TOKENS} tokens, got {q.shape[0]}; split the call")
    if (k is None) != (v is None):
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected k and v both given or both None, got only the other one")
    if k is None:
        return
    _activation("k", k, "num_kv_heads")
    _activation("v", v, "num_kv_heads")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}; cast it before the call")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected {q.shape[0]} tokens as in q, got {x.shape[0]}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected head_dim {q.shape[2]} as in q, got {k.shape[2]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected {k.shape[1]} heads as in k, got {v.shape[1]}")


def check_table(cos_sin, head_dim: int) -> None:
    """The rules of a rotary table for heads of `head_dim` elements."""
    _tensor("cos_sin_cache", cos_sin)
    if cos_sin.dtype != torch.float32:
        raise ValueError(
            f"cos_sin_cache: expected float32, got {cos_sin.dtype}; a table in half precision costs up to 3e-3 rad at every "
            f"position, so rebuild it with decode_rope.RopeTable.build rather than cast it"
        )
    if cos_sin.dim() != 2 or cos_sin.shape[0] < 1:
        raise ValueError(
            f"cos_sin_cache: expected [max_position, rotary_dim], cos then sin, with at least one row, "
            f"got shape {tuple(cos_sin.shape)}"
        )
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(
            f"cos_sin_cache: expected an even rotary_dim of at most head_dim {head_dim}, got {rotary_dim}; "
            f"pass None if nothing rotates"
        )
    if not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin_cache: expected a contiguous table, got strides {cos_sin.stride()}; call .contiguous() once, when it is built"
        )


def _positions(name: str, x, q: Tensor) -> None:
    _tensor(name, x)
    if x.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {x.dtype}")
    if x.dim() == 2:
        raise ValueError(
            f"{name}: expected shape [{q.shape[0]}], got {tuple(x.shape)}; in a decode step the axes of a multi-axis model hold "
            f"one value, so pass one row of them"
        )
    if tuple(x.shape) != (q.shape[0],):
        raise ValueError(f"{name}: expected shape [{q.shape[0]}], one per token of q, got {tuple(x.shape)}")
    _contiguous_1d(name, x)


def _contiguous_1d(name: str, x: Tensor) -> None:
    if x.shape[0] > 1 and x.stride(0) != 1:
        raise ValueError(f"{name}: expected stride 1, got {x.stride(0)}; call .contiguous() on it")


def _no_kv(k_cache, v_cache, block_table, slot_mapping, cache_positions, k_out) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x is not None:
            _tensor(name, x)  # accepted, so that a layer may pass its cache always; never written
    for name, x in (
        ("block_table", block_table),
        ("slot_mapping", slot_mapping),
        ("cache_positions", cache_positions),
        ("k_out", k_out),
    ):
        if x is not None:
            raise ValueError(f"{name}: expected None, because k and v are None and no cache is written; leave it out")


def _caches(k: Tensor, v: Tensor, k_cache, v_cache, kv_layout: str) -> None:
    views = []
    for name, cache, x in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        _tensor(name, cache)
        if cache.dtype != x.dtype:
            raise TypeError(f"{name}: expected the dtype of {name[0]}, {x.dtype}, got {cache.dtype}")
        if cache.dim() not in (3, 4):
            raise ValueError(
                f"{name}: expected 4 dimensions ({kv_layout}) or a flat [slots, num_kv_heads, head_dim], "
                f"got shape {tuple(cache.shape)}; split K and V first, e.g. kv[0] or kv[:, 0]"
            )
        view = cache_view(cache, kv_layout)
        if (view.num_heads, view.head_dim) != tuple(x.shape[1:]):
            raise ValueError(
                f"{name}: expected {x.shape[1]} heads of {x.shape[2]} as in {name[0]}, got {view.num_heads} of {view.head_dim} "
                f"(shape {tuple(cache.shape)}, kv_layout={kv_layout!r}); check kv_layout"
            )
        if view.page_size < 1:
            raise ValueError(f"{name}: expected a page_size of at least 1, got shape {tuple(cache.shape)}")
        _last_dim_contiguous(name, cache)
        views.append(view)
    if views[0][:2] != views[1][:2]:
        raise ValueError(
            f"v_cache: expected {views[0].num_pages} pages of {views[0].page_size} tokens as in k_cache, "
            f"got {views[1].num_pages} of {views[1].page_size}"
        )


def _index(q: Tensor, block_table, slot_mapping, cache_positions, tokens_per_request: int) -> None:
    if (block_table is None) == (slot_mapping is None):
        got = "neither" if block_table is None else "both"
        raise ValueError(f"block_table, slot_mapping: expected exactly one of them, got {got}")
    num_tokens = q.shape[0]
    name, index = ("block_table", block_table) if slot_mapping is None else ("slot_mapping", slot_mapping)
    _tensor(name, index)
    if index.dtype not in INDEX_DTYPES:
        raise TypeError(f"{name}: expected int32 or int64, got {index.dtype}")
    if slot_mapping is not None:
        if index.dim() != 1 or index.shape[0] > num_tokens:
            raise ValueError(f"slot_mapping: expected 1 dimension of at most {num_tokens} slots, got shape {tuple(index.shape)}")
        _contiguous_1d(name, index)
        if cache_positions is not None:
            raise ValueError("cache_positions: expected None with slot_mapping, which already says where tokens go")
        return
    if index.dim() != 2 or index.shape[0] * tokens_per_request < num_tokens:
        rows = -(-num_tokens // tokens_per_request)
        raise ValueError(
            f"block_table: expected [requests, max_pages] with at least {rows} rows for {num_tokens} tokens at "
            f"tokens_per_request={tokens_per_request}, got shape {tuple(index.shape)}"
        )
    _last_dim_contiguous(name, index)
    if cache_positions is not None:
        _positions("cache_positions", cache_positions, q)


def block_table_reach(block_table: Tensor, k_cache: Tensor, kv_layout: str) -> None:
    """A negative place is past every column only if the columns hold fewer than 2^63 places."""
    columns, page_size = block_table.shape[1], cache_view(k_cache, kv_layout).page_size
    if columns * page_size >= 2**63:
        raise ValueError(f"block_table: expected fewer than 2^63 places a row, got {columns} columns of pages of {page_size}")


def _output(name: str, out, like: Tensor) -> None:
    _tensor(name, out)
    if out.dtype != like.dtype:
        raise TypeError(f"{name}: expected the dtype of {name[0]}, {like.dtype}, got {out.dtype}")
    if out.shape != like.shape:
        raise ValueError(f"{name}: expected shape {tuple(like.shape)} as {name[0]}, got {tuple(out.shape)}")
    _last_dim_contiguous(name, out)


def _one_device(given: dict[str, Tensor]) -> None:
    device = given["q"].device
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"q: expected device cuda or cpu, got {device}")
    for name, x in given.items():
        if x.device != device:
            raise ValueError(f"{name}: expected device {device} as q, got {x.device}; move it before the call")


def _no_grad(given: dict[str, Tensor]) -> None:
    if torch.is_grad_enabled():
        for name, x in given.items():
            if x.requires_grad:
                raise ValueError(
                    f"{name}: expected a tensor that needs no gradient, for this call writes in place; "
                    f"wrap it in torch.no_grad() or use decode_rope.apply_rope"
                )


def _aliasing(given: dict[str, Tensor]) -> None:
    """Written tensors may not overlap themselves or anything else that is read or written, except q_out on q and k_out on k."""
    in_place = "q" if "q_out" not in given else "q_out"
    for name in (in_place, "k_out", "k_cache", "v_cache"):
        out = given.get(name)
        if out is None:
            continue
        if overlaps_itself(out):
            raise ValueError(
                f"{name}: expected every element at its own address, got strides {out.stride()} for shape {tuple(out.shape)}; "
                f"it is written to, so it may not be an expanded view"
            )
        for other, x in given.items():
            if other == name or not share_memory(out, x):
                continue
            if name == f"{other}_out" and out.data_ptr() == x.data_ptr() and out.stride() == x.stride():
                continue
            raise ValueError(f"{name}: expected memory of its own, got memory shared with {other}")
