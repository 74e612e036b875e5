"""How a call finds its plan: the first call makes one, and every later call of the configuration takes that one."""

import pytest
import torch
from bad import GOOD
from cases import build, call_arguments, prepare
from lanes import INTERPRETED
from ragged import ragged
from ways import SPECS

import decode_rope
from decode_rope.api.functions import DECODE_CALLS, PREFILL_CALLS
from decode_rope.append.arguments import Append, resolved
from decode_rope.launch.book import Book, identify
from decode_rope.launch.decode import DECODE
from decode_rope.launch.rope import BOOK

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")


def plans_of(book: Book) -> list:
    return list(book._plans.values())


@pytest.mark.parametrize("name", SPECS)
def test_calls_of_one_configuration_share_a_plan(name, fake_driver):
    """The usual call, which is told apart from others in a shorter way, and the others; first, repeated, and on other memory."""
    case = build(SPECS[name], "cpu")
    for one in (case, case, case.clone(), case.clone(), case):
        decode_rope.rope_append_decode(**one.arguments())
        assert len(plans_of(DECODE_CALLS)) == 1
    (plan,) = plans_of(DECODE_CALLS)
    assert DECODE_CALLS._recent == [plan] and len(fake_driver.launches) == 5


@pytest.mark.parametrize("name", ["table", "slots", "unaligned"])
def test_the_short_way_of_a_usual_call_finds_the_plan_of_its_first_call(name, fake_driver, monkeypatch):
    """No second plan, and no second look at the call: with the flags that the function gives, the book finds what it has kept."""
    asked, case = [], build(SPECS[name], "cpu")
    find, run_keyed = DECODE_CALLS.find, DECODE_CALLS.run_keyed
    monkeypatch.setattr(DECODE_CALLS, "find", lambda *key: asked.append((key, find(*key))) or asked[-1][1])
    monkeypatch.setattr(DECODE_CALLS, "run_keyed", lambda call, *key: asked.append((key, "run")) or run_keyed(call, *key))
    for _ in range(3):
        decode_rope.rope_append_decode(**case.arguments())
    (plan,) = plans_of(DECODE_CALLS)
    first, ran, again, second, third = asked
    assert first[1] is None and ran[1] == "run" and again[1] is None
    assert second[1] is plan and third[1] is plan
    assert first[0][0] == ran[0][0] == second[0][0] == third[0][0] == plan.flags
    assert all(one is other for one, other in zip(first[0][1], ran[0][1], strict=True))


def test_a_plan_found_by_key_is_the_one_found_by_guard(fake_driver):
    """`_recent` keeps four; the fifth configuration pushes the first one out, which is then found among all."""
    cases = [build(GOOD.but(num_pages=7 + n), "cpu") for n in range(6)]
    for case in cases:
        decode_rope.rope_append_decode(**case.arguments())
    plans = plans_of(DECODE_CALLS)
    assert len(plans) == 6 and len(DECODE_CALLS._recent) == 4 and plans[0] not in DECODE_CALLS._recent
    decode_rope.rope_append_decode(**cases[0].arguments())
    assert plans_of(DECODE_CALLS) == plans and DECODE_CALLS._recent[0] is plans[0]


def test_run_keyed_after_find_makes_no_second_plan(fake_driver):
    book, call = Book(DECODE), resolved(Append(**build(GOOD, "cpu").arguments()))
    flags, given = identify(call, len(Append.ROLES))
    assert book.find(flags, given) is None
    book.run_keyed(call, flags, given)
    plan = book.find(flags, given)
    assert plan is not None and plans_of(book) == [plan]
    book.run_keyed(call, flags, given)
    book.run(call)
    assert plans_of(book) == [plan] and book.find(flags, given) is plan


def test_prefills_rotations_and_ops_keep_one_plan_each_too(fake_driver):
    case, x, table = ragged("cpu"), torch.ones(5, 3, 32), torch.ones(8, 32)
    one = build(GOOD, "cpu")
    op = prepare(one)
    for _ in range(3):
        decode_rope.rope_append_prefill(**case.arguments())
        decode_rope.apply_rope(x, table, out=x)
        op(**call_arguments(one))
    assert len(plans_of(PREFILL_CALLS)) == len(plans_of(BOOK)) == len(plans_of(op._calls)) == 1


def test_flags_of_another_type_are_another_call(fake_driver):
    """1 is True to Python, and the checks refuse it."""
    case = build(GOOD, "cpu")
    good = case.arguments() | {"enable_pdl": False}
    for function, book in ((decode_rope.rope_append_decode, DECODE_CALLS), (decode_rope.rope_append_prefill, PREFILL_CALLS)):
        function(**good)
        for changes in ({"is_neox": 1}, {"tokens_per_request": True}, {"tokens_per_request": 1.0}, {"enable_pdl": 0}):
            with pytest.raises(TypeError):
                function(**good | changes)
        assert len(plans_of(book)) == 1


def test_a_call_may_be_given_as_fields(fake_driver):
    """Plain ones find the plan of a record, and the other way round."""
    book, call = Book(DECODE), resolved(Append(**build(GOOD, "cpu").arguments()))
    for fields in (call, tuple(call), call):
        book.run(fields)
    assert len(plans_of(book)) == 1 and len(fake_driver.launches) == 3


def test_the_reference_needs_no_plan():
    book, case = Book(DECODE), build(GOOD, "cpu")
    book.run(resolved(Append(**case.arguments())))
    assert not plans_of(book) and not book._recent
