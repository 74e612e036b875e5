"""`prefill`: GB/s against the number of tokens, buffers rotated beyond the L2 cache, and hot; beside a copy of the same bytes."""

from collections.abc import Callable
from typing import Any

import torch

from bench import timing
from bench.buffers import Case, Meta, make_layers, prefill_meta
from bench.providers import Provider
from bench.report import columns, rounded
from bench.runner import Runner, cell, fastest, passed
from bench.stats import summarize
from bench.workloads import Model, traffic

OURS = ("ours-prefill",)
MOST_SETS = 64
SEQUENCE = 4096  # tokens a prompt
COPY = "copy"


def least_bytes(model: Model, tokens: int) -> int:
    """What a prefill of prompts of SEQUENCE tokens has to move: their angles once."""
    return traffic(model, tokens, sequence=SEQUENCE).total


def copy_call(size: int, device: torch.device) -> Callable[[], None]:
    """A kernel of PyTorch that reads and writes `size` bytes in all. Not `copy_`: in a CUDA graph, one of more than half a GB ran
    at 2.7 TB/s instead of 4.2 (H200, torch 2.11)."""
    source, target = (torch.zeros(max(1, size // 8), dtype=torch.int32, device=device) for _ in range(2))
    return lambda: torch.neg(source, out=target)


def prompts(case: Case) -> Meta:
    """The metadata of a prefill: prompts of SEQUENCE tokens."""
    return prefill_meta(case, min(case.tokens, SEQUENCE), 0)


def verified(case: Case, providers: list[Provider], runner: Runner) -> dict[str, str]:
    """Verdicts of providers on at most one prompt; the reference would take long over the largest."""
    small = Case(case.model, min(case.tokens, SEQUENCE), case.device)
    return runner.verified(providers, small, prefill=True, batches=())


def sets_for(model: Model, tokens: int, l2: int) -> int:
    """Buffer sets whose rotation touches at least twice the L2 cache, at most MOST_SETS."""
    return max(2, min(MOST_SETS, -(-2 * l2 // least_bytes(model, tokens))))


def state(model: Model, tokens: int, sets: int, l2: int) -> str:
    if sets == 1:
        return "hot"
    return "cold" if sets * least_bytes(model, tokens) > l2 else "warm"


def sample(ways: dict[str, Callable[[int], Callable[[], object]]], sets: int, runner: Runner, case: Case) -> dict[str, list[float]]:
    """Microseconds a call: name -> samples. A way makes the call of a buffer set.

    A graph runs through all sets and is at least four calls long.
    """
    repeat = max(1, 4 // sets)

    def build(name: str) -> Callable[[], None]:
        return timing.capture([ways[name](i) for i in range(sets)] * repeat, warm=2).replay

    samples = runner.sample(runner.build_each(ways, build, case), target_us=400.0)
    return {name: [us / (sets * repeat) for us in values] for name, values in samples.items()}


def measure(case: Case, sets: int, providers: list[Provider], runner: Runner) -> dict[str, list[float]]:
    """Microseconds a call: name -> samples."""
    meta = prompts(case)
    layers = make_layers(case, meta, sets, 0)
    copies = [copy_call(least_bytes(case.model, case.tokens), case.device) for _ in range(sets)]
    ways = {p.name: lambda i, p=p: p.bind(case, meta, layers[i]) for p in providers}
    return sample(ways | {COPY: lambda i: copies[i]}, sets, runner, case)


def row_of(
    case: Case, samples: dict[str, list[float]], providers: list[Provider], status: dict[str, str], which: str
) -> dict[str, Any]:
    stats = {name: summarize(values) for name, values in samples.items()}
    moved = least_bytes(case.model, case.tokens)
    copied = stats[COPY].median if COPY in stats else None
    peer = fastest(stats, providers, "peer")
    return {
        "model": case.model.name,
        "shape": case.model.shape,
        "tokens": case.tokens,
        "state": which,
        "status": status,
        "bytes": moved,
        "us": {name: value.as_dict() for name, value in stats.items()},
        "gbps": {name: round(moved / value.median / 1e3, 1) for name, value in stats.items()},
        "of_copy": {name: round(copied / value.median, 4) for name, value in stats.items()} if copied else {},
        "best_peer": peer[0] if peer else None,
        "samples": {name: rounded(values) for name, values in samples.items()},
    }


def run(cases: list[Case], providers: list[Provider], runner: Runner) -> None:
    report, providers = runner.report, runner.present(providers)
    bandwidth, l2 = timing.copy_bandwidth(), timing.l2_bytes()
    report.summary["copy_bytes_per_second"] = bandwidth
    names = [p.name for p in providers]
    widths = [15, 7, 5, *(max(8, len(name)) for name in names), 6, 8]
    report.say(
        f"GB/s of the least bytes, medians; beside a copy of as many, and ours / that; copy of 1 GiB {bandwidth / 1e9:.0f} GB/s"
    )
    report.say(columns(["model", "tokens", "state", *names, COPY, "of copy"], widths))

    def one(case: Case) -> None:
        status = verified(case, providers, runner)
        right = passed(providers, status)
        for sets in (sets_for(case.model, case.tokens, l2), 1):
            samples = measure(case, sets, right, runner)
            row = row_of(case, samples, right, status, state(case.model, case.tokens, sets, l2))
            speeds = [cell(f"{row['gbps'][n]:.0f}" if n in row["gbps"] else None, status, n) for n in names]
            share = row["of_copy"].get(OURS[0])
            tail = [f"{row['gbps'][COPY]:.0f}" if COPY in row["gbps"] else "-", f"{share:.3f}" if share else "-"]
            cells = [case.model.name, str(case.tokens), row["state"], *speeds, *tail]
            report.add(row, columns(cells, widths))

    runner.each(cases, one)
