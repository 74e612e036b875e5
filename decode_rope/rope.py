"""`apply_rope`: the rotation alone, for training and for attention over live tensors, with its gradient."""

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import ops_rope
from .checks_prefill import check_no_grad
from .rotate import rotate


def apply_rope(
    x: Tensor,
    cos_sin_cache,
    positions: Tensor | None = None,
    *,
    is_neox: bool = True,
    axis_map: Tensor | None = None,
    inverse: bool = False,
    out: Tensor | None = None,
    layout: str = "NHD",
) -> Tensor:
    """Rotate a query or key tensor: in one kernel launch, without a copy, in any of the usual layouts, and
    differentiably.

    Autograd knows it: the gradient is the inverse rotation of the gradient, one more launch that keeps no
    activations. Numbers are those of `rope_append_decode`, bit for bit. Safe in CUDA graphs, once a
    configuration's first call is done. On CPU tensors `decode_rope.reference` runs instead.

    Rows with `positions < 0` pass through unrotated (padding), and so do rows with a position past the table,
    which are counted; see `decode_rope.check_faults`. Their gradients pass through likewise.

    Args:
        x: `[B, S, H, D]` (layout "NHD"), `[B, H, S, D]` (layout "HND") or `[T, H, D]`; fp16, bf16 or fp32, on
            the CPU float64 too; last dimension contiguous, other strides free.
        cos_sin_cache: fp32 `[max_position, R]`, cosines then sines, contiguous, R even and at most D (the first
            R elements of a head rotate); or a `RopeTable`, whose own pairing then holds.
        positions: int32 or int64 `[S]`, `[B, S]` or `[1, S]` (for `[T, H, D]`: `[T]`), any batch stride; or
            with one dimension more than that in front, `[axes, B, S]` (`[axes, T]`), and an axis map. None: 0 …
            S − 1.
        is_neox: pairs are (i, i + R/2) if true (NeoX, Llama), else (2i, 2i + 1) (GPT-J).
        axis_map: int8 `[R/2]`, the axis of each pair, for positions of several axes, as in
            `rope_append_prefill`.
        inverse: turn backwards (sines negated).
        out: where the result goes, shape and dtype of x; `out=x` rotates in place, for autograd too.
        layout: what the dimensions of a 4-D x are.
    Returns:
        `out`, or a new tensor, dense and in the order of x's strides.
    Raises:
        TypeError, ValueError: an argument is at fault; it is named, and nothing has been written.
        RuntimeError: the first use of a configuration is inside a CUDA graph capture.
        NotImplementedError: a derivative in forward mode is wanted.
    Traffic:
        `2·itemsize·H·D + 4·R` bytes a token; in place `2·itemsize·H·R + 4·R`.
    Example:
        >>> import torch, decode_rope
        >>> x = torch.randn(2, 4, 6, 64, requires_grad=True)  # [B, H, S, D]
        >>> angle = torch.arange(128)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> table = torch.cat([angle.cos(), angle.sin()], dim=1)
        >>> y = decode_rope.apply_rope(x, table, layout="HND")
        >>> back = decode_rope.apply_rope(y, table, layout="HND", inverse=True)
        >>> bool(torch.allclose(back, x, atol=1e-5))
        True
    """
    cos_sin = cos_sin_cache
    if not isinstance(cos_sin, Tensor):
        is_neox = getattr(cos_sin, "is_neox", is_neox)
        axis_map = getattr(cos_sin, "axis_map", None) if axis_map is None else axis_map
        cos_sin = getattr(cos_sin, "cos_sin_cache", cos_sin)
    if torch.is_grad_enabled():
        check_no_grad(x, cos_sin, out)
    if forward_ad._current_level >= 0:
        _no_forward_mode(x)
    if is_compiling():
        return ops_rope.rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout)
    if torch.is_grad_enabled() and getattr(x, "requires_grad", False):
        in_place = out is x
        return _Rope.apply(x, None if in_place else out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, True)
    return rotate(x, out, cos_sin, positions, is_neox, axis_map, inverse, layout, report=True)


def _no_forward_mode(x) -> None:
    if isinstance(x, Tensor) and (is_compiling() or forward_ad.unpack_dual(x).tangent is not None):
        raise NotImplementedError(
            "apply_rope: no derivative in forward mode (jvp, dual tensors), which would be lost without a word; the rotation is "
            "linear, so rotate the tangent in a call of its own"
        )


class _Rope(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, report):
        return rotate(x, x if in_place else out, cos_sin, positions, is_neox, axis_map, inverse, layout, report=report)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, out, in_place, cos_sin, positions, is_neox, axis_map, inverse, layout, _ = inputs
        if in_place or out is not None:
            ctx.mark_dirty(output)
        ctx.save_for_backward(cos_sin, positions, axis_map)
        ctx.flags = (is_neox, inverse, layout)

    @staticmethod
    def backward(ctx, grad):
        cos_sin, positions, axis_map = ctx.saved_tensors
        is_neox, inverse, layout = ctx.flags
        if grad.shape[-1] > 1 and grad.stride(-1) != 1:
            grad = grad.contiguous()
        # Through `apply`, for gradients of gradients. Faults were counted on the way forward.
        turned = _Rope.apply(grad, None, False, cos_sin, positions, is_neox, axis_map, not inverse, layout, False)
        return turned, *[None] * 9
