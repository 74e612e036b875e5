"""`gaps`: when the kernels of a layer start and end, in a graph of (QKV projection, launch, attention) a layer.

Times are CUPTI's, through `torch.profiler`, in steps of 32 ns. What a launch adds to a layer is the time from the end of the kernel
before it to its own end, and what it changes in front of that: a launch with PDL moves the start of its neighbours, too.
"""

from collections.abc import Iterable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.buffers import Case, context_for, decode_meta, make_layers
from bench.in_model import graphs
from bench.providers import Provider
from bench.report import columns
from bench.runner import Runner, passed

LAYERS = 16
REPLAYS = 5
SHOWN = 32  # characters of a kernel's name


class Kernel(NamedTuple):
    """One run of a kernel; times in ns."""

    name: str
    start: int
    end: int


class Edge(NamedTuple):
    """Medians over all places where `second` follows `first`, in ns."""

    first: str
    second: str
    gap: float  # from the end of the first to the start of the second; negative where they overlap
    duration: float  # of the second
    count: int


def edges(kernels: Iterable[Kernel], least: int) -> list[Edge]:
    """How kernels follow each other, in the order in which pairs of names first appear; pairs seen fewer than `least` times, such
    as those between two replays, are left out."""
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for first, second in pairwise(in_order):
        found.setdefault((first.name, second.name), []).append((second.start - first.end, second.end - second.start))
    return [
        Edge(*names, median([gap for gap, _ in seen]), median([duration for _, duration in seen]), len(seen))
        for names, seen in found.items()
        if len(seen) >= least
    ]


def profiled(graph: torch.cuda.CUDAGraph, replays: int) -> list[Kernel]:
    """Every kernel of some replays, after one that warms up."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    return [
        Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.device_type() == DeviceType.CUDA and event.duration_ns() > 0
    ]


def measure(case: Case, providers: list[Provider], runner: Runner, pdl: bool) -> dict[str, Any]:
    """One JSON row: the edges of every provider's graph, and of the one without a launch."""
    right = passed(providers, runner.verified(providers, case))
    meta = decode_meta(case, context_for(case, LAYERS, most=128), 0)
    layers = make_layers(case, meta, LAYERS, 0, fill=True)
    attention, captured = graphs(case, meta, layers, right, runner, pdl)
    found = runner.build_each(captured, lambda name: edges(profiled(captured[name], REPLAYS), least=LAYERS), case)
    return {
        "model": case.model.name,
        "shape": case.model.shape,
        "tokens": case.tokens,
        "attention": attention,
        "edges": {name: [edge._asdict() for edge in of_one] for name, of_one in found.items()},
    }


def run(cases: list[Case], providers: list[Provider], runner: Runner, pdl: bool) -> None:
    providers = runner.present(providers)
    widths = [15, 5, 12, SHOWN, SHOWN, 8, 9]
    runner.report.say(f"ns, medians of {LAYERS} layers and {REPLAYS} replays")
    runner.report.say(columns(["model", "B", "launch", "kernel", "and the one behind it", "gap", "which takes"], widths))

    def one(case: Case) -> None:
        row = measure(case, providers, runner, pdl)
        lines = [
            columns([row["model"], str(row["tokens"]), name, *_cells(edge)], widths)
            for name, of_one in row["edges"].items()
            for edge in of_one
        ]
        runner.report.add(row, "\n".join(lines))

    runner.each(cases, one)


def _cells(edge: dict[str, Any]) -> list[str]:
    return [edge["first"][:SHOWN], edge["second"][:SHOWN], f"{edge['gap']:.0f}", f"{edge['duration']:.0f}"]
