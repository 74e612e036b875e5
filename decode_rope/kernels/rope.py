"""The rotation alone: one tensor of `[batch, sequence, heads, head_dim]` in any order, forwards or backwards.

A program takes BT tokens of LOOP groups of BH heads; a token is a (batch, place in the sequence) pair. The kernel moves
`2·H·D` elements and one fp32 row of the table a token; in place it leaves the unrotated tail alone.
"""

import triton.language as tl

from .heads import change_heads, load_angles, load_heads, past_table, store_heads
from .rotation import POSITION, kernel, report_faults, tile_rows


@kernel
def apply_rope_kernel(
    x_ptr,
    out_ptr,
    cos_sin_ptr,
    positions_ptr,
    axis_map_ptr,
    faults_ptr,
    num_tokens: tl.int64,  # batch · seq_len, less than 2^28
    seq_len: tl.int64,
    max_position: tl.int64,
    stride_axis: tl.int64,  # from one axis of positions to the next
    stride_positions_b: tl.int64,  # 0: the batch shares them
    stride_x_b: tl.int64,
    stride_x_s: tl.int64,
    stride_x_h: tl.int64,
    stride_out_b: tl.int64,
    stride_out_s: tl.int64,
    stride_out_h: tl.int64,
    H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    NEOX: tl.constexpr,
    AXES: tl.constexpr,  # rows of positions; 0: one, and no axis map
    POSITIONS: tl.constexpr,  # false: a token's position is its place in the sequence
    OUT: tl.constexpr,  # the result goes to its own tensor, so the unrotated tail is copied too
    INVERSE: tl.constexpr,
    REPORT: tl.constexpr,  # count positions past the table
    ALIGN: tl.constexpr,  # bytes every row of x and out is aligned to
    ALIGN_TABLE: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    LOOP: tl.constexpr,
):
    GROUPS: tl.constexpr = (H + BH * LOOP - 1) // (BH * LOOP)
    TAIL: tl.constexpr = OUT and R < D
    pid = tl.program_id(0)
    block = (pid // GROUPS).to(tl.int64)
    group = pid % GROUPS
    token, head, _ok = tile_rows(block, group * LOOP, num_tokens, H, BT, BH)
    # Fewer than 2^28 tokens: divide in 32 bits.
    b = (token.to(tl.int32) // seq_len.to(tl.int32)).to(tl.int64)
    place = token - b * seq_len
    pairs, tails = load_heads(
        x_ptr, b * stride_x_b + place * stride_x_s, stride_x_h, block, group, num_tokens,
        H, D, R, NEOX, TAIL, ALIGN, BT, BH, LOOP,
    )  # fmt: skip
    valid = token < num_tokens
    at = b * stride_positions_b + place
    pos = place
    bad = place * 0 - 1
    if POSITIONS:
        pos = tl.load(positions_ptr + at, mask=valid, other=-1).to(tl.int64)
        bad = past_table(positions_ptr, at, valid, pos, stride_axis, axis_map_ptr, max_position, R, AXES)
    c, s = load_angles(
        cos_sin_ptr, positions_ptr, at, valid, pos, head, stride_axis, axis_map_ptr, max_position, R, AXES, ALIGN_TABLE, BT
    )
    if INVERSE:
        s = -s
    new = change_heads(pairs, tails, (c, s), ((), ()), (), D, R, 0, 0.0, False, False, False, out_ptr.dtype.element_ty, LOOP)
    store_heads(
        out_ptr, b * stride_out_b + place * stride_out_s, stride_out_h, new, (pos >= 0) & (bad < 0), pairs, tails,
        block, group, num_tokens, H, D, R, NEOX, OUT, TAIL, ALIGN, BT, BH, LOOP,
    )  # fmt: skip
    if REPORT and POSITIONS:
        report_faults(faults_ptr, token, tl.where(bad >= 0, POSITION, 0), bad, group, head, BT)
