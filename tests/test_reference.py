"""The reference is the oracle of every other test; here it answers to loops over Python numbers and to float64."""

import numpy as np
import pytest
import torch
from cases import FLOATS, Case, Spec, assert_same_storages, bits, build, no_faults, run_reference
from random_cases import CPU_SIZES, random_spec

import decode_rope
from decode_rope import reference


def rotated_head(x: torch.Tensor, cos: np.ndarray, sin: np.ndarray, is_neox: bool) -> torch.Tensor:
    """One head, pair by pair, in numpy's fp32 scalars: two products, one sum, one rounding."""
    half, new = len(cos), x.clone()
    wide = x.float().numpy()
    for i in range(half):
        first, second = (i, i + half) if is_neox else (2 * i, 2 * i + 1)
        x1, x2, c, s = wide[first], wide[second], cos[i], sin[i]
        new[first] = torch.tensor(x1 * c - x2 * s).to(x.dtype)
        new[second] = torch.tensor(x2 * c + x1 * s).to(x.dtype)
    return new


def place_of(case: Case, token: int, position: int) -> tuple[int | None, tuple[int, int] | None]:
    """(flat slot to write or None, (fault kind, value) or None) by the words of the contract."""
    spec = case.spec
    if spec.rotated and position >= spec.max_position:
        return None, (reference.POSITION, position)
    if position < 0 or not spec.heads[1]:
        return None, None
    page_size = 1 if spec.cache.startswith("flat") else spec.page_size
    capacity = spec.num_pages * spec.page_size
    if spec.slots is not None:
        slot = spec.slots[token] if token < len(spec.slots) else -1
        if slot >= capacity:
            return None, (reference.SLOT, slot)
        return (slot, None) if slot >= 0 else (None, None)
    place = position if spec.cache_positions is None else spec.cache_positions[token]
    if place < 0:
        return None, None
    row, column = spec.block_table[token // spec.tokens_per_request], place // page_size
    if column >= len(row):
        return None, (reference.COLUMN, column)
    page = row[column]
    if page * page_size >= capacity:
        return None, (reference.PAGE_ID, page)
    return (page * page_size + place % page_size, None) if page >= 0 else (None, None)


def run_oracle(case: Case) -> Case:
    """The whole call, token by token and head by head."""
    spec, faults = case.spec, []
    q, k, v = case["q"], None, None
    originals = {"q": q.clone()}
    if spec.heads[1]:
        k, v = case["k"], case["v"]
        originals |= {"k": k.clone(), "v": v.clone()}
        caches = {n: reference.pages_first(case[n], case.options["kv_layout"]) for n in ("k_cache", "v_cache")}
        page_size = caches["k_cache"].shape[1]
    for token, position in enumerate(spec.positions):
        new = {name: x[token].clone() for name, x in originals.items()}
        if spec.rotated and 0 <= position < spec.max_position:
            cos, sin = (half.numpy() for half in case["cos_sin_cache"][position].chunk(2))
            for name in new.keys() - {"v"}:
                for head in range(new[name].shape[0]):
                    new[name][head] = rotated_head(new[name][head], cos, sin, spec.is_neox)
        case.returned[token] = new["q"]
        slot, fault = place_of(case, token, position)
        if fault:
            faults.append((token << 35) + (fault[0] << 32) + min(fault[1], 2**32 - 1))
        if slot is not None:
            for name, x in (("k_cache", new["k"]), ("v_cache", new["v"])):
                caches[name][slot // page_size, slot % page_size] = x
        if case.views.get("k_out") is not None:
            case["k_out"][token] = new["k"]
    case.faults = [len(faults), min(faults, default=reference.NO_RECORD)]
    return case


@pytest.mark.parametrize("seed", range(150))
def test_reference_is_the_contract_word_for_word(seed):
    case = build(random_spec(seed, CPU_SIZES), "cpu")
    got, want = run_reference(case.clone()), run_oracle(case.clone())
    assert_same_storages(got, want)
    assert got.faults == want.faults


def test_random_calls_hold_every_kind_of_row():
    """The generator's own promise: without it, the tests that use it show little."""
    seen, options = set(), set()
    for seed in range(400):
        spec = random_spec(seed, CPU_SIZES)
        case = Case({}, {}, {}, spec)
        for token, position in enumerate(spec.positions):
            slot, fault = place_of(case, token, position)
            seen.add("padding" if position < 0 else "written" if slot is not None else "skipped" if fault is None else fault[0])
        seen.add("short" if spec.slots is not None and len(spec.slots) < len(spec.positions) else "")
        shapes = (spec.dtype, spec.positions_dtype, spec.index_dtype, spec.cache, spec.activations, spec.tokens_per_request)
        options.update([*shapes, ("R", spec.rotated), ("page", spec.page_size), ("NeoX", spec.is_neox)])
    assert seen >= {"padding", "written", "skipped", "short", 1, 2, 3, 4}
    assert options >= {*FLOATS, torch.int32, torch.int64, 1, 2, 3, 4, ("NeoX", True), ("NeoX", False)}
    assert options >= {("R", 0), ("R", 20), ("R", 96), ("R", 160), ("page", 1), ("page", 544), ("page", 1056)}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_C12_products_are_fp32_and_rounded_once(dtype, is_neox):
    """Within half an ulp of the output dtype, and what three fp32 roundings add, of float64."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 3, 64, generator=generator).to(dtype)
    x[0] = 1.0078125
    angle = torch.rand(40, 1, 32, generator=generator, dtype=torch.float64) * 6.3
    cos, sin = angle.cos().float(), angle.sin().float()
    got = reference.rotate(x, cos, sin, is_neox).double()
    exact = reference.rotate(x.double(), cos.double(), sin.double(), is_neox)
    size = [reference.rotate(x.abs().double(), cos.abs().double(), s.double(), is_neox) for s in (sin.abs(), -sin.abs())]
    three_roundings = 3 * torch.maximum(*size) * 2.0**-24
    half_ulp = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(1e-30)))) * torch.finfo(dtype).eps / 2
    last_rounding = torch.zeros_like(half_ulp) if dtype == torch.float32 else half_ulp
    assert bool(((got - exact).abs() <= three_roundings + last_rounding).all())
    if dtype != torch.float32:
        half = reference.rotate(x, cos.to(dtype), sin.to(dtype), is_neox).double()
        assert bool(((half - exact).abs() > half_ulp * 1.5).any())  # a half-precision table would fail the line above


def test_rotate_broadcasts_copies_and_keeps_the_tail():
    x = torch.randn(2, 3, 5, 10)
    cos, sin = torch.rand(5, 3), torch.rand(5, 3)
    before = x.clone()
    y = reference.rotate(x, cos, sin)
    assert torch.equal(x, before) and y.data_ptr() != x.data_ptr()
    assert torch.equal(bits(y[..., 6:]), bits(x[..., 6:]))
    assert torch.equal(y[1, 2], reference.rotate(x[1, 2], cos, sin))
    assert y.dtype == x.dtype and reference.rotate(x.double(), cos, sin).dtype == torch.float64


def test_the_reference_counts_faults_only_when_asked():
    case = build(Spec([64, 1], slots=[99, 1]), "cpu")
    reference.rope_append_decode(**case.arguments())
    faults = no_faults("cpu")
    for _ in range(2):
        reference.rope_append_decode(**case.arguments(), faults=faults)
    assert faults.tolist() == [2, (reference.POSITION << 32) + 64]


@pytest.mark.parametrize("seed", range(12))
def test_cpu_tensors_run_the_reference(seed):
    case = build(random_spec(seed, CPU_SIZES), "cpu")
    got, want = case.clone(), run_reference(case.clone())
    assert decode_rope.rope_append_decode(**got.arguments()) is got.returned
    assert_same_storages(got, want)


def test_pages_first_is_a_view_of_the_same_memory():
    cache = torch.zeros(5, 3, 4, 8)
    assert reference.pages_first(cache, "NHD") is cache
    assert reference.pages_first(cache, "HND").shape == (5, 4, 3, 8)
    assert reference.pages_first(cache, "HND").data_ptr() == cache.data_ptr()
    flat = reference.pages_first(cache[:, 0], "HND")
    assert flat.shape == (5, 1, 4, 8) and flat.data_ptr() == cache.data_ptr()
