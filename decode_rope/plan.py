"""Launch plans: everything about a call that its addresses do not change, worked out once.

`append_plan` turns one set of shapes, strides, dtypes and flags into a `Plan`, whose launches only read addresses, the stream and
the current device.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import driver
from .faults import fault_buffer
from .geometry import Geometry, decode_geometry
from .kernels.decode import decode_kernel
from .layout import cache_view, index_shape, lowest_bit, span, steps
from .variants import INTERPRETED, Variant, pdl_supported, variant

_UNBOUNDED = 2**63 - 1
_MAX_READY = 1024
_USUAL = (0, 1, 2, 5, 6, 7, 8, 10)  # the own tensors of a call with no outputs of its own and no cache_positions
raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
current_device = getattr(torch._C, "_cuda_getDevice", None)
cu_launch = driver.cu_launch_kernel_ex() if driver.available() else None


# A profiler that wants to see Triton's launches adds itself to this chain; while it is not empty, launches go through Triton.
launch_hooks = getattr(triton.knobs.runtime.launch_enter_hook, "calls", ())


class Static(NamedTuple):
    """The kernel's compile-time parameters, in its own order; see `kernels/decode.py` for what each means."""

    HQ: int
    HKV: int
    D: int
    DV: int
    R: int
    NEOX: bool
    PAGED: bool
    PAGE: int
    TOKENS_PER_REQUEST: int
    OWN_CACHE_POSITIONS: bool
    Q_OUT: bool
    K_OUT: bool
    ALIGN: int
    ALIGN_TABLE: int
    BTQ: int
    BHQ: int
    BTK: int
    BHK: int
    PDL: bool
    PREFETCH: bool
    SOFT: bool


class Call(NamedTuple):
    """The tensors and flags of one append, checked. `index` is the block table or the slot mapping, as `paged` says."""

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
    q_out: Tensor | None
    k_out: Tensor | None
    tokens_per_request: int = 1
    is_neox: bool = True
    kv_layout: str = "NHD"
    enable_pdl: bool | None = None
    metadata_ready: bool = False
    geometry: Geometry | None = None

    def own_tensors(self) -> tuple[Tensor | None, ...]:
        """The kernel's pointer arguments in order, without the fault record; None where this call has none."""
        return (
            self.q, self.k, self.v, self.q_out, self.k_out, self.k_cache, self.v_cache, self.cos_sin, self.positions,
            self.cache_positions, self.index,
        )  # fmt: skip

    def kernel_tensors(self) -> tuple[Tensor, ...]:
        """The same with stand-ins for what is absent; the kernel compiled for its absence never reads or writes through them."""
        q, positions = self.q, self.positions
        k = q if self.k is None else self.k
        stand_ins = (q, k, q, q, k, q, q, q, positions, positions, positions)
        return tuple([other if own is None else own for own, other in zip(self.own_tensors(), stand_ins, strict=True)])

    def addresses(self) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in self.kernel_tensors()])


class Plan:
    """A launch of one configuration, for whatever memory it is given.

    `flags` and `guard` say which calls the plan is for (`dispatch` sets them). `unaligned` is the plan for memory less aligned
    than this one needs, once there has been any. `packings` holds the distances between q, k and v known to be those of
    interleaved slices. `_ready` holds launches packed for addresses that passed every check, by stream and addresses.
    """

    __slots__ = (
        "_own",
        "_ready",
        "_usual",
        "align_bits",
        "align_table_bits",
        "device",
        "faults",
        "flags",
        "grid",
        "guard",
        "integers",
        "packings",
        "sizes",
        "unaligned",
        "variant",
    )

    def __init__(self, call: Call, compiled: Variant, grid: int, integers: tuple[int, ...]):
        self.variant = compiled
        self.grid = grid
        self.integers = integers
        self.flags = self.guard = self.unaligned = None
        self.align_bits = compiled.static.ALIGN - 1
        self.align_table_bits = compiled.static.ALIGN_TABLE - 1
        self.device = compiled.device.index
        self.faults = fault_buffer(compiled.device)
        self.sizes = tuple([end - start for start, end in map(span, call.kernel_tensors())])
        self.packings = set()
        self._own = tuple([i for i, x in enumerate(call.own_tensors()) if x is not None])
        self._usual = self._own == _USUAL and compiled.direct
        self._ready = {}

    def submit(self, q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions=None, q_out=None, k_out=None) -> bool:
        """Launch on tensors whose shapes, strides, dtypes and devices are the plan's, unless their addresses ask for a closer look
        first; then do nothing and return False."""
        if self._usual:
            addresses = (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), cos_sin.data_ptr(),
                positions.data_ptr(), index.data_ptr(), raw_stream(self.device),
            )  # fmt: skip
            packed = self._ready.get(addresses)
            if packed is not None and current_device() == self.device and not launch_hooks:
                if cu_launch(*packed):
                    driver.launch(packed)
                return True
        call = Call(q, k, v, k_cache, v_cache, cos_sin, positions, index, True, cache_positions, q_out, k_out)
        addresses = call.addresses()
        if not self._apart(addresses):
            return False
        plan = self if self.is_aligned(addresses) else self.unaligned
        if plan is None:
            return False
        plan.launch(call, addresses, self)
        return True

    def adopt(self, call: Call) -> None:
        """Launch a call that has passed every check, and remember its memory as good."""
        addresses = call.addresses()
        if len(self.packings) < _MAX_READY:
            self.packings.add((addresses[1] - addresses[0], addresses[2] - addresses[0]))
        self.fitting(addresses, call).launch(call, addresses, self)

    def fitting(self, addresses: tuple[int, ...], call: Call) -> "Plan":
        """This plan, or the one for less aligned memory if these addresses need it."""
        if self.is_aligned(addresses):
            return self
        if self.unaligned is None:
            self.unaligned = append_plan(call, self.variant.device, aligned=False)
        return self.unaligned

    def is_aligned(self, addresses: tuple[int, ...]) -> bool:
        rows = 0
        for address in addresses[:7]:
            rows |= address
        return not (rows & self.align_bits or addresses[7] & self.align_table_bits)

    def launch(self, call: Call, addresses: tuple[int, ...], found_by: "Plan | None" = None) -> None:
        """Launch on the current stream of the plan's device. `found_by` keeps the packed launch for its next `submit`."""
        if not INTERPRETED and current_device() != self.device:
            with torch.cuda.device(self.device):
                self.launch(call, addresses, found_by)
        elif not self.variant.direct or launch_hooks:
            self.variant.launch_jit(self.grid, (*call.kernel_tensors(), self.faults), self.integers)
        else:
            stream = raw_stream(self.device)
            packed = self.pack(addresses, stream)
            driver.launch(packed)
            if found_by is not None and found_by._usual:
                if len(found_by._ready) >= _MAX_READY:
                    found_by._ready.clear()
                found_by._ready[(*[addresses[i] for i in _USUAL], stream)] = packed

    def pack(self, addresses: tuple[int, ...], stream: int) -> tuple:
        return driver.pack(self.variant, self.grid, stream, (*addresses, self.faults.data_ptr(), *self.integers))

    def _apart(self, addresses: tuple[int, ...]) -> bool:
        """Whether the call's own tensors lie in disjoint ranges; q, k and v may interleave in a packing found good before."""
        ranges = [(addresses[i], self.sizes[i]) for i in self._own]
        if (addresses[1] - addresses[0], addresses[2] - addresses[0]) in self.packings and 1 in self._own:
            start = min(addresses[:3])
            ranges[:3] = [(start, max(a + n for a, n in ranges[:3]) - start)]
        return all(a + n <= b for (a, n), (b, _) in pairwise(sorted(ranges)))


