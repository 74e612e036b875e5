"""AITER's Triton fused_qk_rope_reshape_and_cache. It always writes a rotated K besides the cache."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need

# Newest first: the module moved between releases.
_MODULES = ("aiter.ops.triton.fusions.fused_kv_cache", "aiter.ops.triton.fused_kv_cache")


class Aiter:
    group, exact, slow, cpu = "peer", False, False, False
    modules = _MODULES

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        function = need(_MODULES, "fused_qk_rope_reshape_and_cache")
        cos, sin = meta.cos_sin.chunk(2, dim=-1)
        k_out = torch.empty(layer.k.shape, dtype=layer.k.dtype, device=layer.k.device)
        slots = meta.slots

        def call() -> Tensor:
            function(
                layer.q,
                layer.k,
                layer.v,
                layer.k_cache,
                layer.v_cache,
                slots,
                meta.positions,
                cos,
                sin,
                None,
                None,
                True,
                True,
                apply_scale=False,
                q_out=layer.q,
                k_out=k_out,
                output_zeros=False,
            )
            return layer.q

        return call


def make(name: str, _: str) -> Aiter:
    return Aiter(name)
