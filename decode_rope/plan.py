"""Launch plans: everything about a call that its addresses do not change, worked out once.

`append_plan` turns one set of shapes, strides, dtypes and flags into a `Plan`. `Plan.launch` then only reads addresses, the index
tensor's width and stride, the stream and the current device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .faults import fault_buffer
from .geometry import Geometry, decode_geometry
from .kernels.decode import decode_kernel
from .layout import cache_view, span
from .variants import INTERPRETED, Variant, launch_hooks, pdl_supported, variant

_UNBOUNDED = 2**62
_MAX_PACKINGS = 4096
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device = getattr(torch._C, "_cuda_getDevice", None)


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

    def kernel_tensors(self) -> tuple[Tensor, ...]:
        return kernel_tensors(*self[:8], *self[9:12])


def kernel_tensors(q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions, q_out, k_out) -> tuple[Tensor, ...]:
    """The kernel's pointer arguments in order, without the fault record. Absent ones are stood in for by tensors that exist; the
    kernel compiled for their absence never reads or writes through them."""
    no_kv = k is None
    return (
        q,
        q if no_kv else k,
        q if no_kv else v,
        q if q_out is None else q_out,
        q if no_kv else k if k_out is None else k_out,
        q if no_kv else k_cache,
        q if no_kv else v_cache,
        q if cos_sin is None else cos_sin,
        positions,
        positions if cache_positions is None else cache_positions,
        positions if index is None else index,
    )


class Plan:
    """A launch of one configuration, for whatever memory it is given.

    `unaligned` is the plan for memory less aligned than this one needs, once there has been any.
    """

    __slots__ = (
        "align_bits",
        "align_table_bits",
        "device_index",
        "faults",
        "faults_address",
        "grid",
        "integers",
        "num_tokens",
        "packings",
        "paged",
        "rows_needed",
        "sizes",
        "tail",
        "unaligned",
        "variant",
    )

    def __init__(self, call: Call, compiled: Variant, grid: int, integers: tuple[int, ...]):
        self.variant = compiled
        self.grid = grid
        self.integers = integers
        self.tail = (*integers, *compiled.static)
        self.paged = call.paged
        self.num_tokens = call.q.shape[0]
        self.rows_needed = -(-self.num_tokens // call.tokens_per_request)
        self.sizes = tuple(b - a for a, b in map(span, call.kernel_tensors()[:7]))
        self.packings = set()
        self.align_bits = compiled.static.ALIGN - 1
        self.align_table_bits = compiled.static.ALIGN_TABLE - 1
        self.device_index = compiled.device.index
        self.faults = fault_buffer(compiled.device)
        self.faults_address = self.faults.data_ptr()
        self.unaligned = None

    def submit(
        self,
        q,
        k,
        v,
        k_cache,
        v_cache,
        cos_sin,
        positions,
        block_table,
        slot_mapping,
        cache_positions,
        q_out,
        k_out,
        check_memory: bool = True,
    ) -> bool:
        """Launch, if this memory fits the plan; otherwise do nothing and return False. The tensors' shapes, strides, dtypes and
        devices must be the plan's."""
        index = block_table if self.paged else slot_mapping
        integers = self.index_integers(index)
        tensors = kernel_tensors(q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions, q_out, k_out)
        addresses = tuple([t.data_ptr() for t in tensors])
        if integers is None or (check_memory and not self.apart(addresses, q_out is not None, k_out is not None)):
            return False
        plan = self if self.is_aligned(addresses) else self.unaligned
        if plan is None:
            return False
        plan.launch(tensors, addresses, *integers)
        return True

    def fitting(self, call: "Call") -> "Plan":
        """This plan, or the one for less aligned memory if the call's needs it."""
        if self.is_aligned(tuple([t.data_ptr() for t in call.kernel_tensors()])):
            return self
        if self.unaligned is None:
            self.unaligned = append_plan(call, self.variant.device, aligned=False)
        return self.unaligned

    def adopt(self, call: "Call") -> None:
        """Launch a call that has passed every check, and remember what was new about its memory."""
        tensors = call.kernel_tensors()
        addresses = tuple([t.data_ptr() for t in tensors])
        if len(self.packings) < _MAX_PACKINGS:
            self.packings.add((addresses[1] - addresses[0], addresses[2] - addresses[0]))
        self.fitting(call).launch(tensors, addresses, *self.index_integers(call.index))

    def apart(self, addresses: tuple[int, ...], q_out: bool, k_out: bool) -> bool:
        """Whether what is written shares no memory with anything else, as far as addresses alone can tell.

        q, k and v sliced from one packed tensor interleave; the packings found good before are kept in `packings`.
        """
        q, k, v, qo, ko, kc, vc = addresses[:7]
        size_q, size_k, size_v, _, _, size_kc, size_vc = self.sizes
        if -size_q < q - kc < size_kc or -size_k < k - kc < size_kc or -size_v < v - kc < size_kc:
            return False
        if -size_q < q - vc < size_vc or -size_k < k - vc < size_vc or -size_v < v - vc < size_vc:
            return False
        if (-size_k < k - q < size_q or -size_v < v - q < size_q) and (k - q, v - q) not in self.packings:
            return False
        if not (q_out or k_out):
            return True
        outs = ((0, qo, q),) * q_out + ((1, ko, k),) * k_out
        others = (*zip((q, k, v, kc, vc), (size_q, size_k, size_v, size_kc, size_vc), strict=True),)
        for which, out, own in outs:
            size = self.sizes[3 + which]
            if any(-n < a - out < size for a, n in others if not a == out == own):
                return False
        return not (q_out and k_out and -size_k < ko - qo < size_q)

    def index_integers(self, index: Tensor | None) -> tuple[int, int] | None:
        """(width, row stride) of the index tensor, the two facts about it that vary freely; None if it does not fit the plan."""
        if index is None:
            return 0, 0
        shape, stride = index.shape, index.stride()
        if self.paged:
            fits = shape[0] >= self.rows_needed and (stride[1] == 1 or shape[1] <= 1)
            return (shape[1], stride[0]) if fits else None
        fits = shape[0] <= self.num_tokens and (stride[0] == 1 or shape[0] <= 1)
        return (shape[0], 0) if fits else None

    def is_aligned(self, addresses: tuple[int, ...]) -> bool:
        a = addresses
        rows = a[0] | a[1] | a[2] | a[3] | a[4] | a[5] | a[6]
        return not (rows & self.align_bits or a[7] & self.align_table_bits)

    def launch(self, tensors: tuple[Tensor, ...], addresses: tuple[int, ...], width: int, stride: int) -> None:
        """Launch on the current stream of the tensors' device. `addresses` are those of `tensors`, in kernel order."""
        v = self.variant
        if not INTERPRETED and _current_device() != self.device_index:
            with torch.cuda.device(self.device_index):
                self.launch(tensors, addresses, width, stride)
        elif v.direct and not launch_hooks():
            v.run(
                self.grid, 1, 1, _raw_stream(self.device_index), v.function, v.metadata, None, None, None,
                *addresses, self.faults_address, width, stride, *self.tail,
            )  # fmt: skip
        else:
            v.launch_jit(self.grid, (*tensors, self.faults), (width, stride, *self.integers))


