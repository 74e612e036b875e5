"""`bench step` without a GPU: what a process measures, how the processes of a cell become one row, and what survives a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import providers, step, step_cell, workloads
from bench.__main__ import build_parser, main
from bench.runner import Runner
from bench.stats import Budget
from bench.step_cell import Cell
from bench.transformer import NETWORKS, TINY_NETWORK

pytest_plugins = ["bench_fixtures"]
ROOT = Path(__file__).parents[2]
TINY = Cell(TINY_NETWORK, 2, 40)
NAMES = ("flashinfer", "ours", "sglang")


def test_a_process_times_whole_steps_of_every_provider(step_in_pytorch, runner, report):
    names = ("eager", "ours", "ours-plain", "reference")
    chosen = [providers.load(name) for name in names]
    row = step_cell.measure(TINY, chosen, runner, 1, False, False)
    assert step_in_pytorch == [False] and report.skipped == {}
    assert row["status"] == dict.fromkeys(names, "ok") and set(row["us"]) == set(row["samples"]) == set(names)
    assert (row["network"], row["tokens"], row["context"], row["process"]) == ("tiny", 2, 40, 1)
    dry = step_cell.measure(TINY, chosen, runner, 0, None, True)
    assert dry["status"] == row["status"] and dry["us"] == {}


def test_a_step_that_computes_something_else_is_not_timed(runner, report):
    right = step_cell.agreeing({"a": lambda: torch.ones(4), "b": lambda: torch.full((4,), 1.1)}, runner, "here")
    assert list(right) == ["a"] and list(report.skipped) == ["b: fail: the step's result is off by 0.1"]


def test_every_process_allocates_something_else_first():
    sizes = [step_cell.first_sizes(process) for process in range(4)]
    assert sizes[0] == [] and sizes == [step_cell.first_sizes(process) for process in range(4)]
    assert all(100 << 20 < sum(each) < 600 << 20 for each in sizes[1:])
    assert len({size % 512 for each in sizes[1:] for size in each}) > 12  # odd, whatever the allocator rounds to


def test_a_cell_that_does_not_fit_is_known_beforehand(monkeypatch):
    cell = Cell(NETWORKS["llama-3-8b"], 64, 4096)
    weights = 32 * 2 * (4096 * (48 + 32) * 128 + 3 * 4096 * 14336)
    assert cell.bytes() == weights + 32 * 2 * 64 * 4096 * 8 * 128 * 2
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for total, fits in ((80 << 30, True), (50 << 30, False)):
        properties = type("Properties", (), {"total_memory": total})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=properties: found)
        assert (cell.too_large() is None) == fits
    assert "needs 48.3 GB and 6.4 GB of room; the GPU has 53.7 GB" in cell.too_large()


def row_of(process, **samples):
    """What a process reports, of these samples by provider."""
    us = {name: step_cell.summarize(values).as_dict() for name, values in samples.items()}
    return {
        "network": "tiny",
        "layers": 2,
        "tokens": 2,
        "context": 40,
        "attention": "sdpa",
        "process": process,
        "us": us,
        "samples": samples,
    }


def test_processes_become_one_row():
    rows = [
        row_of(0, flashinfer=[100.0, 102.0, 104.0], ours=[90.0, 92.0, 94.0], sglang=[91.0, 93.0, 95.0], tokenspeed=[120.0] * 3),
        row_of(1, flashinfer=[100.0] * 3, ours=[105.0] * 3, sglang=[98.0] * 3, tokenspeed=[84.0] * 3),
        row_of(2, flashinfer=[100.0] * 3, ours=[95.0] * 3),
    ]
    row = step.merge(rows)
    ours = row["us"]["ours"]
    assert (ours["median"], ours["min"], ours["max"], ours["processes"]) == (95.0, 92.0, 105.0, 3)
    assert (ours["p10"], ours["p90"]) == (95.0, 95.0) and row["us"]["sglang"]["processes"] == 2
    assert row["fastest_fused"] == ["sglang", "tokenspeed", None]
    baseline, fused = row["saved"]["baseline"], row["saved"]["fused"]
    assert baseline["ours"] == {"median": 5.0, "min": -5.0, "max": pytest.approx(9.804)}
    assert fused["ours"] == {"median": pytest.approx((100 / 93 - 25) / 2, abs=1e-3), "min": -25.0, "max": pytest.approx(1.075)}
    assert set(baseline) == {"ours", "sglang", "tokenspeed"} and set(fused) == {"flashinfer", "ours"}
    assert row["processes"] == rows
    cells = step.line(row, NAMES, 4)
    assert cells[3] == "3/4" and cells[6] == "95.0 [92.0, 105.0] ±0.0"
    assert cells[-1] == "5.0 [-5.0, 9.8] | -12.0 [-25.0, 1.1]"


def test_the_summary_counts_losses():
    rows = [step.merge([row_of(0, flashinfer=[100.0], ours=[us], sglang=[90.0])]) for us in (80.0, 95.0, 99.0)]
    rows.append(step.merge([row_of(0, flashinfer=[100.0])]))
    found = step.summary(rows, NAMES)
    assert found["baseline"]["ours"] == {
        "median": 5.0,
        "min": 1.0,
        "max": 20.0,
        "cells": 3,
        "lost": 0,
        "worst": "tiny B=2 context=40",
    }
    assert (found["fused"]["ours"]["lost"], found["fused"]["ours"]["min"]) == (2, -10.0)


def stand_in(monkeypatch, answer):
    """`answer(process)` in place of a child; the processes that were started."""
    started = []

    def start(words, seconds, path):
        started.append(int(words[words.index("--child") + 1]))
        return answer(started[-1])

    monkeypatch.setattr(step, "start", start)
    return started


def test_a_process_that_dies_is_reported_and_the_others_go_on(on_cpu, runner, report, monkeypatch, capsys):
    def answer(process):
        if process == 1:
            return "killed by SIGSEGV"
        return {"rows": [row_of(process, flashinfer=[100.0], ours=[90.0])], "skipped": {"sglang: not installed": [""]}}

    assert stand_in(monkeypatch, answer) == []
    assert step.run([TINY], step.Options(NAMES), runner)
    (row,) = report.rows
    assert [each["process"] for each in row["processes"]] == [0, 2] and row["us"]["ours"]["processes"] == 2
    assert report.skipped["step: killed by SIGSEGV"] == ["tiny B=2 context=40 process 1"]
    assert report.skipped["sglang: not installed"] == ["process 0", "process 2"]
    assert report.summary["saved"]["baseline"]["ours"]["median"] == 10.0
    printed = capsys.readouterr().out
    assert "2/3" in printed and "ours         against flashinfer: 10.0 [10.0, 10.0] % over 1 cells, 0 of them slower" in printed


def test_a_cell_out_of_memory_is_left_after_one_process(on_cpu, runner, report, monkeypatch):
    started = stand_in(monkeypatch, lambda _: {"rows": [], "skipped": {"tiny: OutOfMemoryError: CUDA out of memory": [""]}})
    assert not step.run([TINY, TINY], step.Options(NAMES), runner)
    assert started == [0, 0] and report.rows == []


def test_a_cell_that_would_end_too_late_is_not_begun(on_cpu, report, monkeypatch, capsys):
    clock = [0.0]

    def answer(process):
        clock[0] += 10
        return {"rows": [row_of(process, flashinfer=[100.0])], "skipped": {}}

    monkeypatch.setattr(step.time, "monotonic", lambda: clock[0])
    started = stand_in(monkeypatch, answer)
    step.run([TINY] * 5, step.Options(NAMES), Runner(report, Budget(85, lambda: clock[0]), 5))
    assert len(report.rows) == 2 and started == [0, 1, 2] * 2
    assert "stopped after 60 s, before tiny B=2 context=40: 3 of 5 not run" in capsys.readouterr().out


def test_a_child_is_asked_for_one_cell(runner, tmp_path):
    options = step.Options(("flashinfer", "ours"), pdl=False)
    words = step.command(Cell(NETWORKS["llama-3-8b"], 4, 256), 2, options, runner, 12.0, tmp_path / "out.json")
    args = build_parser().parse_args(words[3:])
    assert (args.networks, args.batches, args.contexts) == (["llama-3-8b"], [4], [256])
    assert (args.child, args.rounds, args.seconds, args.no_attention_pdl, args.dry_run) == (2, 5, 12.0, True, False)
    assert step.find_providers(args.peers)[: len(options.names)] == options.names
    assert step.find_providers(None)[-2:] == ("sglang", "tokenspeed") and step.find_providers(["none"])[-1] != "tokenspeed"
    with pytest.raises(workloads.UsageError, match=r"--networks: expected some of .*; got 'gpt-9'"):
        step.find_networks(["gpt-9"])


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
        ("raise ValueError('no such thing')", "exited with 1: ValueError: no such thing"),
        ("import time; time.sleep(60)", "stopped after 1 s"),
    ],
)
def test_why_a_child_left_no_report(program, reason, tmp_path):
    assert step.start([sys.executable, "-c", program], 1.0, tmp_path / "none.json") == reason


def test_a_dry_run_goes_through_processes_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "dry.json"
    assert main(["step", "--dry-run", "--processes", "2", "--peers", "eager", "--json", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [row["process"] for row in written["rows"]] == [0, 1]
    for row in written["rows"]:
        assert {"ours", "ours-plain", "eager", "reference"} <= row["status"].keys()
        # FlashInfer needs a GPU even where it is installed.
        assert {row["status"][name] for name in row["status"] if name != "flashinfer"} == {"ok"}
    with pytest.raises(SystemExit):
        main(["step", "--dry-run", "--peers", "nobody"])


KERNELS = """
import torch
from bench.attention import triton_attention
from bench.buffers import Case, decode_meta, make_layers
from bench.transformer import EPS, add_rms_norm, head_rms_norm, silu_mul
from bench.workloads import TINY
from tests.bench.bench_on_cpu import sdpa

case = Case(TINY, 2, torch.device("cpu"), torch.float32)
meta = decode_meta(case, 80, 0)
layer = make_layers(case, meta, 1, 0, fill=True)[0]
got = triton_attention(case, meta)(layer.q, layer.k_cache, layer.v_cache)
torch.testing.assert_close(got, sdpa(case, meta)(layer.q, layer.k_cache, layer.v_cache))
x, residual, weight = torch.randn(2, 24), torch.randn(2, 24), torch.randn(24)
want = x + residual
got = add_rms_norm(x, residual, weight)
torch.testing.assert_close(residual, want)
torch.testing.assert_close(got, torch.nn.functional.rms_norm(want, (24,), weight, EPS))
torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(x[:, :12]) * x[:, 12:])
want = torch.nn.functional.rms_norm(layer.q, (16,), weight[:16], EPS)
head_rms_norm(layer.q, weight[:16])
torch.testing.assert_close(layer.q, want)
"""


def test_kernels_of_the_step_in_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", KERNELS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
