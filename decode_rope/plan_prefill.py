"""Launch plans of the prefill kernel; they work as those in `plan.py` do."""

from typing import NamedTuple

import torch
from torch import Tensor

from .geometry_prefill import PrefillGeometry, prefill_geometry, takes_whole_rows
from .kernels.prefill import INTEGERS, POINTERS, prefill_kernel
from .launch import UNBOUNDED, AppendPlan, with_stand_ins
from .layout import cache_view, index_shape, lowest_bit, steps
from .variants import INTERPRETED, pdl_mode, variant


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
    WHOLE: bool
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
        return with_stand_ins(self.own_tensors())

    def addresses(self) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in self.kernel_tensors()])


class PrefillPlan(AppendPlan):
    """A prefill of one configuration."""

    __slots__ = ()

    def repeat(self, given: tuple[Tensor, ...]) -> bool:
        """Launch again on the memory of an earlier call; False, and nothing done, if there was none with it."""
        return self.again([x.data_ptr() for x in given])

    def less_aligned(self, call: PrefillCall) -> "PrefillPlan":
        return prefill_plan(call, self.variant.device, aligned=False)


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
    view = cache_view(call.k_cache, call.kv_layout) if call.appends() else None
    only_appends = call.q_out is None and call.k_out is None and call.cu_seqlens is None
    whole = aligned and only_appends and takes_whole_rows(rotary_dim, itemsize, align)
    sizes = (num_q_heads, num_kv_heads, head_dim, rotary_dim, itemsize)
    geometry = call.geometry or prefill_geometry(*sizes, aligned, whole)
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
        WHOLE=whole,
        PDL=pdl_mode(device, geometry.pdl, call.enable_pdl) > 0,
        SOFT=INTERPRETED,
    )
    integers = (
        *index_shape(call.index, call.paged),
        q.shape[0],
        UNBOUNDED if call.cos_sin is None else call.cos_sin.shape[0],
        0 if view is None else view.num_pages,
        call.tokens_per_request,
        0 if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1,
        call.positions.stride(0) if multi else 0,
        *(stride for stride, _ in strides),
    )
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    compiled = variant(prefill_kernel, (*POINTERS, *INTEGERS), device, dtypes, static, geometry.num_warps)
    moved_q_heads = num_q_heads if static.R or static.Q_OUT or not num_kv_heads else 0
    return PrefillPlan(call, compiled, geometry.programs(q.shape[0], moved_q_heads, num_kv_heads, static.CACHE), integers)
