"""Bad arguments: the exception and its words, for every `raise` of the checks; nothing is launched and no byte changes."""

import ast
import inspect
import traceback
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import Case, Spec, assert_same_storages, build

import decode_rope
from decode_rope import checks, dispatch
from decode_rope.append.faults import fault_buffer

GOOD = Spec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)
SLOTS = GOOD.but(block_table=None, slots=[3, 5, 7])
OUTPUTS = GOOD.but(q_out=True, k_out="own")
PLACED = GOOD.but(cache_positions=[1, 3, 6])
ONLY_Q = GOOD.but(block_table=None, heads=(3, 0))


class Bad(NamedTuple):
    """A valid call, and the arguments that spoil it, made from its case."""

    error: type[Exception]
    words: str  # the message begins so
    change: Callable[[Case], dict]
    spec: Spec = GOOD


def to(name: str, *args, **kwargs):
    return lambda c: {name: c[name].to(*args, **kwargs)}


def give(**arguments):
    return lambda _: arguments


def view(name: str, change: Callable[[torch.Tensor], torch.Tensor]):
    return lambda c: {name: change(c[name])}


def half_way_into(name: str, other: str):
    """`name` as a tensor of its own shape, inside a memory that begins in the middle of `other`."""

    def change(c: Case) -> dict:
        memory = torch.zeros(c[other].numel() + c[name].numel(), dtype=c[name].dtype, device=c.device)
        start = c[other].numel() // 2
        found = {other: memory[: c[other].numel()].view(c[other].shape)}
        return found | {name: memory[start : start + c[name].numel()].view(c[name].shape)}

    return change


