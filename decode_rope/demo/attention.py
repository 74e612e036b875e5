"""Decode attention over the pages of a `PagedKVCache`: one query per batch row, row i is request i."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_rope.cache import PagedKVCache


class Attention(Protocol):
    def plan(self, positions: Sequence[int]) -> None:
        """On the host, before the step that attends at `positions` (negative: padding row)."""

    def begin_step(self, positions: Tensor) -> None:
        """On the device, once per step, before the first layer."""

    def __call__(self, q: Tensor, layer: int) -> Tensor:
        """Attend with rotated `q` `[B, Hq, D]` to all tokens up to the position of each row; `[B, Hq, Dv]`."""


class TorchAttention:
    """Gathers every page of the block table and masks what lies past each row's position.

    It runs anywhere and has static shapes, so that a CUDA graph can hold it; a server would use an attention
    kernel that reads the pages in place.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._columns = torch.arange(cache.max_tokens_per_request, device=cache.block_table.device)

    def plan(self, positions: Sequence[int]) -> None:
        pass

    def begin_step(self, positions: Tensor) -> None:
        # A padding row sees token 0 of page 0, because a softmax over nothing would be NaN.
        visible = self._columns <= positions.clamp(min=0)[:, None]
        self._mask = visible[:, None, None, :]
        self._pages = self._cache.block_table.clamp(min=0).long()

    def __call__(self, q: Tensor, layer: int) -> Tensor:
        k, v = (self._heads_first(cache[self._pages]) for cache in self._cache.layer(layer))
        out = F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=self._mask, enable_gqa=True)
        return out[:, :, 0]

    def _heads_first(self, pages: Tensor) -> Tensor:
        """`[B, pages, …one page…]` to `[B, Hkv, pages * page_size, D]`."""
        if self._cache.kv_layout == "NHD":
            return pages.flatten(1, 2).transpose(1, 2)
        return pages.transpose(1, 2).flatten(2, 3)


class FlashInferAttention:
    """FlashInfer's paged decode kernel. Needs a CUDA device, fp16 or bf16, and the `flashinfer` extra.

    Raises:
        ImportError: flashinfer is not installed.
        ValueError: the cache is on the CPU or in another dtype.
    """

    _WORKSPACE_BYTES = 128 * 2**20

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        k_cache, _ = cache.layer(0)
        device, self._dtype = k_cache.device, k_cache.dtype
        if device.type != "cuda" or self._dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"attention: flashinfer needs float16 or bfloat16 on CUDA, got {self._dtype} on {device}")
        try:
            import flashinfer
        except ImportError as error:
            raise ImportError("--attention flashinfer needs: pip install 'decode_rope[flashinfer]'") from error
        rows, width = cache.block_table.shape
        self._cache = cache
        self._num_heads = num_heads
        self._num_kv_heads = k_cache.shape[2 if cache.kv_layout == "NHD" else 1]
        self._head_dim = k_cache.shape[-1]

        def int_buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        # Tensor cores also serve the head ratios that the other decode kernel is not compiled for.
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(self._WORKSPACE_BYTES, dtype=torch.uint8, device=device),
            cache.kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=int_buffer(rows + 1),
            paged_kv_indices_buffer=int_buffer(rows * width),
            paged_kv_last_page_len_buffer=int_buffer(rows),
        )

    def plan(self, positions: Sequence[int]) -> None:
        page_size = self._cache.page_size
        indptr, last_page_len = [0], []
        indices: list[int] = []
        for row, position in enumerate(positions):
            # A padding row reads one token of page 0: a row without any page is a case of its own there.
            tokens = max(position, 0) + 1
            pages = self._cache.pages(row) if position >= 0 else (0,)
            indices.extend(pages[: math.ceil(tokens / page_size)])
            indptr.append(len(indices))
            last_page_len.append((tokens - 1) % page_size + 1)
        self._wrapper.plan(
            torch.tensor(indptr, dtype=torch.int32),
            torch.tensor(indices, dtype=torch.int32),
            torch.tensor(last_page_len, dtype=torch.int32),
            self._num_heads,
            self._num_kv_heads,
            self._head_dim,
            page_size,
            q_data_type=self._dtype,
            kv_data_type=self._dtype,
        )

    def begin_step(self, positions: Tensor) -> None:
        pass

    def __call__(self, q: Tensor, layer: int) -> Tensor:
        return self._wrapper.run(q.contiguous(), self._cache.layer(layer))
