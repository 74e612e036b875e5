"""The operators behind torch.compile: their schemas say what they write, and they do what eager calls do."""

import gc
import re
from weakref import WeakSet

import pytest
import torch
from bad import GOOD, ONLY_Q
from cases import assert_same_storages, build, call_arguments, check, prepare
from compilers import Recorder, operator_call, recorded
from lanes import ON_GPU
from random_cases import CPU_SIZES, GPU_SIZES, random_spec

import decode_rope
from decode_rope.append import faults
from decode_rope.compile import append, operators

anywhere = pytest.mark.anywhere
decode = operator_call("rope_append_decode")
CALLS = {
    "in place": GOOD,
    "slots, HND": GOOD.but(block_table=None, slots=[3, 5, -1], cache="HND", is_neox=False),
    "no rotation": GOOD.but(rotary_dim=0, cache_positions=[1, 3, 6]),
    "k_out": GOOD.but(k_out="own", positions=[1, -1, 6]),
    "k in place": GOOD.but(k_out="k", activations="packed"),
    "q_out": GOOD.but(q_out=True),
    "q_out, k_out": GOOD.but(q_out=True, k_out="own", tokens_per_request=2),
    "q_out, k in place": GOOD.but(q_out=True, k_out="k"),
    "q only": ONLY_Q,
    "q only, q_out": ONLY_Q.but(q_out=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    """PyTorch's own checks: what a schema does not say is written is not; compilers see what runs; dynamic shapes."""
    case = build(CALLS[name], device)
    ((operator, arguments),) = recorded(decode, **case.arguments())
    outcome = torch.library.opcheck(operator, arguments)
    assert set(outcome) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert set(outcome.values()) == {"SUCCESS"}


def test_every_operator_is_checked():
    used = {recorded(decode, **build(spec, "cpu").arguments())[0][0] for spec in CALLS.values()}
    assert used == {operator for (function, _), (operator, _) in append.OPERATORS.items() if function == "rope_append_decode"}
    assert all(re.fullmatch(r"decode_rope::rope_append_decode_v\d+\w*", operator.name()) for operator in used)


def test_q_itself_as_q_out_is_in_place():
    case = build(GOOD, "cpu")
    ((operator, _),) = recorded(decode, **case.arguments(), q_out=case["q"])
    assert operator is append.OPERATORS["rope_append_decode", (True, False)][0]


@anywhere
@pytest.mark.parametrize("seed", range(2000, 2150 if ON_GPU else 2020))
def test_operators_leave_the_bits_of_the_reference(seed, device):
    case = build(random_spec(seed, GPU_SIZES if ON_GPU else CPU_SIZES), device)
    check(case, decode)
    check(case, decode)


@anywhere
def test_calls_that_differ_in_flags_alone(device):
    """Tensors of the same shapes and strides, one after the other."""
    square = GOOD.but(page_size=2, v_head_dim=16)  # as many tokens a page as heads
    for changes in ({}, dict(is_neox=False), dict(cache="HND"), dict(tokens_per_request=2), dict(cache="HND", is_neox=False)):
        check(build(square.but(**changes), device), decode)


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


def test_traces_are_forgotten_with_their_graphs():
    """PyTorch keeps the last one, and all those whose inputs are views: hence plain tensors here."""
    whole = {name: x.clone() for name, x in build(GOOD, "cpu").arguments().items() if isinstance(x, torch.Tensor)}
    of_other_tests = WeakSet(operators._WRITTEN)

    def own() -> int:
        return sum(trace not in of_other_tests for trace in operators._WRITTEN)

    for calls in (1, 2, 2, 2):
        torch.compile(decode_rope.rope_append_decode, fullgraph=True, backend="aot_eager")(**whole)
        assert own() == calls  # this one, and the last one
        torch._dynamo.reset()
        gc.collect()
        assert own() == 1


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
