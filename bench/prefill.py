"""`prefill`: GB/s against the number of tokens, with buffers rotated beyond the L2 cache, and hot."""

from typing import Any

from bench import timing
from bench.buffers import Case, make_layers, prefill_meta
from bench.providers import Provider
from bench.report import columns, rounded
from bench.runner import Runner, cell, fastest, passed
from bench.stats import summarize
from bench.sweep import sample_ways
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
    """Microseconds a call: name -> samples."""
    meta = prefill_meta(case, min(case.tokens, 4096), 0)
    layers = make_layers(case, meta, sets, 0)
    return sample_ways({p.name: lambda i, p=p: p.bind(case, meta, layers[i]) for p in providers}, sets, runner, case)


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
