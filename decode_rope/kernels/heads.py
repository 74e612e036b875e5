"""Jitted pieces of the kernels that take several groups of heads in one program: prefill and the rotation alone.

A program issues the loads of all its heads before anything waits, and reads the angles of its tokens once for all of them.
"""

import triton
import triton.language as tl

from .norm import changed_rows
from .quant import load_scale, quantised_row, row_scale
from .rotation import (
    NORMAL,
    load_cos_sin,
    load_pairs,
    load_span,
    power_of_two,
    row_pointers,
    store_pairs,
    store_span,
    tile_rows,
)

_PAST_ANY = tl.constexpr(2**32 - 1)
# What is used once should not push anything else out of the L2 cache: loads and stores so marked are 1 to 3 % faster (H200, 16,384
# and 131,072 tokens); either of them alone is not.
STREAM = tl.constexpr(True)


@triton.jit
def load_heads(
    ptr, base, stride_h, block, group, num_tokens,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, TAIL: tl.constexpr,
    ALIGN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr = False,
):  # fmt: skip
    """The rotated pairs of LOOP groups of heads, and with TAIL the elements behind them; `base` is each row's
    token offset."""
    pairs = ()
    tails = ()
    for i in tl.static_range(LOOP):
        _token, head, ok = tile_rows(block, group * LOOP + i, num_tokens, H, BT, BH)
        row = row_pointers(ptr, base + head * stride_h, ALIGN)
        if R > 0:
            pairs += (load_pairs(row, ok, R, NEOX, STREAM, WHOLE),)
        if TAIL:
            tails += (load_span(row, ok, R, D - R, STREAM),)
    return pairs, tails


@triton.jit
def store_heads(
    ptr, base, stride_h, new, turn, pairs, tails, block, group, num_tokens,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, OUT: tl.constexpr, TAIL: tl.constexpr,
    ALIGN: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr, WHOLE: tl.constexpr = False,
    CHANGES_TAIL: tl.constexpr = False,
):  # fmt: skip
    """What `load_heads` reads, written to memory laid out alike: `new`, (pairs, tails), in the rows that `turn`. The others keep
    the bits they have there; with OUT, where they have none yet, they get `pairs` and `tails`."""
    new_pairs, new_tails = new
    for i in tl.static_range(LOOP):
        _token, head, ok = tile_rows(block, group * LOOP + i, num_tokens, H, BT, BH)
        row = row_pointers(ptr, base + head * stride_h, ALIGN)
        if R > 0:
            # Two masked stores, because a select after rounding costs the packed conversions to bf16.
            store_pairs(row, ok & turn, new_pairs[i][0], new_pairs[i][1], R, NEOX, STREAM, WHOLE)
            if OUT:
                store_pairs(row, ok & (turn == 0), pairs[i][0], pairs[i][1], R, NEOX, STREAM, WHOLE)
        if TAIL and CHANGES_TAIL:
            store_span(row, ok & turn, new_tails[i], R, D - R, STREAM)
            if OUT:
                store_span(row, ok & (turn == 0), tails[i], R, D - R, STREAM)
        elif TAIL:
            store_span(row, ok, tails[i], R, D - R, STREAM)


