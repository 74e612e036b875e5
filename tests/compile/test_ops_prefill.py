"""`rope_append_prefill` under torch.compile: schemas say what is written, graphs are whole, bytes are those of eager calls."""

import re

import pytest
import torch
from cases import Case, Spec, assert_same_storages, build, check, moved
from compilers import inductor, operator_call, recorded, spy_on

import decode_rope
from decode_rope import reference

prefill = operator_call("rope_append_prefill")
# Sequences that begin at 0 and 5, a row of padding and one past the table.
GOOD = Spec([*range(4), *range(5, 8), -1, 64], [[5, 2], [0, 6], [1, 3]], heads=(3, 2), head_dim=16, v_head_dim=8)
CU_SEQLENS = {"cu_seqlens_q": torch.tensor([0, 4, 8, 9], dtype=torch.int32)}
RAGGED = GOOD.but(options=CU_SEQLENS)
SLOTS = GOOD.but(block_table=None, slots=[3, 5, -1, 9, 2, 1, 7, 0])
CALLS = {
    "ragged": RAGGED,
    "slots, HND": SLOTS.but(cache="HND", is_neox=False),
    "one request": GOOD.but(tokens_per_request=4),
    "k_out": RAGGED.but(k_out="own"),
    "k in place": RAGGED.but(k_out="k"),
    "q_out": RAGGED.but(q_out=True),
    "q_out, k in place": RAGGED.but(q_out=True, k_out="k"),
    "no rotation": RAGGED.but(rotary_dim=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    case = to(build(CALLS[name], device), device)
    ((operator, arguments),) = recorded(prefill, **case.arguments())
    assert re.fullmatch(r"decode_rope::rope_append_prefill_v\d+\w*", operator.name())
    outcome = torch.library.opcheck(operator, arguments)
    assert len(outcome) == 4 and set(outcome.values()) == {"SUCCESS"}


def to(case: Case, device) -> Case:
    case.options = {name: moved(x, device) for name, x in case.options.items()}
    return case


@pytest.mark.anywhere
@pytest.mark.parametrize("name", CALLS)
def test_operators_and_whole_graphs_leave_the_bytes_of_the_reference(name, device):
    case = to(build(CALLS[name], device), device)
    check(case, prefill)
    check(case, torch.compile(decode_rope.rope_append_prefill, fullgraph=True, backend="aot_eager"))


@pytest.mark.anywhere
def test_live_k_without_a_cache_in_a_graph(device):
    case = build(GOOD.but(k_out="k"), device)
    want = case.clone()
    arguments = dict(q="q", k="k", v=None, k_cache=None, v_cache=None, cos_sin_cache="cos_sin_cache", positions="positions")

    def call(case: Case, function) -> None:
        function(**{name: None if value is None else case[value] for name, value in arguments.items()}, k_out=case["k"])

    call(want, reference.rope_append_prefill)
    call(case, torch.compile(decode_rope.rope_append_prefill, fullgraph=True, backend="aot_eager"))
    assert_same_storages(case, want)


def test_several_axes_in_a_graph(device):
    table = decode_rope.RopeTable.build(16, 64, device=device)
    axis_map = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1], dtype=torch.int8, device=device)
    positions = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], device=device)
    q, k = torch.randn(2, 3, 4, 16, device=device)
    outs = []
    for function in (decode_rope.rope_append_prefill, torch.compile(decode_rope.rope_append_prefill, fullgraph=True)):
        live = k.clone()
        q_out = function(q.clone(), live, None, None, None, table, positions, axis_map=axis_map, k_out=live)
        outs.append((q_out, live))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


@inductor
def test_no_copy_of_a_cache_and_one_graph_for_all_lengths(device, monkeypatch):
    """K and V are slices of one cache made in the graph; the operator gets their own memory."""
    table = decode_rope.RopeTable.build(16, 64, device=device)
    kv = torch.zeros(2, 8, 4, 2, 16, device=device)
    places = []

    def layer(x, kv, positions, slots):
        q, k, v = (x * 2).view(-1, 7, 16).split([3, 2, 2], dim=1)
        return decode_rope.rope_append_prefill(q, k, v, kv[0], kv[1], table, positions, slot_mapping=slots) + 1

    torch._dynamo.config.error_on_recompile = True
    try:
        compiled = torch.compile(layer, fullgraph=True)
        for tokens in (5, 9, 3):
            x, positions = torch.randn(tokens, 7 * 16, device=device), torch.arange(tokens, device=device)
            slots, want = torch.arange(tokens, device=device) + 11, kv.clone()
            for per_token in (x, positions, slots):
                torch._dynamo.mark_dynamic(per_token, 0)
            expected = layer(x, want, positions, slots)
            with monkeypatch.context() as patch:
                spy_on(patch, "rope_append_prefill", lambda call: places.append((call.k_cache.data_ptr(), call.v_cache.data_ptr())))
                got = compiled(x, kv, positions, slots)
            assert torch.equal(got, expected) and torch.equal(kv, want)
    finally:
        torch._dynamo.config.error_on_recompile = False
    assert set(places) == {(kv[0].data_ptr(), kv[1].data_ptr())} and len(places) == 3


def test_errors_are_those_of_eager_calls(device):
    case = to(build(RAGGED, device), device)
    before = case.clone()
    bad = case.arguments() | {"positions": case["positions"].float()}
    with pytest.raises(TypeError, match=r"^positions: expected int32 or int64"):
        torch.compile(decode_rope.rope_append_prefill, backend="aot_eager")(**bad)
    with pytest.raises(ValueError, match=r"^q: expected a tensor that needs no gradient"):
        torch.compile(decode_rope.rope_append_prefill, backend="aot_eager")(
            **case.arguments() | {"q": case["q"].clone().requires_grad_()}
        )
    assert_same_storages(case, before)
