"""The smallest server loop: ragged requests decode together, one token each per step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from decode_rope.cache import PagedKVCache
from decode_rope.demo.model import PagedLlama

_PADDING = -1


@dataclass
class Request:
    """One prompt on its way through the batch."""

    prompt: list[int]
    output: list[int] = field(default_factory=list)
    fed: int = 0
    done: bool = False

    @property
    def next_input(self) -> int:
        return self.prompt[self.fed] if self.fed < len(self.prompt) else self.output[-1]


@dataclass(frozen=True)
class Run:
    """What `generate` did; `seconds` leaves out what its `on_step` took."""

    outputs: list[list[int]]
    steps: int
    seconds: float

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.outputs))


class DecodeStep:
    """One greedy step for a fixed number of rows, eager or replayed from a CUDA graph.

    The graph reads tokens, positions and block table from static tensors, so that one capture serves every
    mix of requests: a row without a request is padding, position -1.

    Args:
        model: decodes one token per row of its cache's block table.
        graph: capture the whole step once, after a warm-up. Needs a CUDA device.
    """

    def __init__(self, model: PagedLlama, graph: bool = False) -> None:
        self._model = model
        table = model.cache.block_table
        self._inputs = torch.zeros(2, len(table), dtype=torch.int64, device=table.device)
        self._inputs[1] = _PADDING
        self._graph: torch.cuda.CUDAGraph | None = None
        if table.is_cuda:
            self._warm_up(graph)
        elif graph:
            raise ValueError("graph: a CUDA graph needs a CUDA device, got the CPU")

    @property
    def rows(self) -> int:
        return self._inputs.shape[1]

    def __call__(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Feed `tokens` at `positions`, one of each per row, and return the likeliest next tokens."""
        self._model.attention.plan(positions)
        staged = torch.tensor([tokens, positions], pin_memory=self._inputs.is_cuda)
        self._inputs.copy_(staged, non_blocking=True)
        if self._graph is None:
            self._forward()
        else:
            self._graph.replay()
        return self._next.tolist()

    @torch.inference_mode()
    def _forward(self) -> None:
        tokens, positions = self._inputs
        self._next = self._model(tokens, positions).argmax(-1)

    def _warm_up(self, graph: bool) -> None:
        """Compile and load everything on padding rows only, which write nothing; then capture."""
        self._model.attention.plan([_PADDING] * self.rows)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        if graph:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._forward()


def generate(
    step: DecodeStep,
    cache: PagedKVCache,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
    on_step: Callable[[Sequence[Request]], None] | None = None,
) -> Run:
    """Decode all prompts greedily, as many at a time as the cache has rows.

    Prompts are read through the decode path too, a token per step, while other rows already generate. A
    request that ends frees its pages, and the next waiting prompt takes its row.

    Args:
        step, cache: the step and the empty cache it was built on.
        prompts: token ids, at least one each.
        stop_ids: a request ends with the first of these it generates, which stays in its output.
        on_step: called after every step with all requests, in the order of `prompts`.

    Raises:
        ValueError: a prompt is empty, `max_new_tokens` is below 1, or the two exceed a row of the block table.
        CacheFull: the live requests need more pages than the cache has.
    """
    _check_sizes(cache, prompts, max_new_tokens)
    requests = [Request(list(prompt)) for prompt in prompts]
    waiting = deque(requests)
    rows: dict[int, Request] = {}
    steps, seconds = 0, 0.0
    while waiting or rows:
        start = time.perf_counter()
        while waiting and len(rows) < cache.max_requests:
            rows[cache.allocate()] = waiting.popleft()
        cache.append_many(list(rows))
        tokens, positions = [0] * step.rows, [_PADDING] * step.rows
        for row, request in rows.items():
            tokens[row], positions[row] = request.next_input, request.fed
        predicted = step(tokens, positions)
        steps += 1
        for row, request in list(rows.items()):
            request.fed += 1
            if request.fed < len(request.prompt):
                continue
            request.output.append(predicted[row])
            if predicted[row] in stop_ids or len(request.output) == max_new_tokens:
                request.done = True
                cache.free(row)
                del rows[row]
        seconds += time.perf_counter() - start
        if on_step is not None:
            on_step(requests)
    return Run([request.output for request in requests], steps, seconds)


def _check_sizes(cache: PagedKVCache, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompts: prompt {index} has no tokens")
        # The last generated token is never fed, so it needs no slot.
        needed = len(prompt) + max_new_tokens - 1
        if needed > cache.max_tokens_per_request:
            raise ValueError(
                f"prompts: prompt {index} needs {needed} slots with max_new_tokens={max_new_tokens}, "
                f"and a row of the block table holds {cache.max_tokens_per_request}"
            )
