"""Threads that call at the same time get what they get one after the other; a forked child works; any order of imports works."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cases import Case, Spec, assert_same_storages, build, call_arguments, prepare, run_reference, without_known
from fake_driver import FakeDriver
from guarded_memory import signal_of
from lanes import INTERPRETED
from random_cases import CPU_SIZES, GPU_SIZES, random_spec

import decode_rope
from decode_rope.api import functions
from decode_rope.append import faults
from decode_rope.launch import book, compiled, plan

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter knows one launch at a time")
THREADS = 8
SPEC = Spec([1, 3, -1, 6], [[1, 2], [3, 4], [0, 0], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)


@pytest.fixture(autouse=True)
def hasty():
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def together(*work: Callable[[], object]) -> list:
    """Run functions in threads that start at one moment; their results, or the first exception."""
    barrier, results = threading.Barrier(len(work)), [None] * len(work)

    def body(i: int) -> None:
        barrier.wait()
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def own_stream(device: torch.device):
    if device.type == "cpu":  # where a forked child could not so much as ask for the current stream
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)


def repeat(call: Callable, case: Case, start: Case, times: int) -> None:
    """Every call leaves what the reference left, worked out before the threads began."""
    want = run_reference(start.clone())
    stream = torch.cuda.Stream() if case.device.type == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.default_stream())
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        for _ in range(times):
            for name, storage in case.storages.items():
                storage.copy_(start.storages[name])
            call(**case.arguments())
            assert_same_storages(case, want)


def all_at_once(starts: list[Case], call: Callable, times: int) -> None:
    cases = [start.clone() for start in starts]
    together(*[lambda c=c, s=s: repeat(call, c, s, times) for c, s in zip(cases, starts, strict=True)])


def test_one_function_many_threads(device):
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    starts = [build(random_spec(seed, sizes), device) for seed in range(3000, 3000 + THREADS)]
    all_at_once(starts, decode_rope.rope_append_decode, times=20)


def test_one_configuration_many_threads(device):
    """They share a plan, and each brings memory of its own; half of it is unaligned."""
    starts = [build(SPEC.but(seed=i, shift=i % 2), device) for i in range(THREADS)]
    all_at_once(starts, decode_rope.rope_append_decode, times=20)


def test_one_op_many_threads(device):
    starts = [build(SPEC.but(seed=i), device) for i in range(THREADS)]
    for start in starts[1:]:
        start["cos_sin_cache"].copy_(starts[0]["cos_sin_cache"])
    op = prepare(starts[0])
    all_at_once(starts, without_known(op), times=20)
    launches = [op.bind(**call_arguments(start)) for start in starts]
    wanted = [run_reference(start.clone()) for start in starts]
    together(*launches)
    for start, want in zip(starts, wanted, strict=True):
        assert_same_storages(start, want)


class TestDirectLaunches:
    """The same on the path to the driver, with a stand-in for it."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch):
        return FakeDriver().install(monkeypatch)

    def test_one_function(self):
        starts = [build(random_spec(seed, CPU_SIZES), "cpu") for seed in range(3100, 3100 + THREADS)]
        all_at_once(starts, decode_rope.rope_append_decode, times=30)

    def test_one_configuration(self):
        starts = [build(SPEC.but(seed=i, shift=i % 2), "cpu") for i in range(THREADS)]
        all_at_once(starts, decode_rope.rope_append_decode, times=30)
        assert compiled.num_compiled() == 2

    def test_one_op(self):
        starts = [build(SPEC.but(seed=i), "cpu") for i in range(THREADS)]
        for start in starts[1:]:
            start["cos_sin_cache"].copy_(starts[0]["cos_sin_cache"])
        all_at_once(starts, without_known(prepare(starts[0])), times=30)

    def test_books_that_are_always_full(self, monkeypatch):
        monkeypatch.setattr(plan, "_MAX_KEPT", 1)
        monkeypatch.setattr(book, "_MAX_PLANS", 1)
        starts = [build(SPEC.but(seed=i, shift=i % 2, num_pages=7 + i % 3), "cpu") for i in range(THREADS)]
        all_at_once(starts, decode_rope.rope_append_decode, times=30)

    def test_two_first_calls_get_one_kernel(self, fake, monkeypatch):
        """The other one would be unloaded with the plan that holds it, and a captured graph may hold the function."""
        load, meeting = fake.load, threading.Barrier(2, timeout=5)

        def load_together(kernel, dtypes):
            with contextlib.suppress(threading.BrokenBarrierError):  # where loading is one at a time: just as good
                meeting.wait()
            load(kernel, dtypes)

        monkeypatch.setattr(compiled.Compiled, "_load", load_together)
        starts = [build(SPEC.but(num_pages=7 + i), "cpu") for i in range(2)]
        all_at_once(starts, decode_rope.rope_append_decode, times=1)
        plans = functions.DECODE_CALLS._plans.values()
        assert len(plans) == 2 and len({id(found.compiled) for found in plans}) == 1


