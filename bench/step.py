"""`step`: a whole decode step, ours against FlashInfer's separate rope and append and against the fused peers.

Every cell (network, batch, context) is measured in several processes of its own, one after the other, each with other memory
allocated before it. Where the allocator puts weights and caches moves a step by several percent and is the same for the whole life
of a process, so the samples of one process cannot show it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.report import Report, columns
from bench.runner import Runner
from bench.stats import median, paired
from bench.step_cell import Cell
from bench.transformer import NETWORKS, TINY_NETWORK, Network
from bench.workloads import UsageError

BATCHES = (1, 2, 4, 8, 16, 64)
CONTEXTS = (256, 1024, 4096)
PROCESSES = 3
STEP_OURS = ("ours", "ours-plain", "ours-tuned")
BASELINE = "flashinfer"
PEERS = ("sglang", "tokenspeed")  # unless others are asked for
FUSED = ("sglang", "tokenspeed", "aiter")  # one launch, as ours
RIVALS = {"baseline": f"against {BASELINE}", "fused": "against the fastest fused peer"}
_ROOT = Path(__file__).resolve().parent.parent
_MOST = 300.0  # seconds a child may measure, which takes a few
_GRACE = 300.0  # seconds a child may take beyond its share: it imports, builds kernels and verifies first


@dataclass(frozen=True)
class Options:
    """names: of all providers, the baseline first. pdl: of the attention; None is its own choice. dry: verify, time nothing."""

    names: tuple[str, ...]
    processes: int = PROCESSES
    pdl: bool | None = None
    dry: bool = False


def find_networks(names: list[str] | None) -> list[Network]:
    """Networks by name; None or `all` is every one. `tiny` is the one of a dry run."""
    if not names or names == ["all"]:
        return list(NETWORKS.values())
    known = NETWORKS | {TINY_NETWORK.name: TINY_NETWORK}
    for name in names:
        if name not in known:
            raise UsageError(f"--networks: expected some of {', '.join(NETWORKS)}; got {name!r}")
    return [known[name] for name in names]


def find_providers(peers: list[str] | None) -> tuple[str, ...]:
    """The baseline, ours, and the peers asked for (`none`: no more)."""
    asked = PEERS if peers is None else [name for name in peers if name != "none"]
    return tuple(dict.fromkeys((BASELINE, *STEP_OURS, *asked)))


# One process


def command(cell: Cell, process: int, options: Options, runner: Runner, seconds: float, path: Path) -> list[str]:
    """The child that measures `cell` as process number `process` and writes its report to `path`."""
    words = [sys.executable, "-m", "bench", "step", "--child", str(process), "--json", str(path)]
    words += ["--networks", cell.network.name, "--batches", str(cell.batch), "--contexts", str(cell.context)]
    words += ["--seconds", f"{seconds:.1f}", "--rounds", str(runner.rounds), "--peers", *options.names]
    return words + ["--no-attention-pdl"] * (options.pdl is False) + ["--dry-run"] * options.dry


def start(words: list[str], seconds: float, path: Path) -> dict[str, Any] | str:
    """The report that a child wrote, or why there is none."""
    environment = dict(os.environ)
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"  # the step's own kernels need Triton's interpreter on the CPU
    try:
        done = subprocess.run(words, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds:.0f} s"
    if path.exists() and done.returncode in (0, 1):
        return json.loads(path.read_text())
    code = done.returncode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return f"{how}: {said[-1].strip()[:200]}" if said else how


def processes(cell: Cell, options: Options, runner: Runner) -> Iterator[dict[str, Any]]:
    """The row of every process that measured something; the others are reported, and the next one goes on."""
    for process in range(options.processes):
        where = f"{cell} process {process}"
        share = max(1.0, min(runner.budget.left() / (options.processes - process), _MOST))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cell.json"
            found = start(command(cell, process, options, runner, share, path), share + _GRACE, path)
        if isinstance(found, str):
            runner.report.skip("step", found, where)
            continue
        for key, places in found["skipped"].items():
            name, reason = key.split(": ", 1)
            for place in places:
                runner.report.skip(name, reason, f"{place} process {process}".lstrip())
        yield from found["rows"]
        if not found["rows"] and "OutOfMemoryError" in str(found["skipped"]):
            return  # nor would it fit in the next process


# One row of all processes


def rival(us: dict[str, Any], which: str) -> str | None:
    """The baseline, or the fastest fused peer of one process; None where there is none."""
    names = (BASELINE,) if which == "baseline" else FUSED
    return min((name for name in names if name in us), key=lambda name: us[name]["median"], default=None)


def saved(row: dict[str, Any], which: str) -> dict[str, float]:
    """Percent of the rival's step that each provider saves in one process: paired differences, so negative for a loss."""
    against = rival(row["us"], which)
    if against is None:
        return {}
    base, out = row["us"][against]["median"], {}
    for name, samples in row["samples"].items():
        if name != against and (which == "baseline" or name not in FUSED):
            out[name] = 100 * median(paired(row["samples"][against], samples)) / base
    return out