def columns_first(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with the last dimension strided."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


TABLE = {
    # flags
    "layout": Bad(ValueError, 'kv_layout: expected "NHD" or "HND", got \'NDH\'', give(kv_layout="NDH")),
    "pairing": Bad(TypeError, "is_neox: expected a bool, got int", give(is_neox=1)),
    "pdl": Bad(TypeError, "enable_pdl: expected None, True or False, got 'yes'", give(enable_pdl="yes")),
    "per request, bool": Bad(TypeError, "tokens_per_request: expected an int, got bool",
        give(tokens_per_request=True)),
    "per request, float": Bad(TypeError, "tokens_per_request: expected an int, got float",
        give(tokens_per_request=1.0)),
    "per request, 2^63": Bad(ValueError, "tokens_per_request: expected at least 1 and less than 2^63, got 9223372036854775808",
        give(tokens_per_request=2**63)),
    "per request, 0": Bad(ValueError, "tokens_per_request: expected at least 1 and less than 2^63, got 0",
        give(tokens_per_request=0)),
    # q, k, v
    "q, list": Bad(TypeError, "q: expected a torch.Tensor, got list", give(q=[1.0])),
    "k, array": Bad(TypeError, "k: expected a torch.Tensor, got ndarray",
        lambda c: {"k": c["k"].float().cpu().numpy()}),
    "q, double": Bad(TypeError, "q: expected dtype bfloat16, float16 or float32, got torch.float64",
        to("q", torch.float64)),
    "q, integers": Bad(TypeError, "q: expected dtype bfloat16", to("q", torch.int16)),
    "q, two dims": Bad(ValueError, "q: expected 3 dimensions [tokens, num_q_heads, head_dim], got",
        view("q", lambda q: q[:, 0])),
    "k, batch": Bad(ValueError, "k: expected 3 dimensions [tokens, num_kv_heads, head_dim], got",
        view("k", lambda k: k[None])),
    "q, no heads": Bad(ValueError, "q: expected at least one head", view("q", lambda q: q[:, :0])),
    "v, no elements": Bad(ValueError, "v: expected at least one head of at least one element",
        view("v", lambda v: v[..., :0])),
    "q, every other": Bad(ValueError, "q: expected a contiguous last dimension (stride 1)",
        view("q", lambda q: q[..., ::2])),
    "v, every other": Bad(ValueError, "v: expected a contiguous last dimension (stride 1)",
        view("v", lambda v: v[..., ::2])),
    "q, too many": Bad(ValueError, f"q: expected fewer than {2**28} tokens",
        view("q", lambda q: q[:1].expand(2**28, -1, -1))),
    "no k": Bad(ValueError, "k: expected k and v both given or both None", give(k=None)),
    "no v": Bad(ValueError, "v: expected k and v both given or both None", give(v=None)),
    "k, other dtype": Bad(TypeError, "k: expected the dtype of q, torch.bfloat16, got torch.float16",
        to("k", torch.float16)),
    "v, other dtype": Bad(TypeError, "v: expected the dtype of q, torch.bfloat16, got torch.float32",
        to("v", torch.float32)),
    "k, tokens": Bad(ValueError, "k: expected 3 tokens as in q, got 2", view("k", lambda k: k[:2])),
    "v, tokens": Bad(ValueError, "v: expected 3 tokens as in q, got 2", view("v", lambda v: v[:2])),
    "k, head_dim": Bad(ValueError, "k: expected head_dim 16 as in q, got 15", view("k", lambda k: k[..., :15])),
    "v, heads": Bad(ValueError, "v: expected 2 heads as in k, got 1", view("v", lambda v: v[:, :1])),
    # the rotary table
    "table, object": Bad(TypeError, "cos_sin_cache: expected a torch.Tensor, got object",
        give(cos_sin_cache=object())),
    "table, half": Bad(ValueError, "cos_sin_cache: expected float32, got torch.bfloat16",
        to("cos_sin_cache", torch.bfloat16)),
    "table, one dim": Bad(ValueError, "cos_sin_cache: expected [max_position, rotary_dim]",
        view("cos_sin_cache", lambda t: t[0])),
    "table, no rows": Bad(ValueError, "cos_sin_cache: expected [max_position, rotary_dim]",
        view("cos_sin_cache", lambda t: t[:0])),
    "table, odd": Bad(ValueError, "cos_sin_cache: expected an even rotary_dim of at most head_dim 16, got 15",
        view("cos_sin_cache", lambda t: t[:, :15].contiguous())),
    "table, wide": Bad(ValueError, "cos_sin_cache: expected an even rotary_dim of at most head_dim 16, got 32",
        view("cos_sin_cache", lambda t: torch.cat([t, t], 1))),
    "table, empty": Bad(ValueError, "cos_sin_cache: expected an even rotary_dim",
        view("cos_sin_cache", lambda t: t[:, :0])),
    "table, sliced": Bad(ValueError, "cos_sin_cache: expected a contiguous table",
        view("cos_sin_cache", lambda t: t[:, :8])),
    # positions
    "positions, list": Bad(TypeError, "positions: expected a torch.Tensor, got list", give(positions=[1, 2, 3])),
    "positions, int16": Bad(TypeError, "positions: expected int32 or int64, got torch.int16",
        to("positions", torch.int16)),
    "positions, float": Bad(TypeError, "positions: expected int32 or int64, got torch.float32",
        to("positions", torch.float32)),
    "positions, axes": Bad(ValueError, "positions: expected shape [3], got (3, 3)",
        view("positions", lambda p: p.expand(3, 3))),
    "positions, few": Bad(ValueError, "positions: expected shape [3], one per token of q, got (2,)",
        view("positions", lambda p: p[:2])),
    "positions, many": Bad(ValueError, "positions: expected shape [3]",
        view("positions", lambda p: torch.cat([p, p]))),
    "positions, scalar": Bad(ValueError, "positions: expected shape [3]", view("positions", lambda p: p[0])),
    "positions, stride": Bad(ValueError, "positions: expected stride 1, got 2",
        view("positions", lambda p: torch.cat([p, p])[::2])),
    # without k and v
    "only q, table": Bad(ValueError, "block_table: expected None, because k and v are None",
        lambda c: {"block_table": c["positions"].view(3, 1)}, ONLY_Q),
    "only q, slots": Bad(ValueError, "slot_mapping: expected None",
        lambda c: {"slot_mapping": c["positions"]}, ONLY_Q),
    "only q, places": Bad(ValueError, "cache_positions: expected None",
        lambda c: {"cache_positions": c["positions"]}, ONLY_Q),
    "only q, k_out": Bad(ValueError, "k_out: expected None", lambda c: {"k_out": torch.empty_like(c["q"])}, ONLY_Q),
    "only q, k_cache": Bad(TypeError, "k_cache: expected a torch.Tensor, got tuple", give(k_cache=()), ONLY_Q),
    # caches
    "k_cache, None": Bad(TypeError, "k_cache: expected a torch.Tensor, got NoneType", give(k_cache=None)),
    "v_cache, tuple": Bad(TypeError, "v_cache: expected a torch.Tensor, got tuple", give(v_cache=())),
    "k_cache, fp16": Bad(TypeError, "k_cache: expected the dtype of k, torch.bfloat16, got torch.float16",
        to("k_cache", torch.float16)),
    "v_cache, bytes": Bad(TypeError, "v_cache: expected the dtype of v", to("v_cache", torch.uint8)),
    "k_cache, both": Bad(ValueError, "k_cache: expected 4 dimensions (NHD) or a flat [slots, num_kv_heads, head_dim]",
        view("k_cache", lambda x: x[None])),
    "v_cache, rows": Bad(ValueError, "v_cache: expected 4 dimensions (NHD) or a flat",
        view("v_cache", lambda x: x[0, 0])),
    "k_cache, HND": Bad(ValueError, "k_cache: expected 2 heads of 16 as in k, got 4 of 16", give(kv_layout="HND")),
    "v_cache, width": Bad(ValueError, "v_cache: expected 2 heads of 8 as in v, got 2 of 7",
        view("v_cache", lambda x: x[..., :7])),
    "k_cache, no page": Bad(ValueError, "k_cache: expected a page_size of at least 1",
        view("k_cache", lambda x: x[:, :0])),
    "v_cache, every other": Bad(ValueError, "v_cache: expected a contiguous last dimension",
        lambda c: {"v_cache": c["k_cache"][..., ::2]}),
    "v_cache, pages": Bad(ValueError, "v_cache: expected 8 pages of 4 tokens as in k_cache, got 7 of 4",
        view("v_cache", lambda x: x[1:])),
    "v_cache, page size": Bad(ValueError, "v_cache: expected 8 pages of 4 tokens as in k_cache, got 8 of 3",
        view("v_cache", lambda x: x[:, 1:])),
    # block table and slots
    "no index": Bad(ValueError, "block_table, slot_mapping: expected exactly one of them, got neither",
        give(block_table=None)),
    "two indices": Bad(ValueError, "block_table, slot_mapping: expected exactly one of them, got both",
        lambda c: {"slot_mapping": c["positions"].clone()}),
    "block_table, list": Bad(TypeError, "block_table: expected a torch.Tensor, got list",
        give(block_table=[[1], [2], [3]])),
    "block_table, int16": Bad(TypeError, "block_table: expected int32 or int64, got torch.int16",
        to("block_table", torch.int16)),
    "block_table, reach": Bad(ValueError, "block_table: expected fewer than 2^63 places a row, got 8388608 columns of pages of 109",
        lambda c: {name: c[name].new_empty(0, 2**40, *c[name].shape[2:]) for name in ("k_cache", "v_cache")}
        | {"block_table": c["block_table"].new_empty(3, 2**23)}),
    "block_table, flat": Bad(ValueError, "block_table: expected [requests, max_pages] with at least 3 rows",
        view("block_table", lambda t: t[:, 0])),
    "block_table, rows": Bad(ValueError, "block_table: expected [requests, max_pages] with at least 3 rows",
        view("block_table", lambda t: t[:2])),
    "block_table, per request": Bad(ValueError, "block_table: expected [requests, max_pages] with at least 2 rows for 3 tokens",
        lambda c: {"block_table": c["block_table"][:1], "tokens_per_request": 2}),
    "block_table, columns": Bad(ValueError, "block_table: expected a contiguous last dimension",
        view("block_table", columns_first)),
    "slots, float": Bad(TypeError, "slot_mapping: expected int32 or int64, got torch.float32",
        to("slot_mapping", torch.float32), SLOTS),
    "slots, many": Bad(ValueError, "slot_mapping: expected 1 dimension of at most 3 slots, got shape (4,)",
        view("slot_mapping", lambda s: torch.cat([s, s[:1]])), SLOTS),
    "slots, two dims": Bad(ValueError, "slot_mapping: expected 1 dimension of at most 3 slots",
        view("slot_mapping", lambda s: s[None]), SLOTS),
    "slots, stride": Bad(ValueError, "slot_mapping: expected stride 1, got 2",
        view("slot_mapping", lambda s: torch.cat([s, s])[::2]), SLOTS),
    "slots, places": Bad(ValueError, "cache_positions: expected None with slot_mapping",
        lambda c: {"cache_positions": c["positions"].clone()}, SLOTS),
    "places, int8": Bad(TypeError, "cache_positions: expected int32 or int64",
        to("cache_positions", torch.int8), PLACED),
    "places, few": Bad(ValueError, "cache_positions: expected shape [3]",
        view("cache_positions", lambda p: p[:1]), PLACED),
    "places, axes": Bad(ValueError, "cache_positions: expected shape [3], got (1, 3)",
        view("cache_positions", lambda p: p[None]), PLACED),
    # outputs
    "q_out, list": Bad(TypeError, "q_out: expected a torch.Tensor, got list", give(q_out=[]), OUTPUTS),
    "q_out, dtype": Bad(TypeError, "q_out: expected the dtype of q, torch.bfloat16, got torch.float32",
        to("q_out", torch.float32), OUTPUTS),
    "k_out, dtype": Bad(TypeError, "k_out: expected the dtype of k", to("k_out", torch.float16), OUTPUTS),
    "q_out, shape": Bad(ValueError, "q_out: expected shape (3, 3, 16) as q, got (3, 2, 16)",
        view("q_out", lambda x: x[:, :2]), OUTPUTS),
    "k_out, shape": Bad(ValueError, "k_out: expected shape (3, 2, 16) as k, got (2, 2, 16)",
        view("k_out", lambda x: x[:2]), OUTPUTS),
    "k_out, columns": Bad(ValueError, "k_out: expected a contiguous last dimension",
        view("k_out", columns_first), OUTPUTS),
    # devices and gradients
    "device of q": Bad(ValueError, "q: expected device cuda or cpu", to("q", "meta")),
    "device of positions": Bad(ValueError, "positions: expected device", to("positions", "meta")),
    "device of v_cache": Bad(ValueError, "v_cache: expected device", to("v_cache", "meta")),
    "device of the index": Bad(ValueError, "block_table: expected device", to("block_table", "meta")),
    "grad of q": Bad(ValueError, "q: expected a tensor that needs no gradient",
        view("q", lambda q: q.clone().requires_grad_())),
    "grad of k_cache": Bad(ValueError, "k_cache: expected a tensor that needs no",
        view("k_cache", lambda q: q.clone().requires_grad_())),
    # shared memory
    "q, expanded": Bad(ValueError, "q: expected every element at its own address",
        view("q", lambda q: q[:, :1].expand(-1, 3, -1))),
    "k_cache, expanded": Bad(ValueError, "k_cache: expected every element at its own",
        view("k_cache", lambda x: x[:1].expand(8, -1, -1, -1))),
    "k_out, expanded": Bad(ValueError, "k_out: expected every element at its own",
        view("k_out", lambda x: x[:1].expand(3, -1, -1)), OUTPUTS),
    "q is k": Bad(ValueError, "q: expected memory of its own, got memory shared with k",
        lambda c: {"k": c["q"][:, :2]}),
    "q is v": Bad(ValueError, "q: expected memory of its own, got memory shared with v",
        lambda c: {"v": c["q"][:, 1:, :8]}),
    "q in k_cache": Bad(ValueError, "q: expected memory of its own, got memory shared with k_cache",
        lambda c: {"q": c["k_cache"].view(-1, 1, 16)[:9].view(3, 3, 16)}),
    "one cache": Bad(ValueError, "k_cache: expected memory of its own, got memory shared with v_cache",
        lambda c: {"v_cache": c["k_cache"][..., :8]}),
    "k in k_cache": Bad(ValueError, "k_cache: expected memory of its own, got memory shared with k",
        lambda c: {"k": c["k_cache"].view(-1, 2, 16)[4:7]}),
    "k_out is v": Bad(ValueError, "k_out: expected memory of its own, got memory shared with v",
        lambda c: {"v": c["k_out"]}, OUTPUTS.but(v_head_dim=16)),
    "k_out is k is v": Bad(ValueError, "k_out: expected memory of its own, got memory shared with v",
        lambda c: {"k_out": c["k"], "v": c["k"]}, OUTPUTS.but(v_head_dim=16)),
    "q_out is k": Bad(ValueError, "q_out: expected memory of its own, got memory shared with k",
        lambda c: {"q_out": c["k"], "k_out": None},
        OUTPUTS.but(heads=(2, 2))),
    "q_out, one row on": Bad(ValueError, "q_out: expected memory of its own, got memory shared with q",
        lambda c: (lambda m: {"q": m[:3], "q_out": m[1:]})(torch.cat([c["q"], c["q"][:1]])), OUTPUTS),
    "k_out is q_out": Bad(ValueError, "q_out: expected memory of its own, got memory shared with k_out",
        lambda c: {"k_out": c["q_out"]},
        OUTPUTS.but(heads=(2, 2))),
    "k half way into q": Bad(ValueError, "q: expected memory of its own, got memory shared with k",
        half_way_into("k", "q")),
    "caches half way": Bad(ValueError, "k_cache: expected memory of its own", half_way_into("v_cache", "k_cache")),
    "table in k_cache": Bad(ValueError, "k_cache: expected memory of its own, got memory shared with cos_sin_cache",
        lambda c: {"cos_sin_cache": c["k_cache"].view(-1).view(torch.float32)[:256].view(16, 16)}),
    "slots in k_cache": Bad(ValueError, "k_cache: expected memory of its own, got memory shared with slot_mapping",
        lambda c: {"slot_mapping": c["k_cache"].view(-1).view(torch.int32)[:3]}, SLOTS),
}  # fmt: skip


def raise_lines(module) -> set[int]:
    """Where a module raises."""
    return {node.lineno for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Raise)}


