"""Norm, token scale and several axes in both kernels: the bits of the reference, whatever the option, the batch and the tile."""

import math

import pytest
import torch
from cases import bits
from norm_cases import (
    BF16,
    BOOKS,
    FP16,
    FP32,
    FUNCTIONS,
    ROWS,
    NormSpec,
    assert_same,
    build,
    check,
    normed,
    run,
    run_reference,
    same_bits,
    with_geometry,
)  # fmt: skip

import decode_rope
from decode_rope import QKNorm, reference
from decode_rope.launch.decode import Geometry
from decode_rope.launch.prefill import PrefillGeometry
from decode_rope.launch.tiles import Tiles
from decode_rope.tables import axes

both = pytest.mark.parametrize("name", FUNCTIONS)
GOOD_AND_PADDING = NormSpec(tokens=2, positions=(9, -1))  # the second row is passed through
OPTIONS = {
    "before": {},
    "after": dict(order="after"),
    "offset": dict(weight_offset=1.0),
    "no weights": dict(q_weight=None, k_weight=None),
    "q weight alone": dict(k_weight=None),
    "k weight alone, after": dict(q_weight=None, order="after"),
    "v too": dict(v_norm=True, v_head_dim=80),
    "rounded": dict(rounded=True),
    "rounded, after": dict(rounded=True, order="after"),
    "bf16 weights": dict(q_weight=BF16, k_weight=BF16, weight_offset=1.0),
    "fp16 and bf16 weights": dict(q_weight=FP16, k_weight=BF16, weight_offset=0.5),
    "large eps": dict(eps=0.5),
    "partial": dict(rotary_dim=32),
    "partial, after": dict(rotary_dim=32, order="after"),
    "partial, rounded": dict(rotary_dim=48, rounded=True, dtype=FP16),
    "partial, rounded, after": dict(rotary_dim=32, rounded=True, order="after", q_weight=None),
    "two rotated elements": dict(rotary_dim=2),
    "NoPE": dict(rotary_dim=0),
    "NoPE, after, rounded": dict(rotary_dim=0, order="after", rounded=True),
    "GPT-J": dict(is_neox=False),
    "GPT-J, partial, after": dict(is_neox=False, rotary_dim=32, order="after"),
    "three axes": dict(axes=3),
    "three axes, GPT-J, partial": dict(axes=3, is_neox=False, rotary_dim=32, order="after"),
    "three axes alone": dict(axes=3, normed=False, rotary_dim=48),
    "scale": dict(scaled=True),
    "scale, after, partial": dict(scaled=True, order="after", rotary_dim=32),
    "scale alone": dict(scaled=True, normed=False),
    "scale alone, partial": dict(scaled=True, normed=False, rotary_dim=32),
    "scale alone, NoPE": dict(scaled=True, normed=False, rotary_dim=0),
    "q_out": dict(q_out=True, rotary_dim=32),
    "q_out, scale, NoPE": dict(q_out=True, scaled=True, rotary_dim=0),
    "k_out": dict(k_out="own", rotary_dim=32),
    "k_out is k": dict(k_out="k", order="after"),
    "k_out, NoPE": dict(k_out="own", rotary_dim=0),
    "v is k": dict(v_is_k=True, v_norm=True),
    "v is k, k_out": dict(v_is_k=True, k_out="own", v_norm=True, order="after"),
    "q and gate": dict(gated=True),
    "slots": dict(slots=True, v_norm=True),
    "q alone": dict(heads=(4, 0), scaled=True),
    "fp16": dict(dtype=FP16),
    "fp32": dict(dtype=FP32, v_norm=True),
    "unaligned": dict(shift=1, weights_shift=1, q_weight=BF16, k_weight=BF16, v_norm=True),
    "all at once": dict(
        rotary_dim=32, is_neox=False, axes=3, scaled=True, q_out=True, k_out="own", v_norm=True, rounded=True, weight_offset=1.0,
    ),
}  # fmt: skip


