"""Bad arguments: the exception and its words, for every `raise` of the checks; nothing is launched and no byte changes."""

import ast
import inspect
import traceback
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from bad import GOOD, ONLY_Q, Bad
from cases import assert_same_storages, build, moved
from ragged import ragged
from refused import DECODE, OUTPUTS, PLACED, PREFILL, ROPE, SLOTS, X
from refused_options import BAD as OPTIONS
from refused_options import arguments as arguments_of

import decode_rope
from decode_rope.append import checks, rules
from decode_rope.append.faults import fault_buffer
from decode_rope.launch import platform


def decode_arguments(bad: Bad, device, spoilt: bool = True) -> dict:
    case = build(bad.spec, device)
    return case.arguments() | (bad.change(case) if spoilt else {})


def prefill_arguments(bad: Bad, device, spoilt: bool = True) -> dict:
    case = ragged(device)
    memories = {}
    changes = {name: moved(x, device, memories) for name, x in bad.change(case).items()}
    return case.arguments() | (changes if spoilt else {})


def rope_arguments(bad: Bad, device, spoilt: bool = True) -> dict:
    good = {"x": torch.ones(X, device=device), "cos_sin_cache": torch.ones(32, 32, device=device)}
    memories = {}
    changes = {name: moved(x, device, memories) for name, x in bad.change(None).items()}
    return good | (changes if spoilt else {})


def snapshot(arguments: dict) -> list[torch.Tensor]:
    """Copies of all bytes behind the tensors of a call."""
    tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor) and x.device.type != "meta"]
    return [torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage()).clone() for x in tensors]


def refused(function: Callable, arguments: dict, bad: Bad, device) -> BaseException:
    """Make the bad call; the error it raised, after a look at its words and at every byte it could have changed."""
    before, faults = snapshot(arguments), fault_buffer(device).clone()
    with pytest.raises(bad.error) as info:
        function(**arguments)
    assert type(info.value) is bad.error
    assert str(info.value).startswith(bad.words), str(info.value)
    assert all(torch.equal(a, b) for a, b in zip(snapshot(arguments), before, strict=True))
    assert torch.equal(fault_buffer(device), faults)
    return info.value


any_prefill = pytest.mark.parametrize("bad", PREFILL, ids=[bad.words for bad in PREFILL])
any_rotation = pytest.mark.parametrize("bad", ROPE, ids=[bad.words for bad in ROPE])


@pytest.mark.anywhere
@pytest.mark.parametrize("name", DECODE)
def test_bad_argument(name, device):
    bad = DECODE[name]
    refused(decode_rope.rope_append_decode, decode_arguments(bad, device), bad, device)


@pytest.mark.anywhere
@any_prefill
def test_bad_argument_of_a_prefill(bad, device):
    refused(decode_rope.rope_append_prefill, prefill_arguments(bad, device), bad, device)


@pytest.mark.anywhere
@any_rotation
def test_bad_argument_of_a_rotation(bad, device):
    refused(decode_rope.apply_rope, rope_arguments(bad, device), bad, device)


@pytest.mark.kernel
@pytest.mark.parametrize("name", DECODE)
def test_bad_argument_after_good_calls(name, device):
    """A plan for the good call exists, and must not take the bad one."""
    bad = DECODE[name]
    for _ in range(2):
        decode_rope.rope_append_decode(**decode_arguments(bad, device, spoilt=False))
    refused(decode_rope.rope_append_decode, decode_arguments(bad, device), bad, device)


@pytest.mark.kernel
def test_bad_arguments_after_good_calls_of_a_prefill(device):
    for _ in range(2):
        decode_rope.rope_append_prefill(**prefill_arguments(PREFILL[0], device, spoilt=False))
    for bad in PREFILL:
        refused(decode_rope.rope_append_prefill, prefill_arguments(bad, device), bad, device)


@pytest.mark.kernel
def test_bad_arguments_after_good_calls_of_a_rotation(device):
    for _ in range(2):
        decode_rope.apply_rope(**rope_arguments(ROPE[0], device, spoilt=False))
    for bad in ROPE:
        refused(decode_rope.apply_rope, rope_arguments(bad, device), bad, device)


@pytest.mark.anywhere
@pytest.mark.parametrize("name", ["table", "slots", "outputs", "places", "only q"])
def test_the_good_calls_are_good(name, device):
    spec = {"table": GOOD, "slots": SLOTS, "outputs": OUTPUTS, "places": PLACED, "only q": ONLY_Q}[name]
    case = build(spec, device)
    before = case.clone()
    decode_rope.rope_append_decode(**case.arguments())
    with pytest.raises(AssertionError):
        assert_same_storages(case, before)


def raise_lines(module: ModuleType) -> set[tuple[str, int]]:
    """Where a module raises."""
    tree = ast.parse(inspect.getsource(module))
    return {(module.__name__, node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Raise)}


def raised_on(error: BaseException) -> tuple[str, int]:
    """The line that raised an error."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    return frame.f_globals["__name__"], line


def test_every_raise_of_the_checks_and_rules_has_a_bad_call():
    cpu = torch.device("cpu")
    calls = [(decode_rope.rope_append_decode, decode_arguments(bad, cpu), bad) for bad in DECODE.values()]
    calls += [(decode_rope.rope_append_prefill, prefill_arguments(bad, cpu), bad) for bad in PREFILL]
    calls += [(decode_rope.apply_rope, rope_arguments(bad, cpu), bad) for bad in ROPE]
    calls += [(decode_rope.rope_append_prefill, arguments_of(*bad[2:]), Bad(bad[0], bad[1], None)) for bad in OPTIONS]
    lines = set()
    for function, arguments, bad in calls:
        try:
            function(**arguments)
        except bad.error as error:
            lines.add(raised_on(error))
    assert raise_lines(checks) | raise_lines(rules) <= lines, "a check without a bad call"


def test_pdl_needs_compute_capability_9(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ValueError, match="enable_pdl: expected None or False on Some GPU"):
        platform.check_pdl(True, torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    platform.check_pdl(True, torch.device("cuda:0"))


@pytest.mark.anywhere
def test_a_tensor_that_needs_a_gradient_is_fine_without_gradients(device):
    case = build(GOOD, device)
    with torch.no_grad():
        decode_rope.rope_append_decode(**case.arguments() | {"q": case["q"].clone().requires_grad_()})