def append_plan(call: Call, device: torch.device, *, aligned: bool = True) -> Plan:
    """The plan of a checked call. `aligned=False`: assume no alignment beyond that of one element.

    Only shapes, strides and dtypes of the call's tensors are looked at, so they may be on the meta device.

    Raises:
        RuntimeError: its kernel is not loaded yet and a CUDA graph is being captured.
    """
    q, num_tokens = call.q, call.q.shape[0]
    num_kv_heads = 0 if call.k is None else call.k.shape[1]
    geometry = call.geometry or decode_geometry(num_tokens, q.shape[1], num_kv_heads, q.shape[2], call.metadata_ready)
    k_view = None if call.k is None else cache_view(call.k_cache, call.kv_layout)
    static = _static(call, geometry, 1 if k_view is None else k_view.page_size, device)
    outs = (q if call.q_out is None else call.q_out, call.k if call.k_out is None else call.k_out)
    strides = steps((q, call.k, call.v, *outs), (call.k_cache, call.v_cache), call.kv_layout)
    itemsize = q.element_size()
    if not aligned or any(size > 1 and stride * itemsize % static.ALIGN for stride, size in strides):
        static = static._replace(ALIGN=itemsize, ALIGN_TABLE=4)
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    max_position = _UNBOUNDED if call.cos_sin is None else call.cos_sin.shape[0]
    grid = geometry.programs(num_tokens, q.shape[1], num_kv_heads)
    num_pages = 0 if k_view is None else k_view.num_pages
    width, row = index_shape(call.index, call.paged)
    integers = (width, row, num_tokens, max_position, num_pages, *(stride for stride, _ in strides))
    return Plan(call, variant(decode_kernel, device, dtypes, static, geometry.num_warps), grid, integers)


def _static(call: Call, geometry: Geometry, page_size: int, device: torch.device) -> Static:
    """The kernel's compile-time parameters, for memory as aligned as the head sizes allow."""
    num_q_heads, head_dim = call.q.shape[1:]
    v_head_dim = head_dim if call.v is None else call.v.shape[2]
    rotary_dim = 0 if call.cos_sin is None else call.cos_sin.shape[1]
    itemsize = call.q.element_size()
    pdl = pdl_supported(device) and (geometry.pdl if call.enable_pdl is None else call.enable_pdl)
    return Static(
        HQ=num_q_heads,
        HKV=0 if call.k is None else call.k.shape[1],
        D=head_dim,
        DV=v_head_dim,
        R=rotary_dim,
        NEOX=call.is_neox,
        PAGED=call.paged,
        PAGE=page_size,
        TOKENS_PER_REQUEST=call.tokens_per_request,
        OWN_CACHE_POSITIONS=call.cache_positions is not None,
        Q_OUT=call.q_out is not None,
        K_OUT=call.k_out is not None,
        ALIGN=lowest_bit(head_dim * itemsize | v_head_dim * itemsize | 16),
        ALIGN_TABLE=lowest_bit(rotary_dim * 4 | 16),
        BTQ=geometry.tokens_q,
        BHQ=geometry.heads_q,
        BTK=geometry.tokens_kv,
        BHK=geometry.heads_kv,
        PDL=pdl,
        PREFETCH=pdl and call.metadata_ready,
        SOFT=INTERPRETED,
    )
