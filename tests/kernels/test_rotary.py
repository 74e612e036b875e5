"""What a rotation is: which elements turn, in which pairs, with which numbers; and nothing leaks from one row to another."""

import math
import re

import pytest
import torch
from cases import FLOATS, Spec, bits, build, check, run
from lanes import ON_GPU

import decode_rope
from decode_rope import reference

pytestmark = pytest.mark.anywhere
ONE = Spec([3, 5], slots=[2, 9], heads=(3, 2))


def turned(x: torch.Tensor, table: torch.Tensor, positions: list[int], is_neox: bool = True) -> torch.Tensor:
    """x in float64, each pair a complex number times cos + i·sin."""
    half = table.shape[1] // 2
    c, s = table[positions].double().unsqueeze(1).chunk(2, -1)
    wide = x.double()
    flat = wide[..., : 2 * half]
    pair = flat.unflatten(-1, (2, half)).transpose(-1, -2) if is_neox else flat.unflatten(-1, (half, 2))
    z = torch.view_as_complex(pair.contiguous()) * torch.complex(c, s)
    y = torch.view_as_real(z)
    y = (y.transpose(-1, -2) if is_neox else y).flatten(-2)
    return torch.cat([y, wide[..., 2 * half :]], -1)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pairs_turn_by_their_angle(dtype, is_neox, device):
    """Against complex numbers in float64, to half an ulp of the output and what fp32 adds."""
    case = build(ONE.but(dtype=dtype, is_neox=is_neox, rotary_dim=48, seed=3), device)
    for name in ("q", "k"):
        case[name].copy_(torch.randn(case[name].shape, generator=torch.Generator().manual_seed(4)))
    got = run(case.clone())
    tolerance = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 2**-22
    for result, x in ((got["q"], case["q"]), (got["k_cache"].flatten(0, 1)[[2, 9]], case["k"])):
        want = turned(x, case["cos_sin_cache"], case.spec.positions, is_neox)
        assert bool(((result.double() - want).abs() <= tolerance * want.abs() * 1.001 + 2**-22 * 5).all())
        other = turned(x, case["cos_sin_cache"], case.spec.positions, not is_neox)
        assert bool(((result.double() - other).abs() > 0.05).any())


def test_known_pairs_one_by_one(device):
    """x = 1, 2, 3, … with cos 0 and sin 1: a quarter turn moves each member to the other's place."""
    table = torch.cat([torch.zeros(1, 2), torch.ones(1, 2)], 1).to(device)
    x = torch.arange(1.0, 7.0, device=device).view(1, 1, 6)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    for is_neox, want in ((True, [-3, -4, 1, 2, 5, 6]), (False, [-2, 1, -4, 3, 5, 6])):
        got = decode_rope.rope_append_decode(x.clone(), None, None, None, None, table, position, is_neox=is_neox)
        assert got.flatten().tolist() == want


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(128, 64), (64, 20), (80, 24), (96, 80), (100, 96), (192, 64), (256, 64)])
def test_C1_C2_the_tail_passes_through_bit_for_bit(head_dim, rotary_dim, is_neox, device):
    """In q in place, in q_out, in k_out and in the cache, filled with NaN before; the tail holds random bits, also NaN."""
    for outputs in (dict(), dict(q_out=True, k_out="own")):
        case = build(ONE.but(head_dim=head_dim, rotary_dim=rotary_dim, is_neox=is_neox, **outputs), device)
        for name in ("k_cache", "q_out", "k_out"):
            if case.views.get(name):
                case[name].fill_(float("nan"))
        got = check(case)
        tails = [("q", got.returned), ("k", got["k_cache"].flatten(0, 1)[[2, 9]])]
        tails += [("k", got["k_out"])] if outputs else []
        for name, result in tails:
            assert torch.equal(bits(result[..., rotary_dim:]), bits(case[name][..., rotary_dim:])), name
            assert not torch.equal(bits(result[..., :rotary_dim]), bits(case[name][..., :rotary_dim])), name


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [2, 6, 10, 20, 24, 40, 72, 80, 96, 100, 160])
def test_C5_sizes_that_are_no_powers_of_two_rotate_exactly(rotary_dim, is_neox, device):
    spec = ONE.but(rotary_dim=rotary_dim, is_neox=is_neox, positions=[63, 62], v_head_dim=72)
    for head_dim in {rotary_dim, rotary_dim + 3, 160}:
        check(build(spec.but(head_dim=head_dim), device))


@pytest.mark.parametrize("head_dim", [1, 3, 576])
def test_C5_any_head_size_rotates_exactly(head_dim, device):
    check(build(ONE.but(head_dim=head_dim, rotary_dim=head_dim - head_dim % 2), device))


def test_NoPE_writes_k_and_v_as_they_are(device):
    case = build(ONE.but(rotary_dim=0, q_out=True, k_out="own"), device)
    got = check(case)
    for name, result in (("q", got["q_out"]), ("k", got["k_out"]), ("k", got["k_cache"].flatten(0, 1)[[2, 9]])):
        assert torch.equal(bits(result), bits(case[name]))


