"""`rope_append_decode` as PyTorch operators, for torch.compile and torch.export.

Operators return nothing, have no gradient and bump no version counter.
"""

from inspect import signature

from torch import Tensor

from .checks import _no_grad
from .dispatch import check_call, decode_plans
from .geometry import Geometry
from .operators import define
from .plan import Call

# Part of every name. Raise it with any change of a schema: graphs cached on disk know an operator by its name alone.
_VERSION = 1

# A schema cannot say "q is written unless q_out is given", so each way of giving outputs has an operator: by
# (q is rotated in place, k is rotated in place), its suffix and what it takes before the arguments that all of them take.
ROWS = {
    (True, False): ("", "Tensor(a!) q, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (True, True): ("_k_in_place", "Tensor(a!) q, Tensor(d!) k, Tensor? v"),
    (False, False): ("_q_out", "Tensor q, Tensor(a!) q_out, Tensor? k, Tensor? v, Tensor(d!)? k_out"),
    (False, True): ("_q_out_k_in_place", "Tensor q, Tensor(a!) q_out, Tensor(d!) k, Tensor? v"),
}
_REST = (
    "Tensor(b!)? k_cache, Tensor(c!)? v_cache, Tensor? cos_sin_cache, Tensor positions, Tensor? block_table, "
    "Tensor? slot_mapping, Tensor? cache_positions, SymInt tokens_per_request, bool is_neox, str kv_layout, bool? enable_pdl, "
    "bool metadata_ready, int[]? geometry"
)
_PLANS = decode_plans()  # of its own: guards made inside an operator do not match outside, where autograd is in other states


def _run(
    q, k, v, k_cache, v_cache, cos_sin_cache, positions, block_table, slot_mapping, cache_positions, q_out, k_out,
    tokens_per_request, is_neox, kv_layout, enable_pdl, metadata_ready, geometry,
) -> None:  # fmt: skip
    """What an operator does to real tensors: an eager call."""
    paged = slot_mapping is None
    index = block_table if paged else slot_mapping
    everything = (q, k, v, k_cache, v_cache, cos_sin_cache, positions, index, cache_positions, q_out, k_out)
    given = tuple([x for x in everything if x is not None])
    geometry = None if geometry is None else Geometry(*geometry)
    facts = (tokens_per_request, is_neox, kv_layout, enable_pdl, metadata_ready, geometry)
    flags = (paged, *[x is None for x in everything], *facts)
    plan = _PLANS.find(flags, given) if paged or block_table is None else None
    if plan is None or not plan.submit(*everything):
        call = Call(*everything[:8], paged, *everything[8:], *facts)
        check_call(call, block_table=block_table, slot_mapping=slot_mapping)
        _PLANS.run_checked(call, flags, given)


_OPERATORS = {
    in_place: define(
        f"rope_append_decode_v{_VERSION}{suffix}",
        f"{rows}, {_REST}",
        lambda *values: _run(*values),
        signature(_run).parameters,
        {"k_out": "k"} if in_place[1] else None,
    )
    for in_place, (suffix, rows) in ROWS.items()
}


def rope_append_decode(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    cos_sin_cache,
    positions: Tensor,
    *,
    block_table: Tensor | None,
    slot_mapping: Tensor | None,
    cache_positions: Tensor | None,
    tokens_per_request: int,
    is_neox: bool,
    kv_layout: str,
    q_out: Tensor | None,
    k_out: Tensor | None,
    enable_pdl: bool | None,
    metadata_ready: bool = False,
    geometry: Geometry | None = None,
) -> Tensor:
    """The public function while a compiler traces it: one operator in the graph.

    Shapes and the like are looked at when the operator runs, so that tracing one batch size does not tie the graph to it.
    """
    if cos_sin_cache is not None and not isinstance(cos_sin_cache, Tensor):
        is_neox = getattr(cos_sin_cache, "is_neox", is_neox)
        cos_sin_cache = getattr(cos_sin_cache, "cos_sin_cache", cos_sin_cache)
    if k is None:
        k_cache = v_cache = None
    given = dict(
        q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, cos_sin_cache=cos_sin_cache, positions=positions,
        block_table=block_table, slot_mapping=slot_mapping, cache_positions=cache_positions, q_out=q_out, k_out=k_out,
    )  # fmt: skip
    _no_grad({name: x for name, x in given.items() if x is not None})  # compiled graphs run where autograd sees nothing
    given.update(
        tokens_per_request=tokens_per_request, is_neox=is_neox, kv_layout=kv_layout, enable_pdl=enable_pdl,
        metadata_ready=metadata_ready, geometry=None if geometry is None else [int(x) for x in geometry],
    )  # fmt: skip
    operator, names = _OPERATORS[q_out is None or q_out is q, k is not None and k_out is k]
    operator(*[given[name] for name in names])
    return q if q_out is None else q_out
