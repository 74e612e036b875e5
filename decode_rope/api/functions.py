"""`rope_append_decode`, `rope_append_prefill` and `apply_rope`.

A call finds the plan of its configuration and launches it; the first call of a configuration is checked, and compiles its kernel.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from ..append.arguments import Append, of_table, resolved, scale_fields
from ..append.checks import check_gradients
from ..append.norm import QKNorm, norm_fields
from ..compile import append as operators
from ..compile import rope as rotation_operators
from ..launch.book import Book
from ..launch.decode import DECODE
from ..launch.prefill import PREFILL
from ..launch.rope import rotate

DECODE_CALLS, PREFILL_CALLS = Book(DECODE), Book(PREFILL)


def rope_append_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_positions: Tensor | None = None,
    tokens_per_request: int = 1,
    is_neox: bool = True,
    kv_layout: str = "NHD",
    axis_map: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    norm: QKNorm | None = None,
    q_token_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Rotate `q` in place, and write rotated `k` and `v` into a paged cache, in one kernel launch.

    For the decode step of a server: one token per request (or `tokens_per_request`, for speculative decoding). Safe in CUDA
    graphs: positions, block table and slots are read from memory at every replay. A configuration's first call compiles its
    kernel, so make it, or `DecodeRope.warmup`, before a capture. On CPU tensors `decode_rope.reference` runs instead.

    Rows that must not be written are skipped: `positions < 0` (padding: q passes through unrotated), and slots or pages `< 0` or
    past the end of a short `slot_mapping` (q is rotated). A position past the table, a page past the cache, a slot past its
    capacity or a block-table column past its width writes nothing either and is counted; see `decode_rope.check_faults`. If two
    tokens have one slot, every aligned 8 bytes of it come from one of them.

    Args:
        q: `[T, Hq, D]` fp16, bf16 or fp32; last dimension contiguous, other strides free. Rotated in place unless `q_out` is given.
        k: `[T, Hkv, D]`, dtype of q. Not modified unless `k_out` is `k`. With `v`, may be None: rotate q only, write no cache.
        v: `[T, Hkv, Dv]`, dtype of q. May share memory with k.
        k_cache: NHD `[pages, page_size, Hkv, D]`, HND `[pages, Hkv, page_size, D]`, or flat `[slots, Hkv, D]` (pages of one
            token); dtype of k or a quantised one, any strides with the last dimension contiguous. The addressed slots are written.
        v_cache: likewise with Dv, with strides of its own.
        cos_sin_cache: fp32 `[max_position, R]`, cosines then sines, contiguous, R even and at most D (the first R elements of a
            head rotate); or a `RopeTable`, whose own pairing then holds; or None: nothing rotates (NoPE), K and V are written.
        positions: `[T]` int32 or int64, in tokens. Row of the table, and by default the place in the sequence. Or `[axes, T]` with
            an axis map, as in `rope_append_prefill`.
        block_table: `[requests, max_pages]` int32 or int64, any row stride. Token t goes to page
            `block_table[t // tokens_per_request, p // page_size]`, offset `p % page_size`, with `p = cache_positions[t]`.
        slot_mapping: `[at most T]` int32 or int64: `page · page_size + offset`. Exactly one of the two, or neither if k is None.
        cache_positions: `[T]` int32 or int64, with block_table: place in the sequence where it is not `positions`.
        tokens_per_request: consecutive tokens that share a row of block_table.
        is_neox: pairs are (i, i + R/2) if true (NeoX, Llama), else (2i, 2i + 1) (GPT-J).
        kv_layout: "NHD" or "HND"; says nothing about flat caches.
        axis_map: int8 `[R/2]`, as in `rope_append_prefill`.
        q_out, k_out: outputs for rotated q and k, shapes and dtypes of q and k. `k_out` may be `k`, unless v shares its memory;
            `q_out` may be float8_e4m3fn.
        norm: a `QKNorm`: heads of q and k are normalised, all D elements of them, before or after the rotation. Rows that are
            passed through (padding, bad positions) are not normalised. None: no norm.
        q_token_scale: fp32 `[T]`; multiplies q after norm and rotation (the attention temperature of Llama 4 and Ministral 3).
        k_scale, v_scale: for caches of float8_e4m3fn, float8_e5m2 or int8, whose codes are `round(clamp(x / scale))`: fp32 on the
            device, 0-dim, `[1]` or `[Hkv]` (None: 1, not for int8). Or, for e4m3 and int8, `[pages, page_size, Hkv]` in any
            layout of the cache (`[slots, Hkv]` for a flat one), any strides: then each token and head has the scale
            `largest / limit`, which is written there, at the place of its code.
        q_scale: fp32 `[1]` for a `q_out` of float8_e4m3fn; None: 1.
        kv_dtype: what caches of dtype uint8 hold.
        enable_pdl: programmatic dependent launch (NVIDIA compute capability 9.0 and later). None: where measurements favour it.
            Everything is read after the wait for earlier kernels.
    Returns:
        q, or `q_out` if given.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
    Traffic:
        `itemsize · (2·Hq·D + 2·Hkv·(D + Dv)) + 4·R` bytes a token, and its index entries.
    Example:
        >>> import torch, decode_rope
        >>> q, k, v = torch.randn(2, 4, 64), torch.randn(2, 1, 64), torch.randn(2, 1, 64)
        >>> k_cache, v_cache = torch.zeros(8, 16, 1, 64), torch.zeros(8, 16, 1, 64)
        >>> table = decode_rope.RopeTable.build(64, 4096)
        >>> block_table = torch.tensor([[3, 5], [0, -1]], dtype=torch.int32)
        >>> positions = torch.tensor([17, 2])
        >>> q = decode_rope.rope_append_decode(q, k, v, k_cache, v_cache, table, positions, block_table=block_table)
        >>> bool((v_cache[5, 1] == v[0]).all())
        True
    """
    cos_sin = cos_sin_cache
    plain = norm is None and q_out is None and k_out is None and q_token_scale is None and q_scale is None
    if plain and cache_positions is None and axis_map is None and k_scale is None and v_scale is None and kv_dtype is None:
        # The usual call, whose identity costs less to tell.
        if cos_sin is not None and not isinstance(cos_sin, Tensor):
            cos_sin, is_neox, axis_map = of_table(cos_sin, is_neox)
        paged = slot_mapping is None
        usual = k is not None and cos_sin is not None and axis_map is None and (paged or block_table is None)
        if usual and not is_compiling():
            given = (q, k, v, k_cache, v_cache, cos_sin, positions, block_table if paged else slot_mapping)
            flags = (
                paged, tokens_per_request, is_neox, kv_layout, enable_pdl, type(tokens_per_request), type(is_neox), type(enable_pdl)
            )  # fmt: skip
            plan = DECODE_CALLS.find(flags, given)
            if plan is None or not plan.again(given):
                call = Append(
                    q, k, v, k_cache, v_cache, cos_sin, positions, block_table, slot_mapping,
                    tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout, enable_pdl=enable_pdl,
                )  # fmt: skip
                DECODE_CALLS.run_keyed(call, flags, given)
            return q
    call = Append(
        q, k, v, k_cache, v_cache, cos_sin, positions, block_table, slot_mapping, cache_positions,
        tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout, axis_map=axis_map, q_out=q_out, k_out=k_out,
        q_token_scale=q_token_scale, q_scale=q_scale, kv_dtype=kv_dtype, enable_pdl=enable_pdl, **norm_fields(norm),
        **scale_fields(k_scale, v_scale),
    )  # fmt: skip
    if is_compiling():
        operators.append("rope_append_decode", call)
    else:
        DECODE_CALLS.run(resolved(call))
    return q if q_out is None else q_out