@pytest.mark.kernel
@both
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_leaves_the_bytes_of_the_reference(device, name, option):
    check(build(GOOD_AND_PADDING.but(**OPTIONS[option]), device), FUNCTIONS[name])


@pytest.mark.kernel
@both
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256, 512])
def test_any_head_size_leaves_the_bytes_of_the_reference(device, name, head_dim):
    for part, order, is_neox in ((1, "before", True), (2, "after", False)):
        spec = NormSpec(tokens=1, heads=(3, 1), head_dim=head_dim, rotary_dim=head_dim // part, v_norm=True, seed=head_dim)
        check(build(spec.but(is_neox=is_neox, order=order), device), FUNCTIONS[name])


@pytest.mark.kernel
@both
def test_tokens_of_one_request(device, name):
    check(build(NormSpec(tokens=5, tokens_per_request=2, v_norm=True, heads=(2, 1)), device), FUNCTIONS[name])


@pytest.mark.kernel
def test_sequences_of_a_prefill(device):
    case = build(NormSpec(tokens=6, tokens_per_request=6, v_norm=True, heads=(2, 1), k_out="own"), device)
    bounds = torch.tensor([1, 5], device=device)  # token 0 and token 5 are in none
    got = check_with(case, decode_rope.rope_append_prefill, cu_seqlens_q=bounds, tokens_per_request=1)
    for row in (0, 5):
        assert same_bits(got["q"][row], case["q"][row]) and same_bits(got["k_out"][row], case["k"][row])


@pytest.mark.kernel
@pytest.mark.parametrize("option", ["before", "after", "partial", "NoPE"])
def test_a_prefill_of_k_without_a_cache(device, option):
    case = build(GOOD_AND_PADDING.but(**OPTIONS[option], heads=(2, 2), k_out="own", slots=True), device)
    no_cache = dict(v=None, k_cache=None, v_cache=None, slot_mapping=None)
    got = check_with(case, decode_rope.rope_append_prefill, **no_cache)
    assert not same_bits(got["k_out"][0], case["k"][0]) and same_bits(got["k_out"][1], case["k"][1])


def check_with(case, function, **options):
    """`check` with other arguments for the reference too."""
    want, got = case.clone(), case.clone()
    reference.rope_append_prefill(**want.arguments() | options)
    function(**got.arguments() | options)
    assert_same(got, want)
    return got


@pytest.mark.kernel
@both
@pytest.mark.parametrize("is_neox", [True, False])
def test_kernels_add_in_the_order_of_the_reference(device, name, is_neox):
    """In fp32, where another order of the sum would show in many of the rows; bf16 hides it."""
    for rotary_dim in (64, 48, 0):
        spec = NormSpec(tokens=1, heads=(32, 0), rotary_dim=rotary_dim, dtype=FP32, is_neox=is_neox, q_weight=None)
        check(build(spec, device), with_geometry(name, Geometry(1, 32, 1, 2, 4, 0) if name == "decode" else None))


# Rows that are passed through.


@pytest.mark.kernel
@both
@pytest.mark.parametrize(("rotary_dim", "order"), [(64, "before"), (32, "before"), (32, "after"), (0, "before")])
def test_rows_without_a_position_keep_their_bits(device, name, rotary_dim, order):
    """Padding rows and, where anything rotates, positions past the table: q is not normalised, not scaled and not rotated, nor is
    k in `k_out`, and no slot is written."""
    bad = (ROWS, ROWS + 7) if rotary_dim else (-3, -(2**40))
    spec = NormSpec(tokens=4, positions=(-1, *bad, 4), rotary_dim=rotary_dim, order=order, scaled=True, v_norm=True, heads=(2, 1))
    for outputs in (dict(q_out=True, k_out="own"), dict(k_out="k")):
        case = build(spec.but(**outputs), device)
        got = check(case, FUNCTIONS[name])
        assert got.faults[0] == (2 if rotary_dim else 0)
        for row in (0, 1, 2):
            assert same_bits(got["q_out" if outputs.get("q_out") else "q"][row], case["q"][row])
            assert same_bits(got["k_out"][row], case["k"][row])
        assert not same_bits(got["q_out" if outputs.get("q_out") else "q"][3], case["q"][3])


@pytest.mark.kernel
@both
def test_rows_without_a_slot_are_normalised_and_not_written(device, name):
    case = build(NormSpec(tokens=4, slots=True, k_out="own", v_norm=True, heads=(2, 1)), device)
    case["slot_mapping"][:] = torch.tensor([-1, 8 * 4, 3, 2**40])
    got = check(case, FUNCTIONS[name])
    assert got.faults[0] == 2
    written = (bits(got["k_cache"]) != bits(case["k_cache"])).flatten(2).any(-1).nonzero().tolist()
    assert written == [[0, 3]]
    want = normed(case["k"], case["k_weight"], 1e-6)
    length = got["k_out"].float().norm(dim=-1) / want.norm(dim=-1).float()
    assert ((length - 1).abs() < 0.01).all()


@pytest.mark.kernel
@both
@pytest.mark.parametrize("alone", [False, True], ids=["q and k", "q alone"])
def test_a_bad_position_of_another_axis(device, name, alone):
    """A row whose height or width the table does not hold is passed through, not written and counted once."""
    spec = NormSpec(tokens=4, axes=3, heads=(2, 0 if alone else 1), rotary_dim=32, v_norm=True, k_out=None if alone else "own")
    case = build(spec, device)
    case["axis_map"].copy_(torch.arange(16) % 3)
    case["positions"][:] = torch.tensor([[1, 2, 3, -1], [1, ROWS, 3, ROWS], [1, 2, -5, 2]])
    got = check(case, FUNCTIONS[name])
    assert got.faults[0] == 2
    for row in (1, 2, 3):
        assert same_bits(got["q"][row], case["q"][row])
    if not alone:
        written = {cache: bits(got[cache]) != bits(case[cache]) for cache in ("k_cache", "v_cache")}
        assert all(changed.flatten(2).any(-1).sum() == 1 for changed in written.values())


@pytest.mark.kernel
@both
def test_rows_of_positions_may_lie_apart(device, name):
    """As a slice of the positions of a longer batch does."""
    case = build(NormSpec(tokens=4, axes=3, slots=True, heads=(2, 1)), device)
    got = first_rows(case.clone().arguments(), 2)
    assert got["positions"].stride(0) == 4
    FUNCTIONS[name](**got)
    reference.rope_append_prefill(**first_rows(case.arguments(), 2))
    assert same_bits(got["q"], case["q"][:2])


@pytest.mark.anywhere
@both
def test_each_option_given_alone_counts(device, name):
    """None of them hides behind the shortest way through a call."""
    case = build(NormSpec(tokens=2, heads=(2, 1), slots=True, normed=False, scaled=True), device)
    plain = case.clone()
    FUNCTIONS[name](**plain.arguments() | dict(q_token_scale=None))
    assert not same_bits(run(case.clone(), FUNCTIONS[name])["q"], plain["q"])
    other = case.clone()
    FUNCTIONS[name](**other.arguments() | dict(q_token_scale=None, norm=QKNorm(None, None, 1e-6)))
    assert not same_bits(other["q"], plain["q"])


# One row's bits in any batch and any tile.


def first_rows(arguments: dict, tokens: int) -> dict:
    """The call of the first tokens alone."""
    return rows_of(arguments, slice(0, tokens))


def rows_of(arguments: dict, rows: slice) -> dict:
    of_tokens = [name for name in ("q", "k", "v", "slot_mapping", "q_token_scale", "k_out") if arguments.get(name) is not None]
    return {**arguments, **{name: arguments[name][rows] for name in of_tokens}, "positions": arguments["positions"][..., rows]}


BATCHES = {
    "NeoX, partial": NormSpec(dtype=FP32, rotary_dim=32, v_norm=True),
    "after, scaled": NormSpec(order="after", scaled=True, q_weight=BF16, k_weight=BF16),
    "three axes": NormSpec(axes=3, weight_offset=1.0, rounded=True),
}


@pytest.mark.kernel
@pytest.mark.parametrize("kind", BATCHES)
def test_C3_a_rows_bits_do_not_depend_on_the_batch(device, on_gpu, kind):
    """Alone, among any number of others, in a decode step or in a prefill."""
    tokens, heads = (513, (20, 4)) if on_gpu else (5, (2, 1))  # 513 · 20 rows of q: more than 10,240
    spec = BATCHES[kind].but(tokens=tokens, heads=heads, slots=True, k_out="own", scales=(1.0, 1e-3, 100.0))
    case, want = build(spec, device), build(spec, device)
    arguments = want.arguments()
    for row in range(tokens):
        decode_rope.rope_append_decode(**rows_of(arguments, slice(row, row + 1)))
    for name, function in FUNCTIONS.items():
        for size in range(1, tokens + 1) if on_gpu else (tokens,) if name == "decode" else (2, tokens):
            got = case.clone()
            function(**first_rows(got.arguments(), size))
            assert same_bits(got["q"][:size], want["q"][:size]) and same_bits(got["k_out"][:size], want["k_out"][:size]), (
                name,
                size,
            )
            slots = got["slot_mapping"][:size]
            for cache in ("k_cache", "v_cache"):
                assert same_bits(got[cache].flatten(0, 1)[slots], want[cache].flatten(0, 1)[slots]), (name, size, cache)


DECODE_TILES = [(1, 2, 1, 2), (1, 8, 2, 1), (2, 1, 4, 1), (4, 4, 2, 2), (8, 2, 8, 2), (16, 1, 1, 4)]
PREFILL_TILES = [
    ((2, 1, 1), (2, 1, 1)), ((4, 2, 1), (2, 2, 1)), ((2, 2, 2), (8, 1, 1)), ((16, 1, 4), (4, 1, 2)), ((8, 4, 1), (16, 2, 1)),
]  # fmt: skip
DECODE_GEOMETRIES = [Geometry(*tiles, warps, 0) for tiles in DECODE_TILES for warps in (1, 4)]
PREFILL_GEOMETRIES = [PrefillGeometry(Tiles(*q), Tiles(*kv), warps) for q, kv in PREFILL_TILES for warps in (4, 8)]
MEMORY = {
    "aligned": NormSpec(q_weight=BF16, k_weight=BF16, v_norm=True),
    "unaligned": NormSpec(dtype=FP32, q_weight=BF16, k_weight=BF16, shift=1, weights_shift=1, order="after"),
    "partial, long": NormSpec(dtype=FP32, head_dim=96, rotary_dim=48, scaled=True, v_norm=True),
}


@pytest.mark.kernel
@pytest.mark.parametrize("memory", MEMORY)
def test_a_tile_changes_no_bit(device, on_gpu, memory):
    """The interpreter knows neither warps nor alignment, so it tries the tiles of one number of warps, on few tokens."""
    if memory == "unaligned" and not on_gpu:
        pytest.skip("the interpreter loads element by element")
    spec = MEMORY[memory].but(tokens=37 if on_gpu else 3, slots=True, heads=(4, 2))
    case = build(spec, device)
    want = run_reference(case.clone())
    for name, geometries in (("decode", DECODE_GEOMETRIES), ("prefill", PREFILL_GEOMETRIES)):
        for geometry in geometries if on_gpu else [g for g in geometries if g.num_warps == 4]:
            assert_same(run(case.clone(), with_geometry(name, geometry)), want)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [80, 128, 512])
