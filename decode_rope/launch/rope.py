"""The launch of a rotation alone, without autograd."""

import torch
from torch import Tensor

from .. import reference
from ..append.arguments import Rotation
from ..append.checks import check_rotation
from ..append.faults import fault_buffer
from ..append.layout import lowest_bit
from ..kernels.rope import apply_rope_kernel
from .book import Book
from .spec import Spec, Values
from .tiles import tiles_of

_WARPS = 4


def _values(call: Rotation, device: torch.device, aligned: bool) -> Values:
    x, positions, itemsize = call.x, call.positions, call.x.element_size()
    batch, seq_len, num_heads, head_dim = _sizes(x, call.layout)
    rotary_dim = call.cos_sin_cache.shape[1]
    steps = {
        f"stride_{name}_{dimension}": stride
        for name, tensor in (("x", x), ("out", x if call.out is None else call.out))
        for dimension, stride in zip("bsh", _steps(tensor, call.layout), strict=True)
    }
    align = lowest_bit(head_dim * itemsize | 16)
    aligned = aligned and not any(stride * itemsize % align for stride in steps.values())
    apart = steps["stride_x_h"] > steps["stride_x_s"] > 0
    shape = (num_heads, head_dim, rotary_dim, itemsize, aligned)
    tiles = call.geometry or tiles_of(*shape, own_output=call.out is not None, apart=apart)
    multi = positions is not None and positions.dim() == x.dim() - 1
    facts = {
        "H": num_heads,
        "D": head_dim,
        "R": rotary_dim,
        "NEOX": call.is_neox,
        "AXES": positions.shape[0] if multi else 0,
        "POSITIONS": positions is not None,
        "OUT": call.out is not None,
        "INVERSE": call.inverse,
        "REPORT": call.report,
        "ALIGN": align if aligned else itemsize,
        "ALIGN_TABLE": lowest_bit(rotary_dim * 4 | 16) if aligned else 4,
        "BT": tiles.tokens,
        "BH": tiles.heads,
        "LOOP": tiles.loop,
    }
    has_batches = x.dim() == 4 and positions is not None and positions.dim() >= 2 and positions.shape[-2] > 1
    integers = {
        "num_tokens": batch * seq_len,
        "seq_len": seq_len,
        "max_position": call.cos_sin_cache.shape[0],
        "stride_axis": positions.stride(0) if multi else 0,
        "stride_positions_b": positions.stride(-2) if has_batches else 0,
        **steps,
    }
    return Values(facts, integers, -(-batch * seq_len // tiles.tokens) * tiles.groups(num_heads), _WARPS)


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


def _reference(call: Rotation) -> None:
    with torch.no_grad():
        reference.apply_rope(
            call.x, call.cos_sin_cache, call.positions, is_neox=call.is_neox, axis_map=call.axis_map, inverse=call.inverse,
            out=call.x if call.out is None else call.out, layout=call.layout,
            faults=fault_buffer(call.x.device) if call.report else None,
        )  # fmt: skip


ROPE = Spec(apply_rope_kernel, Rotation, _values, check_rotation, _reference)
BOOK = Book(ROPE)


def rotate(x, out, cos_sin_cache, positions, is_neox, axis_map, inverse, layout, *, report: bool) -> Tensor:
    """`apply_rope` without autograd."""
    if out is None and isinstance(x, Tensor):
        out = torch.empty_like(x)
    call = Rotation(x, None if out is x else out, cos_sin_cache, positions, axis_map, is_neox, inverse, layout, report)
    if isinstance(x, Tensor) and x.dtype == torch.float64:  # no kernel takes it
        check_rotation(call)
        _reference(call)
    else:
        BOOK.run(call)
    return out