def test_two_first_calls_get_one_fault_record(monkeypatch):
    """Counts in a record that `check_faults` does not know would be lost."""
    make, meeting = torch.tensor, threading.Barrier(2, timeout=5)

    def make_together(*args, **kwargs):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()
        return make(*args, **kwargs)

    monkeypatch.setattr(faults, "_BUFFERS", {})
    monkeypatch.setattr(torch, "tensor", make_together)
    first, second = together(*[lambda: faults.fault_buffer(torch.device("cpu"))] * 2)
    assert first is second


def test_faults_of_all_threads_are_counted(device):
    starts = [build(Spec([5, 70, 64 + i], slots=[3, 4, 5], seed=i, num_pages=4), device) for i in range(THREADS)]

    def work(start: Case, i: int) -> None:
        for _ in range(50):
            decode_rope.rope_append_decode(**start.arguments())

    together(*[lambda s=s, i=i: work(s, i) for i, s in enumerate(starts)])
    with pytest.raises(IndexError, match=rf"{THREADS * 50 * 2} faulty row\(s\).*; row 1: position 70 is past"):
        decode_rope.check_faults()


@pytest.mark.parametrize("used_before", [False, True])
def test_a_forked_child_works_on_the_cpu(used_before, device):
    start = build(SPEC, "cpu")
    if used_before:
        on_device = build(SPEC, device)
        decode_rope.rope_append_decode(**on_device.arguments())
        decode_rope.rope_append_decode(**start.clone().arguments())

    def work():
        repeat(decode_rope.rope_append_decode, start.clone(), start, times=3)
        case = start.clone()
        prepare(case).bind(**call_arguments(case))()
        assert_same_storages(case, run_reference(start.clone()))

    assert signal_of(work) == 0
    repeat(decode_rope.rope_append_decode, start.clone(), start, times=1)


def test_a_fork_in_the_middle_of_other_threads_work(device):
    """A child made while others are in a call finds no lock that nobody will release."""
    starts = [build(SPEC.but(seed=i), "cpu") for i in range(3)]
    stop = threading.Event()

    def work(start: Case) -> None:
        while not stop.is_set():
            repeat(decode_rope.rope_append_decode, start.clone(), start, times=1)

    threads = [threading.Thread(target=work, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            child = starts[0].clone()
            assert signal_of(lambda child=child: repeat(decode_rope.rope_append_decode, child, starts[0], times=2)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


SMALL_CALL = """
q, k, v = torch.ones(1, 2, 8), torch.ones(1, 1, 8), torch.ones(1, 1, 8)
k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
table, position = torch.cat([torch.zeros(6, 4), torch.ones(6, 4)], 1), torch.tensor([5])
for _ in range(2):
    q.fill_(1)
    decode_rope.rope_append_decode(q, k, v, k_cache, v_cache, table, position, block_table=torch.tensor([[-1, 1]]))
assert q.flatten().tolist() == [-1, -1, -1, -1, 1, 1, 1, 1] * 2, q
assert k_cache[1, 1].flatten().tolist() == [-1] * 4 + [1] * 4 and k_cache.count_nonzero() == v_cache.count_nonzero() == 8
decode_rope.check_faults()
print("as it should be")
"""
BEGINNINGS = {
    "decode_rope first": "import decode_rope, torch",
    "triton before torch": "import triton, triton.language; import torch, decode_rope",
    "in a thread": "import threading; t = threading.Thread(target=__import__, args=('decode_rope',)); t.start(); t.join()\n"
    "import torch, decode_rope",
    "inference mode": "import torch; torch.inference_mode().__enter__(); import decode_rope",
    "the interpreter": "import triton, torch, decode_rope",
}


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_process_that_begins_with(beginning):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": str(int(beginning == "the interpreter"))}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{BEGINNINGS[beginning]}\n{SMALL_CALL}"],
        cwd=Path(decode_rope.__file__).parent.parent, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr
