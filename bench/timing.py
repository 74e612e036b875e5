"""Timing on the GPU: CUDA graphs, event timers, and the floors measured beside every number."""

from collections.abc import Callable, Sequence

import torch

from bench.stats import Replay, summarize

# About 60 us of an idle GPU: the replays are queued behind it, so the host never shows in a sample.
_SPIN_CYCLES = 100_000


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def drain() -> None:
    """Waits until the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def capture(calls: Sequence[Callable[[], object]], *, warm: int | None = None) -> torch.cuda.CUDAGraph:
    """One CUDA graph holding `calls` in order. The first `warm` calls (default: all) run once beforehand.

    Results stay alive until the capture ends: a provider that allocates its output must not get the same
    memory for every layer, which would keep that output in the cache. The calls live as long as the graph, for it
    writes to whatever buffers they own.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:warm]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    del results
    graph.calls = list(calls)
    graph.replay()
    torch.cuda.synchronize()
    return graph


class EventTimer:
    """Times replays with CUDA events, one synchronisation a round.

    flush: bytes written before every sample to push everything else out of the L2 cache; a sample is then one
    replay and includes the start of the graph.
    """

    def __init__(self, flush: int = 0) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._flush = torch.empty(flush, dtype=torch.uint8, device="cuda") if flush else None

    def round(self, plan: Sequence[tuple[str, Replay, int]]) -> list[tuple[str, float]]:
        while len(self._events) < len(plan):
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            self._events.append(pair)
        counts = []
        for (_, replay, count), (start, end) in zip(plan, self._events, strict=False):
            if self._flush is not None:
                self._flush.fill_(1)
                count = 1
            torch.cuda._sleep(_SPIN_CYCLES)
            start.record()
            for _ in range(count):
                replay()
            end.record()
            counts.append(count)
        torch.cuda.synchronize()
        return [
            (name, 1e3 * start.elapsed_time(end) / count)
            for (name, _, _), (start, end), count in zip(plan, self._events, counts, strict=False)
        ]


def copy_bandwidth(size: int = 1 << 30, repeats: int = 12) -> float:
    """Bytes a second of a large device copy, bytes read plus bytes written."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    timer = EventTimer()
    timer.round([("copy", lambda: target.copy_(source), 2)])
    samples = [timer.round([("copy", lambda: target.copy_(source), 2)])[0][1] for _ in range(repeats)]
    return 2 * size / (summarize(samples).median * 1e-6)
