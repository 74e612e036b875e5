"""The rotation alone, without autograd: its call, its plan and its launch."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import reference
from .checks_prefill import check_apply
from .dispatch import PlanBook
from .faults import fault_buffer
from .geometry_prefill import Tiles, plain_tiles
from .kernels.plain import INTEGERS, POINTERS, plain_kernel
from .launch import Launch
from .layout import lowest_bit, span
from .variants import INTERPRETED, Variant, variant

_WARPS = 4


class Static(NamedTuple):
    """The kernel's compile-time parameters, in its own order; see `kernels/plain.py` for what each means."""

    H: int
    D: int
    R: int
    NEOX: bool
    AXES: int
    POSITIONS: bool
    OUT: bool
    INVERSE: bool
    REPORT: bool
    ALIGN: int
    ALIGN_TABLE: int
    BT: int
    BH: int
    LOOP: int
    SOFT: bool


class Rotation(NamedTuple):
    """One rotation: x into out (which may be x)."""

    x: Tensor
    out: Tensor
    cos_sin: Tensor
    positions: Tensor | None
    axis_map: Tensor | None
    is_neox: bool = True
    inverse: bool = False
    layout: str = "NHD"
    report: bool = True
    geometry: Tiles | None = None

    def in_place(self) -> bool:
        return self.out.data_ptr() == self.x.data_ptr()

    def kernel_tensors(self) -> tuple[Tensor, ...]:
        """The kernel's pointer arguments in order, without the fault record; x stands in for those that it does
        not read."""
        x = self.x
        return (
            x,
            self.out,
            self.cos_sin,
            x if self.positions is None else self.positions,
            x if self.axis_map is None else self.axis_map,
        )

    def addresses(self) -> tuple[int, ...]:
        return tuple([x.data_ptr() for x in self.kernel_tensors()])


class PlainPlan(Launch):
    """A rotation, for whatever memory it is given."""

    __slots__ = ("_sizes",)
    row_tensors = 2

    def __init__(self, call: Rotation, compiled: Variant, grid: int, integers: tuple[int, ...]):
        super().__init__(compiled, grid, integers)
        self._sizes = [end - start for start, end in map(span, (call.x, call.out))]

    def less_aligned(self, call: Rotation) -> "PlainPlan":
        return _plan(call, self.variant.device, aligned=False)

    def submit(self, call: Rotation) -> bool:
        """Launch, unless the addresses of this call ask for a closer look first; then do nothing and return
        False."""
        addresses = call.addresses()
        if self.again(addresses):
            return True
        delta = addresses[1] - addresses[0]
        apart = delta == 0 or delta >= self._sizes[0] or -delta >= self._sizes[1]
        if apart:
            self._launch(call, addresses)
        return apart

    def adopt(self, call: Rotation) -> None:
        """Launch a call that has passed every check, and remember its memory as good."""
        self._launch(call, call.addresses())

    def _launch(self, call: Rotation, addresses: tuple[int, ...]) -> None:
        packed = self.fitting(addresses, call).launch(call.kernel_tensors(), addresses)
        if packed is not None:
            self.keep(addresses, packed)


