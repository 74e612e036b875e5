"""Every fault of an argument, found before anything is launched or written."""

import math

import torch
from torch import Tensor

from .arguments import Append, MLAAppend, Rotation, given_tensors
from .codes import CODES, DYNAMIC, cache_dtype, is_float8
from .layout import KV_LAYOUTS, cache_view, share_memory
from .norm import WEIGHTS, by_public_name
from .rules import (
    DTYPES,
    MAX_TOKENS,
    check_aliasing,
    check_append_flags,
    check_axes,
    check_axis_map,
    check_bool,
    check_choice,
    check_dense,
    check_device,
    check_dtype,
    check_index_dtype,
    check_last_dim,
    check_like,
    check_needs_no_grad,
    check_own_places,
    check_table,
    check_tensor,
)


def check_append(call: Append, *, prefill: bool) -> None:
    """All rules of `rope_append_decode` and of `rope_append_prefill`.

    Raises:
        TypeError: something is not a tensor, or has a type or dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    check_append_flags(call)
    q, k = call.q, call.k
    live = prefill and k is not None and call.k_cache is None and call.v_cache is None
    if live and call.v is not None:
        raise ValueError("v: expected None, because k_cache and v_cache are None and nothing is done with v; leave it out")
    _activations(call, live)
    if call.cos_sin_cache is not None:
        check_table(call.cos_sin_cache, q.shape[2])
    _positions(call)
    _factors(call)
    if k is None or live:
        _nothing_appended(call, live)
    else:
        for row in ("k", "v"):
            _cache(call, row)
        _same_pages(call)
        for row in ("k", "v"):
            _scale(call, row)
    if call.cu_seqlens_q is not None:
        check_cu_seqlens(call)
    if k is not None and not live:
        check_addressing(call, q.shape[0], cache_view(call.k_cache, call.kv_layout).page_size, prefill)
    if call.k_out is not None:
        check_like("k_out", call.k_out, "k", k)
    if call.q_out is not None:
        _q_out(call)
    elif call.q_scale is not None:
        raise ValueError("q_scale: expected None without a q_out of float8_e4m3fn, which is what it scales; leave it out")
    if k is None or live:
        _no_scales(call)
    given = by_public_name(given_tensors(call))
    if k is None:
        given = {name: x for name, x in given.items() if name not in ("k_cache", "v_cache")}
    check_device("q", given)
    check_needs_no_grad(given)
    in_place = "q" if call.q_out is None else "q_out"
    written = (in_place, "k_out", "k_cache", "v_cache", "k_scale_out", "v_scale_out")
    check_aliasing(given, written, {"q_out": "q", "k_out": "k"})


def _activations(call: Append, live: bool) -> None:
    q, k, v = call.q, call.k, call.v
    _activation("q", q, "num_q_heads")
    if q.shape[0] >= MAX_TOKENS:
        raise ValueError(f"q: expected fewer than {MAX_TOKENS} tokens, got {q.shape[0]}; split the call")
    if (k is None) != (v is None) and not live:
        missing = "k" if k is None else "v"
        raise ValueError(f"{missing}: expected k and v both given or both None, got only the other one")
    given = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
    for name, x in given.items():
        _activation(name, x, "num_kv_heads")
    for name, x in given.items():
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: expected the dtype of q, {q.dtype}, got {x.dtype}; cast it before the call")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: expected {q.shape[0]} tokens as in q, got {x.shape[0]}")
    if k is not None and k.shape[2] != q.shape[2]:
        raise ValueError(f"k: expected head_dim {q.shape[2]} as in q, got {k.shape[2]}")
    if v is not None and v.shape[1] != k.shape[1]:
        raise ValueError(f"v: expected {k.shape[1]} heads as in k, got {v.shape[1]}")


def _activation(name: str, x, heads: str) -> None:
    check_tensor(name, x)
    check_dtype(name, x)
    if x.dim() != 3:
        raise ValueError(
            f"{name}: expected 3 dimensions [tokens, {heads}, head_dim], got shape {tuple(x.shape)}; "
            f"view it so, e.g. {name}.view(tokens, {heads}, head_dim)"
        )
    if x.shape[1] < 1 or x.shape[2] < 1:
        raise ValueError(f"{name}: expected at least one head of at least one element, got shape {tuple(x.shape)}")
    check_last_dim(name, x)


def _positions(call: Append) -> None:
    positions, num_tokens = call.positions, call.q.shape[0]
    check_tensor("positions", positions)
    if call.axis_map is not None:
        check_axis_map(call.axis_map, call.cos_sin_cache)
    if positions.dim() != 2:
        check_per_token("positions", positions, num_tokens)
        return
    check_index_dtype("positions", positions)
    if positions.shape[1] != num_tokens:
        raise ValueError(f"positions: expected shape [axes, {num_tokens}], one per token of q, got {tuple(positions.shape)}")
    check_axes(positions, call.axis_map)


def _factors(call: Append) -> None:
    """The rules for the weights of a norm, and for `q_token_scale`."""
    for name in WEIGHTS:
        weight = getattr(call, name)
        if weight is None:
            continue
        check_tensor(f"norm.{name}", weight)
        check_dtype(f"norm.{name}", weight)
        if tuple(weight.shape) != (call.q.shape[2],):
            hint = "; a norm over all heads together needs a launch of its own before this one" if weight.dim() == 1 else ""
            raise ValueError(
                f"norm.{name}: expected shape [{call.q.shape[2]}], one per element of a head, got {tuple(weight.shape)}{hint}"
            )
        check_dense(f"norm.{name}", weight)
    if call.q_token_scale is not None:
        check_tensor("q_token_scale", call.q_token_scale)
        if call.q_token_scale.dtype != torch.float32:
            raise TypeError(f"q_token_scale: expected float32, got {call.q_token_scale.dtype}")
        if tuple(call.q_token_scale.shape) != (call.q.shape[0],):
            raise ValueError(
                f"q_token_scale: expected shape [{call.q.shape[0]}], one per token of q, got {tuple(call.q_token_scale.shape)}"
            )
        check_dense("q_token_scale", call.q_token_scale)


def check_per_token(name: str, x, num_tokens: int) -> None:
    """The rules for an index tensor of one entry a token."""
    check_tensor(name, x)
    check_index_dtype(name, x)
    if tuple(x.shape) != (num_tokens,):
        raise ValueError(f"{name}: expected shape [{num_tokens}], one per token of q, got {tuple(x.shape)}")
    check_dense(name, x)


def _nothing_appended(call: Append, live: bool) -> None:
    """The rules where k is None, and where k is rotated and there are no caches (`live`)."""
    for name in ("k_cache", "v_cache"):
        if getattr(call, name) is not None:
            check_tensor(name, getattr(call, name))  # accepted, so that a layer may always pass its cache; never written
    why = "there are no caches" if live else "k is None"
    for name in ("block_table", "slot_mapping", "cache_positions", *([] if live else ["k_out"])):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: expected None, because {why} and nothing is appended; leave it out")
    if live and call.k_out is None:
        raise ValueError("k_out: expected a tensor (it may be k), because without caches it is all that is done with k")


def _cache(call: Append, row: str) -> None:
    """The rules for `k_cache` or `v_cache`, into which the rows of k or v go."""
    name, cache, x, kv_layout = f"{row}_cache", getattr(call, f"{row}_cache"), getattr(call, row), call.kv_layout
    check_tensor(name, cache)
    _cache_dtype(name, cache, row, x.dtype, call.kv_dtype)
    if cache.dim() not in (3, 4):
        raise ValueError(
            f"{name}: expected 4 dimensions ({kv_layout}) or a flat [slots, num_kv_heads, head_dim], "
            f"got shape {tuple(cache.shape)}; split K and V first, e.g. kv[0] or kv[:, 0]"
        )
    view = cache_view(cache, kv_layout)
    if (view.num_heads, view.head_dim) != tuple(x.shape[1:]):
        raise ValueError(
            f"{name}: expected {x.shape[1]} heads of {x.shape[2]} as in {row}, got {view.num_heads} of {view.head_dim} "
            f"(shape {tuple(cache.shape)}, kv_layout={kv_layout!r}); check kv_layout"
        )
    if view.page_size < 1:
        raise ValueError(f"{name}: expected a page_size of at least 1, got shape {tuple(cache.shape)}")
    check_last_dim(name, cache)


def _cache_dtype(name: str, cache: Tensor, row: str, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    quantised = "float8_e4m3fn, float8_e5m2 or int8"
    if kv_dtype is not None and not isinstance(kv_dtype, torch.dtype):
        raise TypeError(f"kv_dtype: expected a torch.dtype or None, got {type(kv_dtype).__name__}")
    if kv_dtype is not None and kv_dtype != dtype and kv_dtype not in CODES:
        raise TypeError(f"kv_dtype: expected {quantised}, or the dtype of {row}, {dtype}, got {kv_dtype}")
    if cache.dtype == torch.uint8:
        if kv_dtype not in CODES:
            raise TypeError(f"{name}: expected kv_dtype to say what its bytes are, {quantised}, got kv_dtype={kv_dtype}")
    elif cache.dtype != dtype and cache.dtype not in CODES:
        raise TypeError(f"{name}: expected the dtype of {row}, {dtype}, or {quantised}, got {cache.dtype}")
    elif kv_dtype not in (None, cache.dtype):
        raise TypeError(f"{name}: expected kv_dtype {kv_dtype}, or bytes of it as uint8, got {cache.dtype}")


def _scale(call: Append, row: str) -> None:
    """The rules for `k_scale` or `v_scale`."""
    name, cache = f"{row}_scale", getattr(call, f"{row}_cache")
    given, out, dtype = getattr(call, name), getattr(call, f"{name}_out"), cache_dtype(call, cache)
    if dtype not in CODES:
        if given is not None or out is not None:
            raise ValueError(f"{name}: expected None, because {row}_cache holds {dtype} and is not quantised; leave it out")
        return
    if given is None and out is None:
        if dtype == torch.int8:
            raise ValueError(f"{name}: expected a scale for an int8 cache, got None")
        return
    view = cache_view(cache, call.kv_layout)
    if out is None:
        _given_scale(name, given, (1, view.num_heads))
        return
    if dtype not in DYNAMIC:
        raise ValueError(
            f"{name}: expected a scale of shape [1] or [{view.num_heads}] for a cache of {dtype}, got {tuple(out.shape)}"
        )
    check_scale_dtype(name, out)
    shape = (view.num_pages, view.num_heads) if cache.dim() == 3 else (view.num_pages, view.page_size, view.num_heads)
    if tuple(out.shape) != shape:
        wanted = "[slots, num_kv_heads]" if cache.dim() == 3 else "[pages, page_size, num_kv_heads]"
        raise ValueError(f"{name}: expected shape {list(shape)}, {wanted} in any layout of the cache, got {tuple(out.shape)}")
    check_own_places(name, out)


def _given_scale(name: str, scale, sizes: tuple[int, ...]) -> None:
    check_tensor(name, scale)
    check_scale_dtype(name, scale)
    if scale.dim() > 1 or scale.numel() not in sizes:
        raise ValueError(f"{name}: expected shape {' or '.join(f'[{n}]' for n in dict.fromkeys(sizes))}, got {tuple(scale.shape)}")
    if scale.device.type == "cpu" and not bool(((scale > 0) & (scale < math.inf)).all()):
        raise ValueError(f"{name}: expected positive finite scales, got {scale.tolist()}")


def check_scale_dtype(name: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}: expected float32, got {scale.dtype}")


def _q_out(call: Append) -> None:
    """The rules for `q_out`, which has the dtype of q or holds codes, and for `q_scale`."""
    q, out = call.q, call.q_out
    check_tensor("q_out", out)
    if is_float8(out.dtype):
        if out.dtype != torch.float8_e4m3fn:
            raise TypeError(f"q_out: expected the dtype of q, {q.dtype}, or float8_e4m3fn, got {out.dtype}")
        check_like("q_out", out, "q", q, any_dtype=True)
        if call.q_scale is not None:
            _given_scale("q_scale", call.q_scale, (1,))
        return
    check_like("q_out", out, "q", q)
    if call.q_scale is not None:
        raise ValueError(f"q_scale: expected None, because q_out holds {out.dtype} and is not quantised; leave it out")


def _no_scales(call: Append) -> None:
    for name in ("k_scale", "v_scale"):
        if getattr(call, name) is not None or getattr(call, f"{name}_out") is not None:
            raise ValueError(f"{name}: expected None, because no cache is written; leave it out")


def _same_pages(call: Append) -> None:
    k_view, v_view = (cache_view(cache, call.kv_layout) for cache in (call.k_cache, call.v_cache))
    if k_view[:2] != v_view[:2]:
        raise ValueError(
            f"v_cache: expected {k_view.num_pages} pages of {k_view.page_size} tokens as in k_cache, "
            f"got {v_view.num_pages} of {v_view.page_size}"
        )


def check_cu_seqlens(call: Append | MLAAppend) -> None:
    cu_seqlens = call.cu_seqlens_q
    check_tensor("cu_seqlens_q", cu_seqlens)
    check_index_dtype("cu_seqlens_q", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape [requests + 1], got {tuple(cu_seqlens.shape)}")
    check_dense("cu_seqlens_q", cu_seqlens)
    if call.tokens_per_request != 1:
        raise ValueError(
            f"tokens_per_request: expected 1 with cu_seqlens_q, which says where requests begin, got {call.tokens_per_request}"
        )


def check_addressing(call: Append | MLAAppend, num_tokens: int, page_size: int, prefill: bool) -> None:
    """The rules for the block table or the slot mapping, and for `cache_positions`."""
    if (call.block_table is None) == (call.slot_mapping is None):
        got = "neither" if call.block_table is None else "both"
        raise ValueError(f"block_table, slot_mapping: expected exactly one of them, got {got}")
    if call.slot_mapping is not None:
        _slot_mapping(call.slot_mapping, num_tokens)
        if call.cache_positions is not None:
            raise ValueError("cache_positions: expected None with slot_mapping, which already says where tokens go")
        return
    table = call.block_table
    check_tensor("block_table", table)
    check_index_dtype("block_table", table)
    if table.dim() != 2 or table.shape[0] < call.requests:
        why = "cu_seqlens_q" if call.cu_seqlens_q is not None else f"tokens_per_request={call.tokens_per_request}"
        hint = "; give cu_seqlens_q for sequences of different lengths" if prefill else ""
        raise ValueError(
            f"block_table: expected [requests, max_pages] with at least {call.requests} rows for {num_tokens} tokens and {why}, "
            f"got shape {tuple(table.shape)}{hint}"
        )
    check_last_dim("block_table", table)
    # A negative place is past every column only if the columns hold fewer than 2^63 places.
    columns = table.shape[1]
    if columns * page_size >= 2**63:
        raise ValueError(f"block_table: expected fewer than 2^63 places a row, got {columns} columns of pages of {page_size}")
    if call.cache_positions is not None:
        check_per_token("cache_positions", call.cache_positions, num_tokens)


def _slot_mapping(slots, num_tokens: int) -> None:
    check_tensor("slot_mapping", slots)
    check_index_dtype("slot_mapping", slots)
    if slots.dim() != 1 or slots.shape[0] > num_tokens:
        raise ValueError(f"slot_mapping: expected 1 dimension of at most {num_tokens} slots, got shape {tuple(slots.shape)}")
    check_dense("slot_mapping", slots)


def check_rotation(call: Rotation) -> None:
    """All rules of `apply_rope`.

    Raises:
        TypeError: something is not a tensor, or has a type or dtype of the wrong kind.
        ValueError: shapes, strides, devices or combinations that cannot be launched.
    """
    x, layout = call.x, call.layout
    check_tensor("x", x)
    check_choice("layout", layout, KV_LAYOUTS)
    check_bool("is_neox", call.is_neox)
    check_bool("inverse", call.inverse)
    if x.dtype not in DTYPES and not (x.dtype == torch.float64 and x.device.type == "cpu"):
        raise TypeError(f"x: expected dtype bfloat16, float16 or float32 (float64 on the CPU), got {x.dtype}")
    if x.dim() not in (3, 4) or (x.dim() == 3 and layout == "HND"):
        raise ValueError(
            f'x: expected [B, S, H, D] or [T, H, D] (layout "NHD") or [B, H, S, D] (layout "HND"), got shape {tuple(x.shape)} '
            f"with layout {layout!r}"
        )
    heads = x.shape[1 if layout == "HND" else -2]
    if heads < 1 or x.shape[-1] < 1:
        raise ValueError(f"x: expected at least one head of at least one element, got shape {tuple(x.shape)}")
    check_last_dim("x", x)
    check_table(call.cos_sin_cache, x.shape[-1])
    batch, seq_len = (1, x.shape[0]) if x.dim() == 3 else (x.shape[0], x.shape[2 if layout == "HND" else 1])
    if batch * seq_len >= MAX_TOKENS:
        raise ValueError(f"x: expected fewer than {MAX_TOKENS} tokens, got {batch * seq_len}; split the call")
    if call.axis_map is not None:
        check_axis_map(call.axis_map, call.cos_sin_cache)
    if call.positions is not None:
        _rotation_positions(call, batch, seq_len)
    elif seq_len > call.cos_sin_cache.shape[0]:
        raise ValueError(
            f"cos_sin_cache: expected at least {seq_len} rows, because positions is None and x has {seq_len} places, "
            f"got {call.cos_sin_cache.shape[0]}"
        )
    if call.out is not None:
        check_out(call.out, x)
        check_own_places("out", call.out)
        in_place = call.out.data_ptr() == x.data_ptr() and call.out.stride() == x.stride()
        if not in_place and share_memory(call.out, x):
            raise ValueError("out: expected memory of its own, or x itself, got memory shared with x")
    check_device("x", given_tensors(call))


def _rotation_positions(call: Rotation, batch: int, seq_len: int) -> None:
    x, positions = call.x, call.positions
    check_tensor("positions", positions)
    check_index_dtype("positions", positions)
    shape, flat = tuple(positions.shape), x.dim() == 3
    rest = shape
    if positions.dim() == x.dim() - 1:
        check_axes(positions, call.axis_map)
        rest = shape[1:]
    if rest != (seq_len,) and (flat or rest not in ((1, seq_len), (batch, seq_len))):
        wanted = f"[{seq_len}], [{batch}, {seq_len}] or [axes, {batch}, {seq_len}]"
        wanted = f"[{seq_len}] or [axes, {seq_len}]" if flat else wanted
        raise ValueError(f"positions: expected shape {wanted} for x of shape {tuple(x.shape)}, got {shape}")
    check_last_dim("positions", positions)


def check_out(out, x: Tensor) -> None:
    """Whether the result of `apply_rope` fits into `out`, wherever that lies: the part that can be answered of tensors of dynamic
    sizes, while a compiler traces."""
    check_like("out", out, "x", x)
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        check_own_places("out", out)


def check_gradients(x, cos_sin_cache, out) -> None:
    """With gradients wanted: those of `apply_rope` flow to x alone, and autograd must hear of writes to `out`."""
    if getattr(cos_sin_cache, "requires_grad", False):
        raise ValueError("cos_sin_cache: expected a tensor that needs no gradient, because none is computed; call .detach() on it")
    if getattr(out, "requires_grad", False) and not x.requires_grad:
        raise ValueError("out: expected a tensor that needs no gradient, as x does not; wrap the call in torch.no_grad()")
