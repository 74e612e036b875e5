"""SGLang's fused CUDA rope + KV store, built from the installed package's source on first use."""

from collections.abc import Callable

from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need

# Newest first: the module moved between releases.
_MODULES = ("sglang.kernels.ops.attention.rope", "sglang.jit_kernel.rope")


class SGLang:
    group, exact, slow, cpu = "peer", False, False, False
    modules = _MODULES

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        function = need(_MODULES, "apply_rope_inplace_with_kvcache")
        row = case.model.num_kv_heads * case.model.head_dim
        k_rows, v_rows = layer.k_cache.view(-1, row), layer.v_cache.view(-1, row)
        positions, slots = meta.positions, meta.slots

        def call() -> Tensor:
            function(layer.q, layer.k, layer.v, k_rows, v_rows, meta.cos_sin, positions, slots, is_neox=True)
            return layer.q

        return call


def make(name: str, _: str) -> SGLang:
    return SGLang(name)
