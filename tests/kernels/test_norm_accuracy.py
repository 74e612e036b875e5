"""How near the norm is to the exact result, and in which order it adds."""

import pytest
import torch
from cases import bits
from norm_cases import BF16, FP16, FP32, FUNCTIONS, NormSpec, build, normed, run, run_reference

from decode_rope import QKNorm, reference

both = pytest.mark.parametrize("name", FUNCTIONS)
FRACTION = {BF16: 7, FP16: 10, FP32: 23}  # bits of a mantissa
LEAST = {BF16: -126, FP16: -14, FP32: -126}  # exponents of the smallest normal numbers


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance of `dtype`'s neighbours around float64 numbers."""
    exponent = torch.frexp(x)[1].double() - 1
    return torch.exp2(exponent.clamp(min=LEAST[dtype]) - FRACTION[dtype])


def exact(case) -> tuple[torch.Tensor, torch.Tensor]:
    """q in float64, and with the magnitudes of the two products that make each element in place of their difference."""
    spec, q = case.spec, case["q"].double()
    half = spec.rotated // 2
    cos, sin = case["cos_sin_cache"].double()[case["positions"]].unsqueeze(1).split(half, dim=-1)
    first, second = reference.pair_slices(spec.rotated, spec.is_neox)

    def rotate(x, magnitudes=False):
        y = x.abs() if magnitudes else x.clone()
        x1, x2 = x[..., first], x[..., second]
        if magnitudes:
            y[..., first], y[..., second] = (x1 * cos).abs() + (x2 * sin).abs(), (x2 * cos).abs() + (x1 * sin).abs()
        else:
            y[..., first], y[..., second] = x1 * cos - x2 * sin, x2 * cos + x1 * sin
        return y

    weight = case["q_weight"].double() + spec.weight_offset
    inverse = (q.square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    if spec.order == "before":
        return rotate(q * inverse * weight), rotate(q * inverse * weight, magnitudes=True)
    inverse = (rotate(q).square().mean(-1, keepdim=True) + spec.eps).rsqrt()
    return rotate(q) * inverse * weight, rotate(q, magnitudes=True) * inverse * weight.abs()


def allowed(magnitudes: torch.Tensor, head_dim: int) -> torch.Tensor:
    """What fp32 arithmetic may add to the error, in units of 2^-24 of the magnitudes.

    The tree adds positive numbers in log2(D) + 1 steps, of squares with one rounding; the division and eps give one each. The root
    halves that, and it and the division of 1 by it give one each: log2(D)/2 + 4. The product with the root, the weight's offset and
    the weight give 3, the rotation's product and difference 2, before the norm another 3 through the mean. With second orders,
    log2(D)/2 + 14.
    """
    return (head_dim.bit_length() / 2 + 14) * 2.0**-24 * magnitudes


@pytest.mark.anywhere
@both
@pytest.mark.parametrize("head_dim", [64, 80, 128, 512])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("order", ["before", "after"])
def test_error_against_float64(device, on_gpu, name, head_dim, dtype, order):
    """Half an ulp of the output for the rounding at the end, and what fp32 arithmetic may add. So where a rotation's two products
    do not cancel, bf16 and fp16 are within one ulp."""
    tokens = 500 if on_gpu else 8 if name == "prefill" else 1
    spec = NormSpec(
        tokens=tokens, heads=(4, 0), head_dim=head_dim, dtype=dtype, order=order, weight_offset=1.0, seed=head_dim,
        rotary_dim=head_dim // 2 if head_dim == 128 else head_dim, scales=(1.0, 1e-3, 300.0),
    )  # fmt: skip
    case = build(spec, device)
    got = run(case.clone(), FUNCTIONS[name])["q"].double()
    want, magnitudes = exact(case)
    error, unit, more = (got - want).abs(), ulp(want, dtype), allowed(magnitudes, head_dim)
    assert (error <= unit / 2 + more).all()
    if dtype != FP32:
        clear = more <= unit / 2
        assert clear.double().mean() > 0.97
        assert (error <= unit)[clear].all()


@pytest.mark.anywhere
@both
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 512])
@pytest.mark.parametrize("size", [1e-20, 1e18])
def test_rows_of_any_size(device, name, dtype, head_dim, size):
    """Of 1e18 the squares alone would overflow; beside 1e-20 eps is all there is."""
    spec = NormSpec(tokens=2, heads=(2, 0), head_dim=head_dim, dtype=dtype, rotary_dim=head_dim // 2, scales=(size,), eps=1e-6)
    case = build(spec, device)
    got = run(case.clone(), FUNCTIONS[name])["q"].double()
    want, magnitudes = exact(case)
    assert got.isfinite().all() and got.ne(0).all()
    assert ((got - want).abs() <= ulp(want, dtype) / 2 + allowed(magnitudes, head_dim)).all()


@pytest.mark.anywhere
@both
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("eps", [1e-5, 1e-12, 1e-25])
def test_heads_of_zeros_stay_zeros(device, name, order, eps):
    case = build(
        NormSpec(heads=(2, 2), rotary_dim=32, order=order, v_norm=True, scales=(0.0,), slots=True, eps=eps, tokens=2), device
    )
    got = run(case.clone(), FUNCTIONS[name])
    for x in (got["q"], *(got[cache].flatten(0, 1)[got["slot_mapping"]] for cache in ("k_cache", "v_cache"))):
        assert (x == 0).all()


# The order of the sum.


def sum_by_hand(x: list[torch.Tensor]) -> torch.Tensor:
    """Neighbours, then neighbouring sums."""
    while len(x) > 1:
        x = [x[i] + x[i + 1] for i in range(0, len(x), 2)]
    return x[0]


@pytest.mark.parametrize("length", [1, 2, 8, 24, 40, 64])
def test_the_trees_order(length):
    """The bits of additions one at a time, of numbers whose sum depends on their order."""
    x = torch.exp2(torch.randint(-20, 20, (200, length), generator=torch.Generator().manual_seed(length)).float()) * 1.1
    full = 1 << (length - 1).bit_length()
    want = sum_by_hand([*x.unbind(1), *[torch.zeros(200)] * (full - length)])
    got = reference.tree_sum(x)
    assert got.shape == (200, 1) and torch.equal(bits(got[:, 0]), bits(want))
    if length > 8:
        assert not torch.equal(bits(want), bits(x.flip(1).cumsum(1)[:, -1]))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 12), (16, 0), (40, 32)])
