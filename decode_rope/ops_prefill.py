"""`rope_append_prefill` as PyTorch operators, as `ops.py` has those of decode steps."""

from inspect import signature

from . import dispatch_prefill
from .checks import _no_grad
from .geometry_prefill import PrefillGeometry, Tiles, check_geometry
from .operators import define
from .ops import ROWS

_VERSION = 1  # as in `ops.py`
_REST = (
    "Tensor(b!)? k_cache, Tensor(c!)? v_cache, Tensor? cos_sin, Tensor positions, Tensor? block_table, "
    "Tensor? slot_mapping, Tensor? cache_positions, Tensor? cu_seqlens_q, Tensor? axis_map, SymInt tokens_per_request, "
    "bool is_neox, str kv_layout, bool? enable_pdl, int[]? geometry"
)
_ORDER = tuple(signature(dispatch_prefill.append).parameters)


def _run(*values) -> None:
    """What an operator does to real tensors: an eager call."""
    *arguments, geometry = values
    if geometry is not None:
        geometry = PrefillGeometry(Tiles(*geometry[:3]), Tiles(*geometry[3:6]), geometry[6], bool(geometry[7]))
    dispatch_prefill.append(*arguments, geometry)


_OPERATORS = {
    in_place: define(
        f"rope_append_prefill_v{_VERSION}{suffix}",
        f"{rows}, {_REST}",
        lambda *values: _run(*values),
        _ORDER,
        {"k_out": "k"} if in_place[1] else None,
    )
    for in_place, (suffix, rows) in ROWS.items()
}


def append(*values) -> None:
    """`dispatch_prefill.append` while a compiler traces it: one operator in the graph."""
    given = dict(zip(_ORDER, values, strict=True))
    tensors = ("q", "k", "v", "k_cache", "v_cache", "cos_sin", "positions", "q_out", "k_out")
    _no_grad({name: given[name] for name in tensors if given[name] is not None})
    if given["geometry"] is not None:
        check_geometry(given["geometry"])
        q, kv, num_warps, pdl = given["geometry"]
        given["geometry"] = [*q, *kv, num_warps, int(pdl)]
    in_place = given["q_out"] is None or given["q_out"] is given["q"], given["k"] is not None and given["k_out"] is given["k"]
    operator, names = _OPERATORS[in_place]
    operator(*[given[name] for name in names])
