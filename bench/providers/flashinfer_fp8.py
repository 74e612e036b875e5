"""FlashInfer's fused rope + fp8 quantise + append: other bytes (fp8 Q and caches), so outside every ratio."""

from collections.abc import Callable

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta
from bench.providers import need


def as_fp8(cache: Tensor) -> Tensor:
    """A contiguous e4m3 cache of the same shape in the first half of the storage."""
    return cache.view(-1).view(torch.float8_e4m3fn)[: cache.numel()].view(cache.shape)


class FlashInferFp8:
    group, exact, slow, cpu = "other-bytes", False, False, False
    modules = ("flashinfer.rope",)

    def __init__(self, name: str) -> None:
        self.name = name

    def bind(self, case: Case, meta: Meta, layer: Layer) -> Callable[[], Tensor]:
        fused = need("flashinfer.rope", "rope_quantize_fp8_append_paged_kv_cache")
        q, k, v, code = layer.q, layer.k, layer.v, torch.float8_e4m3fn
        # Empty non-rotary parts and outputs are given, so that no call allocates.
        q_none, k_none = q.new_empty(*q.shape[:2], 0), k.new_empty(*k.shape[:2], 0)
        q_out, q_none_out = torch.empty(q.shape, dtype=code, device=q.device), q_none.to(code)
        caches = (as_fp8(layer.k_cache), as_fp8(layer.v_cache))

        def call() -> Tensor:
            fused(
                q,
                k,
                q_none,
                k_none,
                v,
                meta.cos_sin,
                meta.positions32,
                caches,
                meta.csr.indices,
                meta.csr.indptr,
                meta.requests,
                meta.positions32,
                is_neox=True,
                quantize_dtype=code,
                page_size=case.page_size,
                kv_layout="NHD",
                q_rope_out=q_out,
                q_nope_out=q_none_out,
                enable_pdl=True,
            )
            return q_out

        return call


def make(name: str, _: str) -> FlashInferFp8:
    return FlashInferFp8(name)
