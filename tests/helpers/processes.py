"""Code that needs a process of its own, and what a GPU leaves in one."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from cases import build
from random_cases import GPU_SIZES, random_spec

import decode_rope

HELPERS = Path(__file__).parent
ROOT = HELPERS.parents[1]


def in_a_new_process(code: str, **environment: str) -> str:
    """What `code` prints, with the package and the helpers of the tests importable."""
    path = os.pathsep.join([str(HELPERS), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def digest(seeds) -> str:
    """A hash of all bytes that random calls leave, each made twice so that a repeated launch is in it."""
    state = hashlib.sha256()
    for seed in seeds:
        case = build(random_spec(seed, GPU_SIZES), torch.device("cuda:0"))
        for _ in range(2):
            again = case.clone()
            decode_rope.rope_append_decode(**again.arguments())
            for name in sorted(again.storages):
                state.update(again.storages[name].cpu().numpy().tobytes())
    return state.hexdigest()
