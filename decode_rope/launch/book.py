"""From a call to its plan: finding it, and making it the first time that a configuration is seen."""

from collections.abc import Callable

from torch import Tensor

from ..append.arguments import Record
from . import platform
from .plan import Plan
from .spec import Spec

try:
    # One C++ call compares dtype, device, shape, strides and requires_grad of all tensors: 1 µs in place of 5 in Python.
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None

# A plan is small and cheap to make anew; dropping one drops no kernel, because `compiled` keeps those for ever.
_MAX_PLANS = 8192
_RECENT = 4


class Book:
    """The plans of one kernel's calls, the last few found first. `check`: rules in place of the spec's own."""

    def __init__(self, spec: Spec, check: Callable[[Record], None] | None = None):
        self.spec = spec
        self._check = check or spec.check
        self.clear()

    def clear(self) -> None:
        self._recent: list[Plan] = []
        self._plans: dict[tuple, Plan] = {}

    def run(self, fields: tuple) -> None:
        """Do what a call asks for. Raises, before anything is launched or written, if an argument is at fault.

        `fields`: the call's record, or the values of its fields in order: to make a record would cost a repeated launch 0.3 µs.
        """
        flags, given = identify(fields, len(self.spec.record.ROLES))
        plan = self.find(flags, given)
        if plan is None or not plan.again(given):
            self._run(self.spec.record._make(fields), flags, given, plan)

    def run_keyed(self, call: Record, flags: tuple, given: tuple[Tensor, ...]) -> None:
        """`run`, with the call's flags and those of its tensors that are not None. Equal flags must mean the same arguments in
        `given`."""
        plan = self.find(flags, given)
        if plan is None or not plan.again(given):
            self._run(call, flags, given, plan)

    def _run(self, call: Record, flags: tuple, given: tuple[Tensor, ...], plan: Plan | None) -> None:
        if plan is None or not plan.launch_apart(call):
            self._check(call)
            self._run_checked(call, flags, given)

    def find(self, flags: tuple, given: tuple[Tensor, ...]) -> Plan | None:
        """The plan of calls with these flags and tensors, if there has been such a call."""
        try:
            for plan in self._recent:
                if plan.flags == flags and plan.guard(*given):
                    return plan
            plan = self._plans.get(_key(flags, given)) if self._plans else None
        except (AttributeError, TypeError, ValueError, RuntimeError):  # values of a wrong type; the checks will say so
            return None
        if plan is not None:
            self._put_first(plan, given)
        return plan

    def _run_checked(self, call: Record, flags: tuple, given: tuple[Tensor, ...]) -> None:
        """Run a call that passed every check, and keep its plan. Its first tensor says where, and whether there is work."""
        device = given[0].device
        if platform.runs_reference(device):
            self.spec.reference(call)
        elif given[0].numel() > 0:
            key = _key(flags, given)
            plan = self._plans.get(key)
            if plan is None:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                plan = Plan(self.spec, call, device)
                plan.flags = flags
                plan = self._plans.setdefault(key, plan)
            self._put_first(plan, given)
            plan.launch_checked(call)

    def _put_first(self, plan: Plan, given: tuple[Tensor, ...]) -> None:
        plan.guard = _guard(given)  # a new one, because torch's own fails once autograd is in another mode
        self._recent = [plan, *(other for other in self._recent if other is not plan)][:_RECENT]


def identify(fields: tuple, count: int) -> tuple[tuple, tuple[Tensor, ...]]:
    """What decides a call's plan: its flags, and those of its first `count` fields, the tensors, that are not None."""
    # The types of all fields say which tensors are None; and 1 == True, but the checks refuse one of them.
    return (*fields[count:], *map(type, fields)), tuple([x for x in fields[:count] if x is not None])


def _key(flags: tuple, given: tuple[Tensor, ...]) -> tuple:
    return (flags, *map(_facts, given))


def _facts(x: Tensor) -> tuple:
    """What of a tensor decides its plan."""
    return x.shape, x.stride(), x.dtype, x.device, x.requires_grad


def _guard(tensors: tuple[Tensor, ...]):
    """A function that says whether tensors have the dtypes, devices, shapes, strides and requires_grad of these."""
    if TensorGuards is not None and len({id(x) for x in tensors}) == len(tensors):  # it refuses a tensor that comes twice
        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    wanted = [_facts(x) for x in tensors]
    return lambda *others: all(isinstance(x, Tensor) for x in others) and [_facts(x) for x in others] == wanted