def test_a_tile_changes_no_bit_of_any_head_size(device, head_dim):
    for order, rotary_dim, is_neox in (("before", head_dim, True), ("after", head_dim // 2, True), ("before", head_dim, False)):
        spec = NormSpec(
            tokens=33, dtype=FP32, slots=True, head_dim=head_dim, rotary_dim=rotary_dim, order=order, is_neox=is_neox, v_norm=True
        )
        case = build(spec, device)
        want = run_reference(case.clone())
        for name, geometries in (("decode", DECODE_GEOMETRIES[::3]), ("prefill", PREFILL_GEOMETRIES[::4])):
            for geometry in geometries:
                assert_same(run(case.clone(), with_geometry(name, geometry)), want)


# Memory.


@pytest.mark.kernel
@both
def test_unaligned_weights_have_a_kernel_of_their_own(device, name):
    """A launch of the aligned kernel on them would be an error of the GPU's; the call before is of aligned ones."""
    spec = NormSpec(tokens=2, q_weight=BF16, k_weight=BF16, heads=(2, 1))
    book = BOOKS[name]
    book.clear()
    function = with_geometry(name, None)
    check(build(spec, device), function)
    check(build(spec.but(weights_shift=1), device), function)
    plan, *others = book._recent
    assert not others
    assert (plan.compiled.facts["ALIGN_WEIGHT"], plan.unaligned.compiled.facts["ALIGN_WEIGHT"]) == (16, 2)


@pytest.mark.kernel
@both
def test_weights_are_as_aligned_as_their_length(device, name):
    book = BOOKS[name]
    for head_dim, dtype, align in ((20, BF16, 8), (20, FP32, 16), (6, FP32, 8), (5, FP16, 2)):
        book.clear()
        spec = NormSpec(tokens=2, heads=(2, 1), head_dim=head_dim, rotary_dim=4, q_weight=dtype, k_weight=None)
        check(build(spec, device), with_geometry(name, None))
        assert book._recent[0].compiled.facts["ALIGN_WEIGHT"] == align


@pytest.mark.kernel
@both
@pytest.mark.parametrize("end", [True, False], ids=["end", "begin"])
def test_nothing_is_read_outside_weights_and_scales(device, name, end):
    """Where memory ends behind them, or begins with them."""
    from guarded_memory import at_the_edge, signal_of

    if device.type != "cpu":
        pytest.skip("only the CPU has walls around memory")
    for changes in (dict(head_dim=80, rotary_dim=48, q_weight=BF16, k_weight=FP16), dict(head_dim=24, rotary_dim=0, q_weight=FP32)):
        case = build(NormSpec(heads=(2, 1), scaled=True, v_norm=True, **changes))
        for argument in ("q_weight", "k_weight", "q_token_scale", "positions", "cos_sin_cache"):
            if argument in case.views:
                x = case[argument]
                case._made[argument] = at_the_edge(x, end).view(x.dtype).view(x.shape)
        assert signal_of(lambda case=case: FUNCTIONS[name](**case.arguments())) == 0


# Faults that users of other kernels of this kind have reported, by the code of the list of bugs.


@pytest.mark.anywhere
@both
def test_C1_the_part_that_does_not_rotate_is_normalised_and_does_not_turn(device, name):
    case = build(NormSpec(head_dim=128, rotary_dim=64, dtype=FP32, heads=(2, 0)), device)
    got = run(case.clone(), FUNCTIONS[name])
    want = normed(case["q"], case["q_weight"], 1e-6).float()
    torch.testing.assert_close(got["q"][..., 64:], want[..., 64:], rtol=1e-6, atol=1e-7)
    assert ((got["q"][..., :64] - want[..., :64]).abs() > 1e-3).any()


@pytest.mark.anywhere
@both
@pytest.mark.parametrize("order", ["before", "after"])
def test_C2_D8_the_part_that_does_not_rotate_is_in_outputs_and_cache(device, name, order):
    case = build(NormSpec(rotary_dim=32, dtype=FP32, heads=(2, 1), q_out=True, k_out="own", order=order, slots=True), device)
    got = run(case.clone(), FUNCTIONS[name])
    for what, weight, outputs in (
        ("q", "q_weight", [got["q_out"]]),
        ("k", "k_weight", [got["k_out"], got["k_cache"].flatten(0, 1)[got["slot_mapping"]]]),
    ):
        want = normed(case[what], case[weight], 1e-6).float()[..., 32:]
        for output in outputs:
            torch.testing.assert_close(output[..., 32:], want, rtol=1e-6, atol=1e-7)
    assert same_bits(got["k"], case["k"]) and same_bits(got["q"], case["q"])


@pytest.mark.anywhere
@both
def test_C6_all_rows_of_positions_count(device, name):
    """The bits are those of one axis whose table has each token's own angles; and a change of any row that is used changes q."""
    case = build(NormSpec(axes=3, heads=(2, 0), tokens=2), device)
    got = run(case.clone(), FUNCTIONS[name])
    own = with_angles_of_its_own(case)
    arguments = case.clone().arguments() | dict(cos_sin_cache=own, positions=torch.arange(2, device=device))
    del arguments["axis_map"]
    assert same_bits(got["q"], FUNCTIONS[name](**arguments))
    for axis in range(3):
        other = case.clone()
        other["positions"][axis] = (other["positions"][axis] + 5) % ROWS
        assert not same_bits(run(other, FUNCTIONS[name])["q"], got["q"])
    with pytest.raises(ValueError, match="positions: expected one row"):
        FUNCTIONS[name](**case.arguments() | dict(axis_map=None))


def with_angles_of_its_own(case) -> torch.Tensor:
    """A table with a row for every token: each pair's angle is that of its axis's position."""
    cos, sin = case["cos_sin_cache"].chunk(2, dim=-1)
    rows = case["positions"][case["axis_map"].long()].T
    pair = torch.arange(cos.shape[1], device=cos.device)
    return torch.cat([cos[rows, pair], sin[rows, pair]], dim=1).contiguous()


@pytest.mark.anywhere
@both
def test_C7_sections_and_interleaved_axes_are_not_mixed_up(device, name):
    case = build(NormSpec(axes=3, heads=(2, 0), head_dim=128, tokens=2), device)
    found = []
    for axis_map in (axes.chunked((16, 24, 24)), axes.interleaved((24, 20, 20), 64)):
        call = case.clone()
        call["axis_map"].copy_(torch.tensor(axis_map, dtype=torch.int8))
        found.append(run(call, FUNCTIONS[name])["q"])
        arguments = case.clone().arguments() | dict(
            cos_sin_cache=with_angles_of_its_own(call), positions=torch.arange(2, device=device)
        )
        del arguments["axis_map"]
        assert same_bits(found[-1], FUNCTIONS[name](**arguments))
    assert not same_bits(*found)


@pytest.mark.anywhere
@both
def test_D1_weights_count_in_their_own_precision(device, name):
    """1 + 2^-12 is 1 in bf16."""
    case = build(NormSpec(rotary_dim=0, dtype=FP32, heads=(2, 0), tokens=2), device)
    case["q_weight"].fill_(1 + 2**-12)
    weightless = FUNCTIONS[name](**case.clone().arguments() | dict(norm=QKNorm(None, None, 1e-6)))
    assert same_bits(run(case, FUNCTIONS[name])["q"], weightless * (1 + 2**-12))


@pytest.mark.anywhere
@both
def test_D2_a_weights_dtype_changes_no_bit_of_the_same_weights(device, name):
    case = build(NormSpec(heads=(2, 0), tokens=2, q_weight=BF16), device)
    results = []
    for dtype in (BF16, FP32, FP16):
        call = case.clone()
        norm = call.norm
        q_weight = (norm.q_weight.float() * 8).round() / 8  # what all three hold
        call = FUNCTIONS[name](**call.arguments() | dict(norm=norm._replace(q_weight=q_weight.to(dtype))))
        results.append(call)
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.anywhere
@both
@pytest.mark.parametrize("order", ["before", "after"])
def test_D4_rounded_is_what_two_modules_leave_in_half_precision(device, name, order):
    """Norm and rotation one after the other, each in fp32 and each rounded to bf16 by itself."""
    case = build(NormSpec(rotary_dim=32, rounded=True, order=order, heads=(4, 0), tokens=3), device)
    got = run(case.clone(), FUNCTIONS[name])["q"]

    def norm(x):
        return reference.rms_norm(x.float(), case["q_weight"], 1e-6, 0.0, 32, True).to(BF16)

    def rope(x):
        return decode_rope.apply_rope(x, case["cos_sin_cache"], case["positions"])

    assert same_bits(got, rope(norm(case["q"])) if order == "before" else norm(rope(case["q"])))
    once = FUNCTIONS[name](**case.clone().arguments() | dict(norm=case.norm._replace(rounded=False)))
    assert not same_bits(got, once)
    assert (got.float() - once.float()).abs().max() <= 2**-7 * once.float().abs().max()


@pytest.mark.anywhere
@both
def test_D5_each_of_q_and_k_has_its_weight(device, name):
    case = build(NormSpec(heads=(2, 2), slots=True, dtype=FP32), device)
    case["k"].copy_(case["q"])
    case["q_weight"].fill_(1)
    case["k_weight"].fill_(2)
    got = run(case.clone(), FUNCTIONS[name])
    assert same_bits(got["k_cache"].flatten(0, 1)[got["slot_mapping"]], 2 * got["q"])


@pytest.mark.anywhere
@both
def test_D7_squares_do_not_overflow(device, name):
    case = build(NormSpec(tokens=1, heads=(2, 0), head_dim=256, dtype=FP16, rotary_dim=0, q_weight=None), device)
    case["q"].fill_(3e4)
    got = run(case.clone(), FUNCTIONS[name])["q"]
    assert same_bits(got, torch.ones_like(got))


@pytest.mark.anywhere
@both
def test_v_is_normalised_without_weights_and_only_on_request(device, name):
    case = build(NormSpec(heads=(2, 1), slots=True, dtype=FP32, v_head_dim=80, tokens=2), device)
    for v_norm in (False, True):
        got = case.clone()
        FUNCTIONS[name](**got.arguments() | dict(norm=case.norm._replace(v_norm=v_norm)))
        want = normed(case["v"], None, 1e-6).float() if v_norm else case["v"]
        torch.testing.assert_close(got["v_cache"].flatten(0, 1)[got["slot_mapping"]], want, rtol=2e-6, atol=0)
        assert same_bits(got["v"], case["v"])


@pytest.mark.anywhere
@both
def test_a_token_scale_multiplies_q_after_everything_and_not_k(device, name):
    """A power of two, exactly."""
    case = build(NormSpec(heads=(2, 1), scaled=True, order="after", rotary_dim=32, tokens=3), device)
    case["q_token_scale"].copy_(torch.tensor([1.0, 4.0, 0.5]))
    got = run(case.clone(), FUNCTIONS[name])
    plain = case.clone()
    FUNCTIONS[name](**plain.arguments() | dict(q_token_scale=None))
    factors = torch.tensor([1.0, 4.0, 0.5], device=device).view(3, 1, 1)
    assert same_bits(got["q"], (plain["q"].float() * factors).to(BF16))
    assert torch.equal(got.storages["k_cache"], plain.storages["k_cache"])


@pytest.mark.anywhere
@both
def test_eps_is_added_to_the_mean_inside_the_root(device, name):
    """A head of zeros but for one element that is sqrt(D): the mean is 1."""
    case = build(NormSpec(heads=(1, 0), head_dim=64, rotary_dim=0, dtype=FP32, q_weight=None, eps=3.0, tokens=1), device)
    case["q"].zero_()
    case["q"][..., 5] = 8.0
    got = run(case.clone(), FUNCTIONS[name])["q"]
    assert got[0, 0, 5].item() == pytest.approx(8 / math.sqrt(1 + 3), rel=1e-6)
    assert got[0, 0, :5].eq(0).all()
