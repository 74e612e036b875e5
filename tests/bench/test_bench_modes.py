"""The benchmark's modes on the CPU: a bad provider never stops a run, and no wrong one gets a number."""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from bench_on_cpu import CPU, FORTY, Broken, Missing, sdpa

from bench import decode, everything, host, in_model, plot, prefill, providers, summary, workloads
from bench.__main__ import _label, build_parser, main
from bench.buffers import Case
from bench.providers.eager import Eager
from bench.runner import Runner
from bench.stats import Budget, paired, quantile

pytest_plugins = ["bench_fixtures"]


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


def test_a_graph_runs_through_all_buffer_sets_at_least_four_calls_long(on_cpu, runner, monkeypatch):
    captured = []
    monkeypatch.setattr(
        prefill.timing, "capture", lambda calls, warm: captured.append(len(calls)) or type("G", (), {"replay": print})
    )
    monkeypatch.setattr(runner.__class__, "sample", lambda self, replays, target_us: {name: [12.0] * 5 for name in replays})
    for sets, calls in ((1, 4), (2, 4), (3, 3), (64, 64)):
        assert prefill.sample({"a": lambda i: print}, sets, runner, FORTY)["a"] == pytest.approx([12.0 / calls] * 5)
        assert captured.pop() == calls


def test_in_model_reports_paired_differences(on_cpu, report, runner, monkeypatch):
    monkeypatch.setattr(in_model, "make_attention", lambda case, meta, pdl: ("sdpa", sdpa(case, meta)))
    chosen = [providers.load("ours"), Eager("eager")]
    in_model.run([Case(workloads.TINY, 2)], chosen, decode.Options(layers=2), runner)
    (row,) = report.rows
    differences = paired(row["samples"]["eager"], row["samples"][in_model.BASE])
    assert row["added"]["eager"]["median"] == pytest.approx(quantile(differences, 0.5) / 2, abs=1e-3)
    assert row["best_peer"] == "eager" and row["attention"] == "sdpa"


def test_host_times_every_way_of_calling(on_cpu, report, runner):
    host.run([Case(workloads.TINY, 3)], [Eager("eager")], ["bound", "prepared", "function"], runner)
    assert [row["call"] for row in report.rows] == ["bound", "prepared", "function"]
    assert all(row["us"]["median"] > 0 and len(row["samples"]) == 5 for row in report.rows)


@pytest.mark.kernel
@pytest.mark.parametrize("moved", [8, 25_100, 1 << 16])
def test_the_copying_floor_copies(moved, device):
    from bench import floors

    words = floors.words_of(moved)
    assert words % 16 == 0 and moved <= 8 * words < moved + 128
    source, target = (
        torch.arange(words + 64, dtype=torch.int32, device=device),
        torch.zeros(words + 64, dtype=torch.int32, device=device),
    )
    programs = -(-words // floors._WORDS)
    floors.copy_kernel[(programs,)](source, target, words, floors._WORDS, False)
    assert torch.equal(target[:words], source[:words]) and not target[words:].any()


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


def test_results_files_are_drawn_beside_themselves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    value = {"median": 1.0, "p10": 0.9, "p90": 1.1}
    rows = [
        {"model": "m", "shape": "1/1/1", "tokens": t, "state": "cold", "us": {"ours": value}, "gbps": {"ours": 5.0 * t}}
        for t in (128, 192)
    ]
    for mode in ("prefill", "host"):
        (tmp_path / f"{mode}.json").write_text(json.dumps({"mode": mode, "rows": rows, "environment": {"gpu": None}}))
    assert main(["plot", *map(str, sorted(tmp_path.glob("*.json")))]) == 0
    assert (tmp_path / "prefill.png").stat().st_size > 1000 and not (tmp_path / "host.png").exists()
    assert "skip host.json: plot: expected rows of" in capsys.readouterr().out


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


def test_results_files_are_named_after_what_sets_a_run_apart():
    for arguments, name in (
        (["step"], "step"),
        (["step", "--contexts", "256", "--no-attention-pdl"], "step-no-attention-pdl"),
        (["decode", "--in-model", "--attention-pdl"], "decode-in-model-attention-pdl"),
        (["investigate", "gaps"], "gaps"),
    ):
        assert _label(build_parser().parse_args(arguments)) == name


def test_all_parts_are_commands_and_share_what_time_is_left(monkeypatch, capsys):
    for part in everything.PARTS.values():
        build_parser().parse_args([*part.arguments, "--seconds", "3"])
    ran = []

    def run(command, timeout, **_):
        ran.append((command[3], float(command[-1])))
        assert timeout > float(command[-1])
        if command[3] == "prefill":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if command[3] == "host" else 0)

    monkeypatch.setattr(everything.subprocess, "run", run)
    assert main(["all", "--seconds", "100"]) == 1
    assert [name for name, _ in ran] == [part.arguments[0] for part in everything.PARTS.values()]
    first = 100 * everything.PARTS["decode"].share / sum(part.share for part in everything.PARTS.values())
    assert ran[0][1] == pytest.approx(first, abs=1) and ran[-1][1] == pytest.approx(100, abs=1)
    assert "2 parts failed: host, prefill" in capsys.readouterr().out
    assert main(["all", "--only", "decode", "step"]) == 0
    with pytest.raises(SystemExit):
        main(["all", "--only", "nothing"])


def test_the_readme_shows_the_results_file():
    found = summary.load()
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"{summary.caption(found)}\n\n{summary.table(found)}\n" in readme
