"""The latent kernel of multi-head latent attention: one launch rotates the rotary parts of Q and of the shared key, normalises the
latents, and writes latents and key into their slots.

A program handles one tile of Q rows (a row is one head of one token), or the latents and keys of BT tokens, so that Q never waits
for the block table. The grid is 1-D: first the Q tiles, then the others.
It moves, per token, 2·H·R + 2·(L + R) elements and one fp32 row of the table, plus the index entries.
It writes only `q_out`, the addressed cache slots, and on a fault the fault record.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .norm import BEFORE, changed_rows, load_weights
from .rotation import (
    EVICT,
    begin,
    copy_span,
    issue_loads,
    kernel,
    load_cos_sin,
    load_pairs,
    load_per_token,
    load_span,
    locate,
    report_faults,
    rotate_pairs,
    row_pointers,
    rows,
    steps,
    store_pairs,
    store_span,
    tile_rows,
    turns,
)


@triton.jit
def _positions(positions_ptr, sequences, token, num_tokens, BT: tl.constexpr):
    """The position of each token; −1 past the end, and for tokens before the first sequence or behind the last. `sequences`: (their
    bounds or None, their number)."""
    pos = load_per_token(positions_ptr, token, num_tokens, BT, EVICT)
    cu_seqlens_ptr, num_requests = sequences
    if cu_seqlens_ptr is not None:
        first = tl.load(cu_seqlens_ptr).to(tl.int64)
        last = tl.load(cu_seqlens_ptr + num_requests).to(tl.int64)
        pos = tl.where((token >= first) & (token < last), pos, -1)
    return pos


@triton.jit
def _sequence_of(cu_seqlens_ptr, token, num_requests):
    """The last sequence that begins at or before each token, or 0. Reads bounds alone, whatever they hold."""
    low = token * 0
    high = low + num_requests
    length = num_requests
    while length > 1:
        middle = (low + high) >> 1
        below = tl.load(cu_seqlens_ptr + middle, eviction_policy=EVICT).to(tl.int64) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
        length = (length + 1) >> 1
    return low


@triton.jit
def _place(
    token, pos, where, sequences, num_tokens, max_position, ROTATES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`locate`, for tokens whose requests are what `sequences` says."""
    cache_positions_ptr, index_ptr, index_len, stride_index, num_pages = where
    cu_seqlens_ptr, num_requests = sequences
    table_ptr = index_ptr
    if PAGED and cu_seqlens_ptr is not None:
        # `locate` steps from row to row with the token; start it where that lands on the token's request.
        table_ptr = index_ptr + (_sequence_of(cu_seqlens_ptr, token, num_requests) - token) * stride_index
    return locate(
        token, pos, (cache_positions_ptr, table_ptr, index_len, stride_index, num_pages), num_tokens, max_position,
        ROTATES, PAGED, PAGE, TOKENS_PER_REQUEST, cache_positions_ptr is not None, BT, EVICT,
    )  # fmt: skip


@triton.jit
def _q_tile(
    block, group, q, q_out, cos_sin_ptr, positions_ptr, sequences, num_tokens, max_position,
    H: tl.constexpr, R: tl.constexpr, NEOX_IN: tl.constexpr, NEOX_OUT: tl.constexpr, Q_OUT: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = rows(q, token, head, ALIGN)
    dst = rows(q_out, token, head, ALIGN)
    if cos_sin_ptr is None:
        if PREFETCH:
            gdc_wait()
        copy_span(src, dst, ok, ok, 0, R)
    else:
        if not PREFETCH:
            x1, x2 = load_pairs(src, ok, R, NEOX_IN)
        pos = _positions(positions_ptr, sequences, token, num_tokens, BT)
        issue_loads(FENCE and not PREFETCH)
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT, EVICT)
        if PREFETCH:
            gdc_wait()
            x1, x2 = load_pairs(src, ok, R, NEOX_IN)
        y1, y2 = rotate_pairs(x1, x2, c, s, tl.float32)
        if NEOX_IN != NEOX_OUT:
            # Pairs move within their row, to where another thread may still have to read.
            tl.debug_barrier()
        changed = turns(pos, max_position, head)
        store_pairs(dst, ok & changed, y1, y2, R, NEOX_OUT)
        if Q_OUT:
            store_pairs(dst, ok & (changed == 0), x1, x2, R, NEOX_IN)


