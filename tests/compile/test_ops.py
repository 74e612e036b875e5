"""The operators behind torch.compile: their schemas say what they write, and they do what eager calls do."""

import gc
import re
from collections.abc import Callable

import pytest
import torch
from cases import Case, Spec, assert_same_storages, build, call_arguments, check, prepare
from lanes import ON_GPU
from random_cases import CPU_SIZES, GPU_SIZES, random_spec
from torch.utils._python_dispatch import TorchDispatchMode

import decode_rope
from decode_rope import faults, operators, ops

anywhere = pytest.mark.anywhere
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
def fresh_dynamo():
    """No graph of another test is taken for this one's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operator_call(**arguments) -> torch.Tensor:
    """What a compiled graph does, without a compiler."""
    absent = dict.fromkeys(("block_table", "slot_mapping", "cache_positions", "q_out", "k_out", "enable_pdl"))
    return ops.rope_append_decode(**(absent | arguments))


class Recorder(TorchDispatchMode):
    """Keeps the calls of this package's operators instead of running them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "decode_rope":
            return func(*args, **(kwargs or {}))
        self.calls.append((func, args))


def recorded(function: Callable, case: Case) -> list[tuple]:
    with Recorder() as recorder:
        function(**case.arguments())
    return recorder.calls


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name, device):
    """PyTorch's own checks: what a schema does not say is written is not; compilers see what runs; dynamic shapes."""
    case = build(CALLS[name], device)
    ((operator, arguments),) = recorded(operator_call, case)
    outcome = torch.library.opcheck(operator, arguments)
    assert set(outcome) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
    assert set(outcome.values()) == {"SUCCESS"}


def test_every_operator_is_checked():
    used = {recorded(operator_call, build(spec, "cpu"))[0][0] for spec in CALLS.values()}
    assert used == {operator for operator, _ in ops._OPERATORS.values()}
    assert all(re.fullmatch(r"decode_rope::rope_append_decode_v\d+\w*", operator.name()) for operator in used)


def test_q_itself_as_q_out_is_in_place():
    case = build(GOOD, "cpu")
    ((operator, _),) = recorded(lambda **arguments: operator_call(**arguments, q_out=case["q"]), case)
    assert operator is ops._OPERATORS[True, False][0]


@anywhere
@pytest.mark.parametrize("seed", range(2000, 2150 if ON_GPU else 2020))
def test_operators_leave_the_bits_of_the_reference(seed, device):
    case = build(random_spec(seed, GPU_SIZES if ON_GPU else CPU_SIZES), device)
    check(case, operator_call)
    check(case, operator_call)


@anywhere
def test_calls_that_differ_in_flags_alone(device):
    """Tensors of the same shapes and strides, one after the other."""
    square = GOOD.but(page_size=2, v_head_dim=16)  # as many tokens a page as heads
    for changes in ({}, dict(is_neox=False), dict(cache="HND"), dict(tokens_per_request=2), dict(cache="HND", is_neox=False)):
        check(build(square.but(**changes), device), operator_call)


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
    before = len(operators._WRITTEN)
    for _ in range(3):
        torch.compile(decode_rope.rope_append_decode, fullgraph=True, backend="aot_eager")(**whole)
        assert len(operators._WRITTEN) > before
        torch._dynamo.reset()
        gc.collect()
    assert len(operators._WRITTEN) <= before + 1


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
