"""What a direct launch is given is right: addresses, stream, device, alignment, kernel; for any call after any other. The driver is
a stand-in, see `fake_driver.py`.
"""

import gc

import pytest
import torch
import triton
from cases import Spec, assert_same_storages, build, call_arguments, check, prepare, prepared, run
from far import FAR, expected, reserve, small_call
from lanes import INTERPRETED
from random_cases import CPU_SIZES, random_spec
from ways import SPECS, TABLE, WAYS, either_way, function_of, with_one_of, with_other_flags, works

import decode_rope
from decode_rope.api.functions import DECODE_CALLS
from decode_rope.launch import book, compiled, plan
from decode_rope.launch.decode import decode_geometry

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")


@pytest.mark.parametrize("seed", range(2000, 2030))
@either_way
def test_repeated_launches_of_random_calls(way, seed, fake_driver):
    start = build(random_spec(seed, CPU_SIZES), "cpu")
    case = start.clone()
    works(WAYS[way](case), case, start)
    assert len(fake_driver.launches) == (3 if len(start.spec.positions) else 0)


def test_F3_memory_of_any_alignment_in_any_order_gets_a_kernel_that_fits(fake_driver):
    """The stand-in refuses an address or a stride that its kernel was not compiled for."""
    changes = [{}, dict(shift=1), dict(table_shift=1), dict(shift=8), dict(shift=3, table_shift=2), dict(activations="padded")]
    changes += [dict(cache="NHD padded"), dict(cache="HND beside"), {}]
    for spec in (TABLE, TABLE.but(head_dim=24, v_head_dim=20), TABLE.but(q_out=True, k_out="own"), TABLE.but(rotary_dim=6)):
        cases = [build(spec.but(**change), "cpu") for change in changes]
        for start in (*cases, *cases[::-1]):
            check(start)
            check(start, prepared(start))


@pytest.mark.parametrize(
    ("name", "strides"),
    # q stands for the outputs that there are not.
    {"q": ["q_t", "qo_t", "ko_t"], "k": ["k_t"], "v": ["v_t"], "k_cache": ["kc_p"], "v_cache": ["vc_p"]}.items(),
)
def test_B1_strides_of_64_bits_are_given_in_64(name, strides, fake_driver):
    """And those of no more than 31 in 32, to which the stand-in cuts all others."""
    for n, step in ((2, FAR), (2, 2**31), (2, 2**31 - 2**10)):
        call = small_call("cpu", n)
        want = expected(call)
        memory = reserve(step + 2**16, "cpu")
        call[name] = memory.as_strided(call[name].shape, (step, *call[name].stride()[1:])).copy_(call[name])
        decode_rope.rope_append_decode(**call)
        assert torch.equal(call["q"], want["q"]), step
        decode_rope.rope_append_decode(**call)
        assert fake_driver.arguments[-1]["num_tokens"] == n
        for result in ("k_cache", "v_cache"):
            assert torch.equal(call[result], want[result]), (result, step)
        wide = list(compiled._COMPILED.values())[-1].wide
        assert wide == ({f"stride_{stride}" for stride in strides} if step >= 2**31 else set()), step


@pytest.mark.parametrize("one", ["q", "k", "v", "k_cache", "v_cache", "q_out", "k_out", "cos_sin_cache"])
def test_F3_one_unaligned_tensor_among_aligned_ones_gets_a_kernel_that_fits(one, fake_driver):
    spec = TABLE.but(q_out=True, k_out="own")
    aligned, shifted = build(spec, "cpu"), build(spec.but(shift=1, table_shift=1), "cpu")
    mixed = with_one_of(aligned, shifted, one)
    for start in (aligned, mixed, aligned, mixed):
        check(start)


@pytest.mark.parametrize("name", ["table", "slots", "outputs"])
def test_every_tensor_may_move_alone(name, fake_driver):
    """A launch packed for some memory is not taken for memory that differs in one tensor."""
    start = build(SPECS[name], "cpu")
    case = start.clone()
    works(function_of(case), case, start)
    for storage in start.storages:
        moved = case.clone()
        moved.storages |= {other: memory for other, memory in case.storages.items() if other != storage}
        works(function_of(moved), moved, start)
        works(function_of(case), case, start, times=1)


def test_slices_that_interleave_well_say_nothing_of_others(fake_driver):
    """q, k and v in one packed tensor, then the same views of it moved so that k begins in the last head of q."""
    start = build(TABLE.but(activations="packed", v_head_dim=16), "cpu")
    case = start.clone()
    works(function_of(case), case, start)
    moved = case.clone()
    view = moved.views["k"]
    moved.views["k"] = view._replace(offset=view.offset - 16)
    before = moved.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="q: expected memory of its own, got memory shared with k"):
            decode_rope.rope_append_decode(**moved.arguments())
        assert_same_storages(moved, before)
    works(function_of(case), case, start, times=1)


@either_way
def test_F5_a_launch_goes_to_the_stream_that_is_current(way, fake_driver):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    for fake_driver.stream in (7, 7, 9, 7, 9, 0, 0):
        works(call, case, start, times=1)
    assert [stream or 0 for stream, _ in fake_driver.launches] == [7, 7, 9, 7, 9, 0, 0]


