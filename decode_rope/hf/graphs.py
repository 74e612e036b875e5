"""Decode steps as CUDA graphs: one for each power of two of rows, whose spare rows are padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache import PagedKVCache
from .attention import Attention, Step

_PADDING = -1


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # int64 [3, rows]: tokens, positions, requests
    block_table: Tensor
    logits: Tensor


class DecodeGraphs:
    """Replays a decode step of any number of requests; a graph is captured when its number of rows first comes up.

    Args:
        forward: tokens, positions and block table on the device to logits.
        attention: planned before each replay.
        cache: the tables of its requests are copied inside the graph.
    """

    def __init__(self, forward: Callable[[Tensor, Tensor, Tensor], Tensor], attention: Attention, cache: PagedKVCache) -> None:
        self._forward, self._attention, self._cache = forward, attention, cache
        self._captured: dict[int, _Captured] = {}
        self._pool = None

    def __call__(self, requests: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Logits `[rows, vocab_size]`, at least a row for each request, in a buffer that the next replay overwrites."""
        rows = min(1 << max(len(requests) - 1, 0).bit_length(), self._cache.max_requests)
        captured = self._captured.get(rows) or self._capture(rows)
        padding = rows - len(requests)
        host = [[*tokens, *[0] * padding], [*positions, *[_PADDING] * padding], [*requests, *[0] * padding]]
        self._attention.plan(Step(captured.inputs[1], captured.block_table, requests))
        captured.inputs.copy_(torch.tensor(host, pin_memory=True), non_blocking=True)
        captured.graph.replay()
        return captured.logits

    def capture_all(self) -> None:
        """Capture every number of rows up to the cache's requests."""
        rows = 1
        while rows < 2 * self._cache.max_requests:
            if min(rows, self._cache.max_requests) not in self._captured:
                self._capture(min(rows, self._cache.max_requests))
            rows *= 2

    def _capture(self, rows: int) -> _Captured:
        table = self._cache.block_table
        inputs = torch.zeros(3, rows, dtype=torch.int64, device=table.device)
        inputs[1] = _PADDING  # rows of padding write nothing, so warming up leaves no trace
        own = torch.full((rows, table.shape[1]), -1, dtype=table.dtype, device=table.device)
        self._attention.plan(Step(inputs[1], own, ()))

        def step() -> Tensor:
            torch.index_select(table, 0, inputs[2], out=own)
            return self._forward(inputs[0], inputs[1], own)

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles and loads what a capture must not
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = step()
        self._pool = self._pool or graph.pool()
        self._captured[rows] = _Captured(graph, inputs, own, logits)
        return self._captured[rows]