def raised_on(error: BaseException, module) -> int | None:
    """The line of a module that raised an error."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == module.__file__]
    return lines[-1] if lines else None


def snapshot(arguments: dict) -> list[torch.Tensor]:
    """Copies of all bytes behind the tensors of a call."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.device.type != "meta"]
    return [torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone() for x in tensors]


def refused(bad: Bad, device, warm: bool) -> BaseException:
    """Make the bad call; the error it raised, after a look at its words and at every byte it could have changed."""
    case = build(bad.spec, device)
    if warm:
        for _ in range(2):
            decode_rope.rope_append_decode(**case.clone().arguments())
    arguments = case.arguments() | bad.change(case)
    before, faults = snapshot(arguments), fault_buffer(device).clone()
    with pytest.raises(bad.error) as info:
        decode_rope.rope_append_decode(**arguments)
    assert type(info.value) is bad.error
    assert str(info.value).startswith(bad.words), str(info.value)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(arguments), before, strict=True))
    assert torch.equal(fault_buffer(device), faults)
    return info.value


@pytest.mark.anywhere
@pytest.mark.parametrize("name", TABLE)
def test_bad_argument(name, device):
    refused(TABLE[name], device, warm=False)


@pytest.mark.kernel
@pytest.mark.parametrize("name", TABLE)
def test_bad_argument_after_good_calls(name, device):
    """A plan for the good call exists, and must not take the bad one."""
    refused(TABLE[name], device, warm=True)


