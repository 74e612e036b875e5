"""Quantised caches: codes and scales bit-identical to the reference, and the reference what the contract says."""

import math

import pytest
import torch
from quantised import E4M3, E5M2, FUNCTIONS, INT8, assert_same, hard_numbers, moved, quantised_call
from refused_options import BAD, arguments

import decode_rope
from decode_rope import DecodeRope, QKNorm, reference

DTYPES = {E4M3: "e4m3", E5M2: "e5m2", INT8: "int8"}
by_dtype = pytest.mark.parametrize("kv_dtype", DTYPES, ids=DTYPES.get)
dynamic = pytest.mark.parametrize("kv_dtype", [E4M3, INT8], ids=DTYPES.get)
by_function = pytest.mark.parametrize("function", FUNCTIONS)
SCALES = ("none", "0-dim", "one", "heads")


@pytest.mark.anywhere
@by_function
@pytest.mark.parametrize("scale", SCALES)
@by_dtype
def test_codes_of_given_scales(kv_dtype, scale, function, device):
    if kv_dtype == INT8 and scale == "none":
        pytest.skip("int8 has no scale of 1")
    for seed, layout in enumerate(("NHD", "HND", "flat")):
        assert_same(quantised_call(seed, kv_dtype, scale=scale, layout=layout), function, device)


@pytest.mark.anywhere
@by_function
@pytest.mark.parametrize("layout", ["NHD", "HND", "flat"])
@dynamic
def test_scales_are_found_and_written_beside_each_row(kv_dtype, layout, function, device):
    assert_same(quantised_call(3, kv_dtype, scale="tokens", layout=layout), function, device)


@pytest.mark.anywhere
@by_function
@dynamic
def test_scales_may_lie_inside_the_rows_of_the_cache(kv_dtype, function, device):
    """vLLM's rows of head size + 4 bytes, whose scales it views as strided fp32."""
    for layout in ("NHD", "HND"):
        assert_same(quantised_call(4, kv_dtype, scale="tokens", layout=layout, inline=True), function, device)


@pytest.mark.anywhere
@by_function
@by_dtype
def test_caches_may_come_as_bytes(kv_dtype, function, device):
    assert_same(quantised_call(5, kv_dtype, as_bytes=True), function, device)


@pytest.mark.anywhere
@by_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_dtype_of_rows_sizes_that_are_no_power_of_two_and_partial_rotation(dtype, function, device):
    for seed, (d, r) in enumerate(((20, 20), (24, 8), (80, 64))):
        for kv_dtype in DTYPES:
            scale = "heads" if kv_dtype == E5M2 else "tokens"
            call = quantised_call(seed, kv_dtype, scale=scale, dtype=dtype, head_dim=d, rotary_dim=r, heads=(3, 3), tokens=9)
            assert_same(call, function, device)


@pytest.mark.anywhere
@by_function
def test_norm_and_outputs_beside_codes(function, device):
    """k_out and q are of the dtype of k and q, and not of the cache's."""
    call = quantised_call(7, E4M3, scale="heads")
    weight = torch.rand(16) + 0.5
    call.options["norm"] = QKNorm(moved(weight, device), moved(weight, device), 1e-6, v_norm=True)
    call.tensors["k_out"] = torch.zeros(5, 2, 16, dtype=torch.bfloat16)
    assert_same(call, function, device)


@pytest.mark.anywhere
@by_function
def test_q_goes_to_an_8_bit_output_with_its_scale(function, device):
    """Rows that are passed through are quantised as they are."""
    for scale in ("one", "tokens"):
        assert_same(quantised_call(8, E4M3, scale=scale, q_out=E4M3), function, device)


@pytest.mark.gpu
@by_function
def test_many_calls_on_a_gpu(function, device):
    for seed in range(40):
        kv_dtype = (E4M3, E5M2, INT8)[seed % 3]
        scale = ("heads", "one", "tokens")[seed % 3 if kv_dtype != E5M2 else 0]
        tokens = (1, 7, 64, 300)[seed % 4]
        call = quantised_call(seed, kv_dtype, scale=scale, tokens=min(tokens, 40), head_dim=(128, 64, 96)[seed % 3], rotary_dim=64)
        assert_same(call, function, device)


