"""CUDA graphs: what a replay reads is what lies in memory then; a first use inside a capture is an error that breaks nothing."""

import gc
import random

import pytest
import torch
from cases import Spec, assert_same_storages, bits, build, call_arguments, no_faults, prepare, run_reference
from processes import in_a_new_process
from random_cases import bad_integers, negatives
from ways import WAYS, either_way

import decode_rope
from decode_rope.api import functions
from decode_rope.append.faults import fault_buffer

pytestmark = pytest.mark.gpu
PAGE, PAGES = 4, 160


def capture(work, stream: torch.cuda.Stream | None = None) -> torch.cuda.CUDAGraph:
    """`work` as a graph, after one run of it on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph


def random_step(num_tokens: int, seed: int, paged: bool, **changes) -> Spec:
    """A step of a fixed shape: other positions, pages, slots, padding and faults for each seed, no slot twice."""
    rng = random.Random(seed)
    spoilt = {token for token in range(num_tokens) if rng.random() < 0.25}
    slots = rng.sample(range(PAGE * PAGES), num_tokens)
    spec = Spec([], num_pages=PAGES, page_size=PAGE, heads=(6, 2), seed=seed, index_dtype=torch.int64, **changes)
    bad_position = [*negatives(torch.int64), *bad_integers(torch.int64, spec.max_position)]
    bad_index = [*negatives(torch.int64), *bad_integers(torch.int64, PAGES * PAGE)]
    positions, table = [], []
    for token, slot in enumerate(slots):
        column = rng.randrange(3)
        row = [rng.choice([0, 1, -1, PAGES]) for _ in range(3)]
        row[column] = slot // PAGE
        positions.append(column * PAGE + slot % PAGE)
        if token in spoilt and rng.random() < 0.5:
            positions[-1] = rng.choice(bad_position)
        elif token in spoilt:
            row[column] = slots[token] = rng.choice(bad_index)
        table.append(row)
    return spec.but(positions=positions, **({"block_table": table} if paged else {"slots": slots}))


@pytest.mark.parametrize("paged", [True, False], ids=["table", "slots"])
@pytest.mark.parametrize("num_tokens", [1, 8, 70, 257])
@either_way
def test_F8_replays_read_their_inputs_anew(way, num_tokens, paged, device):
    """q, k, v, positions, table, slots and caches change in place between replays; bytes and faults are the reference's."""
    case = build(random_step(num_tokens, 0, paged), device)
    graph = capture(WAYS[way](case))
    written = 0
    for seed in range(1, 51):
        fresh = build(random_step(num_tokens, seed, paged), device)
        for name, storage in fresh.storages.items():
            case.storages[name].copy_(storage)
        fault_buffer(device).copy_(no_faults("cpu"))
        graph.replay()
        before = fresh.storages["k_cache"].clone()
        run_reference(fresh)
        assert_same_storages(case, fresh)
        assert fault_buffer(device).tolist() == fresh.faults
        written += int(not torch.equal(before, fresh.storages["k_cache"]))
    assert written > 25


def test_F8_a_replay_honours_the_padding_of_its_moment(device):
    start = build(random_step(64, 3, paged=True, q_out=True), device)
    case = start.clone()
    graph = capture(WAYS["function"](case))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        live = torch.rand(64, generator=generator) < torch.rand(1, generator=generator)
        positions = torch.where(live.to(device), start["positions"], -1)
        want = start.clone()
        want["positions"].copy_(positions)
        for name, storage in want.storages.items():
            case.storages[name].copy_(storage)
        graph.replay()
        assert_same_storages(case, run_reference(want))


def test_F8_padding_of_a_batch_bucket_leaves_the_cache_alone(device):
    """A graph for 64 requests serves 5: positions −1, slots −1 and stale tables behind them."""
    case = build(random_step(64, 4, paged=False), device)
    graph = capture(WAYS["DecodeRope"](case))
    case["positions"][5:] = -1
    case["slot_mapping"][5:40] = -1
    before = case.clone()
    graph.replay()
    assert torch.equal(bits(case["q"][5:]), bits(before["q"][5:]))
    assert_same_storages(case, run_reference(before))


