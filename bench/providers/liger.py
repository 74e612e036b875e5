"""Liger's rotary kernel, then two index_copy_: three launches, with cos and sin gathered once outside.

Its kernel reads Q and K as dense rows, so slices of a packed QKV are copied first, as its wrapper does.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need


class Liger:
    group, exact, slow, cpu = "peer", False, False, False
    modules = ("liger_kernel.transformers.rope",)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        rope = need("liger_kernel.transformers.rope", "liger_rotary_pos_emb")
        # A model gathers the angles once a step, whatever its number of layers.
        half_cos, half_sin = meta.cos_sin[meta.positions].unsqueeze(0).chunk(2, dim=-1)
        cos, sin = torch.cat((half_cos, half_cos), -1), torch.cat((half_sin, half_sin), -1)
        q, k = layer.q.transpose(0, 1).unsqueeze(0), layer.k.transpose(0, 1).unsqueeze(0)
        rows = (-1, case.model.num_kv_heads, case.model.head_dim)
        k_rows, v_rows, slots = layer.k_cache.view(rows), layer.v_cache.view(rows), meta.slots

        def call() -> Tensor:
            q_rotated, k_rotated = rope(q, k, cos, sin)
            k_rows.index_copy_(0, slots, k_rotated[0].transpose(0, 1))
            v_rows.index_copy_(0, slots, layer.v)
            return q_rotated[0].transpose(0, 1)

        return call


def make(name: str, _: str) -> Liger:
    return Liger(name)
