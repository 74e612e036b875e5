"""Plain PyTorch operations, one kernel each: what a first implementation does."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate-half in fp32; cos and sin are [T, 1, D / 2]."""
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_rows: Tensor,
    v_rows: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> Tensor:
    """k_rows and v_rows are the caches as [slots, Hkv, D]. Returns a new rotated Q."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    k_rows.index_copy_(0, slots, rotate(k, cos, sin))
    v_rows.index_copy_(0, slots, v)
    return rotate(q, cos, sin)


def bind_with(function: Callable[..., Tensor], case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
    rows = (-1, case.model.num_kv_heads, case.model.head_dim)
    arguments = (
        layer.q,
        layer.k,
        layer.v,
        layer.k_cache.view(rows),
        layer.v_cache.view(rows),
        meta.cos_sin,
        meta.positions,
        meta.slots,
    )
    return lambda: function(*arguments)


class Eager:
    group, exact, slow, cpu = "peer", False, False, True
    modules = ("torch",)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        return bind_with(rope_append, case, meta, layer)


def make(name: str, _: str) -> Eager:
    return Eager(name)
