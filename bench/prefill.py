"""`prefill`: GB/s against the number of tokens, with buffers rotated beyond the L2 cache, and hot."""

from collections.abc import Callable
from typing import Any

from bench import timing
from bench.buffers import Case, make_layers, prefill_meta
from bench.providers import Provider
from bench.report import columns, rounded
from bench.runner import Runner, cell, fastest, passed
from bench.stats import summarize
from bench.workloads import Model, traffic

OURS = ("ours-prefill",)
MOST_SETS = 64


def sets_for(model: Model, tokens: int, l2: int) -> int:
    """Buffer sets whose rotation touches at least twice the L2 cache, at most MOST_SETS."""
    return max(2, min(MOST_SETS, -(-2 * l2 // traffic(model, tokens).total)))


def state(model: Model, tokens: int, sets: int, l2: int) -> str:
    if sets == 1:
        return "hot"
    return "cold" if sets * traffic(model, tokens).total > l2 else "warm"


def measure(case: Case, sets: int, providers: list[Provider], runner: Runner) -> dict[str, list[float]]:
    """Microseconds a call: name -> samples. One graph runs through all buffer sets, at least four calls long."""
    meta = prefill_meta(case, min(case.tokens, 4096), 0)
    layers = make_layers(case, meta, sets, 0)
    repeat = max(1, 4 // sets)
    by_name = {p.name: p for p in providers}

    def build(name: str) -> Callable[[], None]:
        calls = [by_name[name].bind(case, meta, layer) for layer in layers] * repeat
        return timing.capture(calls, warm=2).replay

    samples = runner.sample(runner.build_each(by_name, build, case), target_us=400.0)
    return {name: [us / (sets * repeat) for us in values] for name, values in samples.items()}


def row_of(
    case: Case, samples: dict[str, list[float]], providers: list[Provider], status: dict[str, str], which: str
) -> dict[str, Any]:
    stats = {name: summarize(values) for name, values in samples.items()}
    moved = traffic(case.model, case.tokens).total
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
        "best_peer": peer[0] if peer else None,
        "samples": {name: rounded(values) for name, values in samples.items()},
    }


def run(cases: list[Case], providers: list[Provider], runner: Runner) -> None:
    report, providers = runner.report, runner.present(providers)
    bandwidth, l2 = timing.copy_bandwidth(), timing.l2_bytes()
    report.summary["copy_bytes_per_second"] = bandwidth
    names = [p.name for p in providers]
    widths = [15, 7, 5, *(max(8, len(name)) for name in names), 6]
    report.say(f"GB/s of the least bytes, medians; copy {bandwidth / 1e9:.0f} GB/s")
    report.say(columns(["model", "tokens", "state", *names, "copy"], widths))

    def one(case: Case) -> None:
        # The reference would take long over the largest; 4096 tokens are several prompts' worth of pages.
        small = Case(case.model, min(case.tokens, 4096), case.device)
        status = runner.verified(providers, small, prefill=True, batches=())
        right = passed(providers, status)
        for sets in (sets_for(case.model, case.tokens, l2), 1):
            samples = measure(case, sets, right, runner)
            row = row_of(case, samples, right, status, state(case.model, case.tokens, sets, l2))
            speeds = [cell(f"{row['gbps'][n]:.0f}" if n in row["gbps"] else None, status, n) for n in names]
            cells = [case.model.name, str(case.tokens), row["state"], *speeds, f"{bandwidth / 1e9:.0f}"]
            report.add(row, columns(cells, widths))

    runner.each(cases, one)
