"""FlashInfer: apply_rope_with_cos_sin_cache_inplace, then append_paged_kv_cache (two launches)."""

from collections.abc import Callable

from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need


class FlashInfer:
    group, exact, slow, cpu = "peer", False, False, False
    modules = ("flashinfer",)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        rope = need("flashinfer", "apply_rope_with_cos_sin_cache_inplace")
        append = need("flashinfer", "append_paged_kv_cache")
        head_dim = case.model.head_dim
        q, k = layer.q.flatten(1), layer.k.flatten(1)
        # Everything int32: other dtypes are cast by hidden kernels in every call.
        positions, requests, (indptr, indices, last) = meta.positions32, meta.requests, meta.csr
        caches = (layer.k_cache, layer.v_cache)

        def call() -> Tensor:
            rope(positions, q, k, head_dim, meta.cos_sin, True)
            append(layer.k, layer.v, requests, positions, caches, indices, indptr, last, "NHD")
            return layer.q

        return call


def make(name: str, _: str) -> FlashInfer:
    return FlashInfer(name)