def _plan(call: Rotation, device: torch.device, *, aligned: bool = True) -> PlainPlan:
    """The plan of a checked call; RuntimeError if its kernel is not loaded yet and a CUDA graph is being
    captured."""
    x, positions, itemsize = call.x, call.positions, call.x.element_size()
    batch, seq_len, num_heads, head_dim = _sizes(x, call.layout)
    rotary_dim = call.cos_sin.shape[1]
    strides = [*_steps(x, call.layout), *_steps(call.out, call.layout)]
    align = lowest_bit(head_dim * itemsize | 16)
    aligned = aligned and not any(stride * itemsize % align for stride in strides)
    apart = strides[2] > strides[1] > 0
    shape = (num_heads, head_dim, rotary_dim, itemsize, aligned)
    tiles = call.geometry or plain_tiles(*shape, own_output=not call.in_place(), apart=apart)
    multi = positions is not None and positions.dim() == x.dim() - 1
    static = Static(
        H=num_heads,
        D=head_dim,
        R=rotary_dim,
        NEOX=call.is_neox,
        AXES=positions.shape[0] if multi else 0,
        POSITIONS=positions is not None,
        OUT=not call.in_place(),
        INVERSE=call.inverse,
        REPORT=call.report,
        ALIGN=align if aligned else itemsize,
        ALIGN_TABLE=lowest_bit(rotary_dim * 4 | 16) if aligned else 4,
        BT=tiles.tokens,
        BH=tiles.heads,
        LOOP=tiles.loop,
        SOFT=INTERPRETED,
    )
    of_batch = 0
    if x.dim() == 4 and positions is not None and positions.dim() >= 2 and positions.shape[-2] > 1:
        of_batch = positions.stride(-2)
    of_axis = positions.stride(0) if multi else 0
    integers = (batch * seq_len, seq_len, call.cos_sin.shape[0], of_axis, of_batch, *strides)
    dtypes = (*(t.dtype for t in call.kernel_tensors()), torch.int64)
    compiled = variant(plain_kernel, (*POINTERS, *INTEGERS), device, dtypes, static, _WARPS)
    grid = -(-batch * seq_len // tiles.tokens) * tiles.groups(num_heads)
    return PlainPlan(call, compiled, grid, integers)


def _sizes(x: Tensor, layout: str) -> tuple[int, int, int, int]:
    """(batch, sequence, heads, head_dim)."""
    if x.dim() == 3:
        return 1, *x.shape
    return (x.shape[0], x.shape[2], x.shape[1], x.shape[3]) if layout == "HND" else tuple(x.shape)


def _steps(x: Tensor, layout: str) -> tuple[int, int, int]:
    """Strides in elements of (batch, sequence, heads); 0 where there is nothing to step to."""
    strides = (0, *x.stride()[:2]) if x.dim() == 3 else x.stride()[:3]
    sizes = (1, *x.shape[:2]) if x.dim() == 3 else x.shape[:3]
    steps = tuple(stride if size > 1 else 0 for stride, size in zip(strides, sizes, strict=True))
    return (steps[0], steps[2], steps[1]) if layout == "HND" else steps


def _run_reference(call: Rotation) -> None:
    with torch.no_grad():
        reference.apply_rope(
            call.x, call.cos_sin, call.positions, is_neox=call.is_neox, axis_map=call.axis_map, inverse=call.inverse,
            out=call.out, layout=call.layout, faults=fault_buffer(call.x.device) if call.report else None,
        )  # fmt: skip


def rotation_plans() -> PlanBook:
    """An empty book for rotations."""
    return PlanBook(_plan, _run_reference)


_PLANS = rotation_plans()


def rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout, *, report: bool, geometry=None) -> Tensor:
    """`apply_rope` without autograd."""
    everything = (x, cos_sin, positions, axis_map, None if out is x else out)
    given = tuple([tensor for tensor in everything if tensor is not None])
    options = (is_neox, inverse, layout, report, geometry)
    flags = (
        tuple([tensor is None for tensor in everything]), *options,
        _same_memory(x, out), type(is_neox), type(inverse),  # 1 == True; checks refuse 1
    )  # fmt: skip
    plan = _PLANS.find(flags, given)
    if plan is not None:
        call = Rotation(x, torch.empty_like(x) if out is None else out, cos_sin, positions, axis_map, *options)
        if plan.submit(call):
            return call.out
    on_cpu = isinstance(x, Tensor) and x.device.type == "cpu"
    check_apply(x, cos_sin, positions, is_neox, axis_map, inverse, out, layout, float64=on_cpu)
    call = Rotation(x, torch.empty_like(x) if out is None else out, cos_sin, positions, axis_map, *options)
    if x.dtype == torch.float64:  # which no kernel takes
        _run_reference(call)
    else:
        _PLANS.run_checked(call, flags, given)
    return call.out


def _same_memory(x, out) -> bool:
    """Whether the result overwrites x. What is no tensor, the checks will say."""
    return isinstance(x, Tensor) and isinstance(out, Tensor) and out.data_ptr() == x.data_ptr()
