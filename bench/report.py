"""Where, with what, and how fast: the environment, the rows as they finish, and the JSON file."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import torch

RESULTS = Path(__file__).parent / "results"
_PACKAGES = (
    "torch",
    "triton",
    "flashinfer-python",
    "sglang",
    "tokenspeed-kernel",
    "amd-aiter",
    "liger-kernel",
    "apache-tvm-ffi",
)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, cwd=RESULTS.parent)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """Commit of the checkout, with `+dirty` when a tracked file differs; BENCH_REVISION outside a checkout."""
    commit = _output("git", "rev-parse", "HEAD")
    if commit is None:
        return os.environ.get("BENCH_REVISION")
    return commit + ("+dirty" if _output("git", "status", "--porcelain", "--untracked-files=no") else "")


def environment() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "revision": git_revision(),
        "cores": os.cpu_count(),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = properties.name
        facts["multiprocessors"] = properties.multi_processor_count
        facts["l2_bytes"] = properties.L2_cache_size
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return facts


def slug(text: str | None) -> str:
    return re.sub(r"[^a-z0-9]+", "-", (text or "cpu").lower()).strip("-")


def _finite(value: Any) -> Any:
    """Infinities and NaN are not JSON: they become null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Report:
    """Prints lines at once and keeps everything in the JSON file, rewritten after each row.

    path: of the JSON file, by default results/<gpu>-<mode>.json beside this file; False: none is written.
    """

    def __init__(self, mode: str, arguments: argparse.Namespace, path: str | Literal[False] | None = None) -> None:
        self.mode = mode
        self.environment = environment()
        self.arguments = {key: value for key, value in vars(arguments).items() if key not in ("json", "plot", "run")}
        self.path = None if path is False else Path(path or RESULTS / f"{slug(self.environment['gpu'])}-{mode}.json")
        self.rows: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.skipped: dict[str, list[str]] = {}

    def say(self, line: str = "") -> None:
        print(line, flush=True)

    def head(self) -> None:
        facts = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
        self.say(f"{facts['gpu'] or 'no GPU'}; driver {facts.get('driver')}; {versions}")

    def skip(self, provider: str, reason: str, where: str = "") -> None:
        """Records a provider that did not run and prints each reason once."""
        places = self.skipped.setdefault(f"{provider}: {reason}", [])
        if not places:
            self.say(f"  skip {provider}: {reason}")
        places.append(where)

    def add(self, row: dict[str, Any], line: str) -> None:
        self.rows.append(row)
        self.say(line)
        self.save()

    def as_dict(self) -> dict[str, Any]:
        return _finite(
            {
                "schema": 1,
                "mode": self.mode,
                "environment": self.environment,
                "arguments": self.arguments,
                "rows": self.rows,
                "summary": self.summary,
                "skipped": self.skipped,
            }
        )

    def save(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.as_dict(), allow_nan=False) + "\n")

    def finish(self) -> None:
        self.save()
        if self.path is not None:
            self.say(f"wrote {self.path.name}")


def columns(cells: list[str], widths: list[int]) -> str:
    """Cells right-aligned but for the first; a cell wider than its column keeps its text."""
    first = cells[0].ljust(widths[0])
    return " ".join([first, *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))])


def rounded(samples: list[float]) -> list[float]:
    return [round(value, 4) for value in samples]