def rope_append_prefill(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    cache_positions: Tensor | None = None,
    tokens_per_request: int = 1,
    cu_seqlens_q: Tensor | None = None,
    is_neox: bool = True,
    kv_layout: str = "NHD",
    axis_map: Tensor | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
    norm: QKNorm | None = None,
    q_token_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_scale: Tensor | None = None,
    kv_dtype: torch.dtype | None = None,
    enable_pdl: bool | None = None,
) -> Tensor:
    """Rotate `q` in place, and write rotated `k` and `v` into a paged cache, in one kernel launch, for batches
    of long sequences.

    `rope_append_decode` for a prefill, or a chunk of one: the same arguments, rows that are skipped, faults and
    bits. T tokens here leave exactly what T decode steps leave, however they are cut into calls. Its kernel is
    made for memory bandwidth, that of decode for latency; both are right for any number of tokens. Never waits
    for the device; safe in CUDA graphs.

    Args:
        q, k, v, k_cache, v_cache, cos_sin_cache, is_neox, kv_layout, slot_mapping, cache_positions, q_out,
            k_out, norm, q_token_scale, k_scale, v_scale, q_scale, kv_dtype: as in `rope_append_decode`. Give `k_out=k` to
            rotate k in place too, for attention over the live k. With `k_cache` and `v_cache` None, k is rotated into `k_out`
            and nothing is appended; v must then be None.
        positions: `[T]` int32 or int64, in tokens: row of the table, and by default the place in the sequence.
            Sequences may begin anywhere. Or `[axes, T]` with an axis map, any row stride: pair j turns by the
            position in row `axis_map[j]`. Row 0 decides what is padding (`< 0`) and is the default place in the
            sequence, so multi-axis models, whose positions run behind their tokens, pass `slot_mapping` or
            `cache_positions`. A position of any row in use that the table does not hold makes the row a bad
            one; negative ones of other rows are recorded as 4294967295.
        axis_map: int8 `[R/2]`, the row of `positions` of each pair (see `decode_rope.axes`); taken from a
            `RopeTable` that has one. Entries outside the rows count as the nearest one. Not needed, and not
            looked at, where positions are `[T]`.
        block_table: `[requests, max_pages]` int32 or int64. Its row r serves tokens `cu_seqlens_q[r]` …
            `cu_seqlens_q[r + 1] − 1`, or without `cu_seqlens_q` tokens `r · tokens_per_request` ….
        cu_seqlens_q: `[requests + 1]` int32 or int64, ascending. Read on the device only. Tokens before its
            first entry and from its last one on are padding rows. If it does not ascend, some tokens are not
            appended, and nothing worse happens.
        tokens_per_request: consecutive tokens that share a row of block_table, if `cu_seqlens_q` is not given.
        enable_pdl: as in `rope_append_decode`.
    Returns:
        q, or `q_out` if given.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
    Traffic:
        `itemsize · (2·Hq·D + 2·Hkv·(D + Dv)) + 4·R` bytes a token, and its index entries.
    Example:
        >>> import torch, decode_rope
        >>> q, k, v = torch.randn(5, 4, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64)
        >>> k_cache, v_cache = torch.zeros(8, 16, 1, 64), torch.zeros(8, 16, 1, 64)
        >>> angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> table = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> block_table = torch.tensor([[3, 5], [0, -1]], dtype=torch.int32)
        >>> cu_seqlens = torch.tensor([0, 3, 5])  # a chunk of three tokens, then one of two
        >>> positions = torch.tensor([15, 16, 17, 0, 1])
        >>> q = decode_rope.rope_append_prefill(
        ...     q, k, v, k_cache, v_cache, table, positions, block_table=block_table, cu_seqlens_q=cu_seqlens
        ... )
        >>> bool((v_cache[5, 1] == v[2]).all() and (v_cache[0, 1] == v[4]).all())
        True
    """
    call = Append(
        q, k, v, k_cache, v_cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q, axis_map,
        q_out, k_out, tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout, q_token_scale=q_token_scale,
        q_scale=q_scale, kv_dtype=kv_dtype, enable_pdl=enable_pdl, **norm_fields(norm), **scale_fields(k_scale, v_scale),
    )  # fmt: skip
    if is_compiling():
        operators.append("rope_append_prefill", call)
    else:
        PREFILL_CALLS.run(resolved(call))
    return q if q_out is None else q_out


