"""The kernel tests on a machine without a GPU: a second pytest whose Triton interprets its kernels."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from lanes import INTERPRETED

HERE = Path(__file__).parent
LEAST = 600  # tests that the lane has at least; a lane that quietly loses its tests is worse than none


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="this is the interpreter lane")
def test_the_interpreter_lane():
    command = [sys.executable, "-m", "pytest", str(HERE), "-m", "(kernel or anywhere) and not gpu", "-p", "no:cacheprovider"]
    command += ["--tb=short", "--no-header", "-W", "ignore::RuntimeWarning"]
    if find_spec("xdist") and (os.cpu_count() or 1) >= 8:
        command += ["-n", "6", "--dist", "worksteal"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = ours | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    lane = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True)
    print(lane.stdout[-20000:], lane.stderr[-5000:])
    assert lane.returncode == 0, f"the interpreter lane failed ({lane.returncode}); its own report is above"
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|xfailed|errors?)", lane.stdout)}
    passed, skipped = counts.pop("passed"), counts.pop("skipped", 0)
    assert passed >= LEAST and skipped <= passed // 20, f"{passed} passed, {skipped} skipped"
    assert not counts, counts