@triton.jit
def _row_of(ptr, offset, head, ALIGN: tl.constexpr, BT: tl.constexpr):
    """Pointers to one row for each of BT tokens, at its `offset`. `head` is a block of zeros."""
    if BT == 1:
        return tl.multiple_of(ptr + offset, ALIGN) + head
    else:
        return row_pointers(ptr, offset + head, ALIGN)


@triton.jit
def _slot_of(cache, page, offset, start, head, ALIGN: tl.constexpr, BT: tl.constexpr):
    """Pointers to element `start` of the slots of BT tokens. `cache`: (pointer, strides of pages and of offsets in them)."""
    ptr, stride_p, stride_t = cache
    return _row_of(ptr, steps(page, stride_p) + steps(offset, stride_t) + start, head, ALIGN, BT)


@triton.jit
def _load_key(row, ok, R: tl.constexpr, ROTATES: tl.constexpr, NEOX: tl.constexpr):
    """The members of pairs, or without a rotation the elements of rows as they are."""
    if ROTATES:
        return load_pairs(row, ok, R, NEOX)
    else:
        return (load_span(row, ok, 0, R),)


@triton.jit
def _latent_tile(
    block, kv, k, cache, rope_cache, cos_sin_ptr, positions_ptr, where, sequences, faults_ptr, num_tokens, max_position, weight_ptr,
    L: tl.constexpr, R: tl.constexpr, NEOX_IN: tl.constexpr, NEOX_OUT: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr, EPS: tl.constexpr, ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr,
    ALIGN_TABLE: tl.constexpr, ALIGN_WEIGHT: tl.constexpr, BT: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    ROTATES: tl.constexpr = cos_sin_ptr is not None
    # One row a token; its head is 0.
    token, head, ok = tile_rows(block, 0, num_tokens, 1, BT, 1, True)
    latent_row = _row_of(kv[0], steps(token, kv[1]), head, ALIGN, BT)
    key_row = _row_of(k[0], steps(token, k[1]), head, ALIGN, BT)
    if not PREFETCH:
        latent = load_span(latent_row, ok, 0, L)
        key = _load_key(key_row, ok, R, ROTATES, NEOX_IN)
    pos = _positions(positions_ptr, sequences, token, num_tokens, BT)
    weights = load_weights(weight_ptr, head, num_tokens, L, 0, True, 0, ALIGN_WEIGHT, EVICT)
    issue_loads(FENCE and not PREFETCH)
    if ROTATES:
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT, EVICT)
    page, offset, writes, kind, value = _place(
        token, pos, where, sequences, num_tokens, max_position, ROTATES, PAGED, PAGE, TOKENS_PER_REQUEST, BT
    )
    live = ok & (head * 0 + writes > 0)
    slot = _slot_of(cache, page, offset, 0, head, ALIGN_CACHE, BT)
    if rope_cache[0] is None:
        key_slot = _slot_of(cache, page, offset, L, head, ALIGN_CACHE, BT)
    else:
        key_slot = _slot_of(rope_cache, page, offset, 0, head, ALIGN_CACHE, BT)
    if PREFETCH:
        gdc_wait()
        latent = load_span(latent_row, ok, 0, L)
        key = _load_key(key_row, ok, R, ROTATES, NEOX_IN)
    if weight_ptr is not None:
        _pairs, normed = changed_rows((), (latent,), (), weights, (), L, 0, BEFORE, EPS, False, True, False)
        store_span(slot, live, normed[0], 0, L)
    else:
        store_span(slot, live, latent, 0, L)
    if ROTATES:
        y1, y2 = rotate_pairs(key[0], key[1], c, s, tl.float32)
        store_pairs(key_slot, live, y1, y2, R, NEOX_OUT)
    else:
        store_span(key_slot, live, key[0], 0, R)
    report_faults(faults_ptr, token, kind, value, block * 0, head, BT)


