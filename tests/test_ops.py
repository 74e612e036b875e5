"""torch.compile and torch.export: one operator in the graph, no break, no copy of a cache, the bits of eager calls."""

import ast
import os
import re
import shutil
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import Case, Spec, assert_same_storages, bits, build, call_arguments, check, prepare, run_reference
from conftest import ON_GPU
from random_cases import CPU_SIZES, GPU_SIZES, random_spec
from torch.utils._python_dispatch import TorchDispatchMode

import decode_rope
from decode_rope import faults, ops
from decode_rope.geometry import Geometry

anywhere = pytest.mark.anywhere
inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler: install g++ or set CXX"
)
DTYPE = torch.bfloat16
PAGES, PAGE, HQ, HKV, D, HIDDEN = 8, 4, 4, 2, 16, 64

GOOD = Spec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)
CALLS = {
    "in place": GOOD,
    "slots, HND": GOOD.but(block_table=None, slots=[3, 5, -1], cache="HND", is_neox=False),
    "no rotation": GOOD.but(rotary_dim=0, cache_positions=[1, 3, 6]),
    "k_out": GOOD.but(k_out="own", positions=[1, -1, 6]),
    "k in place": GOOD.but(k_out="k", activations="packed"),
    "q_out": GOOD.but(q_out=True),
    "q_out, k_out": GOOD.but(q_out=True, k_out="own", tokens_per_request=2),
    "q_out, k in place": GOOD.but(q_out=True, k_out="k"),
    "q only": GOOD.but(block_table=None, heads=(3, 0)),
    "q only, q_out": GOOD.but(block_table=None, heads=(3, 0), q_out=True),
}


@pytest.fixture(autouse=True)
def fresh_compilers():
    """No graph of another test, nor of another day, is taken for this one's."""
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def operator_call(**arguments) -> torch.Tensor:
    """What a compiled graph does, without a compiler."""
    absent = dict.fromkeys(("block_table", "slot_mapping", "cache_positions", "q_out", "k_out", "enable_pdl"))
    return ops.rope_append_decode(**(absent | arguments))


class Recorder(TorchDispatchMode):
    """Runs what it sees, and keeps the calls of this package's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "decode_rope":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def recorded(function: Callable, case: Case) -> list[tuple]:
    with Recorder() as recorder:
        function(**case.arguments())
    return recorder.calls


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    """PyTorch's own checks: what a schema does not say is written is not; compilers see what runs; dynamic shapes."""
    case = build(CALLS[name], device)
    ((operator, arguments),) = recorded(operator_call, case.clone())
    outcome = torch.library.opcheck(operator, arguments)
    assert set(outcome) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert set(outcome.values()) == {"SUCCESS"}


def test_every_operator_is_checked():
    used = {recorded(operator_call, build(spec, "cpu"))[0][0] for spec in CALLS.values()}
    assert used == {operator for operator, _ in ops._OPERATORS.values()}
    assert all(re.fullmatch(r"decode_rope::rope_append_decode_v\d+\w*", operator.name()) for operator in used)


@anywhere
@pytest.mark.parametrize("seed", range(2000, 2150 if ON_GPU else 2020))
def test_operators_leave_the_bits_of_the_reference(seed, device):
    case = build(random_spec(seed, GPU_SIZES if ON_GPU else CPU_SIZES), device)
    check(case, operator_call)
    check(case, operator_call)


@pytest.mark.parametrize("prepared", [False, True])
def test_F10_eager_calls_do_not_pass_the_dispatcher(prepared, device):
    case = build(GOOD, device)
    op = prepare(case)
    with Recorder() as recorder:
        op(**call_arguments(case)) if prepared else decode_rope.rope_append_decode(**case.arguments())
    assert recorder.calls == []


def test_the_fault_record_is_made_while_tracing(device, monkeypatch):
    """And is memory like any other: a graph's first run would make it in the graph's pool."""
    monkeypatch.setattr(faults, "_BUFFERS", {})
    case = build(GOOD, device)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return lambda *arguments: (case["q"],)

    torch.compile(decode_rope.rope_append_decode, fullgraph=True, backend=backend)(**case.arguments())
    assert len(graphs) == 1
    assert [type(buffer) for buffer in faults._BUFFERS.values()] == [torch.Tensor]
    decode_rope.check_faults()


@pytest.mark.parametrize("seed", range(3000, 3006))
def test_random_calls_under_dynamo_and_aot_autograd(seed, device):
    """Whatever shares a storage with what: other bytes stay, and if need be the graph is broken."""
    case = build(random_spec(seed, CPU_SIZES), device)
    check(case, torch.compile(decode_rope.rope_append_decode, backend="aot_eager"))


