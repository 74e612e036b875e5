"""Choosing a geometry by timing whole steps.

Which geometry is best depends on the launch's neighbours, which a launch cannot know. With attention that is scheduled early, the
multiprocessors that our programs hold decide where attention's programs land; FlashInfer's, for heads of 128 on 132
multiprocessors, pile up on few of them otherwise, and take 7 µs each alone and 18 µs eight together (H200).
"""

from collections.abc import Callable, Sequence
from statistics import median

import torch

from ..launch.decode import Geometry, decode_geometry
from ..launch.tiles import power_of_two

_ROUNDS = 7
_GAIN = 0.003  # of a step: what a candidate must save to be chosen; less is noise


def candidates_for(num_tokens: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> list[Geometry]:
    """The measured choice first, then other tiles, moments of the trigger, and splits between L1 and shared memory."""
    chosen = decode_geometry(num_tokens, num_q_heads, num_kv_heads, head_dim)
    most_q, most_kv = (max(2, power_of_two(n)) for n in (num_q_heads, num_kv_heads))
    tiles = [chosen[:5]]
    for heads_q, heads_kv, warps in ((2, 2, 1), (4, 4, 1), (16, 8, 4), (32, 8, 8)):
        tiles.append((1, min(heads_q, most_q), 1, min(heads_kv, most_kv), warps))
    found = [chosen]
    for tile in dict.fromkeys(tiles):
        for pdl, carveout in ((1, -1), (1, 100), (0, -1)):
            found.append(Geometry(*tile, pdl, carveout))
    return list(dict.fromkeys(found))


def fastest(
    choose: Callable[[Geometry], None], step: Callable[[], object], candidates: Sequence[Geometry], measure=None
) -> Geometry:
    """The candidate with which `step` takes the least time; the first one, unless another saves 0.3 % or more.

    Args:
        choose: makes following launches use a geometry.
        step: runs the step; captured in a CUDA graph for each candidate, after one eager run.
        measure: graphs -> microseconds of each, in place of events on the current stream.
    """
    graphs = []
    for candidate in candidates:
        choose(candidate)
        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graphs.append(graph)
    times = (measure or _measured)(graphs)
    best = min(range(len(times)), key=times.__getitem__)
    return candidates[best if times[best] < times[0] * (1 - _GAIN) else 0]


def _measured(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Microseconds of a replay, medians of rounds in which every graph is replayed in turn."""
    samples: list[list[float]] = [[] for _ in graphs]
    for _ in range(_ROUNDS):
        for graph, own in zip(graphs, samples, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()  # so that what comes before is a step as well
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            own.append(begin.elapsed_time(end) * 1e3)
    return [median(own) for own in samples]
