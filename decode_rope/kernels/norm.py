"""RMSNorm of a head beside its rotation.

The sum of squares is a tree of additions whose shape depends on D, the rotary dimension and the pairing, and on nothing else: every
addition has two operands, so no tile, layout, number of warps or Triton release can change its bits.
"""

import triton
import triton.language as tl

from .rotation import load_pairs, load_span, log2, rotate_pairs, round_to, widen

# Squares are formed of scaled elements, so that neither rows of 1e18 overflow nor rows of 1e-20 lose what counts beside eps.
SCALE = tl.constexpr(2.0**-20)
BEFORE = tl.constexpr(1)  # NORM: the norm comes before the rotation
AFTER = tl.constexpr(2)


@triton.jit
def _tree_sum(x):
    """The sum of every row, `[ROWS, 1]`: neighbours first, then neighbouring sums. The number of columns is a power of two."""
    for _ in tl.static_range(log2(x.shape[1])):
        x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return x


@triton.jit
def _squares(x):
    scaled = x * SCALE
    return scaled * scaled


@triton.jit
def _inverse_rms(pairs, tail, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean of squares + eps) of every row, `[ROWS, 1]`: pairs are summed first, and the unrotated tail apart."""
    if R > 0:
        total = _tree_sum(_squares(pairs[0]) + _squares(pairs[1]))
        if R < D:
            total += _tree_sum(_squares(tail[0]))
    else:
        total = _tree_sum(_squares(tail[0]))
    if D & (D - 1) == 0:
        mean = total * (1.0 / D)  # exact, and no division
    else:
        mean = tl.div_rn(total, float(D))
    return tl.div_rn(SCALE, tl.sqrt_rn(mean + EPS * SCALE * SCALE))


@triton.jit
def load_weights(
    ptr, head, num_tokens, D: tl.constexpr, R: tl.constexpr, NEOX: tl.constexpr, OFFSET: tl.constexpr,
    ALIGN: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """A norm's weights in fp32 for every row of a tile, as rows are: (of pairs, of the tail). OFFSET is added. Without a pointer,
    two empty tuples."""
    pairs = ()
    tail = ()
    if ptr is not None:
        # The compiler drops hints of alignment with a sum that it can fold; it does not know that this one adds 0.
        row = tl.multiple_of(ptr + (num_tokens < 0).to(tl.int32), ALIGN) + head * 0
        if R > 0:
            w1, w2 = load_pairs(row, head >= 0, R, NEOX, EVICT=EVICT)
            pairs = (_offset(w1, OFFSET), _offset(w2, OFFSET))
        if R < D:
            tail = (_offset(load_span(row, head >= 0, R, D - R, EVICT=EVICT), OFFSET),)
    return pairs, tail


@triton.jit
def _offset(w, OFFSET: tl.constexpr):
    if OFFSET == 0:
        return widen(w)
    else:
        return widen(w) + OFFSET


@triton.jit
def _normed(pairs, tail, weights, D: tl.constexpr, R: tl.constexpr, EPS: tl.constexpr, WEIGHTED: tl.constexpr):
    inverse = _inverse_rms(pairs, tail, D, R, EPS)
    if R > 0:
        pairs = (pairs[0] * inverse, pairs[1] * inverse)
        if WEIGHTED:
            pairs = (pairs[0] * weights[0][0], pairs[1] * weights[0][1])
    if R < D:
        tail = (tail[0] * inverse,)
        if WEIGHTED:
            tail = (tail[0] * weights[1][0],)
    return pairs, tail


@triton.jit
def normed_row(x, D: tl.constexpr, EPS: tl.constexpr):
    """Rows that do not rotate, normalised without weights, in fp32."""
    _pairs, tail = _normed((), (widen(x),), ((), ()), D, 0, EPS, False)
    return tail[0]


@triton.jit
def changed_rows(
    pairs, tail, angles, weights, scale, D: tl.constexpr, R: tl.constexpr,
    NORM: tl.constexpr, EPS: tl.constexpr, ROUNDED: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr,
    dtype: tl.constexpr = tl.float32,
):  # fmt: skip
    """Rows normalised, rotated and scaled: (pairs, tail). Pairs are two tensors, the tail and `scale` one, `angles` cos and sin;
    each is a tuple, empty where there is none.

    NORM: 0 for none, BEFORE or AFTER the rotation. ROUNDED: to the dtype of the rows between the two. WEIGHTED, SCALED: there are
    weights, there is a scale. What is changed is in fp32; pairs that are only rotated are rounded to `dtype`.
    """
    if NORM == 0 and not SCALED:
        if R > 0:
            pairs = rotate_pairs(pairs[0], pairs[1], angles[0], angles[1], dtype)
    else:
        if R > 0:
            given: tl.constexpr = pairs[0].dtype
            pairs = (widen(pairs[0]), widen(pairs[1]))
        else:
            given: tl.constexpr = tail[0].dtype
        if R < D:
            tail = (widen(tail[0]),)
        if NORM == BEFORE:
            pairs, tail = _normed(pairs, tail, weights, D, R, EPS, WEIGHTED)
            if ROUNDED:
                pairs, tail = _rounded(pairs, tail, given, D, R)
        if R > 0:
            pairs = rotate_pairs(pairs[0], pairs[1], angles[0], angles[1], tl.float32)
        if NORM == AFTER:
            if ROUNDED and R > 0:
                pairs, tail = _rounded(pairs, tail, given, D, R)
            pairs, tail = _normed(pairs, tail, weights, D, R, EPS, WEIGHTED)
        if SCALED:
            if R > 0:
                pairs = (pairs[0] * scale[0], pairs[1] * scale[0])
            if R < D:
                tail = (tail[0] * scale[0],)
    return pairs, tail


@triton.jit
def _rounded(pairs, tail, dtype: tl.constexpr, D: tl.constexpr, R: tl.constexpr):
    """Rounded to `dtype`, and in fp32 again."""
    if R > 0:
        pairs = (widen(round_to(pairs[0], dtype)), widen(round_to(pairs[1], dtype)))
    if R < D:
        tail = (widen(round_to(tail[0], dtype)),)
    return pairs, tail