def rotated(x: torch.Tensor, weight: torch.Tensor, k_cache, v_cache, table, positions, **options) -> torch.Tensor:
    """A layer as far as its attention: q, k and v are slices of one projection."""
    q, k, v = torch.nn.functional.linear(x, weight).view(-1, HQ + 2 * HKV, D).split([HQ, HKV, HKV], dim=1)
    return decode_rope.rope_append_decode(q, k, v, k_cache, v_cache, table, positions, **options)


class Layout(NamedTuple):
    """Shapes of what a graph is given, and how it makes the two caches from that."""

    shapes: tuple[tuple[int, ...], ...]
    slices: Callable
    kv_layout: str = "NHD"


LAYOUTS = {
    "two caches": Layout(((PAGES, PAGE, HKV, D),) * 2, lambda k, v: (k, v)),
    "kv[0], kv[1]": Layout(((2, PAGES, PAGE, HKV, D),), lambda kv: (kv[0], kv[1])),
    "kv.unbind(1)": Layout(((PAGES, 2, PAGE, HKV, D),), lambda kv: kv.unbind(1)),
    "permuted": Layout(((PAGES, 2, HKV, PAGE, D),), lambda kv: kv.permute(1, 0, 3, 2, 4).unbind(0)),
    "HND": Layout(((2, PAGES, HKV, PAGE, D),), lambda kv: kv.unbind(0), "HND"),
    "side by side": Layout(((PAGES, PAGE, HKV, 2 * D),), lambda kv: kv.split(D, dim=-1)),
    "one of three layers": Layout(((3, 2, PAGES, PAGE, HKV, D),), lambda kv: kv[1].unbind(0)),
}


def made(shape, device, dtype=DTYPE) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


class Step(NamedTuple):
    """What a layer is given besides its caches."""

    x: torch.Tensor
    weight: torch.Tensor
    table: decode_rope.RopeTable
    positions: torch.Tensor
    block_table: torch.Tensor

    @classmethod
    def of(cls, device, num_tokens: int = 3) -> "Step":
        pages = [[(2 * t + 1) % PAGES, (2 * t + 2) % PAGES] for t in range(num_tokens)]
        return cls(
            made((num_tokens, HIDDEN), device),
            made(((HQ + 2 * HKV) * D, HIDDEN), device),
            decode_rope.RopeTable.build(D, 64, device=device, is_neox=False),
            torch.arange(1, num_tokens + 1, device=device) % (2 * PAGE),
            torch.tensor(pages, dtype=torch.int32, device=device),
        )


def generated(function: Callable, *arguments):
    """The result of the compiled function, and the code Inductor wrote for its one graph."""
    from torch._inductor.utils import run_and_get_code

    result, code = run_and_get_code(torch.compile(function, fullgraph=True), *arguments)
    assert len(code) == 1
    return result, code[0]


def cache_uses(code: str) -> tuple[int, list[str]]:
    """How often the code calls an operator of this package, and its other lines that read or write memory of a cache."""
    body = code[code.index("def call(") :].splitlines()[1:]
    end = next(i for i, line in enumerate(body) if line and not line.startswith(" "))
    lines = [line.strip() for line in body[:end] if not line.strip().startswith("#")]
    calls = [line for line in lines if "torch.ops.decode_rope." in line]
    caches = set()
    for line in calls:
        call = ast.parse(line).body[0].value
        names = next(names for operator, names in ops._OPERATORS.values() if str(operator) in ast.unparse(call.func))
        for cache in ("k_cache", "v_cache"):
            caches |= names_in(call.args[names.index(cache)]) - {"reinterpret_tensor"}
    bookkeeping = ("assert_size_stride(", "del ", "return ")
    others = [line for line in lines if line not in calls and not line.startswith(bookkeeping) and not line.endswith("= args")]
    return len(calls), [line for line in others if caches & set(re.findall(r"\w+", line))]


def names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


@pytest.fixture
def handed(monkeypatch) -> list[tuple[int, int]]:
    """Where the caches lie that operators are given, call by call."""
    places = []
    run = ops._run

    def spy(*arguments):
        places.append((arguments[3].data_ptr(), arguments[4].data_ptr()))
        run(*arguments)

    monkeypatch.setattr(ops, "_run", spy)
    return places


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(bits(got), bits(want))


