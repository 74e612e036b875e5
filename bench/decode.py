"""`decode`: one launch a layer in a CUDA graph of many layers, every provider interleaved with the others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench import timing
from bench.buffers import Case, Layer, Meta, context_for, decode_meta, make_layers
from bench.package import facts_of
from bench.providers import Provider
from bench.providers.ours import Bound
from bench.report import Report, columns, rounded
from bench.runner import Runner, cell, fastest, passed
from bench.stats import median, summarize
from bench.verify import check
from bench.workloads import MODELS, TINY, traffic

OURS = ("ours", "ours-plain", "ours-pdl", "ours-meta")
FLOORS = ("empty", "empty-pdl", "copy-pdl")


@dataclass(frozen=True)
class Options:
    """How the chain of launches is built."""

    layers: int = 32
    hot: bool = False
    flush: bool = False
    packed: bool = True
    seed: int = 0
    attention_pdl: bool = False


def dry_run(providers: list[Provider], runner: Runner, *, prefill: bool = False) -> bool:
    """Verifies every provider, at a tiny size on the CPU where there is no GPU, and times nothing."""
    models = [MODELS["llama-3-8b"], MODELS["smollm2-135m"]] if torch.cuda.is_available() else [TINY]
    all_right = True
    for case in [Case(m, tokens) for m in models for tokens in (1, 5)]:
        for provider in providers:
            if provider.slow and provider.name not in runner.asked:
                continue
            verdict = check(provider, case, prefill=prefill)
            all_right = all_right and verdict.status != "fail"
            row = {"model": case.model.name, "tokens": case.tokens, "provider": provider.name, **verdict._asdict()}
            runner.report.add(row, f"{case} {provider.name:<16} {verdict.status} {verdict.reason}".rstrip())
    return all_right


def state(case: Case, options: Options, l2: int) -> str:
    """`cold` when one replay touches more than the L2 cache holds or it is flushed; `hot`: one layer's buffers."""
    if options.flush:
        return "cold"
    if options.hot:
        return "hot"
    return "cold" if options.layers * traffic(case.model, case.tokens).total > l2 else "warm"


def chain(provider: Provider, case: Case, meta: Meta, layers: list[Layer]) -> Callable[[], None]:
    return timing.capture([provider.bind(case, meta, layer) for layer in layers], warm=2).replay


def floors(providers: list[Provider], case: Case, meta: Meta, layers: list[Layer], runner: Runner) -> dict[str, Callable[[], None]]:
    """Empty kernels with the grid of our launch, and copies of as many bytes; as many as there are layers."""
    from bench.floors import copy_launch, empty_launch

    ours = next((p for p in providers if isinstance(p, Bound)), None)
    if ours is None:
        return {}

    def floor(name: str) -> Callable[[], None]:
        if name == "copy-pdl":
            moved = traffic(case.model, case.tokens).total
            copies = {buffers: copy_launch(moved) for buffers in set(map(id, layers))}
            return timing.capture([copies[id(layer)] for layer in layers], warm=1).replay
        facts = facts_of(ours.launch_object(case, meta, layers[0]))
        launch = empty_launch((facts.grid,), facts.num_warps, pdl=name == "empty-pdl")
        return timing.capture([launch] * len(layers), warm=1).replay

    return runner.build_each(FLOORS, floor, case)


