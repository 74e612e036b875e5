"""Attention over the pages of a `PagedKVCache`, in plain PyTorch: pages are gathered, and SDPA attends to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cache import PagedKVCache
from .families import Layer


@dataclass
class Step:
    """One forward pass over tokens of several requests.

    Attributes:
        positions: int64 `[T]`, on the device; `< 0` is padding.
        block_table: int32 `[rows, pages]`, on the device: a row for each request.
        requests: ids of the requests, in the order of the rows.
        cu_seqlens: int32 `[rows + 1]` on the device, where the tokens of a row begin and end; None: a token a row.
        counts: tokens of each row; None with `cu_seqlens`.
    """

    positions: Tensor
    block_table: Tensor
    requests: Sequence[int]
    cu_seqlens: Tensor | None = None
    counts: Sequence[int] = field(default_factory=list)


class Attention(Protocol):
    """Reads the pages that the append of the same layer has written."""

    def plan(self, step: Step) -> None:
        """The host's part, before a step."""

    def __call__(self, q: Tensor, layer: Layer, step: Step) -> Tensor:
        """Attend with rotated q `[T, num_q_heads, head_dim]`; a result of that shape. Rows of padding mean nothing."""


class SdpaAttention:
    """Gathers the pages of every row and masks what a token may not see.

    It runs anywhere, and has static shapes in a decode step, so that a CUDA graph can hold it. A server on a GPU
    uses an attention kernel that reads the pages in place.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._columns = torch.arange(cache.max_tokens_per_request, device=cache.block_table.device)

    def plan(self, step: Step) -> None:
        pass

    def __call__(self, q: Tensor, layer: Layer, step: Step) -> Tensor:
        if step.cu_seqlens is None:
            k, v = self._gather(layer.index, step.block_table, q.dtype)
            # Padding sees token 0 of page 0, because a softmax over nothing would be NaN.
            visible = self._visible(step.positions.clamp(min=0)[:, None], k.shape[2], layer.window)
            return attend(q[:, :, None], k, v, visible[:, None, None], layer.scale, layer.sinks)[:, :, 0]
        out, first = torch.empty_like(q, memory_format=torch.contiguous_format), 0
        for row, (request, count) in enumerate(zip(step.requests, step.counts, strict=True)):
            rows = slice(first, first := first + count)
            length = self._cache.length(request)
            pages = step.block_table[row : row + 1, : -(-length // self._cache.page_size)]
            k, v = (x[:, :, :length] for x in self._gather(layer.index, pages, q.dtype))
            visible = self._visible(step.positions[rows, None], length, layer.window)
            out[rows] = attend(q[rows].transpose(0, 1)[None], k, v, visible, layer.scale, layer.sinks)[0].transpose(0, 1)
        return out

    def _visible(self, positions: Tensor, length: int, window: int | None) -> Tensor:
        columns = self._columns[:length]
        visible = columns <= positions
        return visible if window is None else visible & (columns > positions - window)

    def _gather(self, index: int, block_table: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """K and V of every row, `[rows, num_kv_heads, tokens, head_dim]`; codes of a quantised cache as numbers."""
        pages = block_table.clamp(min=0).long()
        gathered = (cache[pages] for cache in self._cache.layer(index))
        if self._cache.kv_layout == "NHD":
            return [x.flatten(1, 2).transpose(1, 2).to(dtype) for x in gathered]
        return [x.transpose(1, 2).flatten(2, 3).to(dtype) for x in gathered]


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Attention of q `[B, Hq, n, D]` to k and v `[B, Hkv, L, D]` where `visible` (`[…, n, L]`, bool) is true.

    `sinks` `[Hq]` are logits that take part in the softmax of their head and have no value.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=True)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~visible, -torch.inf)
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    return weights[..., :-1] @ v
