"""A launch that fails changes nothing: no byte of any tensor, no plan; the next call works. Without a GPU the driver is a stand-in,
see `fake_driver.py`.
"""

from collections.abc import Callable

import pytest
import torch
from cases import Case, assert_same_storages, bits, build, call_arguments, prepare, run_reference
from fake_driver import FakeDriver, RealDriver, with_nothing_loaded
from lanes import INTERPRETED, ON_GPU
from ways import SPECS, TABLE, WAYS, either_way, function_of, reset, works

import decode_rope
from decode_rope.api.functions import DECODE_CALLS, PREFILL_CALLS
from decode_rope.append.faults import fault_buffer
from decode_rope.launch import compiled, decode, driver, plan, platform
from decode_rope.launch.book import Book
from decode_rope.launch.rope import BOOK

pytestmark = pytest.mark.skipif(INTERPRETED or (ON_GPU and not platform.DIRECT), reason="launches do not go to the driver")
OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.fixture
def gpu(device, monkeypatch):
    """The driver that calls on `device` will meet."""
    return (RealDriver() if device.type == "cuda" else FakeDriver()).install(monkeypatch)


any_spec = pytest.mark.parametrize("name", SPECS)


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


def assert_whole(book: Book) -> None:
    """Every plan that can be found is one that can be launched."""
    for found in (*book._plans.values(), *book._recent):
        assert found.flags is not None and callable(found.guard)
        assert found.compiled.function is not None and found.compiled in compiled._COMPILED.values()


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
        assert_whole(DECODE_CALLS)


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
        assert compiled.num_compiled() == 0
        assert not DECODE_CALLS._plans and not DECODE_CALLS._recent
    gpu.refuse_to_load = None
    works(call, case, start)
    assert_whole(DECODE_CALLS)


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
    assert_whole(DECODE_CALLS)


@pytest.mark.parametrize("where", ["driver.pack", "plan.fault_buffer", "compiled.fault_buffer", "decode.decode_geometry"])
@either_way
def test_a_step_of_the_first_launch_fails(where, way, gpu, device, monkeypatch):
    start = build(TABLE, device)
    case = start.clone()
    call = WAYS[way](case)
    module = {"driver": driver, "plan": plan, "compiled": compiled, "decode": decode}[where.split(".")[0]]

    def fail(*args, **kwargs):
        raise OUT_OF_MEMORY

    with monkeypatch.context() as broken:
        broken.setattr(module, where.split(".")[1], fail)
        fails(call, case, start, torch.OutOfMemoryError, "out of memory")
    assert_whole(DECODE_CALLS)
    works(call, case, start)


@pytest.mark.parametrize("name", ["rope_append_prefill", "apply_rope"])
def test_prefill_and_apply_rope_fail_the_same_way(name, device, monkeypatch):
    start = build(TABLE.but(head_dim=26, rotary_dim=22), device)
    case, want = start.clone(), start.clone()

    def call(module=decode_rope, of=case):
        if name == "rope_append_prefill":
            return getattr(module, name)(**of.arguments())
        return getattr(module, name)(of["q"], of["cos_sin_cache"], of["positions"], out=of["q"])

    with monkeypatch.context() as broken:
        gpu = (RealDriver() if device.type == "cuda" else FakeDriver()).install(broken)
        gpu.refuse_to_load = OUT_OF_MEMORY
        book = PREFILL_CALLS if name == "rope_append_prefill" else BOOK
        for _ in range(2):
            fails(call, case, start, torch.OutOfMemoryError, "out of memory")
        assert not book._plans and not book._recent and compiled.num_compiled() == 0
    call(decode_rope.reference, want)
    for _ in range(2):
        reset(case, start)
        assert call() is case["q"]
        assert_same_storages(case, want)


def test_no_memory_for_the_result_of_apply_rope(device, monkeypatch):
    start = build(TABLE, device)
    case = start.clone()

    def call():
        return decode_rope.apply_rope(case["q"], case["cos_sin_cache"], case["positions"])

    def fail(*args, **kwargs):
        raise OUT_OF_MEMORY

    with monkeypatch.context() as full:
        full.setattr(torch, "empty_like", fail)
        fails(call, case, start, torch.OutOfMemoryError, "out of memory")
    want = decode_rope.reference.apply_rope(case["q"], case["cos_sin_cache"], case["positions"])
    for _ in range(2):
        assert torch.equal(bits(call()), bits(want))


def test_a_warmup_that_breaks_off_can_be_repeated(gpu, device, monkeypatch):
    start = build(TABLE.but(heads=(32, 8), head_dim=128), device)
    load, loaded = compiled.Compiled._load, []

    def load_two(kernel, dtypes):
        if len(loaded) == 2:
            raise OUT_OF_MEMORY
        loaded.append(kernel)
        load(kernel, dtypes)

    op = prepare(start)
    with monkeypatch.context() as short:
        short.setattr(compiled.Compiled, "_load", load_two)
        with pytest.raises(torch.OutOfMemoryError):
            op.warmup(300)
    assert compiled.num_compiled() == len(loaded) == 2
    op.warmup(300)
    count = compiled.num_compiled()
    assert count > 2
    case = start.clone()
    works(lambda: op(**call_arguments(case)), case, start)
    assert compiled.num_compiled() == count


@pytest.mark.gpu
def test_the_real_driver_refuses_and_the_context_lives(gpu, device):
    """A grid of no programs is an error that does not stick."""
    start = build(TABLE, device)
    case = start.clone()
    call = function_of(case)
    works(call, case, start, times=1)
    (found,) = DECODE_CALLS._recent
    found._kept.clear()
    grid, found.grid = found.grid, 0
    fails(call, case, start, RuntimeError, "CUDA driver error 1, invalid argument")
    found.grid = grid
    works(call, case, start)
    assert torch.ones(8, device=device).sum().item() == 8


@pytest.mark.gpu
def test_a_machine_without_a_compiler_says_so_or_launches(device, monkeypatch, tmp_path):
    """Whether Triton needs one depends on its version and on what it has cached. The caches are whole in either case, and the next
    call, with a compiler, works."""
    start = build(TABLE.but(head_dim=24, v_head_dim=24, rotary_dim=18), device)
    case, want = start.clone(), run_reference(start.clone())
    with monkeypatch.context() as bare:
        with_nothing_loaded(bare)
        bare.setenv("CC", str(tmp_path / "cc"))
        bare.setenv("TRITON_CACHE_DIR", str(tmp_path))
        raised = None
        try:
            decode_rope.rope_append_decode(**case.arguments())
        except Exception as error:
            raised = error
        torch.cuda.synchronize()
        assert_same_storages(case, start if raised else want)
        assert compiled.num_compiled() == (0 if raised else 1)
        assert_whole(DECODE_CALLS)
        assert raised is None or not DECODE_CALLS._plans
    works(function_of(case), case, start)
