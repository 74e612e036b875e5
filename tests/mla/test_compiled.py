"""Latent appends in torch.compile: one operator in the graph, no copy of a cache, the bytes of eager calls."""

import re

import pytest
import torch
from compilers import inductor
from lanes import INTERPRETED
from latents import LatentSpec, build, prepare, run, run_reference

import decode_rope
from decode_rope.append.arguments import MLAAppend
from decode_rope.compile import mla as operators

SPEC = LatentSpec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], norm=torch.float32, dtype=torch.float32)
SPECS = {
    "plain": SPEC,
    "q_out": SPEC.but(q_out=True),
    "pair": SPEC.but(cache="pair"),
    "NoPE": SPEC.but(nope=True),
    "ragged": SPEC.but(positions=[0, 1, 2, 5], cu_seqlens=[0, 3, 4, 4]),
    "halves out": SPEC.but(interleaved_out=False),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


@inductor
@pytest.mark.skipif(INTERPRETED, reason="Inductor is the same under the interpreter")
@pytest.mark.parametrize("name", SPECS)
def test_a_compiled_call_leaves_what_an_eager_one_leaves(name, device):
    function = decode_rope.rope_append_mla_prefill if name == "ragged" else decode_rope.rope_append_mla_decode
    case = build(SPECS[name], device)
    want = run(case.clone())
    got = run(case.clone(), torch.compile(lambda **arguments: function(**arguments), fullgraph=True))
    assert all(torch.equal(got.storages[name], want.storages[name]) for name in want.storages)
    assert got.faults == want.faults


@inductor
@pytest.mark.skipif(INTERPRETED, reason="Inductor is the same under the interpreter")
def test_a_layer_in_one_graph_copies_no_cache_and_takes_any_batch(device):
    case = build(SPEC.but(heads=4), device)
    table, cache, weight = case["cos_sin_cache"], case["cache"].clone(), case["weight"]
    norm = decode_rope.LatentNorm(weight, 1e-6)

    def layer(x, w, cache, positions, slots):
        q, kv, k = torch.nn.functional.linear(x, w).split([4 * 24, 32, 16], -1)
        q_pe = q.unflatten(-1, (4, 24))[..., 8:]
        return decode_rope.rope_append_mla_decode(q_pe, k, kv, cache, table, positions, slot_mapping=slots, kv_norm=norm) * 2

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    w = torch.randn(4 * 24 + 48, 64, device=device)
    for num_tokens in (2, 3, 5):
        x = torch.randn(num_tokens, 64, device=device)
        positions, slots = torch.arange(1, 8, device=device)[:num_tokens] % 6 + 1, torch.arange(num_tokens, device=device) * 3
        positions = torch.where(positions == 2, 1, torch.where(positions > 3, 6, positions))
        mine, theirs = cache.clone(), cache.clone()
        torch.testing.assert_close(compiled(x, w, mine, positions, slots), layer(x, w, theirs, positions, slots))
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    _, code = torch._inductor.utils.run_and_get_code(torch.compile(layer, fullgraph=True), x, w, cache, positions, slots)
    assert len(re.findall(r"torch\.ops\.decode_rope\.rope_append_mla_v\d+", "".join(code))) >= 1
    assert f"({cache.numel()}" not in "".join(code), "a buffer of the cache's size"


@inductor
@pytest.mark.skipif(INTERPRETED, reason="Inductor is the same under the interpreter")
def test_a_prepared_op_compiles(device):
    case = build(SPEC, device)
    op = prepare(case)
    want = run_reference(case.clone())
    got = case.clone()
    names = ("q_pe", "k_pe", "kv_c", "cache", "positions")
    torch.compile(lambda *x, **index: op(*x, **index), fullgraph=True)(
        *[got[name] for name in names], block_table=got["block_table"]
    )
    assert all(torch.equal(got.storages[name], want.storages[name]) for name in want.storages)


def test_schemas_are_made_of_the_record():
    for in_place, (operator, names) in operators.OPERATORS.items():
        arguments = operator._schema.arguments
        assert [argument.name for argument in arguments] == names
        assert set(names) == set(MLAAppend._fields) - ({"q_out"} if in_place else set())
        written = {argument.name for argument in arguments if argument.is_write}
        assert written == {"q_pe" if in_place else "q_out", "cache", "rope_cache"}


def test_the_operator_gets_every_argument_of_a_call(monkeypatch):
    """Values that are all different, so that one in another one's place shows."""
    tensors = [torch.ones(n) for n in range(1, len(MLAAppend.ROLES) + 1)]
    call = MLAAppend(*tensors, 7, False, True, True, 0.25, True, [1, 2, 4, 4, 1, -1])
    seen = []
    monkeypatch.setattr(operators.RUN.book, "run", seen.append)
    operators.append(call)
    for name, got, want in zip(MLAAppend._fields, seen[0], call, strict=True):
        assert got is want or (not isinstance(want, torch.Tensor) and (got == want or list(got) == want)), name
