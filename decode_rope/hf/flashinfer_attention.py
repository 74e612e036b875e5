"""Attention over the pages of a `PagedKVCache` with FlashInfer's kernels, which read them in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ..cache import PagedKVCache
from .attention import Step
from .families import Layer

_WORKSPACE_BYTES = 128 * 2**20
_HEAD_DIMS = (64, 128, 256)  # what its kernels are compiled for


def why_not(cache: PagedKVCache, layers: Sequence[Layer], dtype: torch.dtype) -> str:
    """Why FlashInfer cannot attend here; empty if it can."""
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install 'decode_rope[flashinfer]'"
    if not cache.block_table.is_cuda:
        return "the model is on the CPU"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it knows float16 and bfloat16, not {dtype}"
    if layers[0].head_dim not in _HEAD_DIMS:
        return f"it knows head_dim {', '.join(map(str, _HEAD_DIMS))}, not {layers[0].head_dim}"
    return ""


class FlashInferAttention:
    """A decode wrapper for each number of rows and each window of the model's layers, and a prefill wrapper for each window.

    Decode wrappers keep their index buffers, so that a CUDA graph can hold their kernels.
    """

    def __init__(self, cache: PagedKVCache, layers: Sequence[Layer], dtype: torch.dtype) -> None:
        self._cache, self._dtype, self._layers = cache, dtype, layers
        self._windows = {layer.window: layer for layer in layers}
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.block_table.device)
        self._decode: dict[tuple[int, int | None], Any] = {}
        self._prefill: dict[int | None, Any] = {}

    def plan(self, step: Step) -> None:
        pages = self._cache.page_indices(step.requests, pad_to=len(step.block_table))
        for window, layer in self._windows.items():
            common: dict[str, Any] = dict(
                sm_scale=layer.scale,
                window_left=-1 if window is None else window - 1,
                q_data_type=self._dtype,
                kv_data_type=self._cache.k_storage.dtype,
            )
            sizes = (layer.num_q_heads, layer.num_kv_heads, layer.head_dim, self._cache.page_size)
            if step.cu_seqlens is None:
                self._decode_wrapper(len(step.block_table), window).plan(*pages, *sizes, **common)
            else:
                starts = torch.tensor([0, *step.counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                self._prefill_wrapper(window).plan(starts, *pages, *sizes, causal=True, **common)

    def __call__(self, q: Tensor, layer: Layer, step: Step) -> Tensor:
        if step.cu_seqlens is None:
            wrapper = self._decode[len(step.block_table), layer.window]
        else:
            wrapper = self._prefill[layer.window]
        q, cache = q.contiguous(), self._cache.layer(layer.index)
        if layer.sinks is None:
            return wrapper.run(q, cache)
        # A sink adds exp(sink) to the sum of exp(score) = 2^lse, so that it scales the result by sigmoid(lse · ln 2 − sink).
        out, lse = wrapper.run(q, cache, return_lse=True)
        share = torch.sigmoid(lse * math.log(2) - layer.sinks.float())
        return (out * share[..., None]).to(q.dtype)

    def _decode_wrapper(self, rows: int, window: int | None) -> Any:
        if (rows, window) not in self._decode:
            import flashinfer

            device, width = self._workspace.device, self._cache.max_pages_per_request
            buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in (rows + 1, rows * width, rows)]
            # Tensor cores also serve the head ratios that the other decode kernel is not compiled for.
            self._decode[rows, window] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                self._cache.kv_layout,
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=buffers[0],
                paged_kv_indices_buffer=buffers[1],
                paged_kv_last_page_len_buffer=buffers[2],
            )
        return self._decode[rows, window]

    def _prefill_wrapper(self, window: int | None) -> Any:
        if window not in self._prefill:
            import flashinfer

            self._prefill[window] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, self._cache.kv_layout)
        return self._prefill[window]
