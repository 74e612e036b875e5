"""Launch plans of the prefill kernel; they work as those in `plan.py` do."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import driver
from .faults import fault_buffer
from .geometry_prefill import PrefillGeometry, prefill_geometry
from .kernels.prefill import prefill_kernel
from .layout import cache_view, index_shape, lowest_bit, span, steps
from .plan import current_device, launch_hooks, raw_stream
from .variants import INTERPRETED, Variant, pdl_supported, variant

_UNBOUNDED = 2**63 - 1
_MAX_KNOWN = 1024
_GROUP_OF = (0, 0, 0, 0, 0, 1, 1, *[2] * 6)  # of the kernel's tensors: rows, caches, and what is only read


class Static(NamedTuple):
    """The kernel's compile-time parameters, in its own order; see `kernels/prefill.py` for what each means."""

    HQ: int
    HKV: int
    D: int
    DV: int
    R: int
    NEOX: bool
    AXES: int
    CACHE: bool
    PAGED: bool
    PAGE: int
    RAGGED: bool
    OWN_CACHE_POSITIONS: bool
    Q_OUT: bool
    K_OUT: bool
    ALIGN: int
    ALIGN_TABLE: int
    BTQ: int
    BHQ: int
    LOOPQ: int
    BTK: int
    BHK: int
    LOOPK: int
    PDL: bool
    SOFT: bool


class PrefillCall(NamedTuple):
    """The tensors and flags of one prefill. `index` is the block table or the slot mapping, as `paged` says."""

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    k_cache: Tensor | None
    v_cache: Tensor | None
    cos_sin: Tensor | None
    positions: Tensor
    index: Tensor | None
    paged: bool
    cache_positions: Tensor | None
    axis_map: Tensor | None
    cu_seqlens: Tensor | None
    q_out: Tensor | None
    k_out: Tensor | None
    tokens_per_request: int = 1
    is_neox: bool = True
    kv_layout: str = "NHD"
    enable_pdl: bool | None = None
    geometry: PrefillGeometry | None = None

    def appends(self) -> bool:
        return self.k is not None and self.k_cache is not None

    def rows_needed(self) -> int:
        """Rows of the block table that the tokens may look into."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.shape[0] - 1
        return -(-self.q.shape[0] // self.tokens_per_request)

    def own_tensors(self) -> tuple[Tensor | None, ...]:
        """The kernel's pointer arguments in order, without the fault record; None where this call has none."""
        return (
            self.q, self.k, self.v, self.q_out, self.k_out, self.k_cache, self.v_cache, self.cos_sin, self.positions,
            self.cache_positions, self.index, self.cu_seqlens, self.axis_map,
        )  # fmt: skip

    def kernel_tensors(self) -> tuple[Tensor, ...]:
        """The same with stand-ins for what is absent; the kernel compiled for its absence never reads or writes
        through them."""
        q, positions = self.q, self.positions
        k = q if self.k is None else self.k
        stand_ins = (q, k, q, q, k, q, q, q, *[positions] * 5)
        return tuple([other if own is None else own for own, other in zip(self.own_tensors(), stand_ins, strict=True)])


class Launch:
    """A compiled kernel with everything but its addresses: grid, integer parameters, device, fault record."""

    __slots__ = ("device", "faults", "grid", "integers", "variant")

    def __init__(self, compiled: Variant, grid: int, integers: tuple[int, ...]):
        self.variant = compiled
        self.grid = grid
        self.integers = integers
        self.device = compiled.device.index
        self.faults = fault_buffer(compiled.device)

    def launch(self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...]) -> tuple | None:
        """Launch on the current stream of the kernel's device. `addresses` are those of `tensors`, in kernel
        order. Returns the packed launch, if it was one, for that stream and these addresses."""
        if not INTERPRETED and current_device() != self.device:
            with torch.cuda.device(self.device):
                return self.launch(tensors, addresses)
        if not self.variant.direct or launch_hooks:
            self.variant.launch_jit(self.grid, (*tensors, self.faults), self.integers)
            return None
        parameters = (*addresses, self.faults.data_ptr(), *self.integers)
        packed = driver.pack(self.variant, self.grid, raw_stream(self.device), parameters)
        driver.launch(packed)
        return packed


