"""The ways to make one call again and again on the same buffers, and what it means that they work."""

from collections.abc import Callable

import pytest
import torch
from cases import Case, Spec, assert_same_storages, call_arguments, prepare, run_reference

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


TABLE = Spec([1, 3, -1, 6], [[1, 2], [3, 4], [0, 0], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)
SPECS = {
    "table": TABLE,
    "slots": TABLE.but(block_table=None, slots=[3, 5, 7], dtype=torch.float16, cache="HND"),
    "outputs": TABLE.but(q_out=True, k_out="own", cache_positions=[1, 3, 6, 0]),
    "unaligned": TABLE.but(shift=1, is_neox=False),
    "only q": TABLE.but(block_table=None, heads=(3, 0)),
}
WAYS = {"function": function_of, "DecodeRope": op_of, "bound": bound_of}
either_way = pytest.mark.parametrize("way", WAYS)


def reset(case: Case, start: Case) -> None:
    for name, storage in case.storages.items():
        storage.copy_(start.storages[name])


def with_one_of(case: Case, other: Case, one: str) -> Case:
    """The case with one of its tensors laid out as in the other."""
    mixed, view = case.clone(), other.views[one]
    mixed.views[one] = view._replace(storage="other")
    mixed.storages["other"] = other.storages[view.storage].clone()
    mixed[one].copy_(case[one])
    return mixed


def with_other_flags(start: Case) -> list[Case]:
    """A case of 4 heads and pages of 4, which fit either layout, with one flag changed or none; there and back."""
    variations = [start.clone() for _ in range(4)]
    variations[1].options["is_neox"] = False
    variations[2].options["tokens_per_request"] = 2
    variations[3].options["kv_layout"] = "HND"
    return [*variations, *variations[::-1]]


def prefill_of(case: Case) -> Callable:
    return lambda: decode_rope.rope_append_prefill(**case.arguments())


def works(call: Callable, case: Case, start: Case, times: int = 3) -> None:
    """Every one of some calls, the first, the second and the packed ones, leaves what the reference leaves."""
    want = run_reference(start.clone())
    for _ in range(times):
        reset(case, start)
        assert call() is case.returned
        assert_same_storages(case, want)
