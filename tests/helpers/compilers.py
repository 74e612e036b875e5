"""What tests of torch.compile share."""

import os
import shutil
from collections.abc import Callable

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from decode_rope.append.arguments import Append
from decode_rope.compile import append as operators

inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler: install g++ or set CXX"
)


class Recorder(TorchDispatchMode):
    """Keeps the calls of this package's operators instead of running them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "decode_rope":
            return func(*args, **(kwargs or {}))
        self.calls.append((func, args))


def recorded(function: Callable, *args, **options) -> list[tuple]:
    """(operator, arguments) of every operator of this package that a call reaches."""
    with Recorder() as recorder:
        function(*args, **options)
    return recorder.calls


def operator_call(function: str) -> Callable:
    """What a compiled graph does for a call of the public `function`, without a compiler."""

    def call(**arguments):
        operators.append(function, Append(**arguments))
        return arguments["q"] if arguments.get("q_out") is None else arguments["q_out"]

    return call


def spy_on(monkeypatch, function: str, see: Callable[[Append], object]) -> None:
    """Let `see` look at every call that an operator of `function` makes."""
    book = operators._RUNNERS[function].book
    run = book.run

    def seen(call: Append) -> None:
        see(call)
        run(call)

    monkeypatch.setattr(book, "run", seen)