def apply_rope(
    x: Tensor,
    cos_sin_cache,
    positions: Tensor | None = None,
    *,
    is_neox: bool = True,
    axis_map: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
    layout: str = "NHD",
) -> Tensor:
    """Rotate a query or key tensor: in one kernel launch, without a copy, in any of the usual layouts, and
    differentiably.

    Autograd knows it: the gradient is the inverse rotation of the gradient, one more launch that keeps no
    activations. Numbers are those of `rope_append_decode`, bit for bit. Safe in CUDA graphs, once a
    configuration's first call is done. On CPU tensors `decode_rope.reference` runs instead.

    Rows with `positions < 0` pass through unrotated (padding), and so do rows with a position past the table,
    which are counted; see `decode_rope.check_faults`. Their gradients pass through likewise.

    Args:
        x: `[B, S, H, D]` (layout "NHD"), `[B, H, S, D]` (layout "HND") or `[T, H, D]`; fp16, bf16 or fp32, on
            the CPU float64 too; last dimension contiguous, other strides free.
        cos_sin_cache: fp32 `[max_position, R]`, cosines then sines, contiguous, R even and at most D (the first
            R elements of a head rotate); or a `RopeTable`, whose own pairing then holds.
        positions: int32 or int64 `[S]`, `[B, S]` or `[1, S]` (for `[T, H, D]`: `[T]`), any batch stride; or
            with one dimension more than that in front, `[axes, B, S]` (`[axes, T]`), and an axis map. None: 0 …
            S − 1.
        is_neox: pairs are (i, i + R/2) if true (NeoX, Llama), else (2i, 2i + 1) (GPT-J).
        axis_map: int8 `[R/2]`, the axis of each pair, for positions of several axes, as in
            `rope_append_prefill`.
        inverse: turn backwards (sines negated).
        out: where the result goes, shape and dtype of x; `out=x` rotates in place, for autograd too.
        layout: what the dimensions of a 4-D x are.
    Returns:
        `out`, or a new tensor, dense and in the order of x's strides.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
        NotImplementedError: a derivative in forward mode is wanted.
    Traffic:
        `2·itemsize·H·D + 4·R` bytes a token; in place `2·itemsize·H·R + 4·R`.
    Example:
        >>> import torch, decode_rope
        >>> x = torch.randn(2, 4, 6, 64, requires_grad=True)  # [B, H, S, D]
        >>> angle = torch.arange(128)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> table = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> y = decode_rope.apply_rope(x, table, layout="HND")
        >>> back = decode_rope.apply_rope(y, table, layout="HND", inverse=True)
        >>> bool(torch.allclose(back, x, atol=1e-5))
        True
    """
    cos_sin, is_neox, axis_map = of_table(cos_sin_cache, is_neox, axis_map)
    if torch.is_grad_enabled():
        check_gradients(x, cos_sin, out)
    if forward_ad._current_level >= 0:
        _no_forward_mode(x)
    if is_compiling():
        return rotation_operators.rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout)
    if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
        in_place = out is x
        return _Rope.apply(x, None if in_place else out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, True)
    return rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout, report=True)


def _no_forward_mode(x) -> None:
    if isinstance(x, Tensor) and (is_compiling() or forward_ad.unpack_dual(x).tangent is not None):
        raise NotImplementedError(
            "apply_rope: no derivative in forward mode (jvp, dual tensors), which would be lost without a word; the rotation is "
            "linear, so rotate the tangent in a call of its own"
        )


class _Rope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, report):
        return rotate(x, x if in_place else out, cos_sin, positions, is_neox, axis_map, inverse, layout, report=report)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, _ = inputs
        if in_place or out is not None:
            ctx.mark_dirty(output)
        ctx.save_for_backward(cos_sin, positions, axis_map)
        ctx.flags = (is_neox, inverse, layout)

    @staticmethod
    def backward(ctx, grad):
        cos_sin, positions, axis_map = ctx.saved_tensors
        is_neox, inverse, layout = ctx.flags
        if grad.shape[-1] > 1 and grad.stride(-1) != 1:
            grad = grad.contiguous()
        # Through `apply`, for gradients of gradients. Faults were counted on the way forward.
        turned = _Rope.apply(grad, None, False, cos_sin, positions, is_neox, axis_map, not inverse, layout, False)
        return turned, *[None] * 9
