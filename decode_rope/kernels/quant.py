"""Codes of quantised caches and of quantised Q: e4m3, e5m2 and int8, each in one byte.

`code = round_to_nearest_even(clamp(x / scale))`, with a correctly rounded division. Codes are computed as bytes, so that kernels
see caches of every quantised dtype as uint8.
"""

import triton
import triton.language as tl

from .rotation import SOFT, widen

NATIVE = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)
# The least scale of a row. Divisions are exact from here on; rows below 3.7e-22 (e4m3) have coarser codes, zeros have this scale.
LEAST_SCALE = tl.constexpr(2.0**-80)
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.constexpr_function
def limit_of(code):
    """The largest number that a code stands for."""
    return (0.0, 448.0, 57344.0, 127.0)[code]


@triton.jit
def row_scale(pairs, tail, D: tl.constexpr, R: tl.constexpr, CODE: tl.constexpr):
    """The largest magnitude of each row over the largest code, `[ROWS, 1]`. NaN does not count; infinity counts as the largest
    number."""
    largest = 0.0
    if R > 0:
        largest = tl.maximum(_largest(pairs[0]), _largest(pairs[1]))
        if R < D:
            largest = tl.maximum(largest, _largest(tail[0]))
    else:
        largest = _largest(tail[0])
    return tl.maximum(tl.div_rn(tl.minimum(largest, _LARGEST), limit_of(CODE)), LEAST_SCALE)


@triton.jit
def _largest(x):
    x = widen(x)
    return tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1, keep_dims=True)


@triton.jit
def quantised_row(pairs, tail, scale, D: tl.constexpr, R: tl.constexpr, CODE: tl.constexpr, NATIVE_CAST: tl.constexpr):
    """The codes of rows, as (pairs, tail). `scale`: (one scale, or one a row,), or an empty tuple for a scale of 1."""
    factors = ()
    if len(scale) > 0:
        factors = _factors(scale[0], CODE)
    if R > 0:
        pairs = (_code(pairs[0], factors, CODE, NATIVE_CAST), _code(pairs[1], factors, CODE, NATIVE_CAST))
    if R < D:
        tail = (_code(tail[0], factors, CODE, NATIVE_CAST),)
    return pairs, tail


@triton.jit
def _factors(scale, CODE: tl.constexpr):
    """What `_quotient` needs of a scale."""
    inverse = tl.div_rn(1.0, scale)
    bits = inverse.to(tl.uint32, bitcast=True)
    all_ones = scale.to(tl.uint32, bitcast=True) & 0x7FFFFF == 0x7FFFFF
    correction = (bits - all_ones.to(tl.uint32)).to(tl.float32, bitcast=True)
    # Codes of 8-bit floats saturate by themselves.
    bound = tl.minimum((1.0 if CODE == INT8 else 2.0) * limit_of(CODE) * scale, _LARGEST)
    return scale, inverse, correction, bound


@triton.jit
def load_scale(ptr, stride_h, head, H: tl.constexpr, EVICT: tl.constexpr):
    """(The scale of each row,) of a cache whose scales are given, or an empty tuple without a pointer. Heads past the last one read
    the last one's."""
    scale = ()
    if ptr is not None:
        scale = (tl.load(ptr + tl.minimum(head, H - 1) * stride_h, eviction_policy=EVICT),)
    return scale


@triton.jit
def _code(x, factors, CODE: tl.constexpr, NATIVE_CAST: tl.constexpr):
    LIMIT: tl.constexpr = limit_of(CODE)
    q = widen(x)
    if len(factors) > 0:
        q = _quotient(q, factors)
    if CODE == INT8:
        # Adding 1.5 · 2^23 leaves no room for a fraction: the sum is rounded to an integer, halves to even, in its lowest bits.
        sum = tl.minimum(tl.maximum(q, -LIMIT), LIMIT) + 12582912.0 if SOFT else q + 12582912.0
        return tl.where(q == q, sum, 12582912.0).to(tl.uint32, bitcast=True).to(tl.uint8)
    elif NATIVE_CAST and CODE == E4M3:
        return q.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif NATIVE_CAST:
        return q.to(tl.float8e5).to(tl.uint8, bitcast=True)
    elif CODE == E4M3:
        return _soft_float8(q, LIMIT, 3, 7)
    else:
        return _soft_float8(q, LIMIT, 2, 15)


@triton.jit
def _quotient(x, factors):
    """`x / scale`, correctly rounded for scales from 2^-80 to 2^100. Magnitudes of x above the bound count as it, because their
    codes are the largest anyway; so infinity does not become NaN.

    A product with the inverse is off by two units in the last place at most. Its remainder is exact and corrects it (Markstein
    1990); if all bits of the scale's mantissa are set, with the next smaller inverse. A division takes twice the instructions.
    """
    scale, inverse, correction, bound = factors
    if SOFT:  # its fma rounds twice
        return tl.div_rn(x, scale)
    else:
        x = tl.maximum(x, -bound, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, bound, propagate_nan=tl.PropagateNan.ALL)
        q = x * inverse
        # These signs keep that of a zero.
        return tl.fma(tl.fma(q, scale, -x), -correction, q)


@triton.jit
def _soft_float8(q, LIMIT: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """fp32 to an 8-bit float by integers, to nearest even, clamped to LIMIT; NaN is 0x7F."""
    magnitude = tl.minimum(tl.abs(q), LIMIT)
    bits = magnitude.to(tl.uint32, bitcast=True)
    DROPPED: tl.constexpr = 23 - MANTISSA
    normal = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED
    normal -= (127 - BIAS) << MANTISSA
    # Below the smallest normal number codes count steps; the sum is rounded to a whole number of them, halves to even.
    steps = magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + 12582912.0
    small = steps.to(tl.uint32, bitcast=True) - 0x4B400000
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), small, normal)
    sign = (q.to(tl.uint32, bitcast=True) >> 31) << 7
    return tl.where(q == q, code | sign, 0x7F).to(tl.uint8)
