"""The prefill kernel: rotates Q and K and writes K and V into their slots, for many tokens at once.

A program takes BT tokens of LOOP groups of BH heads, of Q, of K or of V. It issues the loads of all its heads
before anything waits, and reads the angles of its tokens once for all of them; bytes in flight are what a
copy-bound kernel lives on. The grid is 1-D and token-major: the programs of one stretch of tokens are
neighbours, so that its angles and index entries stay in the cache. It moves the bytes that the decode kernel
moves, and writes no others.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .heads import STREAM, change_heads, code_heads, load_angles, load_heads, past_table, store_heads
from .norm import load_weights
from .rotation import NORMAL, POSITION, kernel, locate, report_faults, row_pointers, store_pairs, store_span, tile_rows


@triton.jit
def _padded_positions(positions_ptr, cu_seqlens_ptr, token, num_tokens, num_requests, RAGGED: tl.constexpr):
    """Axis 0's position of each token; −1 past the end, and for tokens before the first sequence or behind the
    last."""
    valid = token < num_tokens
    pos = tl.load(positions_ptr + token, mask=valid, other=-1).to(tl.int64)
    if RAGGED:
        first = tl.load(cu_seqlens_ptr).to(tl.int64)
        last = tl.load(cu_seqlens_ptr + num_requests).to(tl.int64)
        pos = tl.where((token >= first) & (token < last), pos, -1)
    return pos, valid


@triton.jit
def _sequence_of(cu_seqlens_ptr, token, num_requests):
    """The last sequence that begins at or before `token`, or 0."""
    low = token * 0
    high = low + num_requests
    while high - low > 1:
        middle = (low + high) >> 1
        below = tl.load(cu_seqlens_ptr + middle).to(tl.int64) <= token
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _slots(
    request, token, pos, bad, where, num_tokens, PAGED: tl.constexpr, PAGE: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """(page, offset in page, may be written, fault kind, offending value) of each token. `where` is as in `locate`."""
    cache_positions_ptr, index_ptr, index_len, stride_index, num_pages = where
    table_ptr = index_ptr
    if PAGED:
        # `locate` steps from row to row with the token; start it where that lands on the token's request.
        table_ptr = index_ptr + (request - token) * stride_index
    where = (cache_positions_ptr, table_ptr, index_len, stride_index, num_pages)
    page, offset, writes, kind, value = locate(token, pos, where, num_tokens, 0, False, PAGED, PAGE, 1, OWN_CACHE_POSITIONS, BT)
    kind = tl.where(bad >= 0, POSITION, kind)
    value = tl.where(bad >= 0, bad, value)
    return page, offset, (writes > 0) & (bad < 0), kind, value


@triton.jit
def _store_rows(
    request, block, group, pairs, tails, pos, bad, cache, where, faults_ptr, num_tokens, scales, scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    OWN_CACHE_POSITIONS: tl.constexpr, REPORT: tl.constexpr, DYNAMIC: tl.constexpr, ALIGN: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Write LOOP groups of heads to the slots of their tokens, which are in `request` (one for all, or one a
    row)."""
    token, head, ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    page, offset, writes, kind, value = _slots(request, token, pos, bad, where, num_tokens, PAGED, PAGE, OWN_CACHE_POSITIONS, BT)
    cache_ptr, stride_p, stride_t, stride_h = cache
    slot = page * stride_p + offset * stride_t
    for i in tl.static_range(LOOP):
        token, head, ok = tile_rows(block, group * LOOP + i, num_tokens, H, BT, BH)
        row = row_pointers(cache_ptr, slot + head * stride_h, ALIGN)
        if R > 0:
            store_pairs(row, ok & writes, pairs[i][0], pairs[i][1], R, NEOX, STREAM, WHOLE)
        if R < D:
            store_span(row, ok & writes, tails[i], R, D - R, STREAM)
        if DYNAMIC:
            scale_ptr, stride_sp, stride_st, stride_sh = scale
            tl.store(scale_ptr + page * stride_sp + offset * stride_st + head * stride_sh, scales[i], mask=ok & writes)
    if REPORT:
        token, head, ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
        report_faults(faults_ptr, token, kind, value, group, head, BT)


