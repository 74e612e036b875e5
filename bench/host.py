"""`host`: microseconds of Python and driver a call costs, on one pinned core, while the GPU keeps up."""

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench import timing
from bench.buffers import Case, Layer, Meta, decode_meta, make_layers
from bench.driver import raw_launch
from bench.package import facts_of
from bench.providers import Provider, load
from bench.report import Report, columns, rounded
from bench.runner import Runner, passed
from bench.stats import interleave, summarize

KERNEL_GRID = "kernel[grid]"
CALLS = 64  # between two synchronisations, far below the depth of the launch queue


@contextlib.contextmanager
def pinned() -> Iterator[int | None]:
    """Runs on the last core this process may use; yields its number, or None where pinning is not possible."""
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    allowed = os.sched_getaffinity(0)
    core = max(allowed)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, allowed)


class HostTimer:
    """Wall time of a burst of calls; the queue is drained before each burst and outside the clock."""

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain

    def round(self, plan: list[tuple[str, Callable[[], Any], int]]) -> list[tuple[str, float]]:
        out = []
        for name, call, count in plan:
            self._drain()
            begin = time.perf_counter_ns()
            for _ in range(count):
                call()
            out.append((name, (time.perf_counter_ns() - begin) / count / 1e3))
        self._drain()
        return out


def our_calls(case: Case, meta: Meta, layer: Layer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """How decode_rope can be called, from the barest; each value builds its call."""
    bound = load("ours")

    def raw(name: str) -> Callable[[], None]:
        launch = load(name).launch_object(case, meta, layer)
        return raw_launch(facts_of(launch), torch.cuda.current_stream().cuda_stream, launch)

    def prepared() -> Callable[[], Any]:
        op, positions, table = bound.op(case, meta), meta.positions, meta.block_table
        q, k, v, k_cache, v_cache = layer.q, layer.k, layer.v, layer.k_cache, layer.v_cache
        return lambda: op(q, k, v, k_cache, v_cache, positions, block_table=table)

    return {
        "cuLaunchKernelEx": lambda: raw("ours-plain"),
        "cuLaunchKernelEx-pdl": lambda: raw("ours-pdl"),
        "bound": lambda: bound.launch_object(case, meta, layer),
        "prepared": prepared,
        "function": lambda: load("ours-function").bind(case, meta, layer),
    }


def scale_calls(case: Case, meta: Meta, layer: Layer) -> dict[str, Callable[[], Callable[[], Any]]]:
    """Well-known calls to compare with."""
    x = torch.zeros(1024, device=case.device)
    return {
        "torch.add": lambda: lambda: torch.add(x, x, out=x),
        "graph replay": lambda: timing.capture([load("ours").bind(case, meta, layer)]).replay,
    }


def collect(
    case: Case, meta: Meta, layer: Layer, peers: list[Provider], only: list[str] | None, runner: Runner
) -> dict[str, Callable[[], Any]]:
    """Every call that can be built and runs once; the others are reported with the reason."""
    builders = {**our_calls(case, meta, layer), **scale_calls(case, meta, layer)}
    for provider in passed(peers, runner.verified(peers, case)):
        builders[provider.name] = lambda p=provider: p.bind(case, meta, layer)

    def build(name: str) -> Callable[[], Any]:
        call = builders[name]()
        call()
        timing.drain()
        return call

    return runner.build_each([name for name in builders if only is None or name in only], build, case)


def samples_of(case: Case, peers: list[Provider], only: list[str] | None, runner: Runner) -> dict[str, list[float]]:
    """Microseconds a call: name -> samples of CALLS calls each."""
    meta = decode_meta(case, 1024, 0)
    layer = make_layers(case, meta, 1, 0)[0]
    calls = collect(case, meta, layer, peers, only, runner)
    timer, rng = HostTimer(timing.drain), random.Random(0)
    # A target far above any call makes every burst exactly CALLS long.
    return interleave(calls, timer, runner.rounds, rng, target_us=1e9, most=CALLS, budget=runner.budget)


def add_row(report: Report, model: str, tokens: int, call: str, samples: list[float]) -> None:
    value = summarize(samples)
    row = {"model": model, "tokens": tokens, "call": call, "us": value.as_dict(), "samples": rounded(samples)}
    cells = [f"  {call}", f"{value.median:.2f}", f"[{value.p10:.2f}, {value.p90:.2f}]"]
    report.add(row, columns(cells, [26, 10, 20]))


def jit_rows(cases: list[Case], runner: Runner) -> None:
    """The same bound launch through Triton's own `kernel[grid]`, which decode_rope chooses when it is imported."""
    report, root = runner.report, Path(__file__).resolve().parent.parent
    models, batches = (dict.fromkeys(x) for x in zip(*((c.model.name, str(c.tokens)) for c in cases), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "bench", "host", "--peers", "none", "--calls", "bound", "--json", str(path)]
        command += ["--rounds", str(runner.rounds), "--model", *models, "--batch", *batches]
        environment = {**os.environ, "DECODE_ROPE_LAUNCH": "jit"}
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not path.exists():
            report.skip(KERNEL_GRID, f"child exited with {done.returncode}: {done.stderr.strip()[-200:]}")
            return
        rows = json.loads(path.read_text())["rows"]
    report.say(f"{KERNEL_GRID}: the bound launch in a process with DECODE_ROPE_LAUNCH=jit")
    for row in rows:
        report.say(f"{row['model']} tokens={row['tokens']}")
        add_row(report, row["model"], row["tokens"], KERNEL_GRID, row["samples"])


def run(cases: list[Case], peers: list[Provider], only: list[str] | None, runner: Runner) -> None:
    report, peers = runner.report, runner.present(peers)

    def one(case: Case) -> None:
        report.say(str(case))
        for name, samples in samples_of(case, peers, only, runner).items():
            add_row(report, case.model.name, case.tokens, name, samples)

    with pinned() as core:
        report.say(f"host us per call on core {core}, medians [p10, p90]; the queue is drained every {CALLS} calls")
        runner.each(cases, one)
    if only is None:
        jit_rows(cases, runner)
