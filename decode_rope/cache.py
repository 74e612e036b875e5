"""`PagedKVCache`: the owner of pages that a first server needs.

It keeps the K and V storage of every layer, a block table on the device whose address never changes, and a
free list on the host. It launches no kernel of this package: `rope_append_decode` writes into its views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

_KV_LAYOUTS = ("NHD", "HND")
_UNALLOCATED = -1


class CacheFull(RuntimeError):
    """No free page, or no free request id. Nothing was changed: free or preempt a request and try again."""


class PageIndices(NamedTuple):
    """The pages of a batch as FlashInfer's wrappers plan them, int32.

    Attributes:
        indptr: `[rows + 1]`; row r has the pages `indices[indptr[r]:indptr[r + 1]]`.
        indices: `[pages of all rows]`, in token order.
        last_page_len: `[rows]`, tokens in the last page of each row; 0 for a row without pages.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


class PagedKVCache:
    """K and V pages of all layers, shared by up to `max_requests` live requests.

    A request id is a row of the block table: while the request lives, its pages stand in
    `block_table[request]`, in token order, followed by -1. A decode batch whose row i is request i can
    therefore pass `cache.block_table` as it is, captured in a CUDA graph or not.

    Args (all keyword-only):
        num_layers, num_pages, page_size, num_kv_heads, head_dim: sizes, each at least 1. `page_size` is in
            tokens and need not be a power of two.
        max_requests: rows of the block table.
        max_pages_per_request: columns of the block table; `num_pages` if left out. One request holds at most
            `max_pages_per_request * page_size` tokens.
        v_head_dim: head_dim of V; `head_dim` if left out.
        dtype, device: of the K and V storage. The block table is int32 on the same device.
        kv_layout: "NHD" (pages `[num_pages, page_size, num_kv_heads, head_dim]`) or "HND"
            (`[num_pages, num_kv_heads, page_size, head_dim]`).

    Attributes:
        block_table: int32 `[max_requests, max_pages_per_request]`, -1 where no page is allocated. Updated in
            place on the current stream, without a synchronisation; the tensor is never replaced.
        k_storage, v_storage: `[num_layers, *page layout]`, zero at the start so that masked attention over
            unused slots stays finite. Pages are not cleared when they are freed.

    Requests that were forked share their pages until one of them appends to a page that is not full: that one
    then gets a copy of the page. So write only to positions that `append` has just returned.

    `allocate`, `append`, `append_many`, `fork` and `free` either succeed or raise before anything changes. The class
    is not thread-safe, and its bookkeeping runs on the host: call it between graph replays, never inside a
    capture.

    Raises:
        ValueError, TypeError: a size that is not a positive int, or an unknown `kv_layout`.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        max_requests: int,
        max_pages_per_request: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
        kv_layout: str = "NHD",
    ) -> None:
        max_pages_per_request = num_pages if max_pages_per_request is None else max_pages_per_request
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_requests": max_requests,
            "max_pages_per_request": max_pages_per_request,
            "v_head_dim": v_head_dim,
        }
        for name, size in sizes.items():
            _check_int(name, size, at_least=1)
        if kv_layout not in _KV_LAYOUTS:
            raise ValueError(f"kv_layout: expected one of {_KV_LAYOUTS}, got {kv_layout!r}")

        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_requests = max_requests
        self.max_pages_per_request = max_pages_per_request
        self.kv_layout = kv_layout
        page = (page_size, num_kv_heads) if kv_layout == "NHD" else (num_kv_heads, page_size)
        # A tensor made under inference_mode could not be updated outside of it.
        with torch.inference_mode(False):
            self.k_storage = torch.zeros(num_layers, num_pages, *page, head_dim, dtype=dtype, device=device)
            self.v_storage = torch.zeros(num_layers, num_pages, *page, v_head_dim, dtype=dtype, device=device)
            self.block_table = torch.full((max_requests, max_pages_per_request), _UNALLOCATED, dtype=torch.int32, device=device)
        self._layers = list(zip(self.k_storage.unbind(0), self.v_storage.unbind(0), strict=True))
        # Both free lists are stacks: the page touched last is the likeliest to be in the L2 cache.
        self._free_pages = list(range(num_pages))[::-1]
        self._free_requests = list(range(max_requests))[::-1]
        self._pages: list[list[int]] = [[] for _ in range(max_requests)]
        self._sharers = [0] * num_pages  # requests that hold a page
        self._lengths: list[int | None] = [None] * max_requests

    @property
    def requests(self) -> tuple[int, ...]:
        """Ids of the live requests, ascending."""
        return tuple(r for r, length in enumerate(self._lengths) if length is not None)

    @property
    def num_free_pages(self) -> int:
        """Pages that no request holds."""
        return len(self._free_pages)

    @property
    def max_tokens_per_request(self) -> int:
        return self.max_pages_per_request * self.page_size

    def length(self, request: int) -> int:
        """Tokens of `request` that have a slot. The next `append` starts at this position."""
        return self._live(request)

    def pages(self, request: int) -> tuple[int, ...]:
        """Pages of `request` in token order: what its block-table row holds before the first -1."""
        self._live(request)
        return tuple(self._pages[request])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`(k_cache, v_cache)` of one layer: 4-D views in `kv_layout`, the same tensors at every call."""
        return self._layers[index]

    def allocate(self, num_tokens: int = 0) -> int:
        """Start a request with slots for its first `num_tokens` tokens, and return its id.

        An id is a block-table row and is reused after `free`.

        Raises:
            CacheFull: no free request id, or fewer free pages than needed.
            ValueError, TypeError: `num_tokens` is negative, no int, or more than a row of the table holds.
        """
        _check_int("num_tokens", num_tokens, at_least=0)
        if not self._free_requests:
            raise CacheFull(f"all {self.max_requests} requests are in use; free one, or raise max_requests")
        request = self._free_requests[-1]
        self._claim([request], [num_tokens])
        self._free_requests.pop()
        return request

    def append(self, request: int, n: int = 1) -> range:
        """Reserve slots for `n` more tokens of `request` and return their positions.

        Raises:
            CacheFull: fewer free pages than needed.
            ValueError, TypeError: unknown `request`; `n` negative, no int, or past the end of the table row.
        """
        return self.append_many([request], n)[0]

    def append_many(self, requests: Sequence[int], n: int | Sequence[int] = 1) -> list[range]:
        """`append` for a whole batch: all of the requests grow or none does, with one copy to the device.

        Args:
            requests: distinct live ids.
            n: new tokens per request, one number for all or one for each.

        Returns:
            The new positions of each request, in the order given.
        """
        counts = self._counts(requests, n)
        return self._claim(requests, counts)

    def fork(self, request: int) -> int:
        """Start a request with the tokens of `request`, sharing its pages, and return its id.

        For beams, several samples of one prompt, and common prefixes. No K or V is copied until one of the
        sharers appends to the last page while it is not full; that `append` takes one page more.

        Raises:
            CacheFull: no free request id.
            ValueError: unknown `request`.
        """
        length = self._live(request)
        if not self._free_requests:
            raise CacheFull(f"all {self.max_requests} requests are in use; free one, or raise max_requests")
        self._refuse_capture()
        fork, pages = self._free_requests[-1], self._pages[request]
        if pages:
            self.block_table[fork, : len(pages)].copy_(self.block_table[request, : len(pages)])
        self._free_requests.pop()
        for page in pages:
            self._sharers[page] += 1
        self._pages[fork], self._lengths[fork] = list(pages), length
        return fork

    def free(self, request: int) -> None:
        """Give back the pages that only `request` holds and set its block-table row to -1. Its id becomes invalid.

        Raises:
            ValueError: unknown `request`, or freed already.
        """
        self._live(request)
        self._refuse_capture()
        pages = self._pages[request]
        if pages:
            self.block_table[request, : len(pages)].fill_(_UNALLOCATED)
        for page in pages:
            self._sharers[page] -= 1
        self._free_pages.extend(page for page in reversed(pages) if not self._sharers[page])
        self._free_requests.append(request)
        self._pages[request] = []
        self._lengths[request] = None

    def slot_mapping(self, requests: Sequence[int], n: int | Sequence[int] = 1) -> torch.Tensor:
        """Flat slots (page * page_size + offset) of the last `n` tokens of each request.

        Returns:
            int64 `[sum of n]` on the cache's device, request after request: the `slot_mapping` argument of
            `rope_append_decode` and `rope_append_prefill` for tokens that `append` has just reserved.
        """
        slots: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)]
        for request, count in zip(requests, self._counts(requests, n), strict=True):
            length = self._live(request)
            if count > length:
                raise ValueError(f"n: request {request} has {length} tokens, got n={count}; append first")
            positions = torch.arange(length - count, length)
            pages = torch.tensor(self._pages[request], dtype=torch.int64)
            slots.append(pages[positions // self.page_size] * self.page_size + positions % self.page_size)
        return self._to_device(torch.cat(slots))

    def page_indices(self, requests: Sequence[int], *, pad_to: int | None = None) -> PageIndices:
        """The pages of a batch, row i is `requests[i]`, as `plan` of FlashInfer's paged wrappers takes them.

        Call it after `append`: the tokens just reserved count. The tensors are on the CPU, where `plan` reads
        them; pinned beside a CUDA cache.

        Args:
            requests: live ids.
            pad_to: rows to have, at least one for each request. Rows past the requests have one token of page 0.

        Raises:
            ValueError: unknown request, or `pad_to` below the number of requests.
        """
        pad_to = len(requests) if pad_to is None else pad_to
        if pad_to < len(requests):
            raise ValueError(f"pad_to: expected at least a row for each of {len(requests)} requests, got {pad_to}")
        padding = pad_to - len(requests)
        lengths = [self._live(request) for request in requests] + [1] * padding
        pages = [self._pages[request] for request in requests] + [[0]] * padding
        indptr = [0]
        for row in pages:
            indptr.append(indptr[-1] + len(row))
        last = [(length - 1) % self.page_size + 1 if length else 0 for length in lengths]
        pinned = self.block_table.is_cuda
        columns = (indptr, [page for row in pages for page in row], last)
        return PageIndices(*(torch.tensor(column, dtype=torch.int32, pin_memory=pinned) for column in columns))

    def gather(self, layer: int, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Contiguous copies of one request's K and V, `[length, heads, head_dim]` and `[.., v_head_dim]`.

        For tests and for attention that knows no pages; a server's attention reads the pages themselves.
        """
        length = self._live(request)
        pages = self._to_device(torch.tensor(self._pages[request], dtype=torch.int64))
        k, v = (self._token_major(cache[pages]).flatten(0, 1)[:length] for cache in self.layer(layer))
        return k, v

    def __repr__(self) -> str:
        return (
            f"PagedKVCache({self.num_layers} layers, {self.kv_layout} pages of {self.page_size} tokens, "
            f"{self.num_free_pages} of {self.num_pages} pages free, {len(self.requests)} of "
            f"{self.max_requests} requests live, {self.k_storage.dtype} on {self.k_storage.device})"
        )

    def _token_major(self, pages: torch.Tensor) -> torch.Tensor:
        return pages if self.kv_layout == "NHD" else pages.transpose(1, 2)

    def _live(self, request: int) -> int:
        """Length of a live request; the one place where ids are checked."""
        _check_int("request", request)
        if not 0 <= request < self.max_requests:
            raise ValueError(f"request: expected an id below max_requests={self.max_requests}, got {request}")
        length = self._lengths[request]
        if length is None:
            raise ValueError(f"request: {request} is not allocated, or was freed already; live ones: {self.requests}")
        return length

    def _counts(self, requests: Sequence[int], n: int | Sequence[int]) -> list[int]:
        counts = [n] * len(requests) if isinstance(n, int) else list(n)
        if len(counts) != len(requests):
            raise ValueError(f"n: expected one number for each of {len(requests)} requests, got {len(counts)}")
        for request, count in zip(requests, counts, strict=True):
            self._live(request)
            _check_int("n", count, at_least=0)
        if len(set(requests)) != len(requests):
            raise ValueError(f"requests: expected distinct ids, got {list(requests)}")
        return counts

    def _claim(self, requests: Sequence[int], counts: Sequence[int]) -> list[range]:
        """Give each request the pages its next tokens need: check all, then the device, then the host."""
        grown = []
        rows: list[int] = []
        columns: list[int] = []
        copied: list[tuple[int, int]] = []  # which of the new pages begins as a copy, and of which page
        leaving: Counter[int] = Counter()
        for request, count in zip(requests, counts, strict=True):
            start, held = self._lengths[request] or 0, self._pages[request]
            self._check_row(request, start, count)
            grown.append(range(start, start + count))
            first = len(held)
            if count and start % self.page_size and self._sharers[held[-1]] - leaving[held[-1]] > 1:
                first -= 1
                leaving[held[-1]] += 1
                copied.append((len(rows), held[-1]))
            new = range(first, -(-(start + count) // self.page_size))
            rows.extend([request] * len(new))
            columns.extend(new)
        if len(rows) > self.num_free_pages:
            raise CacheFull(f"{len(rows)} pages needed and {self.num_free_pages} of {self.num_pages} free; free a request first")
        pages = self._free_pages[: -len(rows) - 1 : -1]
        self._refuse_capture()
        for index, source in copied:
            for storage in (self.k_storage, self.v_storage):
                storage[:, pages[index]].copy_(storage[:, source])
        self._write_table(rows, columns, pages)
        del self._free_pages[self.num_free_pages - len(rows) :]
        for request, column, page in zip(rows, columns, pages, strict=True):
            self._pages[request][column:] = [page]
            self._sharers[page] = 1
        for _, source in copied:
            self._sharers[source] -= 1
        for request, positions in zip(requests, grown, strict=True):
            self._lengths[request] = positions.stop
        return grown

    def _check_row(self, request: int, start: int, count: int) -> None:
        if start + count > self.max_tokens_per_request:
            raise ValueError(
                f"request {request} cannot grow from {start} to {start + count} tokens: a row of the "
                f"block table holds {self.max_pages_per_request} pages of {self.page_size}; raise "
                "max_pages_per_request"
            )

    def _write_table(self, rows: list[int], columns: list[int], pages: list[int]) -> None:
        if not rows:
            return
        if len(set(rows)) == 1:
            staged = torch.tensor(pages, dtype=torch.int32, pin_memory=self.block_table.is_cuda)
            self.block_table[rows[0], columns[0] : columns[-1] + 1].copy_(staged, non_blocking=True)
            return
        flat = [row * self.max_pages_per_request + column for row, column in zip(rows, columns, strict=True)]
        index, values = self._to_device(torch.tensor([flat, pages], dtype=torch.int64))
        self.block_table.view(-1).index_copy_(0, index, values.to(torch.int32))

    def _to_device(self, host: torch.Tensor) -> torch.Tensor:
        if not self.block_table.is_cuda:
            return host.to(self.block_table.device)
        # Fresh pinned memory at every change: the allocator keeps it until the copy is done, so that neither
        # a synchronisation is needed nor can a later change overtake a copy still in flight.
        return host.pin_memory().to(self.block_table.device, non_blocking=True)

    def _refuse_capture(self) -> None:
        if self.block_table.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "PagedKVCache changed inside a CUDA graph capture: a replay would not repeat the host's "
                "part. Allocate, append and free between replays: the table is updated in place"
            )


def _check_int(name: str, value: int, at_least: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if at_least is not None and value < at_least:
        raise ValueError(f"{name}: expected at least {at_least}, got {value}")