def test_position_zero_of_an_ordinary_table_changes_nothing(device):
    case = build(ONE.but(positions=[0, 0]), device)
    case["cos_sin_cache"][0] = torch.cat([torch.ones(32), torch.zeros(32)])
    got = check(case)
    assert torch.equal(got["q"], case["q"])


def test_C9_numbers_of_the_table_are_used_as_they_are(device):
    """Attention scaling lives in the table: twice the table is twice the result, and nothing is applied again."""
    case = build(ONE.but(dtype=torch.float32), device)
    twice = case.clone()
    twice["cos_sin_cache"].mul_(2)
    got, doubled = check(case), check(twice)
    assert torch.equal(doubled["q"], 2 * got["q"])
    assert torch.equal(doubled["k_cache"].flatten(0, 1)[[2, 9]], 2 * got["k_cache"].flatten(0, 1)[[2, 9]])


def test_C10_C11_long_positions_are_looked_up_exactly(device):
    """Positions that bf16 or fp16 cannot tell apart, or fp32 arithmetic on angles would blur: each has its own row."""
    positions = [256, 257, 4096, 4097, 131071, 131070]
    if ON_GPU:
        positions += [1048574, 1048575]
    size = max(positions) + 1
    spec = Spec(positions, slots=list(range(len(positions))), max_position=size, heads=(2, 1), head_dim=8, num_pages=4)
    for dtype in (torch.int32, torch.int64):
        got = check(build(spec.but(positions_dtype=dtype), device))
        assert not got.faults[0]


def test_C10_half_precision_tables_are_refused(device):
    case = build(ONE, device)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        table = case["cos_sin_cache"].to(dtype)
        with pytest.raises(ValueError, match="cos_sin_cache: expected float32"):
            decode_rope.rope_append_decode(**case.arguments() | {"cos_sin_cache": table})


def test_C13_only_q_and_the_caches_change(device):
    case = build(ONE, device)
    got = check(case)
    for name in ("k", "v", "positions", "slot_mapping", "cos_sin_cache"):
        assert torch.equal(got.storages[name], case.storages[name]), name


@pytest.mark.parametrize(("multi_axis", "words"), [((3, 2), "one row"), ((1, 2), "one row"), ((2, 1), "shape [axes, 2]")])
def test_C6_C7_positions_of_several_axes_are_refused_without_an_axis_map(multi_axis, words, device):
    case = build(ONE, device)
    positions = torch.zeros(multi_axis, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=re.escape(f"positions: expected {words}, ")):
        decode_rope.rope_append_decode(**case.arguments() | {"positions": positions})


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("is_neox", [True, False])
def test_infinity_and_nan_stay_in_their_pair_of_their_row(poison, is_neox, device):
    spec = Spec([3, 5, 7, 9], slots=[2, 9, 10, 12], heads=(3, 2), is_neox=is_neox, dtype=torch.float16)
    clean = build(spec, device)
    dirty = clean.clone()
    dirty["q"][1, 2, 5] = dirty["k"][1, 1, 5] = dirty["v"][1, 1, 5] = poison
    got, want = run(dirty), run(clean)
    partner = 37 if is_neox else 4
    for name, row, head in (("q", 1, 2), ("k_cache", 9, 1)):
        a, b = (case[name] if name == "q" else case[name].flatten(0, 1) for case in (got, want))
        touched = (bits(a) != bits(b)).nonzero().tolist()
        assert sorted(touched) == sorted([row, head, i] for i in (5, partner))
    assert (bits(got["v_cache"]) != bits(want["v_cache"])).nonzero().tolist() == [[2, 1, 1, 5]]


def test_overflow_of_the_output_dtype_is_infinity(device):
    case = build(ONE.but(dtype=torch.float16, positions=[3, 3]), device)
    case["q"].fill_(60000.0)
    case["cos_sin_cache"][3] = math.sqrt(0.5)
    got = check(case)
    assert bool(torch.isinf(got["q"][..., 32:]).all()) and bool((got["q"][..., :32] == 0).all())


def test_q_and_k_depend_on_the_distance_of_positions_alone(device):
    """A real table, not random numbers: the inner product of two rotated heads."""
    angle = torch.outer(torch.arange(64.0), 1e4 ** (-torch.arange(0, 64, 2) / 64))
    table = torch.cat([angle.cos(), angle.sin()], 1).to(device)
    x = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(0))
    y = torch.randn(1, 1, 64, generator=torch.Generator().manual_seed(1))

    def score(a: int, b: int) -> float:
        rows = []
        for z, p in ((x, a), (y, b)):
            position = torch.tensor([p], device=device)
            z = z.to(device, copy=True)
            rows.append(decode_rope.rope_append_decode(z, None, None, None, None, table, position))
        return float((rows[0] * rows[1]).sum())

    assert score(3, 1) == pytest.approx(score(62, 60), abs=1e-4)
    assert score(7, 0) == pytest.approx(score(40, 33), abs=1e-4)
    assert abs(score(7, 0) - score(0, 7)) > 1e-3
    assert reference.rotate(x, *table[5].cpu().chunk(2)).norm() == pytest.approx(float(x.norm()), rel=1e-6)