@inductor
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_copy_of_a_cache_that_the_graph_is_given(name, mode, device, handed):
    layout = LAYOUTS[name]
    step = Step.of(device)

    def function(*given):
        k_cache, v_cache = layout.slices(*given)
        for _ in range(2):  # the second call reads q, and writes the cache, of the first
            q = rotated(
                step.x, step.weight, k_cache, v_cache, step.table, step.positions, block_table=step.block_table,
                kv_layout=layout.kv_layout,
            )  # fmt: skip
        return q

    with mode():
        given = [made(shape, device) for shape in layout.shapes]
        copies = [x.clone() for x in given]
        want = function(*copies)
        handed.clear()
        got, code = generated(function, *given)
        assert_same(got, want)
        for x, y in zip(given, copies, strict=True):
            assert_same(x, y)
        assert handed == [tuple(x.data_ptr() for x in layout.slices(*given))] * 2
    assert cache_uses(code) == (2, [])


class Layer(torch.nn.Module):
    """A layer with its projection, its cache and its table."""

    def __init__(self, step: Step, layout: Layout = LAYOUTS["kv.unbind(1)"], prepared=None):
        super().__init__()
        self.weight = torch.nn.Parameter(step.weight.clone())
        self.layout, self.table, self.prepared = layout, step.table, prepared
        self.register_buffer("kv", made(layout.shapes[0], step.x.device))

    def forward(self, x, positions, block_table):
        k_cache, v_cache = self.layout.slices(self.kv)
        if self.prepared is None:
            return rotated(x, self.weight, k_cache, v_cache, self.table, positions, block_table=block_table)
        q, k, v = torch.nn.functional.linear(x, self.weight).view(-1, HQ + 2 * HKV, D).split([HQ, HKV, HKV], dim=1)
        return self.prepared(q, k, v, k_cache, v_cache, positions, block_table=block_table)


def decode_rope_of(step: Step, **facts) -> decode_rope.DecodeRope:
    shape = dict(num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, page_size=PAGE, dtype=DTYPE, device=step.x.device)
    return decode_rope.DecodeRope(step.table, **(shape | facts))


@inductor
@torch.no_grad()
@pytest.mark.parametrize("prepared", [False, True], ids=["function", "DecodeRope"])
def test_no_copy_of_a_cache_that_is_a_buffer(prepared, device, handed):
    step = Step.of(device)
    layer = Layer(step, prepared=decode_rope_of(step) if prepared else None)
    start = layer.kv.clone()
    want = layer(step.x, step.positions, step.block_table)
    written = layer.kv.clone()
    assert not torch.equal(written, start)
    layer.kv.copy_(start)
    got, code = generated(layer, step.x, step.positions, step.block_table)
    assert_same(got, want)
    assert_same(layer.kv, written)
    assert cache_uses(code) == (1, [])
    assert handed == [tuple(x.data_ptr() for x in layer.kv.unbind(1))]


@inductor
@torch.no_grad()
def test_the_search_for_copies_finds_one(device, monkeypatch):
    """Two inputs of one storage, which the package refuses for this reason: then the graph copies a cache."""
    monkeypatch.setattr(ops, "_graph_inputs", lambda x: [])
    step, kv = Step.of(device), made((6, PAGES, PAGE, HKV, D), device)
    _, code = generated(lambda k, v: rotated(*step[:2], k, v, *step[2:4], block_table=step.block_table), kv[0], kv[1])
    calls, others = cache_uses(code)
    assert calls == 1 and others


@inductor
@torch.no_grad()
def test_copies_a_model_makes_stay_copies(device):
    """q and k are used after calls that rotate their clones, in place and by way of q_out and k_out."""
    step = Step.of(device)

    def function(q, k, v, k_cache, v_cache):
        given = (v, k_cache, v_cache, step.table, step.positions)
        q_in_place, q_out, k_out = q.clone(), q.clone(), k.clone()
        decode_rope.rope_append_decode(q_in_place, k, *given, block_table=step.block_table)
        decode_rope.rope_append_decode(q, k, *given, block_table=step.block_table, q_out=q_out, k_out=k_out)
        return [x * 2 for x in (q, k, q_in_place, q_out, k_out)]

    given = [made((3, h, D), device) for h in (HQ, HKV, HKV)] + [made(s, device) for s in LAYOUTS["two caches"].shapes]
    copies = [x.clone() for x in given]
    results = torch.compile(function, fullgraph=True)(*given), function(*copies)
    for got, want in zip([*results[0], *given], [*results[1], *copies], strict=True):
        assert_same(got, want)


