"""`apply_rope` as PyTorch operators, for torch.compile and torch.export: one that returns a new tensor and has a gradient, and
two that write and have none."""

import torch
from torch import Tensor

from ..append.checks import check_out
from ..launch import rope as eager
from .operators import LIBRARY, define, define_as, make_fault_record

_VERSION = 2  # as in `append.py`
_FLAGS = "Tensor cos_sin_cache, Tensor? positions, Tensor? axis_map, bool is_neox, bool inverse, str layout"
_FIELDS = ("x", "out", "cos_sin_cache", "positions", "is_neox", "axis_map", "inverse", "layout")


def _turned(x, cos_sin, positions, axis_map, is_neox, inverse, layout, report) -> Tensor:
    return eager.rotate(x, None, cos_sin, positions, is_neox, axis_map, inverse, layout, report=report)


def _trace(x, *_) -> Tensor:
    make_fault_record(x.device)
    return torch.empty_like(x)


def _keep(ctx, inputs, output) -> None:
    _, cos_sin, positions, axis_map, *ctx.flags = inputs
    ctx.save_for_backward(cos_sin, positions, axis_map)


def _gradient(ctx, grad):
    is_neox, inverse, layout, _ = ctx.flags
    if grad.shape[-1] > 1 and grad.stride(-1) != 1:
        grad = grad.contiguous()
    # Faults were counted on the way forward.
    return _ROTATE(grad, *ctx.saved_tensors, is_neox, not inverse, layout, False), *[None] * 7


def _write(**arguments) -> None:
    eager.rotate(**arguments, report=True)


_NAME = f"apply_rope_v{_VERSION}"
_ROTATE = define_as(f"{_NAME}(Tensor x, {_FLAGS}, bool report) -> Tensor", _turned, _trace)
torch.library.register_autograd(f"decode_rope::{_NAME}", _gradient, setup_context=_keep, lib=LIBRARY)
_ROTATE_IN_PLACE, _ = define(f"{_NAME}_in_place", f"Tensor(a!) x, {_FLAGS}", _write, _FIELDS, {"out": "x"})
_ROTATE_OUT, _ = define(f"{_NAME}_out", f"Tensor x, Tensor(a!) out, {_FLAGS}", _write, _FIELDS)


def rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout) -> Tensor:
    """The public function while a compiler traces it: one operator in the graph, and where autograd is to see a write, a copy."""
    flags = (cos_sin, positions, axis_map, is_neox, inverse, layout)
    if out is None:
        return _ROTATE(x, *flags, True)
    if out is not x:
        check_out(out, x)  # now, for a copy takes more than the operator does
    if torch.is_grad_enabled() and x.requires_grad:
        return out.copy_(_ROTATE(x, *flags, True))
    if out is x:
        _ROTATE_IN_PLACE(x, *flags)
    else:
        _ROTATE_OUT(x, out, *flags)
    return out
