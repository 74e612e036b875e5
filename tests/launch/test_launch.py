"""How a launch reaches the GPU: stream, device, thread, one kernel and nothing else, the same bits by either way of launching."""

import ctypes
import threading

import pytest
import torch
import triton
from cases import Spec, assert_same_storages, bits, build, check, run_reference
from processes import digest, in_a_new_process
from ways import WAYS, either_way

import decode_rope
from decode_rope import reference
from decode_rope.launch import compiled

pytestmark = pytest.mark.gpu
STEP = Spec([r % 4 for r in range(40)], [[r, -1] for r in range(40)], num_pages=40, heads=(8, 2))


@either_way
def test_repeated_launches_read_memory_anew(way, device):
    case = build(STEP, device)
    launch = WAYS[way](case)
    for seed in range(6):
        fresh = build(STEP.but(seed=seed), device)
        for name, storage in fresh.storages.items():
            case.storages[name].copy_(storage)
        assert launch() is case["q"]
        assert_same_storages(case, run_reference(fresh))


@either_way
def test_F5_the_launch_is_on_the_current_stream(way, device):
    """A stream sleeps, then brings in q: a launch on any other stream would not see it. Two streams by turns."""
    case = build(STEP, device)
    launch = WAYS[way](case)
    fresh = case["q"].clone()
    want = run_reference(case.clone())["q"]
    launch()
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    for stream in streams * 2:
        case["q"].zero_()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            case["q"].copy_(fresh)
            launch()
        stream.synchronize()
        assert torch.equal(bits(case["q"]), bits(want))


@either_way
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_F4_a_launch_is_on_the_device_of_its_tensors(way, device):
    other = torch.device("cuda:1")
    case = build(STEP, other)
    with torch.cuda.device(0):
        launch = WAYS[way](case)
        for _ in range(3):
            before = case.clone()
            launch()
            torch.cuda.synchronize(other)
            assert_same_storages(case, run_reference(before))
        assert torch.cuda.current_device() == 0
    here = build(STEP, torch.device("cuda:0"))
    with torch.cuda.device(1):
        check(here)


def test_a_thread_that_has_not_used_the_gpu(device):
    case = build(STEP, device)
    launch = WAYS["bound"](case)
    launch()
    before = case.clone()
    errors = []

    def work():
        try:
            launch()
            torch.cuda.synchronize(device)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
    assert_same_storages(case, run_reference(before))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@either_way
def test_F9_a_call_is_one_kernel_and_nothing_else(way, dtype, device):
    """No cast of an index, no copy, no allocation: seen by the profiler, by the allocator and as nodes of a graph."""
    case = build(STEP.but(positions_dtype=dtype, index_dtype=dtype, activations="packed"), device)
    launch = WAYS[way](case)
    for _ in range(3):
        launch()
    torch.cuda.synchronize(device)
    allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    for _ in range(10):
        launch()
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for _ in range(5):
            launch()
    assert node_kinds(graph) == [0] * 5
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    control = torch.zeros(1, device=device)
    with torch.profiler.profile(activities=activities) as profile:
        control.add_(1)
        for _ in range(10):
            launch()
        torch.cuda.synchronize(device)
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not any("elementwise" in name for name in on_device):
        pytest.skip("this machine lets no profiler see its kernels, not even PyTorch's own; all else held")
    assert [name for name in on_device if "elementwise" not in name] == ["rope_append_decode_kernel"] * 10


def node_kinds(graph: torch.cuda.CUDAGraph) -> list[int]:
    """CUgraphNodeType of every node of a captured graph; 0 is a kernel."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    return kinds


def test_both_ways_of_launching_leave_the_same_bits():
    seeds = range(40)
    code = (
        "from processes import digest\n"
        "from decode_rope.launch import compiled\n"
        f"print(digest(range({len(seeds)})))\n"
        "assert not any(kernel.direct for kernel in compiled._COMPILED.values())"
    )
    assert in_a_new_process(code, DECODE_ROPE_LAUNCH="jit") == digest(seeds)
    assert any(kernel.direct for kernel in compiled._COMPILED.values()) or torch.version.hip


@either_way
def test_launch_hooks_of_a_profiler_are_called(way, device):
    case = build(STEP, device)
    launch = WAYS[way](case)
    launch()
    names = []

    def hook(metadata):
        names.append(metadata.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        before = case.clone()
        launch()
        assert_same_storages(case, run_reference(before))
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert names == ["rope_append_decode_kernel"]
    launch()
    assert names == ["rope_append_decode_kernel"]


def test_disjoint_slots_on_two_streams_at_once(device):
    """250 times two launches side by side on one cache, each with slots of its own."""
    spec = Spec([7] * 60, slots=list(range(60)), num_pages=64, page_size=2, index_dtype=torch.int64, heads=(8, 4))
    left = build(spec, device)
    right = build(spec.but(slots=[s + 60 for s in spec.slots], seed=1), device)
    for name in ("k_cache", "v_cache"):
        right.views[name], right.storages[name] = left.views[name], left.storages[name]
    want = {name: left.storages[name].clone() for name in ("k_cache", "v_cache")}
    for case in (left, right):
        expected = case.clone()
        for name in want:
            expected.storages[name] = want[name]
        reference.rope_append_decode(**expected.arguments())
    inputs = [(case, case["q"].clone()) for case in (left, right)]
    streams = [torch.cuda.Stream(device) for _ in inputs]
    for _ in range(250):
        for (case, q), stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                case["q"].copy_(q)
                decode_rope.rope_append_decode(**case.arguments())
        torch.cuda.synchronize(device)
        assert all(torch.equal(left.storages[name], want[name]) for name in want)
