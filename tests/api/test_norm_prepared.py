"""A prepared op with a norm, several axes and a token scale does what the function does: called, bound, captured, compiled."""

import pytest
import torch
from norm_cases import BF16, FP32, FUNCTIONS, ROWS, NormSpec, assert_same, build, run, run_reference, same_bits

import decode_rope
from decode_rope.launch.compiled import num_compiled

PREPARED = {
    "norm": NormSpec(v_norm=True, weight_offset=1.0),
    "norm after, one weight": NormSpec(order="after", k_weight=None, rotary_dim=32),
    "axes": NormSpec(axes=3, slots=True),
    "scale": NormSpec(scaled=True, normed=False, rotary_dim=0),
    "all": NormSpec(axes=3, scaled=True, q_out=True, k_out="own", rounded=True, q_weight=BF16, slots=True),
    "q alone": NormSpec(heads=(4, 0), scaled=True, axes=2),
}


def op_of(case, **options) -> decode_rope.DecodeRope:
    spec = case.spec
    return decode_rope.DecodeRope(
        case.get("cos_sin_cache"), num_q_heads=spec.heads[0], num_kv_heads=spec.heads[1], head_dim=spec.head_dim, page_size=4,
        dtype=spec.dtype, norm=case.norm, axes=spec.axes, axis_map=case.get("axis_map"), q_token_scale=spec.scaled,
        q_out=spec.q_out, k_out=spec.k_out is not None, cache_positions="cache_positions" in case.views, device=case["q"].device,
        addressing="slot_mapping" if spec.slots else "block_table", is_neox=spec.is_neox, **options,
    )  # fmt: skip


def of_call(arguments: dict) -> dict:
    """The arguments of a prepared op's call."""
    known = ("cos_sin_cache", "is_neox", "norm", "tokens_per_request", "axis_map")
    return {name: x for name, x in arguments.items() if name not in known}


@pytest.mark.anywhere
@pytest.mark.parametrize("kind", PREPARED)
def test_a_call_and_a_bound_launch_leave_the_bytes_of_the_reference(device, kind):
    case = build(PREPARED[kind], device)
    want = run_reference(case.clone())
    op = op_of(case).warmup(4)
    for _ in range(2):  # the first call has no plan yet
        assert_same(run(case.clone(), lambda **arguments: op(**of_call(arguments))), want)
    assert_same(run(case.clone(), lambda **arguments: op.bind(**of_call(arguments))()), want)


@pytest.mark.kernel
@pytest.mark.parametrize("kind", ["norm", "all"])
def test_warmup_compiles_all_that_calls_launch(device, kind):
    """Of any number of tokens up to its limit, bound or not, aligned or not."""
    case = build(PREPARED[kind].but(tokens=2), device)
    op = op_of(case).warmup(2)
    before = num_compiled()
    op(**of_call(case.arguments()))
    op.bind(**of_call(case.arguments()))()
    unaligned = build(case.spec.but(shift=1), device)
    op(**of_call(unaligned.arguments()))
    assert num_compiled() == before


@pytest.mark.anywhere
def test_weights_are_read_at_each_call(device):
    """They are kept, not copied: what is written into them counts from then on."""
    case = build(PREPARED["norm"], device)
    op = op_of(case)
    bound_case = case.clone()
    launch = op.bind(**of_call(bound_case.arguments()))
    case["q_weight"].add_(1)
    other = case.clone()
    want = run_reference(other)["q"]
    assert same_bits(op(**of_call(case.clone().arguments())), want)
    assert same_bits(launch(), want)


@pytest.mark.anywhere
def test_a_call_that_is_not_what_the_op_was_built_for(device):
    case = build(PREPARED["all"], device)
    op = op_of(case)
    good = of_call(case.arguments())
    before = case.clone()
    one_row = torch.zeros(3, dtype=torch.int64, device=device)
    for changes, said in (
        (dict(q_token_scale=None), "q_token_scale: expected it given, as this op was built"),
        (dict(positions=one_row), r"positions: expected torch.int64 of shape \(3, 3\), as this op was built"),
        (dict(positions=torch.stack([one_row] * 2)), r"positions: expected torch.int64 of shape \(3, 3\)"),
    ):
        with pytest.raises(ValueError, match=said):
            op(**good | changes)
        with pytest.raises(ValueError, match=said):
            op.bind(**good | changes)
    plain = op_of(build(PREPARED["norm"], device))
    call = of_call(build(PREPARED["norm"], device).arguments())
    with pytest.raises(ValueError, match="q_token_scale: expected it left out, as this op was built"):
        plain(**call, q_token_scale=torch.ones(3, device=device))
    for storage, x in before.storages.items():
        assert torch.equal(case.storages[storage], x)


