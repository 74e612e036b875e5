"""The decode kernel: one launch rotates Q and K and writes K and V into their slots.

A program handles one tile of Q rows, of K rows or of V rows (a row is one head of one token), so that Q never waits for the
block table and V never waits for the rotation. The grid is 1-D: first the Q tiles, then K, then V.
It moves, per token, 2·Hq·D + 2·Hkv·(D + Dv) elements and one fp32 row of the table, plus the index entries.
It writes only `q_out`, `k_out`, the addressed cache slots, and on a fault the fault record.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .heads import load_angles, past_table
from .norm import changed_rows, load_weights, normed_row
from .quant import load_scale, quantised_row, row_scale
from .rotation import (
    EVICT,
    POSITION,
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
    rows,
    slots,
    store_pairs,
    store_span,
    tile_rows,
    turns,
)


@triton.jit
def _q_tile(
    block, group, q, q_out, cos_sin_ptr, positions, faults_ptr, num_tokens, max_position, weight_ptr, token_scale_ptr, scale_ptr,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, AXES: tl.constexpr, Q_OUT: tl.constexpr,
    REPORT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUNDED: tl.constexpr,
    CODE: tl.constexpr, NATIVE_CAST: tl.constexpr, ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr, ALIGN_WEIGHT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    CHANGES_TAIL: tl.constexpr = NORM > 0 or token_scale_ptr is not None or CODE > 0
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = rows(q, token, head, ALIGN)
    dst = rows(q_out, token, head, ALIGN)
    if R > 0 or CHANGES_TAIL:
        if not PREFETCH:
            pairs, tail = _load_row(src, ok, D, R, NEOX, CHANGES_TAIL)
        pos = load_per_token(positions[0], token, num_tokens, BT, EVICT)
        weights = load_weights(weight_ptr, head, num_tokens, D, R, NEOX, WEIGHT_OFFSET, ALIGN_WEIGHT, EVICT)
        token_scale = _load_token_scale(token_scale_ptr, token, num_tokens, BT)
        scale = load_scale(scale_ptr, 0, head, H, EVICT)
        issue_loads(FENCE and not PREFETCH)
        angles, bad = _angles(cos_sin_ptr, positions, token, pos, head, num_tokens, max_position, R, AXES, ALIGN_TABLE, BT)
        if PREFETCH:
            gdc_wait()
            pairs, tail = _load_row(src, ok, D, R, NEOX, CHANGES_TAIL)
        new_pairs, new_tail = changed_rows(
            pairs, tail, angles, weights, token_scale, D, R, NORM, EPS, ROUNDED,
            weight_ptr is not None, token_scale_ptr is not None,
        )  # fmt: skip
        if CODE > 0:
            new_pairs, new_tail = quantised_row(new_pairs, new_tail, scale, D, R, CODE, NATIVE_CAST)
            pairs, tail = quantised_row(pairs, tail, scale, D, R, CODE, NATIVE_CAST)
        changed = _turns(pos, bad, max_position, head, R, AXES)
        _store_row(dst, ok & changed, new_pairs, new_tail, D, R, NEOX, CHANGES_TAIL)
        if Q_OUT:
            _store_row(dst, ok & (changed == 0), pairs, tail, D, R, NEOX, CHANGES_TAIL)
        if REPORT and R > 0:
            _report_positions(faults_ptr, token, pos, bad, max_position, group, head, AXES, BT)
    elif PREFETCH:
        gdc_wait()
    if Q_OUT and R < D and not CHANGES_TAIL:
        copy_span(src, dst, ok, ok, R, D - R)


@triton.jit
def _load_row(row, ok, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, TAIL: tl.constexpr):
    """((first members of pairs, second members), (unrotated tail,)) of rows. A tuple is empty where there is nothing to hold, and
    that of the tail without TAIL."""
    pairs = ()
    tail = ()
    if R > 0:
        pairs = load_pairs(row, ok, R, NEOX)
    if R < D and TAIL:
        tail = (load_span(row, ok, R, D - R),)
    return pairs, tail


@triton.jit
def _store_row(row, ok, pairs, tail, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, TAIL: tl.constexpr):
    """The counterpart of `_load_row`."""
    if R > 0:
        store_pairs(row, ok, pairs[0], pairs[1], R, NEOX)
    if R < D and TAIL:
        store_span(row, ok, tail[0], R, D - R)


@triton.jit
def _load_token_scale(ptr, token, num_tokens, BT: tl.constexpr):
    """(The scale of each token,), or an empty tuple without a pointer."""
    scale = ()
    if ptr is not None:
        if BT == 1:
            scale = (tl.load(ptr + token, eviction_policy=EVICT),)
        else:
            scale = (tl.load(ptr + token, mask=token < num_tokens, other=0.0, eviction_policy=EVICT),)
    return scale


@triton.jit
def _angles(
    cos_sin_ptr, positions, token, pos, head, num_tokens, max_position,
    R: tl.constexpr, AXES: tl.constexpr, ALIGN_TABLE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """(cos, sin) of each row, empty without a rotation, and with several axes the first position that the table does not hold or
    −1. `positions` is (pointer, stride of axes, axis map)."""
    angles = ()
    bad = pos
    if R > 0 and AXES == 0:
        angles = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT, EVICT)
    elif R > 0:
        ptr, stride_axis, axis_map_ptr = positions
        valid = token < num_tokens
        bad = past_table(ptr, token, valid, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
        angles = load_angles(
            cos_sin_ptr, ptr, token, valid, pos, head, stride_axis, axis_map_ptr, max_position, R, AXES, ALIGN_TABLE, BT
        )
    return angles, bad


@triton.jit
def _turns(pos, bad, max_position, head, R: tl.constexpr, AXES: tl.constexpr):
    """Whether a row is changed: it is no padding, and the table holds its position."""
    if R == 0:
        return pos + head * 0 >= 0
    elif AXES == 0:
        return turns(pos, max_position, head)
    else:
        return (pos + head * 0 >= 0) & (bad + head * 0 < 0)


@triton.jit
def _report_positions(faults_ptr, token, pos, bad, max_position, group, head, AXES: tl.constexpr, BT: tl.constexpr):
    if AXES == 0:
        report_faults(faults_ptr, token, tl.where(pos >= max_position, POSITION, 0), pos, group, head, BT)
    else:
        report_faults(faults_ptr, token, tl.where(bad >= 0, POSITION, 0), bad, group, head, BT)


@triton.jit
def _k_tile(
    block, group, k, k_out, k_cache, cos_sin_ptr, positions, where, faults_ptr, num_tokens, max_position, weight_ptr, scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, AXES: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, TOKENS_PER_REQUEST: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, K_OUT: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUNDED: tl.constexpr,
    CODE: tl.constexpr, DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr, ALIGN_TABLE: tl.constexpr, ALIGN_WEIGHT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = rows(k, token, head, ALIGN)
    out = rows(k_out, token, head, ALIGN)
    if not PREFETCH:
        pairs, tail = _load_row(src, ok, D, R, NEOX, True)
    pos = load_per_token(positions[0], token, num_tokens, BT, EVICT)
    weights = load_weights(weight_ptr, head, num_tokens, D, R, NEOX, WEIGHT_OFFSET, ALIGN_WEIGHT, EVICT)
    given_scale = ()
    if not DYNAMIC:
        given_scale = load_scale(scale[0], scale[3], head, H, EVICT)
    issue_loads(FENCE and not PREFETCH)
    page, offset, writes, kind, value = locate(
        token, pos, where, num_tokens, max_position,
        R > 0 and AXES == 0, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, BT, EVICT,
    )  # fmt: skip
    slot = slots(k_cache, page, offset, head, ALIGN_CACHE)
    live = ok & (head * 0 + writes > 0)
    angles, bad = _angles(cos_sin_ptr, positions, token, pos, head, num_tokens, max_position, R, AXES, ALIGN_TABLE, BT)
    if R > 0 and AXES > 0:
        kind = tl.where(bad >= 0, POSITION, kind)
        value = tl.where(bad >= 0, bad, value)
        live = live & (bad + head * 0 < 0)
    if PREFETCH:
        gdc_wait()
        pairs, tail = _load_row(src, ok, D, R, NEOX, True)
    new_pairs, new_tail = changed_rows(
        pairs, tail, angles, weights, (), D, R, NORM, EPS, ROUNDED, weight_ptr is not None, False
    )  # fmt: skip
    if CODE > 0:
        cached_pairs, cached_tail = _codes(
            new_pairs, new_tail, given_scale, scale, page, offset, head, live, D, R, CODE, DYNAMIC, NATIVE_CAST
        )  # fmt: skip
        _store_row(slot, live, cached_pairs, cached_tail, D, R, NEOX, True)
    else:
        _store_row(slot, live, new_pairs, new_tail, D, R, NEOX, True)
    if K_OUT:
        if R > 0 or NORM > 0:
            changed = _turns(pos, bad, max_position, head, R, AXES)
            _store_row(out, ok & changed, new_pairs, new_tail, D, R, NEOX, NORM > 0)
            _store_row(out, ok & (changed == 0), pairs, tail, D, R, NEOX, NORM > 0)
        if R < D and NORM == 0:
            store_span(out, ok, tail[0], R, D - R)
    report_faults(faults_ptr, token, kind, value, group, head, BT)


@triton.jit
def _codes(
    pairs, tail, given_scale, scale, page, offset, head, live, D: tl.constexpr, R: tl.constexpr, CODE: tl.constexpr,
    DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr,
):  # fmt: skip
    """The codes of rows for their slots. With DYNAMIC, each row's scale is found and written beside it, to `scale`: (pointer,
    strides of pages, of offsets in them, of heads)."""
    if DYNAMIC:
        given_scale = (row_scale(pairs, tail, D, R, CODE),)
        tl.store(slots(scale, page, offset, head, 4), given_scale[0], mask=live)
    return quantised_row(pairs, tail, given_scale, D, R, CODE, NATIVE_CAST)


@triton.jit
def _v_tile(
    block, group, v, v_cache, positions, where, num_tokens, max_position, scale,
    H: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, AXES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, V_NORM: tl.constexpr, EPS: tl.constexpr,
    CODE: tl.constexpr, DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr, ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, PREFETCH: tl.constexpr, FENCE: tl.constexpr,
):  # fmt: skip
    token, head, ok = tile_rows(block, group, num_tokens, H, BT, BH, H % BH == 0)
    src = rows(v, token, head, ALIGN)
    if not PREFETCH:
        x = load_span(src, ok, 0, DV)
    pos = load_per_token(positions[0], token, num_tokens, BT, EVICT)
    given_scale = ()
    if not DYNAMIC:
        given_scale = load_scale(scale[0], scale[3], head, H, EVICT)
    issue_loads(FENCE and not PREFETCH)
    page, offset, writes, _kind, _value = locate(
        token, pos, where, num_tokens, max_position,
        R > 0 and AXES == 0, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, BT, EVICT,
    )  # fmt: skip
    if R > 0 and AXES > 0:
        ptr, stride_axis, axis_map_ptr = positions
        bad = past_table(ptr, token, token < num_tokens, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
        writes = tl.where(bad >= 0, 0, writes)
    slot = slots(v_cache, page, offset, head, ALIGN_CACHE)
    if PREFETCH:
        gdc_wait()
        x = load_span(src, ok, 0, DV)
        issue_loads(FENCE)
    if V_NORM:
        x = normed_row(x, DV, EPS)
    live = ok & (head * 0 + writes > 0)
    if CODE > 0:
        _pairs, codes = _codes((), (x,), given_scale, scale, page, offset, head, live, DV, 0, CODE, DYNAMIC, NATIVE_CAST)
        x = codes[0]
    store_span(slot, live, x, 0, DV)


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
    q_weight_ptr,  # from here on: None, and no parameter at all, where there is none
    k_weight_ptr,
    q_token_scale_ptr,
    axis_map_ptr,
    stride_axis,
    k_scale_ptr,  # given, or written beside each row
    stride_ks_p,
    stride_ks_t,
    stride_ks_h,
    v_scale_ptr,
    stride_vs_p,
    stride_vs_t,
    stride_vs_h,
    q_scale_ptr,
    HQ: tl.constexpr,  # query heads
    HKV: tl.constexpr,  # KV heads; 0: rotate Q only
    D: tl.constexpr,
    DV: tl.constexpr,
    R: tl.constexpr,  # rotary_dim; 0: NoPE
    NEOX: tl.constexpr,
    AXES: tl.constexpr,  # rows of positions; 0: one, and no axis map
    PAGED: tl.constexpr,  # index is a block table, else a slot mapping
    PAGE: tl.constexpr,
    TOKENS_PER_REQUEST: tl.constexpr,
    OWN_CACHE_POSITIONS: tl.constexpr,
    Q_OUT: tl.constexpr,  # Q goes to its own tensor, so its unrotated tail is copied too
    K_OUT: tl.constexpr,
    NORM: tl.constexpr,  # of q and k: 0 none, 1 before the rotation, 2 after it
    V_NORM: tl.constexpr,
    EPS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,  # added to the norm's weights
    ROUNDED: tl.constexpr,  # to the dtype of q between norm and rotation
    Q_CODE: tl.constexpr,  # what q_out and the caches hold: 0 the dtype of q, else codes as `quant` numbers them
    K_CODE: tl.constexpr,
    V_CODE: tl.constexpr,
    K_DYNAMIC: tl.constexpr,  # scales are found and written, not given
    V_DYNAMIC: tl.constexpr,
    NATIVE_CAST: tl.constexpr,  # the GPU has instructions for 8-bit floats
    ALIGN: tl.constexpr,  # bytes every row of q, k, v and the outputs is aligned to
    ALIGN_CACHE: tl.constexpr,  # the same of the caches
    ALIGN_TABLE: tl.constexpr,
    ALIGN_WEIGHT: tl.constexpr,
    BTQ: tl.constexpr,
    BHQ: tl.constexpr,
    BTK: tl.constexpr,
    BHK: tl.constexpr,
    PDL: tl.constexpr,  # 0: off; dependent kernels may be scheduled 1: at once, 2: when all before us has ended, 3: when we have
    PREFETCH: tl.constexpr,  # read positions, index and table before the PDL wait; then 2 is as 1
    FENCE: tl.constexpr,  # hold NVIDIA's compiler to our order of loads
):
    begin(PDL, PREFETCH)
    NQ: tl.constexpr = (HQ + BHQ - 1) // BHQ
    NK: tl.constexpr = (HKV + BHK - 1) // BHK
    pid = tl.program_id(0)
    positions = (positions_ptr, stride_axis, axis_map_ptr)
    where = (cache_positions_ptr, index_ptr, index_len, stride_index, num_pages)
    q_tiles = ((num_tokens + BTQ - 1) // BTQ) * NQ
    if HKV == 0 or pid < q_tiles:
        _q_tile(
            pid // NQ, pid % NQ, (q_ptr, stride_q_t, stride_q_h), (q_out_ptr, stride_qo_t, stride_qo_h),
            cos_sin_ptr, positions, faults_ptr, num_tokens, max_position, q_weight_ptr, q_token_scale_ptr, q_scale_ptr,
            HQ, D, R, NEOX, AXES, Q_OUT, HKV == 0, NORM, EPS, WEIGHT_OFFSET, ROUNDED,
            Q_CODE, NATIVE_CAST, ALIGN, ALIGN_TABLE, ALIGN_WEIGHT, BTQ, BHQ, PREFETCH, FENCE,
        )  # fmt: skip
    else:
        k_tiles = ((num_tokens + BTK - 1) // BTK) * NK
        tile = pid - q_tiles
        if tile < k_tiles:
            _k_tile(
                tile // NK, tile % NK, (k_ptr, stride_k_t, stride_k_h), (k_out_ptr, stride_ko_t, stride_ko_h),
                (k_cache_ptr, stride_kc_p, stride_kc_t, stride_kc_h),
                cos_sin_ptr, positions, where, faults_ptr, num_tokens, max_position, k_weight_ptr,
                (k_scale_ptr, stride_ks_p, stride_ks_t, stride_ks_h),
                HKV, D, R, NEOX, AXES, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, K_OUT,
                NORM, EPS, WEIGHT_OFFSET, ROUNDED, K_CODE, K_DYNAMIC, NATIVE_CAST,
                ALIGN, ALIGN_CACHE, ALIGN_TABLE, ALIGN_WEIGHT, BTK, BHK, PREFETCH, FENCE,
            )  # fmt: skip
        else:
            tile -= k_tiles
            _v_tile(
                tile // NK, tile % NK, (v_ptr, stride_v_t, stride_v_h), (v_cache_ptr, stride_vc_p, stride_vc_t, stride_vc_h),
                positions, where, num_tokens, max_position, (v_scale_ptr, stride_vs_p, stride_vs_t, stride_vs_h),
                HKV, DV, R, AXES, PAGED, PAGE, TOKENS_PER_REQUEST, OWN_CACHE_POSITIONS, V_NORM, EPS,
                V_CODE, V_DYNAMIC, NATIVE_CAST,
                ALIGN, ALIGN_CACHE, BTK, BHK, PREFETCH, FENCE,
            )  # fmt: skip
