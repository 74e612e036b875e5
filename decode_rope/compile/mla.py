"""`rope_append_mla_decode` and `rope_append_mla_prefill` as a PyTorch operator, whose schema is made of the record `MLAAppend`."""

from ..append.arguments import MLAAppend
from ..append.rules import check_needs_no_grad
from ..launch.mla import MLA, MLAGeometry
from .append import rest_of, runner
from .operators import define

_VERSION = 1  # as in `append.py`
_WRITTEN = {"cache": "Tensor(b!)", "rope_cache": "Tensor(c!)?"}
# By whether q is rotated in place: the suffix of the operator, and the rows that it takes first.
WAYS = {
    True: ("", "Tensor(a!) q_pe, Tensor k_pe, Tensor kv_c"),
    False: ("_q_out", "Tensor q_pe, Tensor(a!) q_out, Tensor k_pe, Tensor kv_c"),
}
RUN = runner(MLA, MLAGeometry)
OPERATORS = {
    way: define(f"rope_append_mla_v{_VERSION}{suffix}", f"{rows}, {rest_of(MLAAppend, _WRITTEN)}", RUN, MLAAppend._fields)
    for way, (suffix, rows) in WAYS.items()
}


def append(call: MLAAppend) -> None:
    """A call while a compiler traces it: one operator in the graph. Shapes are looked at when the operator runs."""
    given = dict(zip(MLAAppend._fields, call, strict=True))
    check_needs_no_grad({name: given[name] for name in MLAAppend.ROLES if given[name] is not None})
    if given["geometry"] is not None:
        given["geometry"] = [int(x) for x in given["geometry"]]
    operator, names = OPERATORS[given["q_out"] is None or given["q_out"] is given["q_pe"]]
    operator(*[given[name] for name in names])