@pytest.mark.anywhere
def test_a_table_brings_its_axis_map(device):
    case = build(PREPARED["axes"], device)
    axis_map = case["axis_map"].tolist()
    table = decode_rope.RopeTable.build(64, ROWS, axis_map=axis_map, device=device)
    case["cos_sin_cache"].copy_(table.cos_sin_cache)
    want = run_reference(case.clone())
    arguments = case.clone().arguments()
    del arguments["axis_map"]
    assert same_bits(decode_rope.rope_append_decode(**arguments | dict(cos_sin_cache=table)), want["q"])
    op = decode_rope.DecodeRope(
        table,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        page_size=4,
        axes=3,
        norm=case.norm,
        device=device,
        addressing="slot_mapping",
    )
    call = of_call(case.clone().arguments())
    assert same_bits(op(**call), want["q"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PREPARED)
@pytest.mark.parametrize("ready", [False, True])
def test_a_graph_reads_everything_anew_at_each_replay(device, kind, ready):
    case = build(PREPARED[kind], device)
    op = op_of(case, metadata_ready=ready).warmup(4)
    launch = op.bind(**of_call(case.arguments()))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
        op(**of_call(case.arguments()))
    for seed in range(1, 4):
        other = build(PREPARED[kind].but(seed=seed), device)
        for name, storage in case.storages.items():
            storage.copy_(other.storages[name])
        graph.replay()
        want = run_reference(run_reference(other))  # twice: q was rotated in place by the first launch
        case.faults = want.faults
        assert_same(case, want)


@pytest.mark.gpu
def test_a_prefill_is_captured_after_one_call(device):
    case = build(NormSpec(tokens=40, slots=True, v_norm=True, q_out=True).but(slots=True), device)
    want = run_reference(case.clone())
    decode_rope.rope_append_prefill(**case.clone().arguments())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_rope.rope_append_prefill(**case.arguments())
    graph.replay()
    case.faults = want.faults
    assert_same(case, want)


@pytest.mark.gpu
def test_launches_of_many_streams_and_a_profiler_leave_the_same_bits(device):
    case = build(PREPARED["all"], device)
    want = run_reference(case.clone())
    for _ in range(3):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            got = case.clone()
            decode_rope.rope_append_decode(**got.arguments())
        stream.synchronize()
        got.faults = want.faults
        assert_same(got, want)


# torch.compile.


def layer_of(case, function):
    """A layer as far as its attention: everything is made of the graph's inputs."""
    spec, fixed = case.spec, case.arguments()

    def layer(qkv, kv, positions, index, q_weight, k_weight, scale):
        q, k, v = qkv.split([spec.heads[0], spec.heads[1], spec.heads[1]], dim=1)
        norm = decode_rope.QKNorm(q_weight, k_weight, spec.eps, spec.weight_offset, spec.order, spec.v_norm, spec.rounded)
        return function(
            q, k, v, kv[0], kv[1], fixed["cos_sin_cache"], positions, slot_mapping=index, axis_map=fixed.get("axis_map"), norm=norm,
            q_token_scale=scale,
        )  # fmt: skip

    return layer


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("kind", ["before", "after, axes, scale"])
def test_a_compiled_layer_has_no_break_and_the_same_bits(device, name, kind):
    """Traced by Dynamo and AOTAutograd, with sizes of tokens that vary."""
    torch._dynamo.reset()
    changes = dict(v_norm=True) if kind == "before" else dict(order="after", axes=3, scaled=True, rounded=True, weight_offset=1.0)
    case = build(NormSpec(tokens=5, dtype=FP32, slots=True, heads=(4, 2), **changes), device)
    layer = layer_of(case, FUNCTIONS[name])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for tokens in (5, 3, 2):
        results = []
        for each in (layer, compiled):
            generator = torch.Generator().manual_seed(tokens)
            qkv = torch.randn(tokens, 8, 64, generator=generator).to(device)
            kv = torch.zeros(2, 8, 4, 2, 64, device=device)
            positions = case["positions"][..., :tokens].contiguous()
            scale = case["q_token_scale"][:tokens].contiguous() if case.spec.scaled else None
            weights = case["q_weight"], case["k_weight"]
            results.append((each(qkv, kv, positions, case["slot_mapping"][:tokens].contiguous(), *weights, scale), qkv, kv))
        for got, want in zip(*results, strict=True):
            assert same_bits(got, want)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("prepared", [False, True], ids=["function", "op"])
def test_inductor_writes_the_same_bits(device, prepared):
    from shutil import which

    if which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    torch._dynamo.reset()
    case = build(NormSpec(tokens=3, dtype=FP32, slots=True, v_norm=True, order="after", axes=3, scaled=True), device)
    if prepared:
        op = op_of(case)

        def function(q, k, v, k_cache, v_cache, table, positions, *, norm, axis_map, **options):
            return op(q, k, v, k_cache, v_cache, positions, **options)
    else:
        function = decode_rope.rope_append_decode
    layer = layer_of(case, function)
    results = []
    for each in (layer, torch.compile(layer, fullgraph=True)):
        qkv = torch.randn(3, 8, 64, generator=torch.Generator().manual_seed(0)).to(device)
        kv = torch.zeros(2, 8, 4, 2, 64, device=device)
        weights = case["q_weight"], case["k_weight"]
        results.append((each(qkv, kv, case["positions"], case["slot_mapping"], *weights, case["q_token_scale"]), qkv, kv))
    for got, want in zip(*results, strict=True):
        assert same_bits(got, want)
    torch._dynamo.reset()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_weight_that_needs_a_gradient_is_named_while_tracing(device, name):
    """Compiled graphs run where autograd sees nothing, so it is now or never."""
    torch._dynamo.reset()
    case = build(NormSpec(dtype=FP32, slots=True), device)
    arguments = case.arguments()
    norm = case.norm._replace(q_weight=case["q_weight"].clone().requires_grad_())
    compiled = torch.compile(lambda q: FUNCTIONS[name](**arguments | dict(q=q, norm=norm)), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"norm\.q_weight: expected a tensor that needs no gradient"):
        compiled(arguments["q"])
    torch._dynamo.reset()
