"""`waves`: time against tokens in small steps, beside the number of waves of programs that the GPU needs for them.

A GPU holds (multiprocessors x programs that fit on one) programs at once. One program more than a whole number of waves
costs up to a wave, which is why a benchmark at one size says little about its neighbours.
"""

from typing import Any

import torch

from bench import timing
from bench.buffers import Case, context_for, decode_meta, make_layers
from bench.driver import facts_of, resident_programs
from bench.providers import load
from bench.report import columns
from bench.runner import Runner, passed
from bench.sweep import time_ways
from bench.workloads import Model, traffic

WAYS = ("ours-plain", "ours-pdl")
LAYERS = 32
TOKENS = range(128, 2049, 64)


def row_of(case: Case, programs: int, at_once: int, timed: dict[str, Any]) -> dict[str, Any]:
    moved = traffic(case.model, case.tokens).total
    return {
        "model": case.model.name,
        "shape": case.model.shape,
        "tokens": case.tokens,
        "programs": programs,
        "at_once": at_once,
        "waves": round(programs / at_once, 3),
        "bytes": moved,
        "gbps": {name: round(moved / us["median"] / 1e3, 1) for name, us in timed["us"].items()},
        **timed,
    }


def measure(case: Case, runner: Runner) -> dict[str, Any]:
    """One JSON row."""
    providers = [load(name) for name in WAYS]
    right = {p.name: p for p in passed(providers, runner.verified(providers, case))}
    meta = decode_meta(case, context_for(case, LAYERS), 0)
    layers = make_layers(case, meta, LAYERS, 0)
    facts = facts_of(right[WAYS[0]].launch_object(case, meta, layers[0]))
    at_once = resident_programs(facts) * torch.cuda.get_device_properties(case.device).multi_processor_count
    ways = {name: lambda i, p=p: p.bind(case, meta, layers[i]) for name, p in right.items()}
    return row_of(case, facts.grid, at_once, time_ways(ways, LAYERS, runner, case))


def run(models: list[Model], batches: list[int], runner: Runner) -> None:
    report, bandwidth = runner.report, timing.copy_bandwidth()
    report.summary["copy_bytes_per_second"] = bandwidth
    report.say(f"us a launch and GB/s, medians; {LAYERS} launches a graph, each its own cache; copy {bandwidth / 1e9:.0f} GB/s")
    widths = [16, 6, 8, 7, *[11, 6] * len(WAYS)]
    report.say(columns(["model", "B", "programs", "waves", *[cell for name in WAYS for cell in (name, "GB/s")]], widths))

    def one(case: Case) -> None:
        row = measure(case, runner)
        cells = [row["model"], str(row["tokens"]), str(row["programs"]), f"{row['waves']:.2f}"]
        for name in WAYS:
            timed = name in row["us"]
            cells += [f"{row['us'][name]['median']:.2f}", f"{row['gbps'][name]:.0f}"] if timed else ["-", "-"]
        report.add(row, columns(cells, widths))

    runner.each([Case(model, tokens) for model in models for tokens in batches], one)