@triton.jit
def change_heads(
    pairs, tails, angles, weights, scale, D: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    ROUNDED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, dtype: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """`changed_rows` for every group of heads that `load_heads` read: (pairs, tails)."""
    new_pairs = ()
    new_tails = ()
    for i in tl.static_range(LOOP):
        row = ()
        tail = ()
        if R > 0:
            row = pairs[i]
        if R < D and (NORM > 0 or SCALED):
            tail = (tails[i],)
        row, tail = changed_rows(row, tail, angles, weights, scale, D, R, NORM, EPS, ROUNDED, WEIGHTED, SCALED, dtype)
        if R > 0:
            new_pairs += (row,)
        if R < D and (NORM > 0 or SCALED):
            new_tails += tail
    if NORM == 0 and not SCALED:
        new_tails = tails
    return new_pairs, new_tails


@triton.jit
def code_heads(
    pairs, tails, scale, block, group, num_tokens, H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, CODE: tl.constexpr,
    DYNAMIC: tl.constexpr, NATIVE_CAST: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    """The codes of every group of heads, and with DYNAMIC the scales that they have: (pairs, tails, scales). `scale`: (pointer,
    strides of pages, of offsets in them, of heads) of the scales."""
    new_pairs = ()
    new_tails = ()
    scales = ()
    for i in tl.static_range(LOOP):
        _token, head, _ok = tile_rows(block, group * LOOP + i, num_tokens, H, BT, BH)
        row = ()
        tail = ()
        if R > 0:
            row = pairs[i]
        if R < D:
            tail = (tails[i],)
        own = ()
        if DYNAMIC:
            own = (row_scale(row, tail, D, R, CODE),)
            scales += own
        else:
            own = load_scale(scale[0], scale[3], head, H, NORMAL)
        row, tail = quantised_row(row, tail, own, D, R, CODE, NATIVE_CAST)
        if R > 0:
            new_pairs += (row,)
        if R < D:
            new_tails += tail
    return new_pairs, new_tails, scales


@triton.jit
def past_table(
    positions_ptr, at, valid, pos, stride_axis, axis_map_ptr, max_position, R: tl.constexpr, AXES: tl.constexpr
):  # fmt: skip
    """The first position of each row that the table does not hold, else −1. `pos` is axis 0's, and negative in
    padding rows.

    With several axes, those that no pair uses are not looked at, and a negative position on another axis than
    the first counts as 2^32 − 1.
    """
    if R == 0:
        bad = pos * 0 - 1
    elif AXES == 0:
        bad = tl.where(pos >= max_position, pos, -1)
    else:
        pair = tl.arange(0, power_of_two(R // 2))
        used = tl.reduce(1 << _axis_of(axis_map_ptr, pair, R // 2, AXES), 0, _bits_of_either)
        bad = pos * 0 - 1
        for a in tl.static_range(AXES - 1, -1, -1):
            p = tl.load(positions_ptr + a * stride_axis + at, mask=valid, other=0).to(tl.int64)
            wrong = (used >> a & 1) * ((p < 0) | (p >= max_position)).to(tl.int32)
            bad = tl.where(wrong > 0, tl.where(p < 0, _PAST_ANY, p), bad)
        bad = tl.where(pos < 0, -1, bad)
    return bad


@triton.jit
def _bits_of_either(a, b):
    return a | b


@triton.jit
def _axis_of(axis_map_ptr, pair, HALF: tl.constexpr, AXES: tl.constexpr):
    """The axis of each pair; entries of the map outside the axes count as the nearest one."""
    axis = tl.load(axis_map_ptr + tl.minimum(pair, HALF - 1)).to(tl.int32)
    return tl.minimum(tl.maximum(axis, 0), AXES - 1)


@triton.jit
def load_angles(
    cos_sin_ptr, positions_ptr, at, valid, pos, head, stride_axis, axis_map_ptr, max_position,
    R: tl.constexpr, AXES: tl.constexpr, ALIGN_TABLE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """cos and sin of every row, `[ROWS, power_of_two(R/2)]`. A row of several axes takes each pair from its
    axis's angles: whole rows of the table are read and selected from, for a gather could not use wide loads."""
    if AXES == 0:
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT)
    else:
        pair = tl.arange(0, power_of_two(R // 2))[None, :] + (head * 0).to(tl.int32)
        axis = _axis_of(axis_map_ptr, pair, R // 2, AXES)
        c, s = load_cos_sin(cos_sin_ptr, pos, max_position, head, R, ALIGN_TABLE, BT)
        for a in tl.static_range(1, AXES):
            p = tl.load(positions_ptr + a * stride_axis + at, mask=valid, other=0).to(tl.int64)
            ca, sa = load_cos_sin(cos_sin_ptr, p, max_position, head, R, ALIGN_TABLE, BT)
            c = tl.where(axis == a, ca, c)
            s = tl.where(axis == a, sa, s)
    return c, s