# The reference


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2], ids=DTYPES.get)
def test_every_number_of_8_bits_is_its_own_code(kv_dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    numbers = codes.float()
    again = reference.quantise(numbers, kv_dtype, None)
    finite = numbers.isfinite()
    assert torch.equal(again.view(torch.uint8)[finite], codes.view(torch.uint8)[finite])
    assert (again.view(torch.uint8)[numbers.isnan()] == 0x7F).all()
    assert again.float()[numbers.isinf()].abs().eq(reference.LIMITS[kv_dtype]).all()


@by_dtype
def test_halves_go_to_even(kv_dtype):
    """E1: truncation, or rounding halves away from zero, would move each of these by a code."""
    ties = {E4M3: [(1.0625, 1.0), (1.1875, 1.25), (2.0**-10, 0.0), (3 * 2.0**-10, 2.0**-8)], INT8: [(0.5, 0), (1.5, 2), (-2.5, -2)]}
    ties[E5M2] = [(1.125, 1.0), (1.375, 1.5), (2.0**-17, 0.0)]
    for number, want in ties[kv_dtype]:
        got = reference.quantise(torch.tensor([number]), kv_dtype, None).float()
        assert got.item() == want, number


@by_dtype
def test_past_the_limit_is_the_limit_and_nan_stays_nan(kv_dtype):
    limit = reference.LIMITS[kv_dtype]
    x = torch.tensor([limit * 1.5, -math.inf, math.inf, math.nan])
    got = reference.quantise(x, kv_dtype, None).float().tolist()
    assert got[:3] == [limit, -limit, limit]
    assert math.isnan(got[3]) or (kv_dtype == INT8 and got[3] == 0)


def test_a_scale_divides():
    """E2: a scale that multiplied would give 64 · 4 = 256."""
    assert reference.quantise(torch.tensor([64.0]), E4M3, torch.tensor([4.0])).float().item() == 16


@dynamic
def test_rows_of_zeros_have_zero_codes_and_a_finite_positive_scale(kv_dtype):
    scale = reference.row_scale(torch.zeros(1, 8), kv_dtype)
    assert 0 < scale.item() < math.inf
    assert not reference.quantise(torch.zeros(1, 8), kv_dtype, scale[:, None]).float().any()


@dynamic
def test_a_found_scale_makes_the_largest_number_the_limit(kv_dtype):
    x = torch.randn(64, 32) * torch.logspace(-18, 18, 64)[:, None]
    scale = reference.row_scale(x, kv_dtype)
    codes = reference.quantise(x, kv_dtype, scale[:, None]).float()
    assert (codes.abs().amax(-1) == reference.LIMITS[kv_dtype]).all()
    error = (codes * scale[:, None] - x).abs() / x.abs().amax(-1, keepdim=True)
    assert error.max() <= (2.0**-4 if kv_dtype == E4M3 else 0.5 / 127 + 1e-6)


@by_dtype
def test_a_cache_is_read_back_as_numbers(kv_dtype):
    for scale in ("heads", *(["tokens"] if kv_dtype != E5M2 else [])):
        for layout in ("NHD", "HND", "flat"):
            call = quantised_call(11, kv_dtype, scale=scale, layout=layout)
            call.options |= {"positions": torch.zeros(5, dtype=torch.int64), "slot_mapping": torch.arange(5)}
            call.tensors |= {name: torch.randn(5, n, 16).to(torch.bfloat16) for name, n in (("q", 4), ("k", 2), ("v", 2))}
            given = call.tensors | call.options
            reference.rope_append_decode(**given)
            numbers = reference.dequantise(given["v_cache"], given["v_scale"], given["kv_layout"]).flatten(0, 1)[:5]
            want = call.tensors["v"].float()
            assert ((numbers - want).abs() <= 0.13 * want.abs().amax(-1, keepdim=True)).all()


# Errors


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("error", "words", "changes", "kv_dtype"), BAD, ids=[f"{i} {bad[1]}" for i, bad in enumerate(BAD)])
def test_a_bad_option_is_refused_by_name_and_nothing_is_written(error, words, changes, kv_dtype, function):
    given = arguments(changes, kv_dtype)
    before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor)}
    with pytest.raises(error) as caught:
        getattr(decode_rope, function)(**given)
    assert str(caught.value).startswith(words) and type(caught.value) is error
    for name, x in before.items():
        assert torch.equal(x.contiguous().view(torch.uint8), given[name].contiguous().view(torch.uint8)), name


# Prepared


@pytest.mark.anywhere
@pytest.mark.parametrize("scale", ["heads", "tokens"])
@dynamic
def test_a_prepared_op_writes_what_the_function_writes(kv_dtype, scale, device):
    call = quantised_call(13, kv_dtype, scale=scale, as_bytes=scale == "heads")
    table = moved(call.options["cos_sin_cache"], device)
    op = DecodeRope(
        table, num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=4, addressing="slot_mapping", kv_dtype=kv_dtype,
        dynamic_scales=scale == "tokens", device=device,
    ).warmup(5)  # fmt: skip
    known = ("cos_sin_cache", "kv_layout", "kv_dtype")

    def through(op_call):
        return lambda **given: op_call(**{name: x for name, x in given.items() if name not in known})

    want = call.run(reference.rope_append_decode, device)
    for way in (op, lambda **given: op.bind(**given)()):
        got = call.run(through(way), device)
        assert all(torch.equal(got[name], want[name]) for name in want if name != "q")


def test_a_prepared_op_refuses_another_cache_and_missing_scales():
    op = DecodeRope(
        None, num_q_heads=4, num_kv_heads=2, head_dim=16, page_size=4, addressing="slot_mapping", kv_dtype=E4M3, device="cpu"
    )
    call = quantised_call(1, E4M3)
    given = {name: x for name, x in (call.tensors | call.options).items() if name not in ("cos_sin_cache", "kv_layout", "kv_dtype")}
    with pytest.raises(ValueError, match=r"^k_scale: expected it given"):
        op(**(given | {"k_scale": None}))
    with pytest.raises(TypeError, match=r"^k_cache: expected kv_dtype torch\.float8_e4m3fn"):
        op(**(given | {name: torch.zeros(12, 4, 2, 16).to(E5M2) for name in ("k_cache", "v_cache")}))


def test_hard_numbers_are_hard():
    x = hard_numbers((64, 4, 16), torch.float32, torch.Generator().manual_seed(0))
    assert x.isnan().any() and x.isinf().any() and (x == 0).all(-1).any() and (x.abs() > 448).any()