@kernel
def rope_append_mla_kernel(
    # In the order of use, as in the decode kernel. Integers have 32 bits unless a value needs 64. Strides are in elements;
    # `index_len` is the block table's width, or the number of slots.
    num_tokens,
    positions_ptr,
    max_position,
    cos_sin_ptr,  # None, and no parameter at all: NoPE
    q_ptr,
    q_out_ptr,
    stride_q_t,
    stride_q_h,
    stride_qo_t,
    stride_qo_h,
    kv_ptr,
    k_ptr,
    stride_kv_t,
    stride_k_t,
    index_ptr,
    index_len,
    stride_index,
    num_pages,
    cache_ptr,
    stride_c_p,
    stride_c_t,
    faults_ptr,
    rope_cache_ptr,  # from here on: None, and no parameter at all, where there is none
    stride_rc_p,
    stride_rc_t,
    kv_weight_ptr,
    cache_positions_ptr,
    cu_seqlens_ptr,
    num_requests,
    H: tl.constexpr,  # query heads
    L: tl.constexpr,  # elements of a latent
    R: tl.constexpr,  # elements of the rotary part of a head and of the key
    NEOX_IN: tl.constexpr,  # pairs are read as (i, i + R/2), else (2i, 2i + 1)
    NEOX_OUT: tl.constexpr,  # the same of what is written
    PAGED: tl.constexpr,  # index is a block table, else a slot mapping
    PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    Q_OUT: tl.constexpr,  # Q goes to its own tensor
    EPS: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes every row of q, k, latents and the output is aligned to
    ALIGN_CACHE: tl.constexpr,
    ALIGN_TABLE: tl.constexpr,
    ALIGN_WEIGHT: tl.constexpr,
    BTQ: tl.constexpr,
    BHQ: tl.constexpr,
    BT: tl.constexpr,
    PDL: tl.constexpr,  # as in the decode kernel, and so is PREFETCH
    PREFETCH: tl.constexpr,
    FENCE: tl.constexpr,  # hold NVIDIA's compiler to our order of loads
):
    begin(PDL, PREFETCH)
    NQ: tl.constexpr = (H + BHQ - 1) // BHQ if cos_sin_ptr is not None or Q_OUT else 0  # Q that stays as it is has no programs
    pid = tl.program_id(0)
    sequences = (cu_seqlens_ptr, num_requests)
    q_tiles = ((num_tokens + BTQ - 1) // BTQ) * NQ
    if NQ > 0 and pid < q_tiles:
        _q_tile(
            pid // NQ, pid % NQ, (q_ptr, stride_q_t, stride_q_h), (q_out_ptr, stride_qo_t, stride_qo_h),
            cos_sin_ptr, positions_ptr, sequences, num_tokens, max_position,
            H, R, NEOX_IN, NEOX_OUT, Q_OUT, ALIGN, ALIGN_TABLE, BTQ, BHQ, PREFETCH, FENCE,
        )  # fmt: skip
    else:
        _latent_tile(
            pid - q_tiles, (kv_ptr, stride_kv_t), (k_ptr, stride_k_t), (cache_ptr, stride_c_p, stride_c_t),
            (rope_cache_ptr, stride_rc_p, stride_rc_t), cos_sin_ptr, positions_ptr,
            (cache_positions_ptr, index_ptr, index_len, stride_index, num_pages), sequences, faults_ptr,
            num_tokens, max_position, kv_weight_ptr,
            L, R, NEOX_IN, NEOX_OUT, PAGED, PAGE, TOKENS_PER_REQUEST, EPS,
            ALIGN, ALIGN_CACHE, ALIGN_TABLE, ALIGN_WEIGHT, BT, PREFETCH, FENCE,
        )  # fmt: skip
