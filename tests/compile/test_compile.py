"""torch.compile and torch.export: no break in the graph, no copy of a cache in the code, the bits of eager calls."""

import ast
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import bits
from compilers import inductor, spy_on

import decode_rope
from decode_rope.append import faults
from decode_rope.compile import append, operators
from decode_rope.launch.decode import Geometry

DTYPE = torch.bfloat16
PAGES, PAGE, HQ, HKV, D, HIDDEN = 8, 4, 4, 2, 16, 64


@pytest.fixture(autouse=True)
def no_cached_code():
    """No graph of another day is taken for this one's."""
    import torch._inductor.config

    with torch._inductor.config.patch(force_disable_caches=True):
        yield


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
        names = next(names for operator, names in append.OPERATORS.values() if str(operator) in ast.unparse(call.func))
        for cache in ("k_cache", "v_cache"):
            caches |= names_in(call.args[names.index(cache)]) - {"reinterpret_tensor"}
    bookkeeping = ("assert_size_stride", "del ", "return ")
    others = [line for line in lines if line not in calls and not line.startswith(bookkeeping) and not line.endswith("= args")]
    return len(calls), [line for line in others if caches & set(re.findall(r"\w+", line))]


def names_in(expression: ast.expr) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


@pytest.fixture
def handed(monkeypatch) -> list[tuple[int, int]]:
    """Where the caches lie that operators are given, call by call."""
    places = []
    spy_on(monkeypatch, "rope_append_decode", lambda call: places.append((call.k_cache.data_ptr(), call.v_cache.data_ptr())))
    return places


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(bits(got), bits(want))


@inductor
@pytest.mark.parametrize("name, mode", [*((name, torch.no_grad) for name in LAYOUTS), ("kv.unbind(1)", torch.inference_mode)])
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
    monkeypatch.setattr(operators, "_home", lambda name, x: None)
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
    (node,) = [n for n in graph.graph.nodes if n.target in [operator for operator, _ in append.OPERATORS.values()]]
    arguments = dict(zip(append.OPERATORS["rope_append_decode", (True, False)][1], node.args, strict=True))
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


@torch.no_grad()
def test_a_compiled_decode_rope_refuses_what_it_was_not_built_for(device):
    step = Step.of(device)
    layer = torch.compile(Layer(step, prepared=decode_rope_of(step, num_q_heads=HQ + 1)), fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"q: expected torch.bfloat16 of shape \(3, 5, 16\), as this op was"):
        layer(step.x, step.positions, step.block_table)