@inductor
@torch.no_grad()
def test_batch_sizes_share_a_graph(device):
    from torch._dynamo.testing import CompileCounterWithBackend

    layer, counter = Layer(Step.of(device)), CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for num_tokens in (3, 2, 5, 17, 4, 33):
        step, start = Step.of(device, num_tokens), layer.kv.clone()
        step.block_table[:] = torch.arange(2 * num_tokens, device=device).view(-1, 2) % PAGES - num_tokens % 3
        step.positions[2:] = -1  # no slot is written twice
        want = layer(step.x, step.positions, step.block_table)
        written = layer.kv.clone()
        layer.kv.copy_(start)
        assert_same(compiled(step.x, step.positions, step.block_table), want)
        assert_same(layer.kv, written)
    assert counter.frame_count <= 2


@torch.no_grad()
def test_a_rope_table_is_an_argument_like_any_other(device):
    """One graph for the tables of one shape and pairing, and another pairing is another graph."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(rotated, fullgraph=True, backend=counter)
    step, caches = Step.of(device), [made(s, device) for s in LAYOUTS["two caches"].shapes]
    for theta, is_neox, graphs in ((1e4, True, 1), (5e5, True, 1), (1e4, False, 2), (5e5, False, 2)):
        table = decode_rope.RopeTable.build(D, 64, theta, is_neox=is_neox, device=device)
        given = (step.x, step.weight, *caches, table, step.positions)
        assert_same(compiled(*given, block_table=step.block_table), rotated(*given, block_table=step.block_table))
        assert counter.frame_count == graphs


def graphs_of(layer: Layer, step: Step) -> list[torch.fx.GraphModule]:
    """What Dynamo makes of a layer."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compile(layer, fullgraph=True, backend=backend)(step.x, step.positions, step.block_table)
    return graphs


@torch.no_grad()
def test_the_facts_of_a_decode_rope_reach_its_operator(device):
    step = Step.of(device)
    tiles = Geometry(1, 2, 1, 2, 4, pdl=False)
    facts = dict(metadata_ready=True, geometry=tiles, enable_pdl=False, is_neox=True)
    (graph,) = graphs_of(Layer(step, prepared=decode_rope_of(step, **facts)), step)
    (node,) = [n for n in graph.graph.nodes if n.target in [operator for operator, _ in ops._OPERATORS.values()]]
    arguments = dict(zip(ops._OPERATORS[True, False][1], node.args, strict=True))
    want = dict(metadata_ready=True, geometry=list(tiles), enable_pdl=False, is_neox=False, kv_layout="NHD", tokens_per_request=1)
    assert {name: arguments[name] for name in want} == want  # the table's own pairing holds


@torch.no_grad()
@pytest.mark.parametrize("prepared", [False, True], ids=["function", "DecodeRope"])
def test_caches_and_tables_of_a_module_are_static(prepared, device):
    """So that CUDA graphs of the compiler use them where they are, instead of copying them in at every replay."""
    step = Step.of(device)
    (graph,) = graphs_of(Layer(step, prepared=decode_rope_of(step) if prepared else None), step)
    inputs = [node.meta for node in graph.graph.nodes if node.op == "placeholder"]
    static = {meta["example_value"].shape for meta in inputs if "_dynamo_static_input_type" in meta["tensor_dict"]}
    assert static == {(PAGES, 2, PAGE, HKV, D), (64, D), ((HQ + 2 * HKV) * D, HIDDEN)}