@either_way
def test_F4_a_launch_makes_the_device_of_its_tensors_current(way, fake_driver):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    for fake_driver.device in (None, 1, 1, None, 1):
        current = fake_driver.device
        works(call, case, start, times=1)
        assert fake_driver.device == current
    assert [device for _, device in fake_driver.launches] == [None] * 5


@either_way
def test_a_profiler_s_launch_hook_sees_every_launch(way, fake_driver, monkeypatch):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    works(call, case, start)
    seen = []
    monkeypatch.setattr(compiled.Compiled, "launch_jit", lambda self, grid, values: seen.append(grid))
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        for _ in range(2):
            call()
    finally:
        hook.remove(print)
    assert len(seen) == 2 and len(fake_driver.launches) == 3
    works(call, case, start)


def test_full_books_are_begun_anew(fake_driver, monkeypatch):
    monkeypatch.setattr(plan, "_MAX_KEPT", 2)
    monkeypatch.setattr(book, "_MAX_PLANS", 2)
    cases = [build(TABLE.but(seed=seed, num_pages=7 + seed % 4), "cpu") for seed in range(8)]
    for _ in range(2):
        for start in cases:
            case = start.clone()
            works(function_of(case), case, start, times=2)
    plans = DECODE_CALLS._plans.values()
    assert len(plans) <= 2 and all(len(found._kept) <= 2 and len(found._known) <= 2 for found in plans)


def test_F3_without_torch_s_tensor_guards_calls_are_told_apart_too(fake_driver, monkeypatch):
    monkeypatch.setattr(book, "TensorGuards", None)
    starts = [build(spec, "cpu") for spec in SPECS.values()]
    starts += [build(TABLE.but(**changes), "cpu") for changes in (
        dict(dtype=torch.float16), dict(dtype=torch.float32), dict(positions=[1, 3, -1], num_pages=9), dict(page_size=5),
        dict(activations="padded"), dict(index_dtype=torch.int64), dict(head_dim=20), dict(cache="NHD padded"),
    )]  # fmt: skip
    for start in (*starts, *starts[::-1]):
        check(start)
        check(start)
    case = starts[0].clone()
    with pytest.raises(ValueError, match="q: expected a tensor that needs no gradient"):
        decode_rope.rope_append_decode(**case.arguments() | {"q": case["q"].clone().requires_grad_()})
    with pytest.raises(TypeError, match=r"v: expected a torch\.Tensor"):
        decode_rope.rope_append_decode(**case.arguments() | {"v": [1.0]})


def test_flags_of_one_call_say_nothing_about_the_next(fake_driver):
    """The same tensors, another pairing or another way through the block table."""
    start = build(TABLE.but(head_dim=8, v_head_dim=8, block_table=[[1, 2], [3, 4], [5, 6], [0, 7]], heads=(4, 4)), "cpu")
    for one in with_other_flags(start):
        check(one)
        check(one)


def test_F2_a_bound_launch_outlives_everything_it_was_made_from(fake_driver):
    start = build(TABLE, "cpu")
    case = start.clone()
    launch = prepare(case).bind(**call_arguments(case))
    launch()
    compiled._COMPILED.clear()
    gc.collect()
    works(launch, case, start)


@pytest.mark.parametrize("changes", [dict(k_out="k"), dict(v_is_k=True, v_head_dim=16), dict(k_out="own", q_out=True)], ids=str)
def test_a_tensor_given_twice_is_looked_at_closely_once(changes, fake_driver, monkeypatch):
    """Calls that are no plain ones find their plan too: without checks, and without a new guard each time."""
    start = build(TABLE.but(**changes), "cpu")
    case = start.clone()
    works(function_of(case), case, start, times=2)
    monkeypatch.setattr(DECODE_CALLS, "_check", None)
    monkeypatch.setattr(book, "_guard", None)
    works(function_of(case), case, start)


def test_slices_that_interleave_are_checked_once_for_all_memory(fake_driver, monkeypatch):
    start = build(TABLE.but(activations="packed"), "cpu")
    case, moved = start.clone(), start.clone()
    works(function_of(case), case, start)
    monkeypatch.setattr(DECODE_CALLS, "_check", None)
    works(function_of(moved), moved, start)


def test_kernels_are_compiled_without_contraction_and_with_their_warps(fake_driver):
    run(build(TABLE, "cpu"))
    (found,) = compiled._COMPILED.values()
    geometry = decode_geometry(4, 3, 2, 16)
    assert found.options == {"num_warps": geometry.num_warps, "num_stages": 1, "enable_fp_fusion": False}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tokens, carveout", [(3, {14: 100}), (1500, {})])
def test_small_launches_leave_shared_memory_to_their_neighbours(way, tokens, carveout, fake_driver):
    spec = Spec([0] * tokens, [[r] for r in range(tokens)], num_pages=tokens, heads=(8, 1), head_dim=32, rotary_dim=32)
    WAYS[way](build(spec, "cpu"))()
    assert fake_driver.attributes == [carveout]