def spread(values: list[float]) -> dict[str, float]:
    return {"median": round(median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


def _by_name(each: list[dict[str, Any]], pick: Callable[[Any], Any] = lambda value: value) -> dict[str, list[Any]]:
    """name -> what the processes that have it say."""
    names = dict.fromkeys(name for one in each for name in one)
    return {name: [pick(one[name]) for one in each if name in one] for name in names}


def merge(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One JSON row of a cell from those of its processes.

    us: name -> `median`, the median of the processes' medians; `min` and `max` of these, the spread between processes; `p10` and
    `p90`, medians of the processes' own, the spread inside; in how many `processes`. saved: rival -> name -> percent, in the same
    way. fastest_fused: by process. processes: their rows, whole.
    """
    us = {}
    for name, each in _by_name([row["us"] for row in rows]).items():
        inside = {key: round(median([one[key] for one in each]), 3) for key in ("p10", "p90")}
        us[name] = spread([one["median"] for one in each]) | inside | {"processes": len(each)}
    shared = {key: rows[0][key] for key in ("network", "layers", "tokens", "context", "attention")}
    return shared | {
        "us": us,
        "saved": {which: {n: spread(x) for n, x in _by_name([saved(row, which) for row in rows]).items()} for which in RIVALS},
        "fastest_fused": [rival(row["us"], "fused") for row in rows],
        "processes": rows,
    }


def summary(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """rival -> each of ours -> percent saved over all cells, how many cells lose, and the worst."""
    out: dict[str, dict[str, Any]] = {}
    for which in RIVALS:
        out[which] = {}
        for name in (name for name in names if name.startswith("ours")):
            known = [(row["saved"][which][name]["median"], row) for row in rows if name in row["saved"][which]]
            if known:
                worst = min(known, key=lambda item: item[0])[1]
                cell = f"{worst['network']} B={worst['tokens']} context={worst['context']}"
                lost = sum(value < 0 for value, _ in known)
                out[which][name] = spread([value for value, _ in known]) | {"cells": len(known), "lost": lost, "worst": cell}
    return out


# What is printed


def _range(value: dict[str, Any] | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value['median']:.{digits}f} [{value['min']:.{digits}f}, {value['max']:.{digits}f}]"


def line(row: dict[str, Any], names: tuple[str, ...], asked: int) -> list[str]:
    """Of every provider its time; of each of ours what it saves."""
    cells = [row["network"], str(row["tokens"]), str(row["context"]), f"{len(row['processes'])}/{asked}", row["attention"]]
    for name in names:
        us = row["us"].get(name)
        cells.append(f"{_range(us, 1)} ±{(us['p90'] - us['p10']) / 2:.1f}" if us else "-")
    for name in (name for name in names if name.startswith("ours")):
        cells.append(" | ".join(_range(row["saved"][which].get(name), 1) for which in RIVALS))
    return cells


def print_head(report: Report, names: tuple[str, ...], widths: list[int]) -> None:
    report.say("us per decode step: median of the processes' medians [least, most of them] ± half of p10 to p90 inside a process")
    report.say(f"% saved, median [least, most] of the processes: {' | '.join(RIVALS.values())}")
    saves = [f"{name} saves" for name in names if name.startswith("ours")]
    report.say(columns(["network", "B", "context", "of", "attention", *names, *saves], widths))


def print_summary(report: Report) -> None:
    for which, by_name in report.summary["saved"].items():
        for name, value in by_name.items():
            cells = f"{_range(value, 1)} % over {value['cells']} cells, {value['lost']} of them slower; worst {value['worst']}"
            report.say(f"  {name:<12} {RIVALS[which]}: {cells}")


def run(cells: list[Cell], options: Options, runner: Runner) -> bool:
    """Every cell that fits in memory and in the time. True if something was measured and, in a dry run, all of it was right."""
    report, names, slowest, right = runner.report, options.names, 0.0, True
    widths = [15, 4, 7, 3, 10, *(31 for _ in names), *(39 for name in names if name.startswith("ours"))]
    if not options.dry:
        print_head(report, names, widths)
    for done, cell in enumerate(cells):
        # The children of a cell are never cut short, so one that would end too late is not begun.
        if runner.budget.left() <= slowest:
            runner.stopped(cells, done)
            break
        if reason := cell.too_large():
            report.skip(str(cell), reason)
            continue
        begin = time.monotonic()
        rows = list(processes(cell, options, runner))
        slowest = max(slowest, time.monotonic() - begin)
        for row in rows if options.dry else ():
            report.add(row, f"{cell} process {row['process']}: {row['status']}")
            right = right and "fail" not in row["status"].values()
        if rows and not options.dry:
            row = merge(rows)
            report.add(row, columns(line(row, names, options.processes), widths))
    if not options.dry:
        report.summary["saved"] = summary(report.rows, names)
        print_summary(report)
    return right and bool(report.rows)