BAD = {
    "dtype": (TypeError, "positions: expected int32 or int64", lambda c: {"positions": c["positions"].float()}),
    "both": (ValueError, "block_table, slot_mapping: expected exactly one", lambda c: {"slot_mapping": c["positions"]}),
    "v": (ValueError, "v: expected k and v both given", lambda c: {"v": None}),
    "shape": (ValueError, "v_cache: expected 2 heads of 8", lambda c: {"v_cache": c["k_cache"].clone()}),
    "memory": (ValueError, "k_cache: expected memory of its own", lambda c: {"v_cache": c["k_cache"][..., :8]}),
    "gradient": (ValueError, "q: expected a tensor that needs no gradient", lambda c: {"q": c["q"].clone().requires_grad_()}),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_are_those_of_eager_calls(name, device):
    error, words, change = BAD[name]
    case = build(GOOD, device)
    before = case.clone()
    with pytest.raises(error, match="^" + re.escape(words)):
        torch.compile(decode_rope.rope_append_decode, backend="aot_eager")(**(case.arguments() | change(case)))
    assert_same_storages(case, before)


def test_a_compiled_decode_rope_refuses_what_it_was_not_built_for(device):
    step = Step.of(device)
    layer = torch.compile(Layer(step, prepared=decode_rope_of(step, num_q_heads=HQ + 1)), backend="aot_eager")
    with torch.no_grad(), pytest.raises(ValueError, match=r"q: expected torch.bfloat16 of shape \(3, 5, 16\), as this op was"):
        layer(step.x, step.positions, step.block_table)


REFUSED = {
    "two inputs of one storage": ((2, PAGES, PAGE, HKV, D), lambda kv: kv.unbind(0), lambda k, v: (k, v), "share its storage"),
    "a slice of a slice": ((3, PAGES, PAGE, HKV, 2 * D), lambda kv: (kv[1],), lambda kv: kv.split(D, dim=-1), "slice itself"),
}


@inductor
@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_compiler_would_get_wrong_runs_eagerly(name, device):
    """The graph breaks there; under `fullgraph=True` the error says what to do."""
    shape, outside, inside, words = REFUSED[name]
    step, kv = Step.of(device), made(shape, device)
    copy = kv.clone()

    def function(*given):
        return rotated(step.x, step.weight, *inside(*given), step.table, step.positions, block_table=step.block_table)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(function, fullgraph=True)(*outside(kv))
    assert_same(kv, copy)
    torch._dynamo.reset()
    assert_same(torch.compile(function)(*outside(kv)), function(*outside(copy)))
    assert_same(kv, copy)


@torch.no_grad()
@pytest.mark.parametrize("strict", [False, True])
def test_export(strict, device):
    step = Step.of(device)
    layer = Layer(step)
    start = layer.kv.clone()
    program = torch.export.export(layer, (step.x, step.positions, step.block_table), strict=strict).module()
    want, got = layer(*step[:1], *step[3:]), program(*step[:1], *step[3:])
    assert_same(got, want)
    assert_same(program.kv, layer.kv)
    assert not torch.equal(layer.kv, start)


class Doubled(Layer):
    """A layer whose q, k and v come from a kernel of Inductor's, of exact results. It launches twice on its cache."""

    def forward(self, qkv, positions, block_table):
        for _ in range(2):
            q, k, v = (qkv * 2).split([HQ, HKV, HKV], dim=1)
            given = (q, k, v, *self.layout.slices(self.kv))
            if self.prepared is None:
                q = decode_rope.rope_append_decode(*given, self.table, positions, block_table=block_table)
            else:
                q = self.prepared(*given, positions, block_table=block_table)
        return q


@pytest.mark.gpu
@pytest.mark.parametrize("held", ["buffer", "marked input"])
@pytest.mark.parametrize("prepared", [False, True], ids=["function", "DecodeRope"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_cuda_graphs_of_the_compiler(mode, prepared, held, device, monkeypatch):
    """`mode="reduce-overhead"`: replays read positions, block tables and the rotary table anew, and run no Python of ours."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(faults, "_BUFFERS", {})  # as in a process whose first call is the compiled one
    monkeypatch.setattr(ops, "_PLANS", type(ops._PLANS)())
    calls = []
    run = ops._run
    monkeypatch.setattr(ops, "_run", lambda *arguments: (calls.append(1), run(*arguments))[1])
    counters.clear()
    with mode():
        step = Step.of(device)
        layer = Doubled(step, prepared=decode_rope_of(step) if prepared else None)
        kv = layer.kv
        if held == "marked input":
            del layer.kv
            torch._dynamo.mark_static_address(kv)
        function = torch.compile(lambda kv, *given: with_cache(layer, kv, *given), mode="reduce-overhead", fullgraph=True)
        for number in range(8):
            qkv = made((3, HQ + 2 * HKV, D), device)
            positions = torch.tensor([(number * 3 + t) % 8 for t in range(3)], device=device)
            positions[number % 3] = -1 if number % 2 else 7
            block_table = torch.tensor([[2 * t + number % 2, 7 - number % 2] for t in range(3)], dtype=torch.int32, device=device)
            layer.table.cos_sin_cache.uniform_(-1, 1)
            want_kv = kv.clone()
            want = with_cache(layer, want_kv, qkv, positions, block_table)
            made_before = len(calls)
            torch.compiler.cudagraph_mark_step_begin()
            got = function(kv, qkv, positions, block_table)
            assert_same(got, want)
            assert_same(kv, want_kv)
            assert len(calls) == made_before or number < 3
        block_table.fill_(PAGES)  # past the cache: counted, in a replay too
        function(kv, qkv, positions, block_table)
    assert counters["inductor"]["cudagraph_skips"] == 0
    with pytest.raises(IndexError, match=f"page {PAGES}"):
        decode_rope.check_faults()