@triton.jit
def _store(
    block, group, pairs, tails, pos, bad, cache, where, cu_seqlens_ptr, faults_ptr, num_tokens, tokens_per_request, num_requests,
    scale, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    RAGGED: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, REPORT: tl.constexpr, CODE: tl.constexpr, DYNAMIC: tl.constexpr,
    NATIVE_CAST: tl.constexpr, ALIGN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantise rows if CODE says so, find the requests of a tile's tokens, then `_store_rows`."""
    token, _head, _ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    scales = ()
    if CODE > 0:
        pairs, tails, scales = code_heads(
            pairs, tails, scale, block, group, num_tokens, H, D, R, CODE, DYNAMIC, NATIVE_CAST, BT, BH, LOOP
        )
    if RAGGED and PAGED:
        # Walk the tile from sequence to sequence, mostly one step. `cursor` always moves, so no contents can hold us up.
        cursor = block * BT
        last = tl.load(cu_seqlens_ptr + num_requests).to(tl.int64)
        stop = tl.minimum(tl.minimum(cursor + BT, num_tokens), last)
        while cursor < stop:
            request = _sequence_of(cu_seqlens_ptr, cursor, num_requests)
            begins, ends = _bounds(cu_seqlens_ptr, request, num_requests)
            inside = (token >= begins) & (token >= cursor) & (token < ends)
            _store_rows(
                request, block, group, pairs, tails, tl.where(inside, pos, -1), tl.where(inside, bad, -1), cache, where,
                faults_ptr, num_tokens, scales, scale,
                H, D, R, NEOX, PAGED, PAGE, OWN_CACHE_POSITIONS, REPORT, DYNAMIC, ALIGN, BT, BH, LOOP, WHOLE,
            )  # fmt: skip
            cursor = tl.maximum(ends, cursor + 1)
    else:
        request = token
        if PAGED:
            # Fewer than 2^28 tokens: divide in 32 bits, for 64 take a call.
            request = (token.to(tl.int32) // tl.minimum(tokens_per_request, 1 << 28).to(tl.int32)).to(tl.int64)
        _store_rows(
            request, block, group, pairs, tails, pos, bad, cache, where, faults_ptr, num_tokens, scales, scale,
            H, D, R, NEOX, PAGED, PAGE, OWN_CACHE_POSITIONS, REPORT, DYNAMIC, ALIGN, BT, BH, LOOP, WHOLE,
        )  # fmt: skip


@triton.jit
def _bounds(cu_seqlens_ptr, request, num_requests):
    """The first token of a sequence and the one after its last; an empty range if there are no sequences."""
    some = request < num_requests
    begins = tl.load(cu_seqlens_ptr + request, mask=some, other=0).to(tl.int64)
    ends = tl.load(cu_seqlens_ptr + request + 1, mask=some, other=0).to(tl.int64)
    return begins, ends


@triton.jit
def _rotate_tile(
    block, group, rows, out, cos_sin_ptr, positions, cu_seqlens_ptr, faults_ptr, num_tokens, max_position, num_requests,
    weight_ptr, token_scale_ptr, scale_ptr,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, AXES: tl.constexpr, RAGGED: tl.constexpr,
    OUT: tl.constexpr, REPORT: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr,
    ROUNDED: tl.constexpr, CODE: tl.constexpr, NATIVE_CAST: tl.constexpr, ALIGN: tl.constexpr, ALIGN_TABLE: tl.constexpr,
    ALIGN_WEIGHT: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows of Q, or of K without a cache. `rows`, `out`: (pointer, stride of tokens, stride of heads); `positions`: (pointer,
    stride of axes, axis map)."""
    SCALED: tl.constexpr = token_scale_ptr is not None
    CHANGES_TAIL: tl.constexpr = NORM > 0 or SCALED or CODE > 0
    positions_ptr, stride_axis, axis_map_ptr = positions
    src_ptr, stride_t, stride_h = rows
    out_ptr, stride_out_t, stride_out_h = out
    token, head, ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    TAIL: tl.constexpr = R < D and (OUT or CHANGES_TAIL)
    pairs, tails = load_heads(
        src_ptr, token * stride_t, stride_h, block, group, num_tokens, H, D, R, NEOX, TAIL, ALIGN, BT, BH, LOOP, WHOLE
    )
    new = (pairs, tails)
    turn = ok
    if R > 0 or CHANGES_TAIL:
        pos, valid = _padded_positions(positions_ptr, cu_seqlens_ptr, token, num_tokens, num_requests, RAGGED)
        bad = past_table(positions_ptr, token, valid, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
        angles = ()
        if R > 0:
            angles = load_angles(
                cos_sin_ptr, positions_ptr, token, valid, pos, head, stride_axis, axis_map_ptr, max_position,
                R, AXES, ALIGN_TABLE, BT,
            )  # fmt: skip
        weights = load_weights(weight_ptr, head, num_tokens, D, R, NEOX, WEIGHT_OFFSET, ALIGN_WEIGHT, NORMAL)
        scale = ()
        if SCALED:
            scale = (tl.load(token_scale_ptr + token, mask=valid, other=0.0),)
        new = change_heads(
            pairs, tails, angles, weights, scale, D, R, NORM, EPS, ROUNDED, weight_ptr is not None, SCALED,
            out_ptr.dtype.element_ty if CODE == 0 else tl.float32, LOOP,
        )  # fmt: skip
        if CODE > 0:
            per_head = (scale_ptr, 0, 0, 0)
            new_pairs, new_tails, _scales = code_heads(
                new[0], new[1], per_head, block, group, num_tokens, H, D, R, CODE, False, NATIVE_CAST, BT, BH, LOOP
            )  # fmt: skip
            new = (new_pairs, new_tails)
            pairs, tails, _scales = code_heads(
                pairs, tails, per_head, block, group, num_tokens, H, D, R, CODE, False, NATIVE_CAST, BT, BH, LOOP
            )  # fmt: skip
        turn = (pos >= 0) & (bad < 0)
        if REPORT and R > 0:
            report_faults(faults_ptr, token, tl.where(bad >= 0, POSITION, 0), bad, group, head, BT)
    store_heads(
        out_ptr, token * stride_out_t, stride_out_h, new, turn, pairs, tails, block, group, num_tokens,
        H, D, R, NEOX, OUT, TAIL, ALIGN, BT, BH, LOOP, WHOLE, CHANGES_TAIL,
    )  # fmt: skip


@triton.jit
def _k_tile(
    block, group, k, k_out, k_cache, cos_sin_ptr, positions, where, cu_seqlens_ptr, faults_ptr,
    num_tokens, max_position, tokens_per_request, num_requests, weight_ptr, scale,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, AXES: tl.constexpr, PAGED: tl.constexpr,
    PAGE: tl.constexpr, RAGGED: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, K_OUT: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, ROUNDED: tl.constexpr,
    CODE: tl.constexpr, DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr, ALIGN_TABLE: tl.constexpr, ALIGN_WEIGHT: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    positions_ptr, stride_axis, axis_map_ptr = positions
    k_ptr, stride_t, stride_h = k
    token, head, _ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    pairs, tails = load_heads(
        k_ptr, token * stride_t, stride_h, block, group, num_tokens, H, D, R, NEOX, R < D, ALIGN, BT, BH, LOOP, WHOLE
    )
    pos, valid = _padded_positions(positions_ptr, cu_seqlens_ptr, token, num_tokens, num_requests, RAGGED)
    bad = past_table(positions_ptr, token, valid, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
    angles = ()
    if R > 0:
        angles = load_angles(
            cos_sin_ptr, positions_ptr, token, valid, pos, head, stride_axis, axis_map_ptr, max_position,
            R, AXES, ALIGN_TABLE, BT,
        )  # fmt: skip
    weights = load_weights(weight_ptr, head, num_tokens, D, R, NEOX, WEIGHT_OFFSET, ALIGN_WEIGHT, NORMAL)
    new = change_heads(
        pairs, tails, angles, weights, (), D, R, NORM, EPS, ROUNDED, weight_ptr is not None, False,
        k_ptr.dtype.element_ty if CODE == 0 else tl.float32, LOOP,
    )  # fmt: skip
    if K_OUT:
        out_ptr, stride_out_t, stride_out_h = k_out
        store_heads(
            out_ptr, token * stride_out_t, stride_out_h, new, (pos >= 0) & (bad < 0), pairs, tails, block, group, num_tokens,
            H, D, R, NEOX, True, R < D, ALIGN, BT, BH, LOOP, WHOLE, NORM > 0,
        )  # fmt: skip
    _store(
        block, group, new[0], new[1], pos, bad, k_cache, where, cu_seqlens_ptr, faults_ptr,
        num_tokens, tokens_per_request, num_requests, scale,
        H, D, R, NEOX, PAGED, PAGE, RAGGED, OWN_CACHE_POSITIONS, True, CODE, DYNAMIC, NATIVE_CAST, ALIGN_CACHE, BT, BH, LOOP, WHOLE,
    )  # fmt: skip


@triton.jit
def _v_tile(
    block, group, v, v_cache, positions, where, cu_seqlens_ptr, faults_ptr,
    num_tokens, max_position, tokens_per_request, num_requests, scale,
    H: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, AXES: tl.constexpr, PAGED: tl.constexpr, PAGE: tl.constexpr,
    RAGGED: tl.constexpr, OWN_CACHE_POSITIONS: tl.constexpr, V_NORM: tl.constexpr, EPS: tl.constexpr,
    CODE: tl.constexpr, DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr, ALIGN: tl.constexpr, ALIGN_CACHE: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    positions_ptr, stride_axis, axis_map_ptr = positions
    v_ptr, stride_t, stride_h = v
    token, _head, _ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    pairs, rows = load_heads(v_ptr, token * stride_t, stride_h, block, group, num_tokens, H, DV, 0, True, True, ALIGN, BT, BH, LOOP)
    pos, valid = _padded_positions(positions_ptr, cu_seqlens_ptr, token, num_tokens, num_requests, RAGGED)
    bad = past_table(positions_ptr, token, valid, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
    if V_NORM:
        pairs, rows = change_heads(pairs, rows, (), ((), ()), (), DV, 0, 1, EPS, False, False, False, tl.float32, LOOP)
    _store(
        block, group, pairs, rows, pos, bad, v_cache, where, cu_seqlens_ptr, faults_ptr,
        num_tokens, tokens_per_request, num_requests, scale,
        H, DV, 0, True, PAGED, PAGE, RAGGED, OWN_CACHE_POSITIONS, False, CODE, DYNAMIC, NATIVE_CAST,
        ALIGN_CACHE, BT, BH, LOOP, False,
    )  # fmt: skip


@kernel
def rope_append_prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    k_out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    cos_sin_ptr,
    positions_ptr,
    cache_positions_ptr,
    index_ptr,
    cu_seqlens_ptr,
    axis_map_ptr,
    faults_ptr,
    index_len: tl.int64,  # the block table's width, or the number of slots
    stride_index: tl.int64,
    num_tokens: tl.int64,
    max_position: tl.int64,
    num_pages: tl.int64,
    tokens_per_request: tl.int64,
    num_requests: tl.int64,
    stride_axis: tl.int64,  # from one axis of positions to the next
    stride_q_t: tl.int64,  # strides are in elements
    stride_q_h: tl.int64,
    stride_k_t: tl.int64,
    stride_k_h: tl.int64,
    stride_v_t: tl.int64,
    stride_v_h: tl.int64,
    stride_qo_t: tl.int64,
    stride_qo_h: tl.int64,
    stride_ko_t: tl.int64,
    stride_ko_h: tl.int64,
    stride_kc_p: tl.int64,
    stride_kc_t: tl.int64,
    stride_kc_h: tl.int64,
    stride_vc_p: tl.int64,
    stride_vc_t: tl.int64,
    stride_vc_h: tl.int64,
    q_weight_ptr,  # from here on: None, and no parameter at all, where there is none
    k_weight_ptr,
    q_token_scale_ptr,
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
    CACHE: tl.constexpr,  # K and V are written to a cache
    PAGED: tl.constexpr,  # index is a block table, else a slot mapping
    PAGE: tl.constexpr,
    RAGGED: tl.constexpr,  # cu_seqlens says where sequences begin and end
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
    LOOPQ: tl.constexpr,
    BTK: tl.constexpr,
    BHK: tl.constexpr,
    LOOPK: tl.constexpr,
    WHOLE: tl.constexpr,  # NeoX rows are read and written in one piece
    PDL: tl.constexpr,
):
    # As in the decode kernel: a dependent kernel waits for our completion before it reads.
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    NQ: tl.constexpr = (HQ + BHQ * LOOPQ - 1) // (BHQ * LOOPQ)
    NK: tl.constexpr = (HKV + BHK * LOOPK - 1) // (BHK * LOOPK)
    STRETCH: tl.constexpr = max(BTQ, BTK)
    # Q that stays as it is in place gets no programs: an H200 starts 0.8 a nanosecond, empty or not.
    Q_MOVES: tl.constexpr = R > 0 or NORM > 0 or q_token_scale_ptr is not None or Q_OUT or HKV == 0
    Q_TILES: tl.constexpr = STRETCH // BTQ * NQ if Q_MOVES else 0
    K_TILES: tl.constexpr = STRETCH // BTK * NK
    V_TILES: tl.constexpr = K_TILES if CACHE else 0
    pid = tl.program_id(0)
    stretch = (pid // (Q_TILES + K_TILES + V_TILES)).to(tl.int64)
    tile = pid % (Q_TILES + K_TILES + V_TILES)
    positions = (positions_ptr, stride_axis, axis_map_ptr)
    where = (cache_positions_ptr, index_ptr, index_len, stride_index, num_pages)
    k = (k_ptr, stride_k_t, stride_k_h)
    k_out = (k_out_ptr, stride_ko_t, stride_ko_h)
    if HKV == 0 or tile < Q_TILES:
        _rotate_tile(
            stretch * (STRETCH // BTQ) + tile // NQ, tile % NQ,
            (q_ptr, stride_q_t, stride_q_h), (q_out_ptr, stride_qo_t, stride_qo_h), cos_sin_ptr, positions, cu_seqlens_ptr,
            faults_ptr, num_tokens, max_position, num_requests, q_weight_ptr, q_token_scale_ptr, q_scale_ptr,
            HQ, D, R, NEOX, AXES, RAGGED, Q_OUT, HKV == 0, NORM, EPS, WEIGHT_OFFSET, ROUNDED, Q_CODE, NATIVE_CAST,
            ALIGN, ALIGN_TABLE, ALIGN_WEIGHT, BTQ, BHQ, LOOPQ, WHOLE,
        )  # fmt: skip
    elif not CACHE:
        _rotate_tile(
            stretch * (STRETCH // BTK) + (tile - Q_TILES) // NK, (tile - Q_TILES) % NK, k, k_out,
            cos_sin_ptr, positions, cu_seqlens_ptr, faults_ptr, num_tokens, max_position, num_requests, k_weight_ptr, None, None,
            HKV, D, R, NEOX, AXES, RAGGED, True, True, NORM, EPS, WEIGHT_OFFSET, ROUNDED, 0, False,
            ALIGN, ALIGN_TABLE, ALIGN_WEIGHT, BTK, BHK, LOOPK, WHOLE,
        )  # fmt: skip
    elif tile < Q_TILES + K_TILES:
        _k_tile(
            stretch * (STRETCH // BTK) + (tile - Q_TILES) // NK, (tile - Q_TILES) % NK, k, k_out,
            (k_cache_ptr, stride_kc_p, stride_kc_t, stride_kc_h), cos_sin_ptr, positions, where, cu_seqlens_ptr, faults_ptr,
            num_tokens, max_position, tokens_per_request, num_requests, k_weight_ptr,
            (k_scale_ptr, stride_ks_p, stride_ks_t, stride_ks_h),
            HKV, D, R, NEOX, AXES, PAGED, PAGE, RAGGED, OWN_CACHE_POSITIONS, K_OUT, NORM, EPS, WEIGHT_OFFSET, ROUNDED,
            K_CODE, K_DYNAMIC, NATIVE_CAST, ALIGN, ALIGN_CACHE, ALIGN_TABLE, ALIGN_WEIGHT, BTK, BHK, LOOPK, WHOLE,
        )  # fmt: skip
    else:
        tile -= Q_TILES + K_TILES
        _v_tile(
            stretch * (STRETCH // BTK) + tile // NK, tile % NK, (v_ptr, stride_v_t, stride_v_h),
            (v_cache_ptr, stride_vc_p, stride_vc_t, stride_vc_h), positions, where, cu_seqlens_ptr, faults_ptr,
            num_tokens, max_position, tokens_per_request, num_requests, (v_scale_ptr, stride_vs_p, stride_vs_t, stride_vs_h),
            HKV, DV, R, AXES, PAGED, PAGE, RAGGED, OWN_CACHE_POSITIONS, V_NORM, EPS,
            V_CODE, V_DYNAMIC, NATIVE_CAST, ALIGN, ALIGN_CACHE, BTK, BHK, LOOPK,
        )  # fmt: skip
