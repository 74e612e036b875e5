"""FlashInfer: slots of new tokens from the page indices of its wrappers, for servers that keep no block table."""

import torch
from torch import Tensor


def csr_slot_mapping(batch_indices: Tensor, positions: Tensor, kv_indptr: Tensor, kv_indices: Tensor, page_size: int) -> Tensor:
    """The `slot_mapping` that writes where FlashInfer's `append_paged_kv_cache` does. On the device, without a synchronisation.

    Args:
        batch_indices: `[T]`, the request of each token; `< 0`: padding.
        positions: `[T]`, its place in the sequence; `< 0`: padding.
        kv_indptr: `[requests + 1]`, where the pages of each request begin in `kv_indices`.
        kv_indices: pages of all requests.
        page_size: tokens a page.

    Returns:
        int64 `[T]`: `page · page_size + offset`; −1 for padding, and for tokens past the pages of their request.
    """
    request, place = batch_indices.long().clamp(min=0), positions.long().clamp(min=0)
    at = kv_indptr.long()[request] + place // page_size
    held = (batch_indices >= 0) & (positions >= 0) & (at < kv_indptr.long()[request + 1])
    page = kv_indices.long()[torch.where(held, at, 0)]
    return torch.where(held, page * page_size + place % page_size, -1)
