"""Launch plans: everything about a call that its addresses do not change, worked out once.

`append_plan` turns one set of shapes, strides, dtypes and flags into a `Plan`, whose launches only read addresses, the stream and
the current device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import driver
from .geometry import Geometry, decode_geometry
from .kernels.decode import INTEGERS, POINTERS, decode_kernel
from .launch import UNBOUNDED, AppendPlan, cu_launch, current_device, launch_hooks, raw_stream, with_stand_ins
from .layout import cache_view, index_shape, lowest_bit, steps
from .variants import INTERPRETED, Variant, pdl_mode, variant

_USUAL = (0, 1, 2, 5, 6, 7, 8, 10)  # the own tensors of a call with no outputs of its own and no cache_positions


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
    PDL: int
    PREFETCH: bool
    WIDE: int
    FENCE: bool
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
        """The kernel's POINTERS, without the fault record; None where this call has none."""
        return (
            self.q, self.k, self.v, self.q_out, self.k_out, self.k_cache, self.v_cache, self.cos_sin, self.positions,
            self.cache_positions, self.index,
        )  # fmt: skip

    def kernel_tensors(self) -> tuple[Tensor, ...]:
        return with_stand_ins(self.own_tensors())

    def addresses(self) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in self.kernel_tensors()])


class Plan(AppendPlan):
    """A decode step of one configuration. It keeps packed launches of the usual calls alone, those with no outputs of their own
    and no cache_positions."""

    __slots__ = ()

    def __init__(self, call: Call, compiled: Variant, grid: int, integers: tuple[int, ...], carveout: int):
        super().__init__(call, compiled, grid, integers, carveout)
        self._keeps = compiled.direct and tuple([i for i, _, _ in self._ranges]) == _USUAL

    def submit(self, q, k, v, k_cache, v_cache, cos_sin, positions, index, cache_positions=None, q_out=None, k_out=None) -> bool:
        """Launch on tensors whose shapes, strides, dtypes and devices are the plan's, unless their addresses ask for a closer look
        first; then do nothing and return False."""
        if self._keeps:
            addresses = (
                q.data_ptr(), k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), cos_sin.data_ptr(),
                positions.data_ptr(), index.data_ptr(), raw_stream(self.device),
            )  # fmt: skip
            packed = self._ready.get(addresses)
            if packed is not None and current_device() == self.device and not launch_hooks:
                if cu_launch(*packed):
                    driver.launch(packed)
                return True
        return self.look_closer(Call(q, k, v, k_cache, v_cache, cos_sin, positions, index, True, cache_positions, q_out, k_out))

    def less_aligned(self, call: Call) -> "Plan":
        return append_plan(call, self.variant.device, aligned=False)


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
    outs = (q if call.q_out is None else call.q_out, call.k if call.k_out is None else call.k_out)
    strides = steps((q, call.k, call.v, *outs), (call.k_cache, call.v_cache), call.kv_layout)
    max_position = UNBOUNDED if call.cos_sin is None else call.cos_sin.shape[0]
    num_pages = 0 if k_view is None else k_view.num_pages
    integers = (*index_shape(call.index, call.paged), num_tokens, max_position, num_pages, *(stride for stride, _ in strides))
    static = _static(call, geometry, 1 if k_view is None else k_view.page_size, integers, device)
    itemsize = q.element_size()
    if not aligned or any(size > 1 and stride * itemsize % static.ALIGN for stride, size in strides):
        static = static._replace(ALIGN=itemsize, ALIGN_TABLE=4)
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    grid = geometry.programs(num_tokens, q.shape[1], num_kv_heads)
    compiled = variant(decode_kernel, (*POINTERS, *INTEGERS), device, dtypes, static, geometry.num_warps)
    return Plan(call, compiled, grid, integers, geometry.carveout)


def _static(call: Call, geometry: Geometry, page_size: int, integers: tuple[int, ...], device: torch.device) -> Static:
    """The kernel's compile-time parameters, for memory as aligned as the head sizes allow."""
    num_q_heads, head_dim = call.q.shape[1:]
    v_head_dim = head_dim if call.v is None else call.v.shape[2]
    rotary_dim = 0 if call.cos_sin is None else call.cos_sin.shape[1]
    itemsize = call.q.element_size()
    pdl = pdl_mode(device, geometry.pdl, call.enable_pdl)
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
        PREFETCH=pdl > 0 and call.metadata_ready,
        WIDE=sum(1 << i for i, n in enumerate(integers) if n >= 2**31),
        FENCE=not INTERPRETED and torch.version.hip is None,
        SOFT=INTERPRETED,
    )
