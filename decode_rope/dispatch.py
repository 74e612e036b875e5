"""From arguments to a launch: finding the plan of a call, and making it the first time a configuration is seen."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .checks import check_append
from .faults import fault_buffer
from .plan import Call, append_plan
from .variants import INTERPRETED

try:
    # One C++ call compares dtype, device, shape, strides and requires_grad of all tensors: 1 µs in place of 5 in Python.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

# A plan is small and cheap to make anew; dropping one drops no kernel, for `variants` keeps those for ever.
_MAX_PLANS = 8192
_RECENT = 4


class PlanBook:
    """Plans by the flags and tensors of their calls, the last few found first.

    Args:
        make_plan: (call, device) -> plan, for a checked call.
        run_on_cpu: call -> None, through the reference.
    """

    def __init__(self, make_plan: Callable, run_on_cpu: Callable):
        self._make_plan, self._run_on_cpu = make_plan, run_on_cpu
        self._recent: list = []
        self._plans: dict[tuple, Any] = {}

    def find(self, flags: tuple, given: tuple[Tensor, ...]):
        """The plan of calls with these flags and tensors, or None. `flags` must tell which arguments `given` are."""
        for plan in self._recent:
            if plan.flags == flags and plan.guard(*given):
                return plan
        if not self._plans:
            return None
        try:
            plan = self._plans.get(_key(flags, given))
        except (AttributeError, TypeError):  # not tensors at all; the checks will say so
            return None
        if plan is not None:
            self._put_first(plan, given)
        return plan

    def run_checked(self, call, flags: tuple, given: tuple[Tensor, ...]) -> None:
        """Run a call that passed every check, and keep its plan. The first tensor given says where, and whether there is anything
        to do."""
        device = given[0].device
        if runs_reference(device):
            self._run_on_cpu(call)
        elif given[0].numel() > 0:
            key = _key(flags, given)
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                plan = self._make_plan(call, device)
                plan.flags = flags
                plan = self._plans.setdefault(key, plan)
            self._put_first(plan, given)
            plan.adopt(call)

    def _put_first(self, plan, given: tuple[Tensor, ...]) -> None:
        plan.guard = _guard(given)  # anew, for torch's own fails once autograd is in another mode
        self._recent = [plan, *(other for other in self._recent if other is not plan)][:_RECENT]


def _key(flags: tuple, given: tuple[Tensor, ...]) -> tuple:
    return (flags, *map(facts, given))


def facts(x: Tensor | None):
    """What of a tensor decides its plan."""
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.requires_grad)


def _guard(tensors: tuple[Tensor, ...]):
    """A function that says whether tensors have the dtypes, devices, shapes, strides and requires_grad of these."""
    if TensorGuards is not None and len({id(x) for x in tensors}) == len(tensors):  # it refuses a tensor that comes twice
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    wanted = [facts(x) for x in tensors]
    return lambda *others: all(isinstance(x, Tensor) for x in others) and [facts(x) for x in others] == wanted


def check_call(call: Call, *, slot_mapping: Tensor | None, block_table: Tensor | None) -> None:
    """Every rule of `checks.check_append`, and that the device has what `enable_pdl=True` asks for."""
    check_append(
        *call[:7], block_table, slot_mapping, call.cache_positions, call.tokens_per_request, call.is_neox, call.kv_layout,
        call.q_out, call.k_out, call.enable_pdl,
    )  # fmt: skip
    check_pdl(call.enable_pdl, call.q.device)


def check_pdl(enable_pdl: bool | None, device: torch.device) -> None:
    """Refuse `enable_pdl=True` on a GPU without it; without a GPU it means nothing."""
    if not enable_pdl or device.type != "cuda":
        return
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


def decode_plans() -> PlanBook:
    """An empty book for decode steps."""
    return PlanBook(append_plan, run_reference)
