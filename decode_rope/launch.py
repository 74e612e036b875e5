"""Launches of a compiled kernel: all but its addresses, and, of decode steps and prefills, which memory it may be given."""

from collections.abc import Iterable

import torch
import triton
from torch import Tensor

from . import driver
from .faults import fault_buffer
from .layout import span
from .variants import INTERPRETED, Variant

UNBOUNDED = 2**31 - 1  # as a number of positions, where nothing looks at it
_MAX_KNOWN = 1024
# Of the kernels' tensors, in order: rows, caches, and what is only read.
_ROWS, _CACHES, _READ = range(3)
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
cu_launch = driver.cu_launch_kernel_ex() if driver.available() else None
# A profiler that wants to see Triton's launches adds itself to this chain; while it is not empty, launches go through Triton.
launch_hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", ())


def with_stand_ins(own: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The tensors of a decode step or prefill, in the order of a kernel's POINTERS, with others in place of those that are
    None; the kernel compiled for their absence never reads or writes through them."""
    q, k, positions = own[0], own[0] if own[1] is None else own[1], own[8]
    stand_ins = (q, k, q, q, k, q, q, q, *[positions] * (len(own) - 8))
    return tuple([other if x is None else x for x, other in zip(own, stand_ins, strict=True)])


class Launch:
    """A compiled kernel with everything but its addresses, for one configuration of shapes, strides, dtypes and flags: grid,
    integer parameters, device, fault record. It may keep packed launches, by addresses and the stream.

    `flags` and `guard` say which calls it is for (`dispatch` sets them). `unaligned` is the launch for memory less aligned than
    this one needs, once there has been any. Of its addresses, the first `row_tensors` are of rows, and the next is the rotary
    table's.
    """

    __slots__ = (
        "_align_bits", "_ready", "_table_bits", "carveout", "device", "faults", "flags", "grid", "guard", "integers", "unaligned",
        "variant",
    )  # fmt: skip
    row_tensors: int

    def __init__(self, compiled: Variant, grid: int, integers: tuple[int, ...], carveout: int = -1):
        self.variant = compiled
        self.grid = grid
        self.integers = integers
        self.carveout = carveout
        self.device = compiled.device.index
        self.faults = fault_buffer(compiled.device)
        self.flags = self.guard = self.unaligned = None
        self._align_bits = compiled.static.ALIGN - 1
        self._table_bits = compiled.static.ALIGN_TABLE - 1
        self._ready = {}

    def less_aligned(self, call) -> "Launch":
        """The launch of the same configuration for memory of no alignment beyond that of one element."""
        raise NotImplementedError

    def fitting(self, addresses: tuple[int, ...], call) -> "Launch":
        """This launch, or the one for less aligned memory if these addresses need it."""
        if self.is_aligned(addresses):
            return self
        if self.unaligned is None:
            self.unaligned = self.less_aligned(call)
        return self.unaligned

    def is_aligned(self, addresses: tuple[int, ...]) -> bool:
        rows = 0
        for address in addresses[: self.row_tensors]:
            rows |= address
        return not (rows & self._align_bits or addresses[self.row_tensors] & self._table_bits)

    def again(self, addresses: Iterable[int]) -> bool:
        """Launch once more on the memory of a kept launch; False, and nothing done, if there is none."""
        if not self._ready or launch_hooks or current_device() != self.device:
            return False
        packed = self._ready.get((*addresses, raw_stream(self.device)))
        if packed is None:
            return False
        driver.launch(packed)
        return True

    def keep(self, addresses: Iterable[int], packed: tuple) -> None:
        if len(self._ready) >= _MAX_KNOWN:
            self._ready.clear()
        self._ready[(*addresses, raw_stream(self.device))] = packed

    def launch(self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...]) -> tuple | None:
        """Launch on the current stream of the kernel's device. `addresses` are those of `tensors`, in the
        order of the kernel's POINTERS. Returns the packed launch, if it was one, for that stream and these addresses."""
        if not INTERPRETED and current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(tensors, addresses)
        if not self.variant.direct or launch_hooks:
            self.variant.launch_jit(self.grid, (*tensors, self.faults), self.integers)
            return None
        packed = self.pack(addresses, raw_stream(self.device))
        driver.launch(packed)
        return packed

    def pack(self, addresses: tuple[int, ...], stream: int) -> tuple:
        parameters = self.variant.in_order((*addresses, self.faults.data_ptr(), *self.integers))
        return driver.pack(self.variant, self.grid, stream, parameters, self.carveout)


class AppendPlan(Launch):
    """A decode step or prefill, for whatever memory it is given.

    `_known` holds how q, k, v and the outputs, and how the two caches, have been found to lie relative to each other without harm:
    slices of one tensor interleave, and `k_out` may be `k`. Launches are kept by the addresses of the call's own tensors, if the
    plan `_keeps` them.
    """

    __slots__ = ("_keeps", "_known", "_ranges")
    row_tensors = 7

    def __init__(self, call, compiled: Variant, grid: int, integers: tuple[int, ...], carveout: int = -1):
        super().__init__(compiled, grid, integers, carveout)
        self._known = set()
        self._keeps = True
        groups = (*[_ROWS] * 5, *[_CACHES] * 2, *[_READ] * len(call.own_tensors()))
        sizes = [end - start for start, end in map(span, call.kernel_tensors())]
        self._ranges = [(i, sizes[i], groups[i]) for i, x in enumerate(call.own_tensors()) if x is not None]

    def look_closer(self, call) -> bool:
        """Launch on tensors whose shapes, strides, dtypes and devices are the plan's, unless their addresses ask for the checks
        first; then do nothing and return False."""
        addresses = call.addresses()
        if not self._apart(addresses):
            return False
        if self.unaligned is None and not self.is_aligned(addresses):
            return False
        self._launch(call, addresses)
        return True

    def adopt(self, call) -> None:
        """Launch a call that has passed every check, and remember its memory as good."""
        addresses = call.addresses()
        if len(self._known) + 1 < _MAX_KNOWN:
            self._known.update(_arrangements(addresses))
        self._launch(call, addresses)

    def _launch(self, call, addresses: tuple[int, ...]) -> None:
        packed = self.fitting(addresses, call).launch(call.kernel_tensors(), addresses)
        if packed is not None and self._keeps:
            own = [addresses[i] for i, _, _ in self._ranges]
            self.keep(own, packed)

    def _apart(self, addresses: tuple[int, ...]) -> bool:
        """Whether the call's own tensors lie in disjoint ranges, as far as they are not known to interleave, or
        are only read."""
        rows, caches = _arrangements(addresses)
        harmless = (rows in self._known, caches in self._known, True)
        reach = [0, 0, 0]
        for start, size, group in sorted([(addresses[i], size, group) for i, size, group in self._ranges]):
            for other in range(3):
                if start < reach[other] and not (other == group and harmless[group]):
                    return False
            reach[group] = max(reach[group], start + size)
        return True


def _arrangements(addresses: tuple[int, ...]) -> tuple[tuple, tuple]:
    """How q, k, v and the outputs lie relative to each other, and how the caches do."""
    q, k, v, q_out, k_out, k_cache, v_cache = addresses[:7]
    return (k - q, v - q, q_out - q, k_out - q), (v_cache - k_cache,)
