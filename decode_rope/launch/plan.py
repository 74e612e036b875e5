"""Launch plans: everything about a call that its addresses do not change, worked out once."""

import inspect

import torch
from torch import Tensor

from ..append.arguments import ALIGNED_BY, CACHE, ROW, SCALE, Record, given_tensors, kernel_tensors
from ..append.codes import kernel_dtype
from ..append.faults import fault_buffer
from ..append.layout import span
from . import driver
from .compiled import compiled
from .driver import machine
from .platform import INTERPRETED
from .spec import Spec

_MAX_KEPT = 1024
_TOGETHER = ((ROW,), (CACHE, SCALE))  # kinds that may interleave; all others are only read


class Plan:
    """A compiled kernel for one configuration of shapes, strides, dtypes and flags, ready for whatever memory it is given.

    It keeps packed launches by the addresses of the call's tensors and the stream. `_known` holds how the rows and how the caches
    of checked calls lay relative to each other: slices of one tensor interleave, and `k_out` may be `k`.

    Attributes:
        flags, guard: say which calls it is for; `book.Book` sets them.
        compiled, grid, integers, carveout: what is launched.
        unaligned: the plan for memory less aligned than this one needs, once there has been any.
    """

    __slots__ = (
        "_alignments", "_groups", "_is_usual", "_kept", "_known", "_ranges", "carveout", "compiled", "device", "faults", "flags",
        "grid", "guard", "integers", "spec", "unaligned",
    )  # fmt: skip

    def __init__(self, spec: Spec, call: Record, device: torch.device, *, aligned: bool = True):
        """The plan of a checked call, on `device`; its tensors may be on the meta device.

        Raises:
            RuntimeError: the kernel is not loaded yet and a CUDA graph is being captured.
        """
        values = spec.values(call, device, aligned)
        parameters = inspect.signature(spec.kernel.fn).parameters
        dtypes = {name: x.dtype for name, x in _as_kernels_see(call).items() if name in parameters}
        dtypes["faults_ptr"] = torch.int64
        plain = inspect.Parameter.empty
        wide = frozenset(name for name, n in values.integers.items() if n >= 2**31 and parameters[name].annotation is plain)
        self.spec = spec
        self.compiled = compiled(spec.kernel, device, dtypes, values.facts, wide, values.num_warps)
        self.grid, self.integers, self.carveout = values.grid, values.integers, values.carveout
        self.device = device.index
        self.faults = fault_buffer(device)
        self.flags = self.guard = self.unaligned = None
        roles = call.ROLES
        self._alignments = [
            (role.parameter, values.facts[ALIGNED_BY[role.kind]] - 1)
            for role in roles.values()
            if values.facts.get(ALIGNED_BY.get(role.kind)) is not None and role.parameter not in values.facts
        ]
        self._groups = [[roles[name].parameter for name in given_tensors(call) if roles[name].kind in kinds] for kinds in _TOGETHER]
        self._ranges = [
            (roles[name].parameter, end - start, _group(roles[name].kind))
            for name, (start, end) in ((name, span(x)) for name, x in given_tensors(call).items())
        ]
        self._is_usual = len(self._ranges) == 8  # as a decode step with one index and no outputs of its own has
        self._known: set[tuple] = set()
        self._kept: dict[tuple, tuple] = {}

    def again(self, given: tuple[Tensor, ...]) -> bool:
        """Launch once more on the memory of an earlier call; False, and nothing done, if there was none with it. `given`: the
        call's tensors that are not None."""
        kept = self._kept
        if not kept:
            return False
        if self._is_usual:  # written out, this takes 0.4 µs less, of 2.3 for a whole call
            q, k, v, k_cache, v_cache, cos_sin, positions, index = given
            packed = kept.get((
                q.data_ptr(), k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), cos_sin.data_ptr(),
                positions.data_ptr(), index.data_ptr(), machine.stream(self.device),
            ))  # fmt: skip
        else:
            packed = kept.get((*[x.data_ptr() for x in given], machine.stream(self.device)))
        if packed is None or machine.device() != self.device or machine.hooks:
            return False
        if machine.cu_launch(*packed):
            driver.launch(packed)
        return True

    def launch_apart(self, call: Record) -> bool:
        """Launch on tensors whose shapes, strides, dtypes and devices are the plan's, unless their addresses ask for the checks
        first; then do nothing and return False."""
        addresses = addresses_of(call)
        if not self._are_apart(addresses):
            return False
        if self.unaligned is None and not self._are_aligned(addresses):
            return False
        self._launch(call, addresses)
        return True

    def launch_checked(self, call: Record) -> None:
        """Launch a call that has passed every check, and remember how its memory lies as good."""
        addresses = addresses_of(call)
        if len(self._known) + 1 < _MAX_KEPT:
            self._known.update(self._arrangements(addresses))
        self._launch(call, addresses)

    def fitting(self, call: Record, addresses: dict[str, int]) -> "Plan":
        """This plan, or the one for less aligned memory if these addresses need it."""
        if self._are_aligned(addresses):
            return self
        if self.unaligned is None:
            self.unaligned = Plan(self.spec, call, self.compiled.device, aligned=False)
        return self.unaligned

    def launch(self, call: Record, addresses: dict[str, int]) -> tuple | None:
        """Launch on the current stream of the plan's device. Returns the packed launch for that stream and memory, or None."""
        if not INTERPRETED and machine.device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(call, addresses)
        if not self.compiled.direct or machine.hooks:
            self.compiled.launch_jit(self.grid, {**_as_kernels_see(call), "faults_ptr": self.faults, **self.integers})
            return None
        packed = self.pack(addresses, machine.stream(self.device))
        driver.launch(packed)
        return packed

    def pack(self, addresses: dict[str, int], stream: int) -> tuple:
        values = {**addresses, "faults_ptr": self.faults.data_ptr(), **self.integers}
        return self.compiled.pack(self.grid, stream, values, self.carveout)

    def _launch(self, call: Record, addresses: dict[str, int]) -> None:
        packed = self.fitting(call, addresses).launch(call, addresses)
        if packed is not None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            self._kept[(*[addresses[parameter] for parameter, _, _ in self._ranges], machine.stream(self.device))] = packed

    def _are_aligned(self, addresses: dict[str, int]) -> bool:
        return not any(addresses[parameter] & bits for parameter, bits in self._alignments)

    def _are_apart(self, addresses: dict[str, int]) -> bool:
        """Whether the call's tensors lie in disjoint ranges, as far as they are not known to interleave, or are only read."""
        harmless = (*(arrangement in self._known for arrangement in self._arrangements(addresses)), True)
        reach = [0, 0, 0]
        for start, size, group in sorted([(addresses[parameter], size, group) for parameter, size, group in self._ranges]):
            for other in range(3):
                if start < reach[other] and not (other == group and harmless[group]):
                    return False
            reach[group] = max(reach[group], start + size)
        return True

    def _arrangements(self, addresses: dict[str, int]) -> list[tuple]:
        """How the rows lie relative to each other, and how the caches do."""
        found = []
        for group, parameters in enumerate(self._groups):
            places = [addresses[parameter] for parameter in parameters]
            found.append((group, *[place - places[0] for place in places]))
        return found


def _as_kernels_see(call: Record) -> dict[str, Tensor]:
    """`kernel_tensors`, with codes as bytes."""
    coded = [role.parameter for role in call.ROLES.values() if role.kind in (ROW, CACHE)]
    tensors = kernel_tensors(call)
    return {name: x.view(kernel_dtype(x.dtype)) if name in coded else x for name, x in tensors.items()}


def _group(kind: int) -> int:
    return next((i for i, kinds in enumerate(_TOGETHER) if kind in kinds), len(_TOGETHER))


def addresses_of(call: Record) -> dict[str, int]:
    """The addresses that a kernel's pointer parameters get, by parameter."""
    return {parameter: x.data_ptr() for parameter, x in kernel_tensors(call).items()}