@either_way
def test_F2_a_graph_outlives_the_objects_it_was_captured_from(way, device):
    case = build(random_step(8, 5, paged=True), device)
    graph = capture(WAYS[way](case))
    functions.DECODE_CALLS.clear()
    gc.collect()
    torch.cuda.empty_cache()
    for seed in range(20):  # other plans and kernels come and go
        other = build(random_step(seed + 1, seed, paged=True), device)
        decode_rope.rope_append_decode(**other.arguments())
        prepare(other).bind(**call_arguments(other))()
    gc.collect()
    fresh = build(random_step(8, 6, paged=True), device)
    for name, storage in fresh.storages.items():
        case.storages[name].copy_(storage)
    graph.replay()
    assert_same_storages(case, run_reference(fresh))


FIRST_USE = """
import torch
from cases import Spec, assert_same_storages, build, call_arguments, prepare, run_reference
import decode_rope

spec = Spec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], heads=(7, 3), head_dim=52, rotary_dim=20)
case = build(spec, torch.device("cuda:0"))
x = torch.zeros(4, device="cuda")
op = prepare(case)

def unseen(way):
    arguments = case.arguments() if way == "function" else call_arguments(case)
    {"function": decode_rope.rope_append_decode, "op": op, "bound": op.bind}[way](**arguments)

def check_capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        for way in ("function", "op", "bound"):
            try:
                unseen(way)
            except RuntimeError as error:
                assert "first time inside a CUDA graph capture" in str(error) and "warmup" in str(error), error
            else:
                raise AssertionError(way + " did not raise")
            x.add_(1)
    before = case.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [4.0] * 4
    assert_same_storages(case, before)
    op.warmup(3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**call_arguments(case))
    assert_same_storages(case, before)
    graph.replay()
    assert_same_storages(case, run_reference(before))

check_capture()
print("went on")
"""


def test_F1_a_first_use_inside_a_capture_is_an_error_and_the_capture_goes_on():
    """In a process of its own, so that nothing was used before."""
    assert in_a_new_process(FIRST_USE) == "went on"


@pytest.mark.parametrize("num_tokens", [1, 3, 64, 65, 200, 256, 257, 300])
@pytest.mark.parametrize("shift", [0, 1])
def test_F1_after_warmup_any_number_of_tokens_can_be_captured_at_once(num_tokens, shift, device):
    """No call of that size was ever made before its capture."""
    spec = random_step(num_tokens, 7, paged=True, head_dim=56, rotary_dim=56)
    case = build(spec.but(shift=shift), device)
    op = prepare(case).warmup(300)
    before = case.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        allocated = torch.cuda.memory_stats(device)["allocation.all.allocated"]
        op(**call_arguments(case))
        assert torch.cuda.memory_stats(device)["allocation.all.allocated"] == allocated
    assert_same_storages(case, before)
    graph.replay()
    assert_same_storages(case, run_reference(before))


def test_a_capture_on_a_stream_of_the_user(device):
    case = build(random_step(8, 8, paged=True), device)
    before = case.clone()
    stream = torch.cuda.Stream(device)
    launch = WAYS["bound"](case)
    graph = capture(launch, stream)
    for name, storage in before.storages.items():
        case.storages[name].copy_(storage)
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.default_stream(device))
        graph.replay()
    stream.synchronize()
    assert_same_storages(case, run_reference(before))


def test_graphs_of_several_sizes_and_eager_calls_by_turns(device):
    """As a server has them: one graph for each batch size, and a plain call now and then."""
    sizes = (1, 2, 4, 8, 16, 65)
    cases = {n: build(random_step(n, 9, paged=True), device) for n in sizes}
    graphs = {n: capture(WAYS["DecodeRope"](case)) for n, case in cases.items()}
    rng = random.Random(0)
    for turn in range(60):
        n = rng.choice(sizes)
        fresh = build(random_step(n, 100 + turn, paged=True), device)
        for name, storage in fresh.storages.items():
            cases[n].storages[name].copy_(storage)
        if turn % 4 == 0:
            decode_rope.rope_append_decode(**cases[n].arguments())
        else:
            graphs[n].replay()
        assert_same_storages(cases[n], run_reference(fresh))


def test_a_chain_of_layers_in_one_graph(device):
    """32 launches, each on the caches of its own layer; all of them right after each replay."""
    layers = [build(random_step(8, 200 + i, paged=True), device) for i in range(32)]
    start = [layer.clone() for layer in layers]
    launches = [WAYS["bound"](layer) for layer in layers]
    graph = capture(lambda: [launch() for launch in launches])
    for _ in range(5):
        for layer, fresh in zip(layers, start, strict=True):
            for name, storage in fresh.storages.items():
                layer.storages[name].copy_(storage)
        graph.replay()
        for layer, fresh in zip(layers, start, strict=True):
            assert_same_storages(layer, run_reference(fresh.clone()))