def measure(case: Case, providers: list[Provider], options: Options, runner: Runner) -> dict[str, list[float]]:
    """Microseconds a launch of every provider and of the floors: name -> samples."""
    count = 1 if options.hot else options.layers
    meta = decode_meta(case, context_for(case, count), options.seed)
    layers = make_layers(case, meta, count, options.seed, packed=options.packed) * (options.layers // count)
    by_name = {p.name: p for p in providers}
    replays = runner.build_each(by_name, lambda name: chain(by_name[name], case, meta, layers), case)
    replays |= floors(providers, case, meta, layers, runner)
    samples = runner.sample(replays, target_us=200.0, flush=2 * timing.l2_bytes() if options.flush else 0)
    return {name: [us / options.layers for us in values] for name, values in samples.items()}


def row_of(
    case: Case,
    samples: dict[str, list[float]],
    providers: list[Provider],
    status: dict[str, str],
    bandwidth: float,
    which: str,
) -> dict[str, Any]:
    """One JSON row: medians, percentiles, samples and ratios; no speed for a provider that was wrong."""
    stats = {name: summarize(values) for name, values in samples.items()}
    peer = fastest(stats, providers, "peer")
    ours = {p.name: stats[p.name].median for p in providers if p.group == "ours" and p.name in stats}
    moved = traffic(case.model, case.tokens)
    return {
        "model": case.model.name,
        "shape": case.model.shape,
        "tokens": case.tokens,
        "state": which,
        "status": status,
        "bytes": moved.total,
        "copy_us": round(1e6 * moved.total / bandwidth, 4),
        "us": {name: value.as_dict() for name, value in stats.items()},
        "best_peer": peer[0] if peer else None,
        "ratio": {name: round(peer[1] / us, 4) for name, us in ours.items()} if peer else {},
        "samples": {name: rounded(values) for name, values in samples.items()},
    }


class Table:
    """One line a case: medians in microseconds, the floors, and best peer / ours."""

    def __init__(self, providers: list[Provider]) -> None:
        self.names = [p.name for p in providers]
        self.ours = next((p.name for p in providers if p.group == "ours"), "ours")
        self.heads = [name.replace("flashinfer", "fi").replace("tokenspeed", "tokensp") for name in self.names]
        self.widths = [15, 5, 5, *(max(6, len(head)) for head in self.heads), 6, 9, 8, 6, 10, 6]

    def header(self) -> str:
        cells = ["model", "B", "state", *self.heads, *FLOORS, "bytes", "best peer", "ratio"]
        return columns(cells, self.widths)

    def line(self, row: dict[str, Any]) -> str:
        us = [self._cell(row, name) for name in (*self.names, *FLOORS)]
        ratio = row["ratio"].get(self.ours)
        tail = [f"{row['copy_us']:.2f}", row["best_peer"] or "-", f"{ratio:.2f}x" if ratio else "-"]
        return columns([row["model"], str(row["tokens"]), row["state"], *us, *tail], self.widths)

    @staticmethod
    def _cell(row: dict[str, Any], name: str) -> str:
        us = row["us"].get(name)
        return cell(us and f"{us['median']:.2f}", row["status"], name)


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, Any]]:
    """For each of ours: median of best peer / ours at B <= 64 and at B >= 128, and its worst row."""
    out = {}
    for name in names:
        known = [(row["ratio"][name], row) for row in rows if name in row.get("ratio", {})]
        if known:
            ratio, row = min(known, key=lambda item: item[0])
            out[name] = {
                "small": median([r for r, row in known if row["tokens"] <= 64]),
                "large": median([r for r, row in known if row["tokens"] >= 128]),
                "worst": ratio,
                "worst_row": f"{row['model']} B={row['tokens']} against {row['best_peer']}",
            }
    return out


def print_summary(report: Report) -> None:
    report.say("best correct peer / ours (above 1: ours is faster)")
    for name, value in report.summary["ratios"].items():
        small, large = (f"{value[k]:.2f}x" if value[k] else "-" for k in ("small", "large"))
        worst = f"{value['worst']:.2f}x ({value['worst_row']})"
        report.say(f"  {name:<12} B<=64 {small}, B>=128 {large}, worst {worst}")


def run(cases: list[Case], providers: list[Provider], options: Options, runner: Runner) -> None:
    report, providers = runner.report, runner.present(providers)
    bandwidth, l2 = timing.copy_bandwidth(), timing.l2_bytes()
    report.summary["copy_bytes_per_second"] = bandwidth
    report.say(f"copy {bandwidth / 1e9:.0f} GB/s; us per launch, medians; {options.layers} launches a graph")
    table = Table(providers)
    report.say(table.header())

    def one(case: Case) -> None:
        status = runner.verified(providers, case, packed=options.packed)
        right = passed(providers, status)
        samples = measure(case, right, options, runner)
        row = row_of(case, samples, right, status, bandwidth, state(case, options, l2))
        report.add(row, table.line(row))

    runner.each(cases, one)
    report.summary["ratios"] = summary(report.rows, [p.name for p in providers if p.group == "ours"])
    print_summary(report)
