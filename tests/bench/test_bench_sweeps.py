"""The benchmark's sweeps without a GPU: each compares before it times, and leaves out what is wrong."""

import json
import subprocess

import pytest
import torch
from cases import Spec, build, call_arguments, prepare
from lanes import INTERPRETED
from test_bench import CPU, CpuGraph, on_cpu, report, runner  # noqa: F401

import decode_rope
from bench import driver, everything, gaps, in_model, prefill, providers, sweep, tiles, variants, verify, waves, workloads
from bench.__main__ import _label, build_parser, main
from bench.buffers import Case, decode_meta

SMALL = workloads.Model("small", 4, 2, 16, 64)


@pytest.fixture
def small_variants(monkeypatch):
    changes = (v._replace(head_dim=v.head_dim // 8, rotary_dim=v.rotary_dim // 8) for v in variants.PREFILL)
    monkeypatch.setattr(variants, "PREFILL", tuple(changes))


def test_a_graph_runs_through_all_buffer_sets_at_least_four_calls_long(on_cpu, runner, monkeypatch):  # noqa: F811
    captured = []
    monkeypatch.setattr(
        sweep.timing, "capture", lambda calls, warm: captured.append(len(calls)) or type("G", (), {"replay": print})
    )
    monkeypatch.setattr(runner.__class__, "sample", lambda self, replays, target_us: {name: [12.0] * 5 for name in replays})
    for sets, calls in ((1, 4), (2, 4), (3, 3), (64, 64)):
        timed = sweep.time_ways({"a": lambda i: print}, sets, runner, "here")
        assert captured.pop() == calls and timed["us"]["a"]["median"] == pytest.approx(12.0 / calls, abs=1e-3)


def test_variants_verify_and_compare_with_the_first(on_cpu, report, runner, small_variants):  # noqa: F811
    variants.run([SMALL], [40], runner)
    prefill, layouts = report.rows
    assert set(prefill["us"]) == {v.name for v in variants.PREFILL} and report.skipped == {}
    assert prefill["share"]["NeoX bf16"] == 1.0 and set(layouts["us"]) == set(variants.LAYOUTS)
    for row in report.rows:
        assert next(iter(row["share"].values())) == 1.0 and set(row["share"]) == set(row["gbps"]) == set(row["us"])
    times = {name: row["us"][name]["median"] for name in variants.LAYOUTS}  # of the same bytes
    ratio = times["[B, S, H, D]"] / times["[B, H, S, D]"]
    assert layouts["share"]["[B, H, S, D]"] == pytest.approx(ratio, rel=1e-2)


@pytest.mark.parametrize("group", variants.GROUPS)
def test_a_variant_that_is_wrong_has_no_speed(group, on_cpu, report, runner, small_variants, monkeypatch):  # noqa: F811
    name = {"prefill": "rope_append_prefill", "apply_rope": "apply_rope"}[group]
    right = getattr(decode_rope, name)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        if kwargs.get("is_neox") is False or kwargs.get("layout") == "HND":
            (args[3] if group == "prefill" else kwargs["out"]).view(torch.uint8).view(-1)[5] ^= 1
        return result

    monkeypatch.setattr(decode_rope, name, wrong)
    row = variants.measure(group, SMALL, 40, runner)
    left_out = "GPT-J pairs" if group == "prefill" else "[B, H, S, D]"
    assert left_out not in row["us"] and list(report.skipped) == [f"{left_out}: fail: not the reference's bits"]
    assert len(row["us"]) >= 1


def test_bytes_of_a_partial_rotation():
    model = workloads.MODELS["llama-3-8b"]
    whole, half = (workloads.traffic(model, 3, rotary_dim=r) for r in (None, 64))
    assert whole == workloads.traffic(model, 3, rotary_dim=128)
    assert half.written == 3 * (32 * 64 + 16 * 128) * 2
    assert half.read == half.written + 3 * (64 * 4 + 8 + 4)


def test_prefill_counts_angles_once_a_position():
    model = workloads.MODELS["llama-3-8b"]
    rows = 2 * (32 + 2 * 8) * 128 * 2 + 8 + 4
    assert prefill.least_bytes(model, 10) == 10 * (rows + 128 * 4)
    assert prefill.least_bytes(model, 10_000) == 10_000 * rows + 4096 * 128 * 4
    assert prefill.least_bytes(model, 10_000, 64) == 10_000 * (rows - 2 * 32 * 64 * 2) + 4096 * 64 * 4


def test_the_copy_beside_a_prefill_moves_as_many_bytes():
    assert prefill.copy_call(2 * 40, CPU)().nbytes == 40


@pytest.mark.parametrize("prefill", [False, True])
def test_tiles_are_tried_beside_the_chosen_one(prefill, on_cpu, report, runner):  # noqa: F811
    tiles.run([Case(SMALL, 6, CPU, torch.float32)], prefill, runner)
    (row,) = report.rows
    assert tiles.CHOSEN in row["us"] and len(row["us"]) > 5 and report.skipped == {}


def test_a_tile_that_changes_bits_has_no_speed(on_cpu, report, runner, monkeypatch):  # noqa: F811
    right = tiles.prefill_call

    def wrong(case, meta, geometry):
        bind = right(case, meta, geometry)
        if geometry is None or geometry.num_warps == 4:
            return bind

        def spoiled(layer):
            def call():
                bind(layer)()
                layer.v_cache.view(torch.uint8).view(-1)[3] ^= 1

            return call

        return spoiled

    monkeypatch.setattr(tiles, "prefill_call", wrong)
    row = tiles.measure(Case(SMALL, 6, CPU), True, runner)
    assert {name.split("/")[-2] for name in row["us"] if name != tiles.CHOSEN} == {"4"} and tiles.CHOSEN in row["us"]
    assert any("not the bits of the chosen tile" in reason for reason in report.skipped)


def test_a_provider_of_any_tiles():
    """As `tiles` prints them, so that `step` and `--in-model` can be asked about them."""
    from decode_rope.launch.decode import Geometry

    name = "ours@" + tiles.label(Geometry(1, 2, 1, 4, 1, 1, -1))
    assert name == "ours@1/2/1/4/1/1/-1"
    found = providers.load(name)
    case = Case(SMALL, 6, CPU)
    assert found.make_op(case, decode_meta(case, 64, 0)).geometry == Geometry(1, 2, 1, 4, 1, 1, -1)
    assert verify.check(found, case)[:2] == ("ok", "")
    with pytest.raises(workloads.UsageError, match="numbers between slashes after ours@, got '1/x'"):
        providers.load("ours@1/x")


def test_gaps_between_kernels():
    """Of every pair in a row its median, an overlap as a negative gap; pairs seen rarely are left out."""
    kernel = gaps.Kernel
    a_layer = [("gemm", 0, 100), ("rope", 130, 150), ("attention", 140, 240)]
    kernels = [kernel(name, 1000 * i + start, 1000 * i + end) for i in range(3) for name, start, end in a_layer]
    kernels[1] = kernel("rope", 104, 150)
    found = gaps.edges(reversed(kernels), least=3)
    assert found == [gaps.Edge("gemm", "rope", 30, 20, 3), gaps.Edge("rope", "attention", -10, 100, 3)]
    assert gaps.edges(kernels, least=2)[2] == gaps.Edge("attention", "gemm", 760, 100, 2)


@pytest.mark.gpu
def test_gaps_of_a_layer(runner, device):  # noqa: F811
    ours = [providers.load("ours")]
    row = gaps.measure(Case(workloads.find_models(["8/1/128"])[0], 1), ours, runner, False)
    launch = [edge for edge in row["edges"]["ours"] if edge["second"] == "decode_kernel"]
    assert len(launch) == 1 and launch[0]["count"] == gaps.LAYERS * gaps.REPLAYS and 0 < launch[0]["duration"] < 100_000
    assert not any("decode_kernel" in edge["second"] for edge in row["edges"][in_model.BASE])


@pytest.mark.parametrize("model", workloads.MODELS.values(), ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 1024])
def test_tiles_to_try_can_be_built_and_include_several(model, tokens):
    from decode_rope import geometry, geometry_prefill

    for make, check in ((tiles.decode_tiles, geometry.check_geometry), (tiles.prefill_tiles, geometry_prefill.check_geometry)):
        found = list(make(model, tokens))
        assert len({tiles.label(g) for g in found}) >= 4
        for candidate in found:
            check(candidate)
    chosen = geometry.decode_geometry(tokens, model.num_q_heads, model.num_kv_heads, model.head_dim)
    assert {g[5:] for g in tiles.decode_tiles(model, tokens)} == {chosen[5:]}  # all but tiles and warps


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


def test_results_files_are_named_after_what_sets_a_run_apart():
    for arguments, name in (
        (["step"], "step"),
        (["step", "--context", "256", "--no-attention-pdl"], "step-no-attention-pdl-context-256"),
        (["decode", "--in-model", "--attention-pdl"], "decode-in-model-attention-pdl"),
        (["tiles", "--prefill"], "tiles-prefill"),
    ):
        assert _label(build_parser().parse_args(arguments)) == name


@pytest.mark.parametrize("context", [16, 200, 1024])
def test_a_step_has_the_context_it_is_given(context, monkeypatch):
    """Or a shorter one where memory ends."""
    from bench import step

    class Stop(Exception):
        pass

    def meta(case, positions, *_, **__):
        raise Stop(positions)

    monkeypatch.setattr(step, "decode_meta", meta)
    network = step.find_networks(["llama-3.2-1b"])[0]
    with pytest.raises(Stop, match=str(context)):
        step.measure(network, 1, [], [], None, context=context)


def test_waves_count_programs(on_cpu, report, runner, monkeypatch):  # noqa: F811
    facts = driver.Facts(1, 528, 4, 0, False, [])
    monkeypatch.setattr(waves, "facts_of", lambda launch: facts)
    monkeypatch.setattr(waves, "resident_programs", lambda facts: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"multi_processor_count": 132}))
    waves.run([SMALL], [3], runner)
    (row,) = report.rows
    assert (row["programs"], row["at_once"], row["waves"]) == (528, 264, 2.0) and set(row["us"]) == set(waves.WAYS)