def append_plan(call: Call, device: torch.device, *, aligned: bool = True) -> Plan:
    """The plan of a checked call. `aligned=False`: assume no alignment beyond that of one element.

    Only shapes, strides and dtypes of the call's tensors are looked at, so they may be on the meta device.

    Raises:
        RuntimeError: its kernel is not loaded yet and a CUDA graph is being captured.
    """
    q, num_tokens = call.q, call.q.shape[0]
    num_kv_heads = 0 if call.k is None else call.k.shape[1]
    geometry = call.geometry or decode_geometry(num_tokens, q.shape[1], num_kv_heads, q.shape[2])
    k_view = None if call.k is None else cache_view(call.k_cache, call.kv_layout)
    static = _static(call, geometry, 1 if k_view is None else k_view.page_size, device)
    strides = _strides(call)
    itemsize = q.element_size()
    if not aligned or any(size > 1 and stride * itemsize % static.ALIGN for stride, size in strides):
        static = static._replace(ALIGN=itemsize, ALIGN_TABLE=4)
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    max_position = _UNBOUNDED if call.cos_sin is None else call.cos_sin.shape[0]
    grid = geometry.programs(num_tokens, q.shape[1], num_kv_heads)
    num_pages = 0 if k_view is None else k_view.num_pages
    integers = (num_tokens, max_position, num_pages, *(stride for stride, _ in strides))
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
        ALIGN=_lowest_bit(head_dim * itemsize | v_head_dim * itemsize | 16),
        ALIGN_TABLE=_lowest_bit(rotary_dim * 4 | 16),
        BTQ=geometry.tokens_q,
        BHQ=geometry.heads_q,
        BTK=geometry.tokens_kv,
        BHK=geometry.heads_kv,
        PDL=pdl,
        PREFETCH=pdl and call.metadata_ready,
        SOFT=INTERPRETED,
    )


def _lowest_bit(n: int) -> int:
    return n & -n


def _strides(call: Call) -> list[tuple[int, int]]:
    """(stride in elements, size) of every dimension the kernel steps along, in the order of its arguments."""
    q, k, v = call.q, call.k, call.v
    rows = (q, k, v, q if call.q_out is None else call.q_out, k if call.k_out is None else call.k_out)
    found = []
    for x in rows:
        found += [(0, 0)] * 2 if x is None else zip(x.stride()[:2], x.shape[:2], strict=True)
    for cache in (call.k_cache, call.v_cache):
        if k is None:
            found += [(0, 0)] * 3
            continue
        view = cache_view(cache, call.kv_layout)
        found += [
            (view.stride_page, view.num_pages),
            (view.stride_offset, view.page_size),
            (view.stride_head, view.num_heads),
        ]
    return found