@pytest.mark.anywhere
@pytest.mark.parametrize("name", ["table", "slots", "outputs", "places", "only q"])
def test_the_good_calls_are_good(name, device):
    spec = {"table": GOOD, "slots": SLOTS, "outputs": OUTPUTS, "places": PLACED, "only q": ONLY_Q}[name]
    case = build(spec, device)
    before = case.clone()
    decode_rope.rope_append_decode(**case.arguments())
    with pytest.raises(AssertionError):
        assert_same_storages(case, before)


def test_every_raise_of_the_checks_is_in_the_table():
    lines = set()
    for bad in TABLE.values():
        case = build(bad.spec, "cpu")
        try:
            decode_rope.rope_append_decode(**case.arguments() | bad.change(case))
        except (TypeError, ValueError) as error:
            lines.add(raised_on(error, checks))
    assert raise_lines(checks) <= lines, "a check without a bad argument in TABLE"


def test_pdl_needs_compute_capability_9(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match="enable_pdl: expected None or False on Some GPU"):
        dispatch.check_pdl(True, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    dispatch.check_pdl(True, torch.device("cuda:0"))


@pytest.mark.anywhere
def test_a_tensor_that_needs_a_gradient_is_fine_without_gradients(device):
    case = build(GOOD, device)
    with torch.no_grad():
        decode_rope.rope_append_decode(**case.arguments() | {"q": case["q"].clone().requires_grad_()})
