"""`all`: every mode in turn, each in a process of its own, so that none can spoil the next, and with its share of the time left."""

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from bench.workloads import UsageError

ROOT = Path(__file__).resolve().parent.parent
_GRACE = 180.0  # a mode finishes the row it is at


class Part(NamedTuple):
    """arguments of `python -m bench`, and the share of the time."""

    arguments: tuple[str, ...]
    share: float


PARTS = {
    "decode": Part(("decode",), 30),
    "decode-hot": Part(("decode", "--hot", "--quick"), 5),
    "decode-in-model": Part(("decode", "--in-model"), 12),
    "decode-in-model-attention-pdl": Part(("decode", "--in-model", "--attention-pdl"), 12),
    "host": Part(("host",), 6),
    "step": Part(("step", "--quick"), 40),
    "prefill": Part(("prefill", "--model", "llama-3-8b", "llama-3-70b-tp8", "gpt-oss-20b"), 14),
}


def choose(names: list[str] | None) -> dict[str, Part]:
    for name in names or ():
        if name not in PARTS:
            raise UsageError(f"--only: expected some of {', '.join(PARTS)}; got {name!r}")
    return {name: part for name, part in PARTS.items() if names is None or name in names}


def run(seconds: float, names: list[str] | None) -> int:
    """0 if every part ended well."""
    left, end, bad = choose(names), time.monotonic() + seconds, []
    for name, part in list(left.items()):
        budget = max(0.0, end - time.monotonic()) * part.share / sum(p.share for p in left.values())
        del left[name]
        print(f"\n== {name}, {budget:.0f} s", flush=True)
        command = [sys.executable, "-m", "bench", *part.arguments, "--seconds", f"{budget:.1f}"]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=budget + _GRACE, check=False).returncode
        except subprocess.TimeoutExpired:
            print(f"{name}: stopped, {_GRACE:.0f} s over its time", flush=True)
            code = 1
        bad += [name] * (code != 0)
    print(f"\n{len(bad)} parts failed{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0
