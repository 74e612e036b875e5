"""From the arguments of a prefill to a launch, as `dispatch.py` does it for decode steps."""

from . import reference
from .checks_prefill import check_prefill
from .dispatch import PlanBook, check_pdl
from .faults import fault_buffer
from .geometry_prefill import check_geometry
from .plan_prefill import PrefillCall, prefill_plan


def append(
    q, k, v, k_cache, v_cache, cos_sin, positions, block_table, slot_mapping, cache_positions, cu_seqlens_q, axis_map,
    q_out, k_out, tokens_per_request, is_neox, kv_layout, enable_pdl, geometry,
) -> None:  # fmt: skip
    """What `rope_append_prefill` does; arguments and errors are its own."""
    paged = slot_mapping is None
    index = block_table if paged else slot_mapping
    everything = (
        q, k, v, q_out, k_out, k_cache, v_cache, cos_sin, positions, cache_positions, index, cu_seqlens_q, axis_map
    )  # fmt: skip
    given = tuple([x for x in everything if x is not None])
    flags = (
        tuple([x is None for x in everything]), paged, tokens_per_request, is_neox, kv_layout, enable_pdl, geometry,
        type(tokens_per_request), type(is_neox), type(enable_pdl),  # 1 == True, but the checks refuse one of them
    )  # fmt: skip
    plan = _PLANS.find(flags, given) if paged or block_table is None else None
    if plan is None or not plan.repeat(given):
        call = PrefillCall(
            q, k, v, k_cache, v_cache, cos_sin, positions, index, paged, cache_positions, axis_map, cu_seqlens_q,
            q_out, k_out, tokens_per_request, is_neox, kv_layout, enable_pdl, geometry,
        )  # fmt: skip
        if plan is None or not plan.look_closer(call):
            check_prefill(call, block_table=block_table, slot_mapping=slot_mapping)
            check_pdl(enable_pdl, q.device)
            if geometry is not None:
                check_geometry(geometry)
            _PLANS.run_checked(call, flags, given)


def _run_reference(call: PrefillCall) -> None:
    index = {"block_table" if call.paged else "slot_mapping": call.index}
    reference.rope_append_prefill(
        *call[:7],
        **index,
        cache_positions=call.cache_positions,
        tokens_per_request=call.tokens_per_request,
        cu_seqlens_q=call.cu_seqlens,
        is_neox=call.is_neox,
        kv_layout=call.kv_layout,
        axis_map=call.axis_map,
        q_out=call.q_out,
        k_out=call.k_out,
        faults=fault_buffer(call.q.device),
    )


def prefill_plans() -> PlanBook:
    """An empty book for prefills."""
    return PlanBook(prefill_plan, _run_reference)


_PLANS = prefill_plans()
