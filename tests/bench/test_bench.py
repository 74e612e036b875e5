"""The benchmark without a GPU: what it counts, how it judges a provider, and that a bad provider never stops a run."""

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import decode, driver, host, in_model, ncu, plot, prefill, providers, step, timing, verify, workloads
from bench.__main__ import build_parser, main
from bench.buffers import Case, Layer, context_for, decode_meta, make_layers, num_pages, prefill_meta
from bench.providers import Unavailable
from bench.providers.eager import Eager, rope_append
from bench.providers.flashinfer_fp8 import as_fp8
from bench.report import Report, columns, slug
from bench.runner import Runner
from bench.stats import Budget, interleave, paired, quantile, summarize
from bench.transformer import Network

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
FORTY = Case(workloads.TINY, 40, CPU)


@pytest.fixture
def report(tmp_path):
    return Report("decode", argparse.Namespace(), str(tmp_path / "out.json"))


@pytest.fixture
def runner(report):
    return Runner(report, rounds=5)


class CpuGraph:
    """Stands in for a CUDA graph: replaying runs the calls again."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


class CpuTimer:
    def __init__(self, flush=0):
        self.flush = flush

    def round(self, plan):
        out = []
        for name, replay, count in plan:
            begin = time.perf_counter_ns()
            for _ in range(count):
                replay()
            out.append((name, (time.perf_counter_ns() - begin) / count / 1e3))
        return out


@pytest.fixture
def on_cpu(monkeypatch):
    """Every mode on the CPU: graphs replay Python calls, and the floors are two calls that do nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(timing, "capture", lambda calls, warm=None: CpuGraph(calls))
    monkeypatch.setattr(timing, "EventTimer", CpuTimer)
    monkeypatch.setattr(timing, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(timing, "l2_bytes", lambda: 60 << 20)
    monkeypatch.setattr(decode, "floors", lambda *_: {name: lambda: None for name in decode.FLOORS})


class Broken(Eager):
    """Eager PyTorch, then one thing wrong."""

    def __init__(self, how):
        super().__init__(f"broken-{how}")
        self.how = how

    def bind(self, case, meta, layer):
        if self.how == "raises":
            raise RuntimeError("no such kernel\nand more")
        right = super().bind(case, meta, layer)

        def call():
            q = right()
            if self.how == "q":
                q[0, 0, 0] += 1
            elif self.how == "nan":
                q[-1, -1, -1] = float("nan")
            elif self.how == "k":
                layer.k_cache.view(-1, *layer.k.shape[1:])[meta.slots[-1]] *= 1.5
            elif self.how == "v":
                layer.v_cache.view(-1, *layer.v.shape[1:])[meta.slots[0]] = 0
            elif self.how == "stray":
                free = sorted(set(range(layer.k_cache.shape[0] * case.page_size)) - set(meta.slots.tolist()))
                layer.k_cache.view(torch.int16).view(-1, *layer.k.shape[1:])[free[0], 0, 0] ^= 1
            return q

        return call


class Missing(Eager):
    modules = ("no_such_module_c",)


def test_models_are_found_by_name_and_by_shape():
    assert [m.shape for m in workloads.find_models(["llama-3-8b", "8/1/128"])] == ["32/8/128", "8/1/128"]
    assert len(workloads.find_models(None)) == len(workloads.MODELS) == 6
    with pytest.raises(workloads.UsageError, match=r"--model: expected one of .*; got 'gpt-9'"):
        workloads.find_models(["gpt-9"])


def test_bytes_moved():
    counted = workloads.traffic(workloads.MODELS["llama-3-8b"], 3)
    assert counted.written == 3 * (32 + 8 + 8) * 128 * 2
    assert counted.read == counted.written + 3 * (128 * 4 + 8 + 4)
    assert counted.total == counted.read + counted.written
    halved = workloads.traffic(workloads.MODELS["llama-3-8b"], 3, out_element_size=1)
    assert (halved.read, halved.written) == (counted.read, counted.written // 2)


def test_statistics():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert summarize([float(x) for x in range(11)]) == (5.0, 1.0, 9.0, 11)
    assert paired([3.0, 5.0], [1.0, 1.5]) == [2.0, 3.5]
    with pytest.raises(ValueError, match="equal lengths"):
        paired([1.0], [])
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_interleaving_pairs_every_round_in_a_random_order_and_keeps_to_the_budget():
    seen = []

    class Timer:
        def round(self, plan):
            seen.append([(name, count) for name, _, count in plan])
            return [(name, 10.0 if name == "slow" else 1.0) for name, _, _ in plan]

    samples = interleave({"slow": print, "fast": print}, Timer(), 40, random.Random(0), target_us=20.0)
    assert samples == {"slow": [10.0] * 40, "fast": [1.0] * 40}
    assert {count for one in seen[1:] for name, count in one if name == "slow"} == {2}
    assert {count for one in seen[1:] for name, count in one if name == "fast"} == {20}
    assert len({one[0][0] for one in seen[1:]}) == 2
    spent = Budget(0)
    assert len(interleave({"a": print}, Timer(), 40, random.Random(0), budget=spent)["a"]) == 5


@pytest.mark.parametrize("meta", [decode_meta(FORTY, 64, 3), prefill_meta(FORTY, 24, 3)], ids=["decode", "prefill"])
def test_the_forms_of_a_page_table_agree(meta):
    assert len(set(meta.slots.tolist())) == 40
    assert int(meta.slots.max()) < num_pages(meta) * 16
    lengths = meta.starts.diff()
    assert meta.starts[0] == 0 and meta.starts[-1] == 40
    assert torch.equal(torch.repeat_interleave(torch.arange(len(lengths)), lengths), meta.requests.long())
    indptr, indices, last = meta.csr
    assert {x.dtype for x in (indptr, indices, last, meta.positions32, meta.requests, meta.starts)} == {torch.int32}
    for request in range(meta.block_table.shape[0]):
        pages = indices[indptr[request] : indptr[request + 1]]
        length = int(meta.positions[meta.requests == request].max()) + 1
        assert (len(pages) - 1) * 16 + int(last[request]) == length == int(meta.lengths[request])
        for token in (meta.requests == request).nonzero().flatten():
            position = int(meta.positions[token])
            assert int(meta.slots[token]) == int(pages[position // 16]) * 16 + position % 16


def test_packed_layers_are_slices_and_copies_keep_their_strides():
    meta = decode_meta(FORTY, 64, 0)
    packed, apart = (make_layers(FORTY, meta, 2, 0, packed=p, fill=True) for p in (True, False))
    heads = workloads.TINY.heads * workloads.TINY.head_dim
    assert packed[0].k.stride() == (heads, 16, 1) and apart[0].k.is_contiguous()
    assert torch.equal(packed[1].v, apart[1].v) and not torch.equal(packed[0].q, packed[1].q)
    assert packed[0].clone().q.stride() == packed[0].q.stride()
    assert packed[0].k.flatten(1).data_ptr() == packed[0].k.data_ptr()


def test_context_fits_the_memory_it_is_given():
    large = Case(workloads.MODELS["llama-3-8b"], 1024, CPU)
    context = context_for(large, 32)
    assert context % 16 == 0 and 64 <= context < 4096
    assert 32 * 1024 * context * 8 * 128 * 2 * 2 <= 16e9
    assert context_for(Case(workloads.TINY, 1, CPU), 32) == 4096


@pytest.mark.parametrize("name", providers.REGISTRY)
def test_every_registered_provider_loads_without_its_package(name):
    provider = providers.load(name)
    assert provider.name == name and provider.group in ("ours", "peer", "other-bytes")
    assert provider.modules and all(isinstance(flag, bool) for flag in (provider.exact, provider.slow, provider.cpu))


def test_choosing_peers_and_missing_packages():
    assert [p.name for p in providers.choose(("ours",), ["none"])] == ["ours"]
    assert [p.name for p in providers.choose(("ours",), None)][1:] == list(providers.PEERS)
    with pytest.raises(workloads.UsageError, match="--peers"):
        providers.choose((), ["nobody"])
    assert providers.missing(("no_such_module_a", "json")) is None
    with pytest.raises(Unavailable, match="import no_such_module_b: ModuleNotFoundError"):
        providers.need(("no_such_module_a", "no_such_module_b"), "x")
    with pytest.raises(Unavailable, match="json has no x"):
        providers.need("json", "x")


def test_a_package_that_lacks_something_says_what(tmp_path, monkeypatch):
    """And not that another release's module is not there."""
    (tmp_path / "half_installed").mkdir()
    (tmp_path / "half_installed" / "__init__.py").touch()
    (tmp_path / "half_installed" / "rope.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    assert providers.missing(("half_installed.rope", "half_installed.old.rope")).endswith("No module named 'what_it_needs'")
    assert "half_installed.old" in providers.missing(("half_installed.new", "half_installed.old.rope"))


@pytest.mark.parametrize(
    ("name", "prefilling"),
    [
        *((name, False) for name in ("reference", "ours-function", "ours", "ours-meta", "eager")),
        ("reference", True),
        ("eager", True),
    ],
)
def test_right_providers_pass(name, prefilling):
    for packed in (True, False):
        assert verify.check(providers.load(name), FORTY, prefill=prefilling, packed=packed)[:2] == ("ok", "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("q", "Q is .* times the tolerance"),
        ("nan", "Q is inf times"),
        ("k", "K cache is .* times the tolerance"),
        ("v", "V cache is not what was appended"),
        ("stray", "wrote K cache rows that were not addressed"),
        ("raises", "RuntimeError: no such kernel$"),
    ],
)
def test_wrong_providers_fail_with_a_reason(how, reason):
    import re

    verdict = verify.check(Broken(how), FORTY)
    assert verdict.status == "fail" and re.search(reason, verdict.reason), verdict


def test_an_exact_provider_may_not_be_one_ulp_off():
    class AlmostOurs(Broken):
        exact = True

    assert verify.check(AlmostOurs("none"), FORTY).status == "ok"
    assert "not bit-identical: K cache" in verify.check(AlmostOurs("stray"), FORTY).reason


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.3, "fail")])
def test_fp8_providers_are_judged_by_one_fp8_ulp(factor, status):
    class Fp8(Eager):
        group = "other-bytes"

        def bind(self, case, meta, layer):
            rows = (-1, *layer.k.shape[1:])
            k_rows, v_rows = torch.zeros(2, num_pages(meta) * case.page_size, *layer.k.shape[1:])

            def call():
                x = (layer.q.float(), layer.k.float(), layer.v.float() * factor)
                q = rope_append(*x, k_rows, v_rows, meta.cos_sin, meta.positions, meta.slots)
                for cache, new in ((layer.k_cache, k_rows), (layer.v_cache, v_rows)):
                    codes = as_fp8(cache).view(rows).view(torch.uint8)
                    codes[meta.slots] = new[meta.slots].to(torch.float8_e4m3fn).view(torch.uint8)
                return q.to(torch.float8_e4m3fn)

            return call

    assert verify.check(Fp8("fp8"), FORTY).status == status


def test_providers_for_a_gpu_are_skipped_without_one():
    assert verify.check(providers.load("sglang"), FORTY) == ("skip", "needs a GPU", None)


def test_report_writes_json_after_every_row_and_prints_a_reason_once(report, capsys):
    report.skip("peer", "not installed", "a")
    report.skip("peer", "not installed", "b")
    report.add({"x": float("inf"), "y": [1.5, float("nan")]}, "a line")
    written = json.loads(report.path.read_text())
    assert written["rows"] == [{"x": None, "y": [1.5, None]}]
    assert written["skipped"] == {"peer: not installed": ["a", "b"]}
    assert {"gpu", "versions", "revision", "time"} <= written["environment"].keys()
    assert capsys.readouterr().out.splitlines() == ["  skip peer: not installed", "a line"]
    assert columns(["a", "bc", "d"], [3, 4, 1]) == "a     bc d"
    assert slug("NVIDIA H200") == "nvidia-h200" and slug(None) == "cpu"


def test_decode_runs_past_wrong_and_raising_providers(on_cpu, report, runner, capsys):
    chosen = [providers.load("ours"), Eager("eager"), Broken("q"), Broken("raises"), Missing("missing")]
    cases = [Case(workloads.TINY, tokens) for tokens in (1, 128)]
    decode.run(cases, chosen, decode.Options(layers=3), runner)
    small, large = report.rows
    assert small["status"] == {"ours": "ok", "eager": "ok", "broken-q": "fail", "broken-raises": "fail"}
    assert set(small["us"]) == {"ours", "eager", *decode.FLOORS} and small["best_peer"] == "eager"
    assert small["ratio"]["ours"] == pytest.approx(small["us"]["eager"]["median"] / small["us"]["ours"]["median"], rel=1e-2)
    assert len(small["samples"]["ours"]) == 5 and small["state"] == "warm"
    assert report.summary["ratios"]["ours"]["small"] == small["ratio"]["ours"]
    assert report.summary["ratios"]["ours"]["large"] == large["ratio"]["ours"]
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 4 and "skip missing: import no_such_module_c" in printed


def test_a_spent_budget_says_what_was_not_run(on_cpu, report, runner, capsys):
    cases = [Case(workloads.TINY, tokens) for tokens in (1, 2)]
    decode.run(cases, [Eager("eager")], decode.Options(), Runner(report, Budget(0)))
    assert report.rows == [] and "before tiny 4/2/16 tokens=1: 2 of 2 not run" in capsys.readouterr().out


def test_states_are_named_after_what_the_cache_holds():
    model, l2 = workloads.MODELS["llama-3-8b"], 60 << 20
    states = [decode.state(Case(model, tokens, CPU), decode.Options(), l2) for tokens in (1, 64, 128)]
    assert states == ["warm", "warm", "cold"]
    assert decode.state(FORTY, decode.Options(hot=True), l2) == "hot"
    assert decode.state(FORTY, decode.Options(flush=True), l2) == "cold"
    assert prefill.sets_for(model, 1, l2) == prefill.MOST_SETS and prefill.sets_for(model, 1 << 17, l2) == 2
    assert [prefill.state(model, *x, l2) for x in ((1, 64), (16384, 2), (16384, 1))] == ["warm", "cold", "hot"]


def test_prefill_reports_bandwidth_in_both_states(on_cpu, report, runner):
    chosen = [providers.load("reference"), Eager("eager")]
    prefill.run([Case(workloads.TINY, tokens) for tokens in (5, 40)], chosen, runner)
    assert [(row["tokens"], row["state"]) for row in report.rows] == [(5, "warm"), (5, "hot"), (40, "warm"), (40, "hot")]
    row = report.rows[0]
    assert row["gbps"]["eager"] == pytest.approx(row["bytes"] / row["us"]["eager"]["median"] / 1e3, abs=0.2)
    assert row["of_copy"]["eager"] == pytest.approx(row["us"]["copy"]["median"] / row["us"]["eager"]["median"], abs=1e-3)


def sdpa(case, meta):
    """Attention in PyTorch, over the pages."""

    def attend(q, k_cache, v_cache):
        rows = (-1, case.model.num_kv_heads, case.model.head_dim)
        out = []
        for t in range(case.tokens):
            past = torch.arange(int(meta.lengths[t]))
            slots = meta.block_table[t, past // case.page_size].long() * case.page_size + past % case.page_size
            k, v = (c.view(rows)[slots].transpose(0, 1)[None] for c in (k_cache, v_cache))
            heads = q[t][None, :, None]
            out.append(torch.nn.functional.scaled_dot_product_attention(heads, k, v, enable_gqa=True)[0, :, 0])
        return torch.stack(out)

    return attend


def test_in_model_reports_paired_differences(on_cpu, report, runner, monkeypatch):
    monkeypatch.setattr(in_model, "make_attention", lambda case, meta, pdl: ("sdpa", sdpa(case, meta)))
    chosen = [providers.load("ours"), Eager("eager")]
    in_model.run([Case(workloads.TINY, 2)], chosen, decode.Options(layers=2), runner)
    (row,) = report.rows
    differences = paired(row["samples"]["eager"], row["samples"][in_model.BASE])
    assert row["added"]["eager"]["median"] == pytest.approx(quantile(differences, 0.5) / 2, abs=1e-3)
    assert row["best_peer"] == "eager" and row["attention"] == "sdpa"


def test_step_compares_whole_steps_and_rejects_a_wrong_one(on_cpu, report, runner, monkeypatch):
    def norm(x, residual, weight):
        residual += x
        return torch.nn.functional.rms_norm(residual, weight.shape, weight)

    def head_norm(x, weight):
        x.copy_(torch.nn.functional.rms_norm(x, weight.shape, weight))

    def silu_mul(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    transformer = importlib.import_module("bench.transformer")
    monkeypatch.setattr(transformer, "add_rms_norm", norm)
    monkeypatch.setattr(transformer, "silu_mul", silu_mul)
    monkeypatch.setattr(step, "head_rms_norm", head_norm)
    asked = []
    monkeypatch.setattr(step, "make_attention", lambda case, meta, pdl: asked.append(pdl) or ("sdpa", sdpa(case, meta)))
    monkeypatch.setattr(step, "BASELINE", "eager")
    network = Network("tiny", 2, workloads.TINY, 32, qk_norm=True)
    step.run([network], [2], ["reference"], runner, False)
    (row,) = report.rows
    assert asked == [False]
    assert set(row["us"]) == {"eager", *step.OURS, "reference"}
    assert set(row["saved_us"]) == {*step.OURS, "reference"} and report.skipped == {}
    right = step.agreeing({"a": lambda: torch.ones(4), "b": lambda: torch.full((4,), 1.1)}, runner, "here")
    assert list(right) == ["a"]


def test_host_times_every_way_of_calling(on_cpu, report, runner):
    host.run([Case(workloads.TINY, 3)], [Eager("eager")], ["bound", "prepared", "function"], runner)
    assert [row["call"] for row in report.rows] == ["bound", "prepared", "function"]
    assert all(row["us"]["median"] > 0 and len(row["samples"]) == 5 for row in report.rows)


def test_driver_structures_have_the_layout_of_the_c_headers():
    import ctypes

    assert ctypes.sizeof(driver.LaunchConfig) == 56 and driver.LaunchConfig.stream.offset == 32
    assert ctypes.sizeof(driver.LaunchAttribute) == 72 and driver.LaunchAttribute.value.offset == 8
    facts = driver.Facts(1 << 41, 7, 4, 96, True, [("p", 1 << 40), ("q", -3), ("p", 0)])
    config, _ = driver.launch_config(facts, 123)
    assert (*config.grid, *config.block, config.shared, config.stream) == (7, 1, 1, 128, 1, 1, 96, 123)
    assert config.num_attributes == 1 and config.attributes[0].id == 6 and config.attributes[0].value.number == 1
    assert driver.launch_config(facts._replace(pdl=False), 123)[0].num_attributes == 0
    config, _ = driver.launch_config(facts._replace(carveout=100), 123)
    assert [(a.id, a.value.number) for a in config.attributes[: config.num_attributes]] == [(6, 1), (14, 100)]
    pointers, values = driver.kernel_parameters(facts.arguments)
    assert len(pointers) == 3 and [v.value for v in values] == [1 << 40, -3, None]
    assert ctypes.c_int64.from_address(pointers[1]).value == -3


def test_ncu_output_is_read_between_markers():
    text = f"""==PROF== Connected
{ncu._PREFIX} llama-3-8b 128 ours
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","byte","byte","ns"
"0","bench_marker_kernel","32","0","900"
"1","decode_kernel","1,600","200","1,500"
"2","bench_marker_kernel","32","0","900"
"3","rope","10","20","30"
"4","append","1","2","3"
"""
    ours, two = ncu.split(ncu.parse(text))
    assert ours == [ncu.Kernel("decode_kernel", 1600.0, 200.0, 1500.0)] and len(two) == 2
    assert ncu.labels(text) == [("llama-3-8b", 128, "ours")]
    row = ncu.row_of("llama-3-8b", 128, "flashinfer", two)
    assert row["dram"] == {"read": 11.0, "written": 22.0} and row["us"] == pytest.approx(0.033)
    assert ncu.parse("==ERROR== no permission") == []


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    value = {"median": 1.0, "p10": 0.9, "p90": 1.1}
    rows = [{"model": "m", "shape": "1/1/1", "tokens": t, "state": "cold", "us": {"ours": value}} for t in (1, 8)]
    results = {"mode": "decode", "rows": rows, "environment": {"gpu": None}}
    plot.draw(results, str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").stat().st_size > 1000


def test_plot_data():
    value = {"median": 1.0, "p10": 0.9, "p90": 1.1}
    rows = [{"model": "m", "tokens": t, "state": "hot", "us": {"ours": value}, "gbps": {"ours": 2.0}} for t in (1, 8)]
    assert plot.series(rows, "us") == {"ours": [(1, 1.0), (8, 1.0)]}
    assert list(plot.panels({"mode": "prefill", "rows": rows})) == ["m hot"]
    with pytest.raises(workloads.UsageError, match="plot: expected rows"):
        plot.draw({"mode": "host", "rows": rows, "environment": {"gpu": None}}, "x.png")


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = build_parser().parse_args(["decode", "--model", "8/1/128", "--batch", "1", "64", "--peers", "none", "--hot"])
    assert (args.batch, args.peers, args.hot, args.seconds) == ([1, 64], ["none"], True, 240)
    assert main(["decode"]) == 2 and "no CUDA device" in capsys.readouterr().err
    out = tmp_path / "dry.json"
    assert main(["decode", "--dry-run", "--peers", "eager", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["provider"] for row in rows} == {"reference", "ours-function", *decode.OURS, "eager"}
    assert {row["status"] for row in rows} == {"ok"}
    with pytest.raises(SystemExit):
        main(["decode", "--dry-run", "--peers", "nobody"])
    with pytest.raises(SystemExit):
        build_parser().parse_args(["decode", "--batch", "0"])


KERNELS = """
import torch
from bench.attention import triton_attention
from bench.buffers import Case, decode_meta, make_layers
from bench.transformer import EPS, add_rms_norm, head_rms_norm, silu_mul
from bench.workloads import TINY
from tests.test_bench import sdpa

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


def test_layers_of_one_case_share_nothing():
    meta = decode_meta(FORTY, 64, 0)
    first, second = make_layers(FORTY, meta, 2, 0)
    assert isinstance(first, Layer) and first.k_cache.data_ptr() != second.k_cache.data_ptr()
    assert first.q.data_ptr() != second.q.data_ptr()


def test_the_readme_shows_the_results_file():
    from bench import summary

    found = summary.load()
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    assert f"{summary.caption(found)}\n\n{summary.table(found)}\n" in readme


def test_long_workloads_of_the_profiler_are_prefills(runner):
    for tokens, name in ((40, "ours"), (ncu.MOST_DECODE + 1, "ours-prefill")):
        (provider,), meta = ncu.workload(Case(workloads.TINY, tokens), ["ours"], runner)
        assert provider.name == name and meta.positions.numel() == tokens
    row = ncu.row_of("llama-3-8b", 10_000, "ours-prefill", [])
    assert sum(row["counted"].values()) == prefill.least_bytes(workloads.MODELS["llama-3-8b"], 10_000)
