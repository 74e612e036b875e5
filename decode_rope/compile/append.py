"""`rope_append_decode` and `rope_append_prefill` as PyTorch operators. Their schemas are made of the record `Append`.

Operators return nothing, have no gradient and bump no version counter.
"""

import typing

import torch
from torch import Tensor

from ..append.arguments import ROW, Append, of_table
from ..append.norm import NormFacts, by_public_name
from ..append.rules import check_needs_no_grad
from ..launch.book import Book
from ..launch.decode import DECODE, Geometry
from ..launch.prefill import PREFILL
from .operators import define

# Part of every name. Raise it with any change of a schema: graphs cached on disk know an operator by its name alone.
_VERSION = 2

# A schema cannot say "q is written unless q_out is given". So each way of giving outputs has an operator: by
# (q is rotated in place, k is rotated in place), its suffix and the rows that it takes first.
WAYS = {
    (True, False): ("", "Tensor(a!) q, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (True, True): ("_k_in_place", "Tensor(a!) q, Tensor(d!) k, Tensor? v"),
    (False, False): ("_q_out", "Tensor q, Tensor(a!) q_out, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (False, True): ("_q_out_k_in_place", "Tensor q, Tensor(a!) q_out, Tensor(d!) k, Tensor? v"),
}
_WRITTEN = {"k_cache": "Tensor(b!)?", "v_cache": "Tensor(c!)?", "k_scale_out": "Tensor(e!)?", "v_scale_out": "Tensor(f!)?"}
_KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    bool: "bool",
    str: "str",
    bool | None: "bool?",
    float | None: "float?",
    torch.dtype | None: "ScalarType?",
    NormFacts | None: "float[]?",
    typing.Any: "int[]?",  # a geometry
}


def rest_of(record, written: dict[str, str]) -> str:
    """The part of a schema that every way of calling has: all fields of a record but the rows. `written`: the kinds of those that
    are written."""
    kinds = typing.get_type_hints(record)
    rows = [name for name, role in record.ROLES.items() if role.kind == ROW]
    return ", ".join(f"{written.get(name, _KINDS[kinds[name]])} {name}" for name in record._fields if name not in rows)


def runner(spec, geometry: type):
    # Books of their own: guards made inside an operator do not match outside, where autograd is in other states.
    book = Book(spec)

    def run(**arguments) -> None:
        """What an operator does to real tensors: an eager call."""
        if arguments["geometry"] is not None:
            arguments["geometry"] = geometry(*arguments["geometry"])
        if arguments.get("norm") is not None:
            eps, offset, *choices = arguments["norm"]
            arguments["norm"] = NormFacts(eps, offset, *map(bool, choices))
        book.run(spec.record(**arguments))

    run.book = book
    return run


_RUNNERS = {"rope_append_decode": runner(DECODE, Geometry), "rope_append_prefill": runner(PREFILL, Geometry)}
OPERATORS = {
    (function, way): define(
        f"{function}_v{_VERSION}{suffix}",
        f"{rows}, {rest_of(Append, _WRITTEN)}",
        run,
        Append._fields,
        {"k_out": "k"} if way[1] else None,
    )
    for function, run in _RUNNERS.items()
    for way, (suffix, rows) in WAYS.items()
}


def append(function: str, call: Append) -> None:
    """A call of the public function while a compiler traces it: one operator in the graph.

    Shapes are looked at when the operator runs, so that tracing one batch size does not tie the graph to it.
    """
    given = dict(zip(Append._fields, call, strict=True))
    table = of_table(given["cos_sin_cache"], given["is_neox"], given["axis_map"])
    given["cos_sin_cache"], given["is_neox"], given["axis_map"] = table
    if given["k"] is None:
        given["k_cache"] = given["v_cache"] = None
    tensors = {name: given[name] for name in Append.ROLES if given[name] is not None}
    check_needs_no_grad(by_public_name(tensors))  # now, because compiled graphs run where autograd sees nothing
    if given["norm"] is not None:
        given["norm"] = [float(x) for x in given["norm"]]
    if given["geometry"] is not None:
        given["geometry"] = [int(x) for x in given["geometry"]]
    q_in_place = given["q_out"] is None or given["q_out"] is given["q"]
    k_in_place = given["k"] is not None and given["k_out"] is given["k"]
    operator, names = OPERATORS[function, (q_in_place, k_in_place)]
    operator(*[given[name] for name in names])
