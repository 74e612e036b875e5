"""The tensors a call works on: per-layer Q, K, V and caches, and the metadata all layers share."""

from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from bench.workloads import PAGE_SIZE, Model

THETA = 500000.0


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """One row of a table: a model's layer at a number of tokens."""

    model: Model
    tokens: int
    device: torch.device = field(default_factory=default_device)
    dtype: torch.dtype = torch.bfloat16
    page_size: int = PAGE_SIZE

    def __str__(self) -> str:
        return f"{self.model.name} {self.model.shape} tokens={self.tokens}"


class PagedCSR(NamedTuple):
    """FlashInfer's page table: int32 `indptr [R+1]`, `indices [pages in use]`, `last_page_len [R]`."""

    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor


@dataclass(frozen=True)
class Meta:
    """Positions and page tables, in every form a provider asks for; the derived forms are built once.

    cos_sin: fp32 [max_position, head_dim], cos then sin. positions: int64 [T]. requests: int32 [T], the row of
    `block_table` (int32 [R, max_pages]) each token belongs to. lengths: tokens each request holds, int32 [R].
    """

    cos_sin: Tensor
    positions: Tensor
    requests: Tensor
    block_table: Tensor
    page_size: int

    @cached_property
    def slots(self) -> Tensor:
        """int64 [T]: page * page_size + offset."""
        column = self.positions // self.page_size
        page = self.block_table[self.requests.long(), column].long()
        return page * self.page_size + self.positions % self.page_size

    @cached_property
    def positions32(self) -> Tensor:
        return self.positions.int()

    @cached_property
    def lengths(self) -> Tensor:
        lengths = torch.zeros(self.block_table.shape[0], dtype=torch.int64, device=self.positions.device)
        lengths.scatter_reduce_(0, self.requests.long(), self.positions + 1, "amax")
        return lengths.int()

    @cached_property
    def csr(self) -> PagedCSR:
        pages = (self.lengths + self.page_size - 1) // self.page_size
        indptr = torch.zeros(pages.numel() + 1, dtype=torch.int32, device=pages.device)
        indptr[1:] = pages.cumsum(0)
        columns = torch.arange(self.block_table.shape[1], device=pages.device)
        indices = self.block_table[columns[None, :] < pages[:, None]].int()
        return PagedCSR(indptr, indices, self.lengths - (pages - 1) * self.page_size)


@dataclass
class Layer:
    """q [T, Hq, D], k and v [T, Hkv, D], caches NHD [pages, page_size, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def clone(self) -> "Layer":
        """A copy that keeps every stride, so that a packed QKV stays packed."""
        return Layer(*(_clone(x) for x in (self.q, self.k, self.v, self.k_cache, self.v_cache)))


def _clone(x: Tensor) -> Tensor:
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return out.copy_(x)


@cache
def cos_sin_table(head_dim: int, max_position: int, device: torch.device) -> Tensor:
    """fp32 [max_position, head_dim], cos then sin, of the plain rotary embedding; built once, never written."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] / THETA**exponent
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def _shuffled_pages(requests: int, pages_each: int, spare: int, generator: torch.Generator) -> Tensor:
    """int32 [requests, pages_each]: every request owns its pages, scattered over the whole cache."""
    pages = torch.randperm(requests * pages_each + spare, generator=generator)[: requests * pages_each]
    return pages.view(requests, pages_each).int()


def decode_meta(case: Case, context: int, seed: int, *, full: bool = False, spare: int = 3) -> Meta:
    """One token a request, at a random position below `context` (at `context - 1` when `full`)."""
    generator = torch.Generator().manual_seed(seed)
    table = _shuffled_pages(case.tokens, -(-context // case.page_size), spare, generator)
    low = context - 1 if full else 0
    positions = torch.randint(low, context, (case.tokens,), generator=generator)
    return Meta(
        cos_sin_table(case.model.head_dim, max(context, 8192), case.device),
        positions.to(case.device),
        torch.arange(case.tokens, dtype=torch.int32, device=case.device),
        table.to(case.device),
        case.page_size,
    )


def prefill_meta(case: Case, sequence: int, seed: int) -> Meta:
    """`tokens` tokens as prompts of `sequence` tokens each (the last may be shorter), from position 0."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(case.tokens)
    requests = -(-case.tokens // sequence)
    table = _shuffled_pages(requests, -(-sequence // case.page_size), 3, generator)
    return Meta(
        cos_sin_table(case.model.head_dim, max(sequence, 8192), case.device),
        (tokens % sequence).to(case.device),
        (tokens // sequence).int().to(case.device),
        table.to(case.device),
        case.page_size,
    )


def num_pages(meta: Meta, spare: int = 3) -> int:
    return meta.block_table.numel() + spare


def make_layers(case: Case, meta: Meta, count: int, seed: int, *, packed: bool = True, fill: bool = False) -> list[Layer]:
    """`count` layers, each with its own buffers. Q, K and V are random.

    packed: Q, K and V are slices of one [T, Hq + 2 Hkv, D] tensor, as a QKV projection leaves them.
    fill: random caches too (verification); otherwise uninitialised, since a launch only writes them.
    """
    model = case.model
    generator = torch.Generator(device=case.device).manual_seed(seed)
    sizes = [model.num_q_heads, model.num_kv_heads, model.num_kv_heads]
    shape = (num_pages(meta), case.page_size, model.num_kv_heads, model.head_dim)
    layers = []
    for _ in range(count):
        qkv = _randn((case.tokens, model.heads, model.head_dim), case, generator)
        q, k, v = qkv.split(sizes, dim=1)
        if not packed:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        caches = [torch.empty(shape, dtype=case.dtype, device=case.device) for _ in range(2)]
        if fill:
            for cache in caches:
                cache.copy_(_randn(shape, case, generator))
        layers.append(Layer(q, k, v, *caches))
    return layers


def _randn(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=case.device, dtype=torch.float32).to(case.dtype)


def context_for(case: Case, layers: int, *, limit_bytes: float = 8e9, most: int = 4096, least: int = 64) -> int:
    """Longest context (a multiple of the page) whose caches fit in `limit_bytes` over all layers, from `least` to `most`."""
    model = case.model
    a_token = layers * case.tokens * model.num_kv_heads * model.head_dim * 2 * case.dtype.itemsize
    context = int(limit_bytes // a_token) // case.page_size * case.page_size
    return min(most, max(least, context))