def test_all_parts_are_commands_and_share_what_time_is_left(monkeypatch, capsys):
    for part in everything.PARTS.values():
        build_parser().parse_args([*part.arguments, "--seconds", "3"])
    ran = []

    def run(command, timeout, **_):
        ran.append((command[3], float(command[-1])))
        assert timeout > float(command[-1])
        if command[3] == "ncu":
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 3 if command[3] == "host" else 0)

    monkeypatch.setattr(everything.subprocess, "run", run)
    assert main(["all", "--seconds", "100"]) == 1
    assert [name for name, _ in ran] == [part.arguments[0] for part in everything.PARTS.values()]
    first = 100 * everything.PARTS["decode"].share / sum(part.share for part in everything.PARTS.values())
    assert ran[0][1] == pytest.approx(first, abs=1) and ran[-1][1] == pytest.approx(100, abs=1)
    assert "2 parts failed: host, ncu" in capsys.readouterr().out
    assert main(["all", "--only", "decode", "waves"]) == 0
    with pytest.raises(SystemExit):
        main(["all", "--only", "nothing"])


def test_results_files_are_drawn_beside_themselves(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    value = {"median": 1.0, "p10": 0.9, "p90": 1.1}
    rows = [{"model": "m", "shape": "1/1/1", "tokens": t, "us": {"ours": value}, "gbps": {"ours": 5.0 * t}} for t in (128, 192)]
    for mode in ("waves", "host"):
        (tmp_path / f"{mode}.json").write_text(json.dumps({"mode": mode, "rows": rows, "environment": {"gpu": None}}))
    assert main(["plot", *map(str, sorted(tmp_path.glob("*.json")))]) == 0
    assert (tmp_path / "waves.png").stat().st_size > 1000 and not (tmp_path / "host.png").exists()
    assert "skip host.json: plot: expected rows of" in capsys.readouterr().out


@pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")
def test_the_benchmark_s_bare_launch_has_the_parameters_of_ours(fake_driver):
    """In the kernel's own order, which is not that of the call's tensors; Triton's scratch pointers last."""
    case = build(Spec([5, 0, 6], [[1, 2], [0, 5], [3, 4]]), "cpu")
    launch = prepare(case).bind(**call_arguments(case))
    launch()
    ours = fake_driver.arguments[-1]
    kinds = ["p" if name.endswith("_ptr") else "q" for name in ours]
    assert driver.facts_of(launch).arguments == [*zip(kinds, ours.values(), strict=True), ("p", 0), ("p", 0)]
