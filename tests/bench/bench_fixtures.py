"""Fixtures of the benchmark's tests: a report, a runner, and every mode on the CPU."""

import argparse
import importlib

import pytest
import torch
from bench_on_cpu import CpuGraph, CpuTimer, sdpa

from bench import decode, step_cell, timing
from bench.report import Report
from bench.runner import Runner


@pytest.fixture
def report(tmp_path):
    return Report("decode", argparse.Namespace(), str(tmp_path / "out.json"))


@pytest.fixture
def runner(report):
    return Runner(report, rounds=5)


@pytest.fixture
def on_cpu(monkeypatch):
    """Every mode on the CPU: graphs replay Python calls, and the floors are two calls that do nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "capture", lambda calls, warm=None: CpuGraph(calls))
    monkeypatch.setattr(timing, "EventTimer", CpuTimer)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 60 << 20)
    monkeypatch.setattr(decode, "floors", lambda *_: {name: lambda: None for name in decode.FLOORS})


@pytest.fixture
def step_in_pytorch(on_cpu, monkeypatch):
    """The kernels of a step and its attention are PyTorch's; the list holds the PDL choice of every attention made."""

    def norm(x, residual, weight):
        residual += x
        return torch.nn.functional.rms_norm(residual, weight.shape, weight)

    def head_norm(x, weight):
        x.copy_(torch.nn.functional.rms_norm(x, weight.shape, weight))

    def silu_mul(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    asked = []
    transformer = importlib.import_module("bench.transformer")
    monkeypatch.setattr(transformer, "add_rms_norm", norm)
    monkeypatch.setattr(transformer, "silu_mul", silu_mul)
    monkeypatch.setattr(step_cell, "head_rms_norm", head_norm)
    monkeypatch.setattr(step_cell, "make_attention", lambda case, meta, pdl: asked.append(pdl) or ("sdpa", sdpa(case, meta)))
    return asked
