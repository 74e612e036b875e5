"""The ways to make one call again and again on the same buffers, and what it means that they work."""

from collections.abc import Callable

from cases import Case, assert_same_storages, call_arguments, prepare, run_reference

import decode_rope


def function_of(case: Case) -> Callable:
    return lambda: decode_rope.rope_append_decode(**case.arguments())


def op_of(case: Case) -> Callable:
    op = prepare(case)
    return lambda: op(**call_arguments(case))


def bound_of(case: Case) -> Callable:
    op, launches = prepare(case), []

    def call():
        if not launches:
            launches.append(op.bind(**call_arguments(case)))
        return launches[0]()

    return call


WAYS = {"function": function_of, "DecodeRope": op_of, "bound": bound_of}


def reset(case: Case, start: Case) -> None:
    for name, storage in case.storages.items():
        storage.copy_(start.storages[name])


def works(call: Callable, case: Case, start: Case, times: int = 3) -> None:
    """Every one of some calls, the first, the second and the packed ones, leaves what the reference leaves."""
    want = run_reference(start.clone())
    for _ in range(times):
        reset(case, start)
        assert call() is case.returned
        assert_same_storages(case, want)