class PrefillPlan(Launch):
    """A launch of one configuration of shapes, strides, dtypes and flags, for whatever memory it is given.

    `flags` and `guard` say which calls the plan is for (`dispatch` sets them). `unaligned` is the plan for
    memory less aligned than this one needs, once there has been any. `_known` holds how q, k, v and the outputs,
    and how the two caches, have been found to lie relative to each other without harm: slices of one tensor
    interleave, and `k_out` may be `k`. `_ready` holds packed launches by the addresses of the call's own tensors
    and the stream.
    """

    __slots__ = ("_align_bits", "_known", "_ranges", "_ready", "_table_bits", "flags", "guard", "unaligned")

    def __init__(self, call: PrefillCall, compiled: Variant, grid: int, integers: tuple[int, ...]):
        super().__init__(compiled, grid, integers)
        self._align_bits = compiled.static.ALIGN - 1
        self._table_bits = compiled.static.ALIGN_TABLE - 1
        self._known = set()
        self._ready = {}
        self.flags = self.guard = self.unaligned = None
        sizes = [end - start for start, end in map(span, call.kernel_tensors())]
        self._ranges = [(i, sizes[i], _GROUP_OF[i]) for i, x in enumerate(call.own_tensors()) if x is not None]

    def repeat(self, given: tuple[Tensor, ...]) -> bool:
        """Launch again on the memory of an earlier call; False, and nothing done, if there was none with it."""
        if not self._ready or launch_hooks or current_device() != self.device:
            return False
        packed = self._ready.get((*[x.data_ptr() for x in given], raw_stream(self.device)))
        if packed is None:
            return False
        driver.launch(packed)
        return True

    def submit(self, call: PrefillCall) -> bool:
        """Launch on tensors whose shapes, strides, dtypes and devices are the plan's, unless their addresses
        ask for a closer look first; then do nothing and return False."""
        addresses = tuple([x.data_ptr() for x in call.kernel_tensors()])
        if not self._apart(addresses):
            return False
        if self.unaligned is None and not self._is_aligned(addresses):
            return False
        self._launch(call, addresses)
        return True

    def adopt(self, call: PrefillCall) -> None:
        """Launch a call that has passed every check, and remember its memory as good."""
        addresses = tuple([x.data_ptr() for x in call.kernel_tensors()])
        if len(self._known) < _MAX_KNOWN:
            self._known.update(_arrangements(addresses))
        if self.unaligned is None and not self._is_aligned(addresses):
            self.unaligned = prefill_plan(call, self.variant.device, aligned=False)
        self._launch(call, addresses)

    def _launch(self, call: PrefillCall, addresses: tuple[int, ...]) -> None:
        plan = self if self._is_aligned(addresses) else self.unaligned
        packed = plan.launch(call.kernel_tensors(), addresses)
        if packed is not None:
            if len(self._ready) >= _MAX_KNOWN:
                self._ready.clear()
            own = [addresses[i] for i, _, _ in self._ranges]
            self._ready[(*own, raw_stream(self.device))] = packed

    def _is_aligned(self, addresses: tuple[int, ...]) -> bool:
        rows = 0
        for address in addresses[:7]:
            rows |= address
        return not (rows & self._align_bits or addresses[7] & self._table_bits)

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


def prefill_plan(call: PrefillCall, device: torch.device, *, aligned: bool = True) -> PrefillPlan:
    """The plan of a checked call. `aligned=False`: assume no alignment beyond that of one element.

    Raises:
        RuntimeError: its kernel is not loaded yet and a CUDA graph is being captured.
    """
    q, itemsize = call.q, call.q.element_size()
    num_q_heads, head_dim = q.shape[1:]
    num_kv_heads = 0 if call.k is None else call.k.shape[1]
    v_head_dim = call.v.shape[2] if call.appends() else head_dim
    rotary_dim = 0 if call.cos_sin is None else call.cos_sin.shape[1]
    outs = (q if call.q_out is None else call.q_out, call.k if call.k_out is None else call.k_out)
    strides = steps((q, call.k, call.v, *outs), (call.k_cache, call.v_cache), call.kv_layout)
    align = lowest_bit(head_dim * itemsize | v_head_dim * itemsize | 16)
    aligned = aligned and not any(size > 1 and stride * itemsize % align for stride, size in strides)
    geometry = call.geometry or prefill_geometry(num_q_heads, num_kv_heads, head_dim, rotary_dim, itemsize, aligned)
    view = cache_view(call.k_cache, call.kv_layout) if call.appends() else None
    multi = call.positions.dim() == 2
    static = Static(
        HQ=num_q_heads,
        HKV=num_kv_heads,
        D=head_dim,
        DV=v_head_dim,
        R=rotary_dim,
        NEOX=call.is_neox,
        AXES=call.positions.shape[0] if multi else 0,
        CACHE=view is not None,
        PAGED=call.paged,
        PAGE=1 if view is None else view.page_size,
        RAGGED=call.cu_seqlens is not None,
        OWN_CACHE_POSITIONS=call.cache_positions is not None,
        Q_OUT=call.q_out is not None,
        K_OUT=call.k_out is not None,
        ALIGN=align if aligned else itemsize,
        ALIGN_TABLE=lowest_bit(rotary_dim * 4 | 16) if aligned else 4,
        BTQ=geometry.q.tokens,
        BHQ=geometry.q.heads,
        LOOPQ=geometry.q.loop,
        BTK=geometry.kv.tokens,
        BHK=geometry.kv.heads,
        LOOPK=geometry.kv.loop,
        PDL=pdl_supported(device) and (geometry.pdl if call.enable_pdl is None else call.enable_pdl),
        SOFT=INTERPRETED,
    )
    integers = (
        *index_shape(call.index, call.paged),
        q.shape[0],
        _UNBOUNDED if call.cos_sin is None else call.cos_sin.shape[0],
        0 if view is None else view.num_pages,
        call.tokens_per_request,
        0 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1,
        call.positions.stride(0) if multi else 0,
        *(stride for stride, _ in strides),
    )
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    compiled = variant(prefill_kernel, device, dtypes, static, geometry.num_warps)
    return PrefillPlan(call, compiled, geometry.programs(q.shape[0], num_q_heads, num_kv_heads, static.CACHE), integers)
