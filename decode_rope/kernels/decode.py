"""The decode kernel: one launch rotates Q and K and writes K and V into their slots.

A program handles one tile of Q rows, of K rows or of V rows (a row is one head of one token), so that Q never waits for the
block table and V never waits for the rotation. The grid is 1-D: first the Q tiles, then K, then V.
It moves, per token, 2·Hq·D + 2·Hkv·(D + Dv) elements and one fp32 row of the table, plus the index entries.
It writes only `q_out`, `k_out`, the addressed cache slots, and on a fault the fault record.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .rotation import (
    POSITION,
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
    steps,
    store_pairs,
    store_span,
    tile_rows,
    turns,
)

# Metadata is of all layers. To keep it in the L2 cache while a layer's weights go by is worth 0.1-0.4 us a launch (H200, behind a
# projection of 50 MB).
EVICT = tl.constexpr("evict_last")


@triton.jit
def _q_tile(
    block, group, q, q_out, cos_sin_ptr, positions_ptr, faults_ptr, num_tokens, max_position,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, Q_OUT: tl.constexpr, REPORT: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = _rows(q, token, head, ALIGN)
    dst = _rows(q_out, token, head, ALIGN)
    if R > 0:
        if not PREFETCH:
            x1, x2 = load_pairs(src, ok, R, NEOX)
        pos = load_per_token(positions_ptr, token, num_tokens, BT, EVICT)
        issue_loads(FENCE and not PREFETCH)
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT, EVICT)
        if PREFETCH:
            gdc_wait()
            x1, x2 = load_pairs(src, ok, R, NEOX)
        y1, y2 = rotate_pairs(x1, x2, c, s, tl.float32)
        rotated = turns(pos, max_position, head)
        store_pairs(dst, ok & rotated, y1, y2, R, NEOX)
        if Q_OUT:
            store_pairs(dst, ok & (rotated == 0), x1, x2, R, NEOX)
        if REPORT:
            report_faults(faults_ptr, token, tl.where(pos >= max_position, POSITION, 0), pos, group, head, BT)
    elif PREFETCH:
        gdc_wait()
    if Q_OUT and R < D:
        copy_span(src, dst, ok, ok, R, D - R)


@triton.jit
def _rows(tensor, token, head, ALIGN: tl.constexpr):
    """Pointers to the rows of a tensor, which is (pointer, stride of tokens, stride of heads)."""
    ptr, stride_t, stride_h = tensor
    return row_pointers(ptr, steps(token, stride_t) + steps(head, stride_h), ALIGN)


@triton.jit
def _slots(cache, page, offset, head, ALIGN: tl.constexpr):
    """Pointers to the rows of a cache, which is (pointer, strides of pages, of offsets in them, of heads)."""
    ptr, stride_p, stride_t, stride_h = cache
    return row_pointers(ptr, steps(page, stride_p) + steps(offset, stride_t) + steps(head, stride_h), ALIGN)


@triton.jit
def _k_tile(
    block, group, k, k_out, k_cache, cos_sin_ptr, positions_ptr, where, faults_ptr, num_tokens, max_position,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, K_OUT: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr, ALIGN_TABLE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = _rows(k, token, head, ALIGN)
    out = _rows(k_out, token, head, ALIGN)
    if R > 0 and not PREFETCH:
        x1, x2 = load_pairs(src, ok, R, NEOX)
    if R < D and not PREFETCH:
        tail = load_span(src, ok, R, D - R)
    pos = load_per_token(positions_ptr, token, num_tokens, BT, EVICT)
    issue_loads(FENCE and not PREFETCH)
    page, offset, writes, kind, value = locate(
        token, pos, where, num_tokens, max_position, R > 0, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, BT, EVICT
    )
    slot = _slots(k_cache, page, offset, head, ALIGN_CACHE)
    live = ok & (head * 0 + writes > 0)
    if R > 0:
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT, EVICT)
    if PREFETCH:
        gdc_wait()
        if R > 0:
            x1, x2 = load_pairs(src, ok, R, NEOX)
        if R < D:
            tail = load_span(src, ok, R, D - R)
    if R > 0:
        y1, y2 = rotate_pairs(x1, x2, c, s, tl.float32)
        store_pairs(slot, live, y1, y2, R, NEOX)
        if K_OUT:
            rotated = turns(pos, max_position, head)
            store_pairs(out, ok & rotated, y1, y2, R, NEOX)
            store_pairs(out, ok & (rotated == 0), x1, x2, R, NEOX)
    if R < D:
        store_span(slot, live, tail, R, D - R)
        if K_OUT:
            store_span(out, ok, tail, R, D - R)
    report_faults(faults_ptr, token, kind, value, group, head, BT)


@triton.jit
def _v_tile(
    block, group, v, v_cache, positions_ptr, where, num_tokens, max_position,
    H: tl.constexpr, DV: tl.constexpr, ROTARY: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = _rows(v, token, head, ALIGN)
    if not PREFETCH:
        x = load_span(src, ok, 0, DV)
    pos = load_per_token(positions_ptr, token, num_tokens, BT, EVICT)
    issue_loads(FENCE and not PREFETCH)
    page, offset, writes, _kind, _value = locate(
        token, pos, where, num_tokens, max_position, ROTARY, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, BT, EVICT
    )
    slot = _slots(v_cache, page, offset, head, ALIGN_CACHE)
    if PREFETCH:
        gdc_wait()
        x = load_span(src, ok, 0, DV)
        issue_loads(FENCE)
    store_span(slot, ok & (head * 0 + writes > 0), x, 0, DV)


@kernel
def rope_append_decode_kernel(
    # In the order of use, because a launch reads its parameters through a cache that is empty: those of all tiles and of Q, then of
    # K, then of V. Integers have 32 bits unless a value needs 64: one instruction then multiplies what four would. Strides are in
    # elements; `index_len` is the block table's width, or the number of slots.
    num_tokens,
    positions_ptr,
    max_position,
    cos_sin_ptr,
    q_ptr,
    q_out_ptr,
    stride_q_t,
    stride_q_h,
    stride_qo_t,
    stride_qo_h,
    index_ptr,
    index_len,
    stride_index,
    num_pages,
    k_ptr,
    k_cache_ptr,
    stride_k_t,
    stride_k_h,
    stride_kc_p,
    stride_kc_t,
    stride_kc_h,
    faults_ptr,
    v_ptr,
    v_cache_ptr,
    stride_v_t,
    stride_v_h,
    stride_vc_p,
    stride_vc_t,
    stride_vc_h,
    cache_positions_ptr,
    k_out_ptr,
    stride_ko_t,
    stride_ko_h,
    HQ: tl.constexpr,  # query heads
    HKV: tl.constexpr,  # KV heads; 0: rotate Q only
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,  # rotary_dim; 0: NoPE
    NEOX: tl.constexpr,
    PAGED: tl.constexpr,  # index is a block table, else a slot mapping
    PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    OWN_CACHE_POSITIONS: tl.constexpr,
    Q_OUT: tl.constexpr,  # Q goes to its own tensor, so its unrotated tail is copied too
    K_OUT: tl.constexpr,
    ALIGN: tl.constexpr,  # bytes every row of q, k, v and the outputs is aligned to
    ALIGN_CACHE: tl.constexpr,  # the same of the caches
    ALIGN_TABLE: tl.constexpr,
    BTQ: tl.constexpr,
    BHQ: tl.constexpr,
    BTK: tl.constexpr,
    BHK: tl.constexpr,
    PDL: tl.constexpr,  # 0: off; dependent kernels may be scheduled 1: at once, 2: when all before us has ended, 3: when we have
    PREFETCH: tl.constexpr,  # read positions, index and table before the PDL wait; then 2 is as 1
    FENCE: tl.constexpr,  # hold NVIDIA's compiler to our order of loads
):
    # A dependent kernel waits for our completion before it reads, so it may be scheduled from here on: worth 0.2-0.4 us at
    # small grids (H200).
    if PDL:
        if PDL == 1 or (PDL == 2 and PREFETCH):
            gdc_launch_dependents()
        if not PREFETCH:
            gdc_wait()
            if PDL == 2:
                gdc_launch_dependents()
    NQ: tl.constexpr = (HQ + BHQ - 1) // BHQ
    NK: tl.constexpr = (HKV + BHK - 1) // BHK
    pid = tl.program_id(0)
    where = (cache_positions_ptr, index_ptr, index_len, stride_index, num_pages)
    q_tiles = ((num_tokens + BTQ - 1) // BTQ) * NQ
    if HKV == 0 or pid < q_tiles:
        _q_tile(
            pid // NQ, pid % NQ, (q_ptr, stride_q_t, stride_q_h), (q_out_ptr, stride_qo_t, stride_qo_h),
            cos_sin_ptr, positions_ptr, faults_ptr, num_tokens, max_position,
            HQ, D, R, NEOX, Q_OUT, HKV == 0, ALIGN, ALIGN_TABLE, BTQ, BHQ, PREFETCH, FENCE,
        )  # fmt: skip
    else:
        k_tiles = ((num_tokens + BTK - 1) // BTK) * NK
        tile = pid - q_tiles
        if tile < k_tiles:
            _k_tile(
                tile // NK, tile % NK, (k_ptr, stride_k_t, stride_k_h), (k_out_ptr, stride_ko_t, stride_ko_h),
                (k_cache_ptr, stride_kc_p, stride_kc_t, stride_kc_h),
                cos_sin_ptr, positions_ptr, where, faults_ptr, num_tokens, max_position,
                HKV, D, R, NEOX, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, K_OUT,
                ALIGN, ALIGN_CACHE, ALIGN_TABLE, BTK, BHK, PREFETCH, FENCE,
            )  # fmt: skip
        else:
            tile -= k_tiles
            _v_tile(
                tile // NK, tile % NK, (v_ptr, stride_v_t, stride_v_h), (v_cache_ptr, stride_vc_p, stride_vc_t, stride_vc_h),
                positions_ptr, where, num_tokens, max_position,
                HKV, DV, R > 0, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS,
                ALIGN, ALIGN_CACHE, BTK, BHK, PREFETCH, FENCE,
            )  # fmt: skip
