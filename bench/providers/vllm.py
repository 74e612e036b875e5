"""vLLM: rotary_embedding, then reshape_and_cache_flash (two launches)."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need


class Vllm:
    group, exact, slow, cpu = "peer", False, False, False
    modules = ("vllm._custom_ops",)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        rotary = need("vllm._custom_ops", "rotary_embedding")
        append = need("vllm._custom_ops", "reshape_and_cache_flash")
        q, k, head_dim = layer.q.flatten(1), layer.k.flatten(1), case.model.head_dim
        one = torch.ones(1, dtype=torch.float32, device=case.device)
        slots = meta.slots

        def call() -> Tensor:
            rotary(meta.positions, q, k, head_dim, meta.cos_sin, True)
            append(layer.k, layer.v, layer.k_cache, layer.v_cache, slots, "auto", one, one)
            return layer.q

        return call


def make(name: str, _: str) -> Vllm:
    return Vllm(name)
