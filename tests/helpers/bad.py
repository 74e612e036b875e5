"""Calls that must be refused."""

from collections.abc import Callable
from typing import NamedTuple

from cases import Case, Spec

GOOD = Spec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], heads=(3, 2), head_dim=16, v_head_dim=8)
ONLY_Q = GOOD.but(block_table=None, heads=(3, 0))


class Bad(NamedTuple):
    """A valid call, and the arguments that spoil it, made from its case."""

    error: type[Exception]
    words: str  # the message begins so
    change: Callable[[Case], dict]
    spec: Spec = GOOD


def give(**arguments):
    return lambda _: arguments
