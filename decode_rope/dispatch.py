"""From arguments to a launch: the key a plan is found under, and what happens the first time a configuration is seen."""

import torch
from torch import Tensor

from . import reference
from .checks import check_append
from .faults import fault_buffer
from .plan import Call, Plan, append_plan
from .variants import INTERPRETED

# A plan is small and cheap to make anew; dropping one drops no kernel, for `variants` keeps those for ever.
_MAX_PLANS = 8192


def facts(x: Tensor | None):
    """What of a tensor decides its plan."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.get_device())


def index_facts(x: Tensor | None):
    """The same of a block table or slot mapping, whose width and row stride are read at each launch instead."""
    return None if x is None else (x.dim(), x.dtype, x.get_device())


def check_call(call: Call, *, slot_mapping: Tensor | None, block_table: Tensor | None) -> None:
    """Every rule of `checks.check_append`, and that the device has what `enable_pdl=True` asks for."""
    check_append(
        *call[:7], block_table, slot_mapping, call.cache_positions, call.tokens_per_request, call.is_neox, call.kv_layout,
        call.q_out, call.k_out, call.enable_pdl,
    )  # fmt: skip
    if call.enable_pdl and call.q.device.type == "cuda":
        require_pdl(call.q.device)


def require_pdl(device: torch.device) -> None:
    if torch.version.hip or torch.cuda.get_device_capability(device)[0] < 9:
        raise ValueError(
            f"enable_pdl: expected None or False on {torch.cuda.get_device_name(device)}, because programmatic dependent launch "
            f"needs an NVIDIA GPU of compute capability 9.0 or later, got True"
        )


def runs_reference(device: torch.device) -> bool:
    """CPU tensors go to the PyTorch reference, unless Triton interprets its kernels."""
    return device.type == "cpu" and not INTERPRETED


def run_reference(call: Call) -> None:
    index = {"block_table" if call.paged else "slot_mapping": call.index}
    reference.rope_append_decode(
        *call[:7],
        **index,
        cache_positions=call.cache_positions,
        tokens_per_request=call.tokens_per_request,
        is_neox=call.is_neox,
        kv_layout=call.kv_layout,
        q_out=call.q_out,
        k_out=call.k_out,
        faults=fault_buffer(call.q.device),
    )


def run_checked(call: Call, plans: dict[tuple, Plan], key: tuple | None) -> None:
    """Run a call that passed every check, keeping its plan under `key`."""
    device = call.q.device
    if runs_reference(device):
        run_reference(call)
    elif call.q.shape[0] > 0:
        plan = plans.get(key)
        if plan is None:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            plan = plans[key] = append_plan(call, device)
        plan.adopt(call)