REFUSED = {
    "two inputs of one storage": ((2, PAGES, PAGE, HKV, D), lambda kv: kv.unbind(0), lambda k, v: (k, v), "share its storage"),
    "a slice of a slice": ((3, PAGES, PAGE, HKV, 2 * D), lambda kv: (kv[1],), lambda kv: kv.split(D, dim=-1), "slice itself"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_compiler_would_get_wrong_is_no_full_graph(name, device):
    """And the error says what to do."""
    shape, outside, inside, words = REFUSED[name]
    step, kv = Step.of(device), made(shape, device)
    start = kv.clone()

    def function(*given):
        return rotated(step.x, step.weight, *inside(*given), step.table, step.positions, block_table=step.block_table)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        torch.compile(function, fullgraph=True)(*outside(kv))
    assert_same(kv, start)


@inductor
@torch.no_grad()
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("function", [decode_rope.rope_append_decode, decode_rope.rope_append_prefill])
def test_an_input_of_the_same_storage_that_is_used_later(function, backend, device):
    """The compiler learns of it after the call, when it has taken the cache for the only input there."""
    step = Step.of(device)
    both = [made((3, PAGES, PAGE, HKV, D), device) for _ in range(2)]
    q, k, v = (made((3, heads, D), device) for heads in (HQ, HKV, HKV))

    def layer(q, k, v, k_cache, v_cache, all_keys):
        turned = function(q.clone(), k, v, k_cache, v_cache, step.table, step.positions, block_table=step.block_table)
        return turned, all_keys[0, 1].float().sum()

    compiled = torch.compile(layer, backend=backend)
    for i in (0, 2, 1):
        copies = [x.clone() for x in both]
        want = layer(q, k, v, *(x[i] for x in copies), copies[0])
        got = compiled(q, k, v, *(x[i] for x in both), both[0])
        for x, y in zip([*got, *both], [*want, *copies], strict=True):
            assert_same(x, y)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="k_cache: inputs of the graph share its storage"):
        torch.compile(layer, backend=backend, fullgraph=True)(q, k, v, *(x[0] for x in both), both[0])


# All layers in one tensor, and what one of them holds, from which it makes its two caches.
SHARED = {
    "two caches": ((2, 3, PAGES, PAGE, HKV, D), lambda kv, i: (kv[0, i], kv[1, i]), lambda k, v: (k, v)),
    "kv": ((3, 2, PAGES, PAGE, HKV, D), lambda kv, i: (kv[i],), lambda kv: kv.unbind(0)),
    "kv, side by side": ((3, PAGES, PAGE, HKV, 2 * D), lambda kv, i: (kv[i],), lambda kv: kv.split(D, dim=-1)),
}


@inductor
@torch.no_grad()
@pytest.mark.parametrize("name", SHARED)
def test_layers_that_hold_slices_of_one_tensor(name, device, handed):
    """Compiled one by one and together, whether a call is compiled or breaks the graph: it writes where an eager one does."""
    shape, held, caches = SHARED[name]
    step, kv = Step.of(device), made(shape, device)

    def function(x, *layers):
        for layer in layers:
            q = rotated(x, step.weight, *caches(*layer), step.table, step.positions, block_table=step.block_table)
        return q

    compiled = torch.compile(function)
    for layers in ([0], [2], [1], [0, 1, 2]):
        x, copy = made(step.x.shape, device), kv.clone()
        want = function(x, *(held(copy, i) for i in layers))
        handed.clear()
        assert_same(compiled(x, *(held(kv, i) for i in layers)), want)
        assert_same(kv, copy)
        assert handed in ([], [tuple(cache.data_ptr() for cache in caches(*held(kv, i))) for i in layers])


@inductor
@torch.no_grad()
def test_layers_that_hold_slices_of_two_tensors(device, handed):
    """Keys of all layers in one, values in the other: one graph without copies."""
    step = Step.of(device)
    both = [made((3, PAGES, PAGE, HKV, D), device) for _ in range(2)]
    copies = [x.clone() for x in both]

    def function(x, k_caches, v_caches):
        for k_cache, v_cache in zip(k_caches, v_caches, strict=True):
            q = rotated(x, step.weight, k_cache, v_cache, step.table, step.positions, block_table=step.block_table)
        return q

    want = function(step.x, *(x.unbind(0) for x in copies))
    handed.clear()
    got, code = generated(function, step.x, *(x.unbind(0) for x in both))
    for x, y in zip([got, *both], [want, *copies], strict=True):
        assert_same(x, y)
    assert cache_uses(code) == (3, [])
    assert handed == list(zip(*([x.data_ptr() for x in kv] for kv in both), strict=True))


@inductor
@torch.no_grad()
def test_caches_of_several_sizes(device):
    """From the second one on, Dynamo takes sizes for dynamic, and Inductor would lose the distance between K and V."""
    step = Step.of(device)

    def function(x, kv):
        return rotated(x, step.weight, *kv.unbind(0), step.table, step.positions, block_table=step.block_table)

    compiled = torch.compile(function)
    for num_pages in (PAGES, 2 * PAGES, 3 * PAGES):
        kv = made((2, num_pages, PAGE, HKV, D), device)
        copy = kv.clone()
        assert_same(compiled(step.x, kv), function(step.x, copy))
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

    def forward(self, qkv, positions, block_table, kv=None):
        for _ in range(2):
            q, k, v = (qkv * 2).split([HQ, HKV, HKV], dim=1)
            given = (q, k, v, *self.layout.slices(self.kv if kv is None else kv))
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
    """`mode="reduce-overhead"`: replays read positions, pages and the rotary table anew, and run no Python of ours."""
    from torch._dynamo.utils import counters

    monkeypatch.setattr(faults, "_BUFFERS", {})  # as in a process whose first call is the compiled one
    append._RUNNERS["rope_append_decode"].book.clear()
    calls = []
    # What a call is given must not be kept: PyTorch looks for tensors of a graph's memory that live on.
    spy_on(monkeypatch, "rope_append_decode", lambda arguments: calls.append(None))
    counters.clear()
    with mode():
        step = Step.of(device)
        layer, eager = (Doubled(step, prepared=decode_rope_of(step) if prepared else None) for _ in range(2))
        kv = layer.kv
        given = []
        if held == "marked input":
            layer.kv = None
            torch._dynamo.mark_static_address(kv)
            given = [kv]
        compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
        for number in range(8):
            qkv = made((3, HQ + 2 * HKV, D), device)
            positions = torch.tensor([(3 * number + token) % (2 * PAGE) for token in range(3)], device=device)
            positions[number % 3] = -1
            block_table = ((torch.arange(6, device=device) + number) % PAGES).view(3, 2).int()
            step.table.cos_sin_cache.uniform_(-1, 1)
            eager.kv.copy_(kv)
            want = eager(qkv, positions, block_table)
            before = len(calls)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(compiled(qkv, positions, block_table, *given), want)
            assert_same(kv, eager.kv)
        assert len(calls) == before  # that one was a replay, and so is the next
        torch.compiler.cudagraph_mark_step_begin()
        compiled(qkv, positions, torch.full_like(block_table, PAGES), *given)
        assert_same(kv, eager.kv)
        assert len(calls) == before
    assert counters["inductor"]["cudagraph_skips"] == 0
    with pytest.raises(IndexError, match=f"4 faulty row.*page {PAGES} is past"):
        decode_rope.check_faults()
