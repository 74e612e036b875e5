"""A launch that fails changes nothing: no byte of any tensor, no plan; the next call works. And what a launch is given is right:
addresses, streams, devices, alignment. Without a GPU the driver is a stand-in, see `fake_driver.py`.
"""

import gc
from collections.abc import Callable

import pytest
import torch
import triton
from cases import Case, Spec, assert_same_storages, build, call_arguments, check, prepare, prepared, run, run_reference
from conftest import INTERPRETED, ON_GPU
from fake_driver import FakeDriver, RealDriver
from random_cases import CPU_SIZES, random_spec

import decode_rope
from decode_rope import api, dispatch, driver, plan, variants
from decode_rope.faults import fault_buffer

pytestmark = pytest.mark.skipif(INTERPRETED or (ON_GPU and not variants.DIRECT), reason="launches do not go to the driver")
TABLE = Spec([1, 3, -1, 6], [[1, 2], [3, 4], [0, 0], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)
SPECS = {
    "table": TABLE,
    "slots": TABLE.but(block_table=None, slots=[3, 5, 7], dtype=torch.float16, cache="HND"),
    "outputs": TABLE.but(q_out=True, k_out="own", cache_positions=[1, 3, 6, 0]),
    "unaligned": TABLE.but(shift=1, is_neox=False),
    "only q": TABLE.but(block_table=None, heads=(3, 0)),
}
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def gpu(device, monkeypatch):
    """The driver that calls on `device` will meet."""
    return (RealDriver() if device.type == "cuda" else FakeDriver()).install(monkeypatch)


@pytest.fixture
def fake(monkeypatch):
    return FakeDriver().install(monkeypatch)


def function_of(case: Case) -> Callable:
    return lambda: decode_rope.rope_append_decode(**case.arguments())


def op_of(case: Case) -> Callable:
    op = prepare(case)
    return lambda: op(**call_arguments(case))


def bound_of(case: Case) -> Callable:
    op, launches = prepare(case), []

    def call():
        if not launches:
            launches.append(op.bind(**call_arguments(case)))
        return launches[0]()

    return call


WAYS = {"function": function_of, "DecodeRope": op_of, "bound": bound_of}
either_way = pytest.mark.parametrize("way", WAYS)
any_spec = pytest.mark.parametrize("name", SPECS)


def reset(case: Case, start: Case) -> None:
    for name, storage in case.storages.items():
        storage.copy_(start.storages[name])


def works(call: Callable, case: Case, start: Case, times: int = 3) -> None:
    """Every one of some calls, the first, the second and the packed ones, leaves what the reference leaves."""
    want = run_reference(start.clone())
    for _ in range(times):
        reset(case, start)
        assert call() is case.returned
        assert_same_storages(case, want)


def fails(call: Callable, case: Case, start: Case, error: type[BaseException], words: str) -> None:
    """The call raises, and no byte and no fault record has changed."""
    reset(case, start)
    faults = fault_buffer(case.device).clone()
    with pytest.raises(error) as info:
        call()
    assert words in str(info.value)
    if case.device.type == "cuda":
        torch.cuda.synchronize()
    assert_same_storages(case, start)
    assert torch.equal(fault_buffer(case.device), faults)


def assert_whole(book: dispatch.PlanBook) -> None:
    """Every plan that can be found is one that can be launched."""
    for found in (*book._plans.values(), *book._recent):
        assert found.flags is not None and callable(found.guard)
        assert found.variant.function is not None and found.variant in variants._VARIANTS.values()


@any_spec
@either_way
def test_the_driver_refuses(way, name, gpu, device):
    """At the first launch, at the second, and when the launch is packed already."""
    start = build(SPECS[name], device)
    for calls_before in (0, 1, 2):
        case = start.clone()
        call = WAYS[way](case)
        works(call, case, start, times=calls_before)
        gpu.fail_next(719, times=2)
        fails(call, case, start, RuntimeError, "the kernel launch failed with CUDA driver error 719, ")
        gpu.codes.clear()
        works(call, case, start)
        assert_whole(api._PLANS)


@either_way
def test_a_thread_without_a_context_tries_again(way, gpu, device, monkeypatch):
    """201, invalid context: what a thread gets that has not touched the GPU."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: torch.Event("cpu"))
    start = build(TABLE, device)
    for calls_before in (0, 1, 2):
        case = start.clone()
        call = WAYS[way](case)
        works(call, case, start, times=calls_before)
        gpu.fail_next(201)
        works(call, case, start, times=1)
        assert not gpu.codes


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), OUT_OF_MEMORY, KeyboardInterrupt()], ids=repr)
@any_spec
@either_way
def test_a_kernel_that_does_not_load(way, name, error, gpu, device):
    start = build(SPECS[name], device)
    case = start.clone()
    call = WAYS[way](case)
    gpu.refuse_to_load = error
    for _ in range(2):
        fails(call, case, start, type(error), str(error))
        assert variants.num_variants() == 0
        assert not api._PLANS._plans and not api._PLANS._recent
    gpu.refuse_to_load = None
    works(call, case, start)
    assert_whole(api._PLANS)


@either_way
def test_the_kernel_for_unaligned_memory_does_not_load(way, gpu, device):
    """Its aligned sister stays, and serves aligned memory."""
    start, shifted = (build(TABLE.but(shift=shift), device) for shift in (0, 1))
    case, odd = start.clone(), shifted.clone()
    call, odd_call = WAYS[way](case), WAYS[way](odd)
    works(call, case, start)
    gpu.refuse_to_load = RuntimeError("no room")
    fails(odd_call, odd, shifted, RuntimeError, "no room")
    works(call, case, start)
    gpu.refuse_to_load = None
    works(odd_call, odd, shifted)
    works(call, case, start)
    assert_whole(api._PLANS)


@pytest.mark.parametrize("where", ["driver.pack", "plan.fault_buffer", "variants.fault_buffer", "plan.decode_geometry"])
@either_way
def test_a_step_of_the_first_launch_fails(where, way, gpu, device, monkeypatch):
    start = build(TABLE, device)
    case = start.clone()
    call = WAYS[way](case)
    module = {"driver": driver, "plan": plan, "variants": variants}[where.split(".")[0]]

    def fail(*args, **kwargs):
        raise OUT_OF_MEMORY

    with monkeypatch.context() as broken:
        broken.setattr(module, where.split(".")[1], fail)
        fails(call, case, start, torch.OutOfMemoryError, "out of memory")
    assert_whole(api._PLANS)
    works(call, case, start)


def test_a_warmup_that_breaks_off_can_be_repeated(gpu, device, monkeypatch):
    start = build(TABLE.but(heads=(32, 8), head_dim=128), device)
    load, loaded = variants.Variant._load, []

    def load_two(variant, dtypes):
        if len(loaded) == 2:
            raise OUT_OF_MEMORY
        loaded.append(variant)
        load(variant, dtypes)

    op = prepare(start)
    with monkeypatch.context() as short:
        short.setattr(variants.Variant, "_load", load_two)
        with pytest.raises(torch.OutOfMemoryError):
            op.warmup(300)
    assert variants.num_variants() == len(loaded) == 2
    op.warmup(300)
    count = variants.num_variants()
    assert count > 2
    case = start.clone()
    works(lambda: op(**call_arguments(case)), case, start)
    assert variants.num_variants() == count


@pytest.mark.gpu
def test_the_real_driver_refuses_and_the_context_lives(gpu, device):
    """A grid of no programs is an error that does not stick."""
    start = build(TABLE, device)
    case = start.clone()
    call = function_of(case)
    works(call, case, start, times=1)
    (found,) = api._PLANS._recent
    found._ready.clear()
    grid, found.grid = found.grid, 0
    fails(call, case, start, RuntimeError, "CUDA driver error 1, invalid argument")
    found.grid = grid
    works(call, case, start)
    assert torch.ones(8, device=device).sum().item() == 8


@pytest.mark.gpu
def test_no_compiler_on_the_machine(device, monkeypatch, tmp_path):
    """Whether Triton needs one depends on its version; the caches do not."""
    start = build(TABLE.but(head_dim=24, v_head_dim=24, rotary_dim=18), device)
    case = start.clone()
    with monkeypatch.context() as bare:
        bare.setattr(variants, "_VARIANTS", {})
        bare.setenv("CC", str(tmp_path / "cc"))
        bare.setenv("TRITON_CACHE_DIR", str(tmp_path))
        try:
            decode_rope.rope_append_decode(**case.arguments())
        except Exception:
            assert_same_storages(case, start)
    works(function_of(case), case, start)


# What a launch is given.


@pytest.mark.parametrize("seed", range(2000, 2030))
@either_way
def test_repeated_launches_of_random_calls(way, seed, fake):
    start = build(random_spec(seed, CPU_SIZES), "cpu")
    case = start.clone()
    works(WAYS[way](case), case, start)
    assert len(fake.launches) == (3 if len(start.spec.positions) else 0)


def test_F3_memory_of_any_alignment_in_any_order(fake):
    """The stand-in refuses an address or a stride that its kernel was not compiled for."""
    changes = [{}, dict(shift=1), dict(table_shift=1), dict(shift=8), dict(shift=3, table_shift=2), dict(activations="padded")]
    changes += [dict(cache="NHD padded"), dict(cache="HND beside"), {}]
    for spec in (TABLE, TABLE.but(head_dim=24, v_head_dim=20), TABLE.but(q_out=True, k_out="own"), TABLE.but(rotary_dim=6)):
        cases = [build(spec.but(**change), "cpu") for change in changes]
        for start in (*cases, *cases[::-1]):
            check(start)
            check(start, prepared(start))


@pytest.mark.parametrize("one", ["q", "k", "v", "k_cache", "v_cache", "q_out", "k_out", "cos_sin_cache"])
def test_F3_one_unaligned_tensor_among_aligned_ones(one, fake):
    spec = TABLE.but(q_out=True, k_out="own")
    aligned, shifted = build(spec, "cpu"), build(spec.but(shift=1, table_shift=1), "cpu")
    mixed = aligned.clone()
    view = shifted.views[one]
    mixed.views[one] = view._replace(storage="shifted")
    mixed.storages["shifted"] = shifted.storages[view.storage]
    if one == "cos_sin_cache":
        mixed[one].copy_(aligned[one])
    for start in (aligned, mixed, aligned, mixed):
        check(start)


@pytest.mark.parametrize("name", ["table", "slots", "outputs"])
def test_every_tensor_may_move_alone(name, fake):
    """A launch packed for some memory is not taken for memory that differs in one tensor."""
    start = build(SPECS[name], "cpu")
    case = start.clone()
    works(function_of(case), case, start)
    for storage in start.storages:
        moved = case.clone()
        moved.storages |= {other: memory for other, memory in case.storages.items() if other != storage}
        works(function_of(moved), moved, start)
        works(function_of(case), case, start, times=1)


def test_slices_that_interleave_well_say_nothing_of_others(fake):
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
def test_F5_a_launch_goes_to_the_stream_that_is_current(way, fake):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    for fake.stream in (7, 7, 9, 7, 9, 0, 0):
        works(call, case, start, times=1)
    assert [stream or 0 for stream, _ in fake.launches] == [7, 7, 9, 7, 9, 0, 0]


@either_way
def test_F4_a_launch_makes_the_device_of_its_tensors_current(way, fake):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    for fake.device in (None, 1, 1, None, 1):
        current = fake.device
        works(call, case, start, times=1)
        assert fake.device == current
    assert [device for _, device in fake.launches] == [None] * 5


@either_way
def test_a_profiler_s_launch_hook_sees_every_launch(way, fake, monkeypatch):
    start = build(TABLE, "cpu")
    case = start.clone()
    call = WAYS[way](case)
    works(call, case, start)
    seen = []
    monkeypatch.setattr(variants.Variant, "launch_jit", lambda self, grid, tensors, integers: seen.append(grid))
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        for _ in range(2):
            call()
    finally:
        hook.remove(print)
    assert len(seen) == 2 and len(fake.launches) == 3
    works(call, case, start)


def test_full_books_are_begun_anew(fake, monkeypatch):
    monkeypatch.setattr(plan, "_MAX_READY", 2)
    monkeypatch.setattr(dispatch, "_MAX_PLANS", 2)
    cases = [build(TABLE.but(seed=seed, num_pages=7 + seed % 4), "cpu") for seed in range(8)]
    for _ in range(2):
        for start in cases:
            case = start.clone()
            works(function_of(case), case, start, times=2)
    plans = api._PLANS._plans.values()
    assert len(plans) <= 2 and all(len(p._ready) <= 2 and len(p.packings) <= 2 for p in plans)


def test_F3_without_torch_s_tensor_guards(fake, monkeypatch):
    monkeypatch.setattr(dispatch, "TensorGuards", None)
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


def test_flags_of_one_call_say_nothing_about_the_next(fake):
    """The same tensors, another pairing or another way through the block table."""
    start = build(TABLE.but(head_dim=8, v_head_dim=8, block_table=[[1, 2], [3, 4], [5, 6], [0, 7]], heads=(4, 4)), "cpu")
    variations = [start, *(start.clone() for _ in range(3))]
    variations[1].options["is_neox"] = False
    variations[2].options["tokens_per_request"] = 2
    variations[3].options["kv_layout"] = "HND"  # 4 heads, pages of 4: both readings fit
    for one in (*variations, *variations[::-1]):
        check(one)
        check(one)


def test_F2_a_bound_launch_outlives_everything_it_was_made_from(fake):
    start = build(TABLE, "cpu")
    case = start.clone()
    launch = prepare(case).bind(**call_arguments(case))
    launch()
    variants._VARIANTS.clear()
    gc.collect()
    works(launch, case, start)


def test_kernels_are_compiled_without_contraction_and_with_their_warps(fake):
    run(build(TABLE, "cpu"))
    (found,) = variants._VARIANTS.values()
    geometry = plan.decode_geometry(4, 3, 2, 16)
    assert found.options == {"num_warps": geometry.num_warps, "num_stages": 1, "enable_fp_fusion": False}