def test_the_norms_order(head_dim, rotary_dim, is_neox):
    """Pairs, then the tree of pairs, then the tree of the rest; then one operation after the other, each rounded to fp32."""
    x = torch.randn(300, head_dim, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 3, 300)[:, None]
    weight = torch.linspace(-2, 2, head_dim)
    squares = ((x * 2.0**-20) * (x * 2.0**-20)).unbind(1)
    half, zero = rotary_dim // 2, torch.zeros(300)
    pairs = [(i, i + half) if is_neox else (2 * i, 2 * i + 1) for i in range(half)]
    parts = [[squares[a] + squares[b] for a, b in pairs], list(squares[rotary_dim:])]
    sums = [sum_by_hand(part + [zero] * ((1 << (len(part) - 1).bit_length()) - len(part))) for part in parts if part]
    total = sums[0] if len(sums) == 1 else sums[0] + sums[1]
    mean = total / torch.tensor(float(head_dim)) + torch.tensor(1e-6 * 2.0**-40)
    root = mean.double().sqrt().float()
    want = x * (torch.tensor(2.0**-20) / root)[:, None] * (weight + 1.0)
    assert torch.equal(bits(reference.rms_norm(x, weight, 1e-6, 1.0, rotary_dim, is_neox)), bits(want))


def test_the_reference_on_float64_differences():
    """`rms_norm` is the norm: float64 says the same to fp32's precision."""
    x, weight = torch.randn(50, 96), torch.randn(96)
    got = reference.rms_norm(x, weight, 1e-5, 1.0, 64, True)
    torch.testing.assert_close(got.double(), normed(x, weight, 1e-5, 1.0), rtol=2e-6, atol=0)


@pytest.mark.anywhere
@both
def test_a_norm_that_does_nothing_changes_nothing_else(device, name):
    """A scale of ones, and weights whose offset is all of them."""
    case = build(NormSpec(tokens=2, heads=(2, 1), scaled=True, normed=False, dtype=FP32), device)
    case["q_token_scale"].fill_(1)
    plain = run_reference(build(case.spec.but(scaled=False), device))
    assert torch.equal(bits(run(case.clone(), FUNCTIONS[name])["q"]), bits(plain["q"]))
    ones = torch.zeros(64, device=device)
    results = [
        FUNCTIONS[name](**case.clone().arguments() | dict(norm=norm))
        for norm in (QKNorm(ones, ones, 1e-6, weight_offset=1.0), QKNorm(None, None, 1e-6))
    ]
    assert torch.equal(bits(results[0]), bits(results[1]))
