"""`python -m decode_rope env` and `check`."""

import json
import os
import subprocess
import sys

import pytest
import torch

from decode_rope.cli import check


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "decode_rope", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_env_prints_json_and_text_of_the_same_facts():
    facts = json.loads(command("env", "--json").stdout)
    assert facts["torch"] == torch.__version__
    assert ("none" in facts["devices"]) == (not torch.cuda.is_available())
    text = command("env", DECODE_ROPE_PDL="0").stdout
    assert all(name in text for name in facts) and "DECODE_ROPE_PDL=0" in text


def test_an_unknown_command_is_refused():
    assert command("rotate").returncode == 2


def test_check_passes_here():
    done = command("check", "--tokens", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(check.CASES)} of {len(check.CASES)} cases equal" in done.stdout


@pytest.mark.parametrize("target, seen", [("k", "caches"), ("q", "q")])
def test_check_sees_a_kernel_that_differs(monkeypatch, target, seen):
    def wrong(q, k, v, k_cache, v_cache, table, positions, **options):
        check.reference.rope_append_decode(q, k, v, k_cache, v_cache, table, positions, **options)
        {"q": q, "k": k_cache}[target].view(-1)[0] += 1

    monkeypatch.setattr(check, "rope_append_decode", wrong)
    case = check.CASES[3]
    assert seen in check.compare(case, 3, torch.device("cpu"), 0)
