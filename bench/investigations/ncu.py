"""`ncu`: DRAM bytes that Nsight Compute counts against the bytes we count, for a few workloads.

The profiler empties the caches before every kernel, so reads are complete; writes still in the L2 cache when a
kernel ends are not counted. Workloads of more than MOST_DECODE tokens are prefills.
"""

import csv
import glob
import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench import prefill
from bench.buffers import Case, Meta, context_for, decode_meta, make_layers
from bench.providers import Provider, Unavailable, load
from bench.report import columns
from bench.runner import Runner, passed
from bench.workloads import find_models, traffic

METRICS = {
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "gpu__time_duration.sum": "nanoseconds",
}
MARKER = "bench_marker_kernel"
WORKLOADS = (("llama-3-8b", 128), ("llama-3-8b", 1024), ("llama-3-70b-tp8", 512), ("llama-3-8b", 131072))
MOST_DECODE = prefill.SEQUENCE
_PREFIX = "bench-ncu:"


class Kernel(NamedTuple):
    name: str
    read: float
    written: float
    nanoseconds: float


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    if found:
        return found
    installed = sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu") + glob.glob("/usr/local/cuda*/bin/ncu"))
    return installed[-1] if installed else None


def parse(text: str) -> list[Kernel]:
    """Kernels in launch order from `ncu --csv --page raw --print-units base`; lines around the table are ignored."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels = []
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        # The row after the header holds the units and has no ID.
        if row["ID"] and row["ID"].isdigit():
            values = {field: float(row[metric].replace(",", "")) for metric, field in METRICS.items()}
            kernels.append(Kernel(row["Kernel Name"], **values))
    return kernels


def split(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels between one marker and the next."""
    groups: list[list[Kernel]] = []
    for kernel in kernels:
        if kernel.name.startswith(MARKER):
            groups.append([])
        elif groups:
            groups[-1].append(kernel)
    return groups


def child(workloads: list[tuple[str, int]], names: list[str], runner: Runner) -> None:
    """Runs inside the profiler: one call of every workload and provider that verifies, a marker before each."""
    from bench.floors import marker

    ready = {}
    for model, tokens in workloads:
        ready |= _ready(Case(find_models([model])[0], tokens), names, runner)
    marker()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for label, call in ready.items():
        marker()
        call()
        torch.cuda.synchronize()
        print(f"{_PREFIX} {label}", flush=True)
    torch.cuda.profiler.stop()


def workload(case: Case, names: list[str], runner: Runner) -> tuple[list[Provider], Meta]:
    """The providers that are right, and the metadata, of a decode step or a prefill."""
    if case.tokens <= MOST_DECODE:
        providers = [load(name) for name in names]
        right = passed(providers, runner.verified(providers, case))
        return right, decode_meta(case, context_for(case, 1, limit_bytes=1e9), 0)
    providers = [load(prefill.OURS[0] if name == "ours" else name) for name in names]
    return passed(providers, prefill.verified(case, providers, runner)), prefill.prompts(case)


def _ready(case: Case, names: list[str], runner: Runner) -> dict[str, Callable[[], Any]]:
    """Calls of one case that have run once, by the label `child` prints."""
    right, meta = workload(case, names, runner)

    def build(provider: Provider) -> Callable[[], Any]:
        call = provider.bind(case, meta, make_layers(case, meta, 1, 0)[0])
        call()
        return call

    by_name = {p.name: p for p in right}
    calls = runner.build_each(by_name, lambda name: build(by_name[name]), case)
    return {f"{case.model.name} {case.tokens} {name}": call for name, call in calls.items()}


def labels(text: str) -> list[tuple[str, int, str]]:
    """(model, tokens, provider) of every call the child says it made, in order."""
    found = [line.split()[1:] for line in text.splitlines() if line.startswith(_PREFIX)]
    return [(model, int(tokens), provider) for model, tokens, provider in found]


def profile(ncu: str, workloads: list[tuple[str, int]], names: list[str], seconds: float) -> tuple[str, list[Kernel]]:
    """What the child printed, and the kernels the profiler saw.

    Raises:
        Unavailable: the profiler could not read its counters.
    """
    chosen = [f"{model}:{tokens}" for model, tokens in workloads]
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "kernels.csv"
        command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--log-file", str(log), "--csv"]
        command += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS)]
        command += [sys.executable, "-m", "bench", "investigate", "ncu", "--child", *chosen, "--peers", *names]
        try:
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"ncu took more than {seconds:.0f} s") from error
        said = log.read_text() if log.exists() else ""
    kernels = parse(said)
    if not kernels:
        tail = " / ".join((said + done.stdout + done.stderr).strip().splitlines()[-4:])
        raise Unavailable(f"ncu gave no kernels (exit {done.returncode}): {tail[-400:]}")
    return done.stdout, kernels


def row_of(model: str, tokens: int, provider: str, kernels: list[Kernel]) -> dict[str, Any]:
    counted = traffic(find_models([model])[0], tokens, sequence=prefill.SEQUENCE if tokens > MOST_DECODE else None)
    return {
        "model": model,
        "tokens": tokens,
        "provider": provider,
        "kernels": [kernel._asdict() for kernel in kernels],
        "counted": {"read": counted.read, "written": counted.written},
        "dram": {"read": sum(k.read for k in kernels), "written": sum(k.written for k in kernels)},
        "us": sum(k.nanoseconds for k in kernels) / 1e3,
    }


def run(names: list[str], runner: Runner) -> None:
    report = runner.report
    ncu = find_ncu()
    if ncu is None:
        report.skip("ncu", "Nsight Compute is not installed")
        return
    try:
        text, kernels = profile(ncu, list(WORKLOADS), names, runner.budget.left())
    except Unavailable as error:
        report.skip("ncu", str(error))
        return
    for line in text.splitlines():
        if line.lstrip().startswith("skip "):
            report.say(line)
    widths = [16, 6, 14, 7, 11, 11, 7, 11, 11, 7, 8]
    report.say("bytes read and written: counted from the shapes, seen at the DRAM, and seen / counted; cold caches")
    report.say(columns(["model", "B", "provider", "kernels", "read", "DRAM", "ratio", "written", "DRAM", "ratio", "us"], widths))
    for (model, tokens, provider), group in zip(labels(text), split(kernels), strict=False):
        row = row_of(model, tokens, provider, group)
        cells = [model, str(tokens), provider, str(len(group))]
        for way in ("read", "written"):
            counted, seen = row["counted"][way], row["dram"][way]
            cells += [str(counted), f"{seen:.0f}", f"{seen / counted:.2f}"]
        report.add(row, columns([*cells, f"{row['us']:.2f}"], widths))
