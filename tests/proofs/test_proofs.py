"""The scripts that look for corruption notice it: the soak, the sanitizer run and the mutation run, each with a fault for it."""

import ast
import json
import re
from collections.abc import Callable

import pytest
import run_mutants
import run_sanitizer
import run_soak
import torch
from lanes import INTERPRETED
from mutant import PLAIN, Mutant
from run_mutants import MUTANTS
from run_soak import Stream

from decode_rope import DecodeRope
from decode_rope.append.faults import fault_buffer

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the scripts are the same under the interpreter")
CPU = torch.device("cpu")


def test_the_soak_runs_to_its_end(tmp_path, capsys):
    path = tmp_path / "counts.json"
    assert run_soak.main(["--dry-run", "--json", str(path)]) == 0
    counts = json.loads(path.read_text())
    assert counts["soak"]["replays"] == 40 and counts["soak"]["launches"] == 80
    assert all(counts["soak"][name] > 10 for name in ("compared with the reference", "checksums", "faults"))
    assert counts["repeats"]["repeats"] == 6 and counts["big cache"]["pages looked at"] == 80
    assert "right  soak: 40 replays" in capsys.readouterr().out


def test_the_soak_ends_when_its_time_is_up(capsys):
    assert run_soak.main(["--dry-run", "--seconds", "0"]) == 0
    assert "stopped after 0 of 40 replays" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_no_soak_and_no_sanitizer(capsys, monkeypatch):
    assert run_soak.main([]) == 0
    monkeypatch.setattr("sys.argv", ["run_sanitizer.py"])
    assert run_sanitizer.main() == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out] == ["skipped", "skipped"]


def one_byte(stream: Stream) -> None:
    stream.storages[1][1][4].view(torch.uint8).view(-1)[77] ^= 1


def two_pages_change_places(stream: Stream) -> None:
    storage = stream.storages[0][0]
    storage[[0, 2]] = storage[[2, 0]]


def two_words_change_places(stream: Stream) -> None:
    words = stream.storages[0][1].view(torch.int64).view(-1)
    words[[0, 1]] = words[[1, 0]]


def a_fault_is_forgotten(stream: Stream) -> None:
    fault_buffer(CPU)[0] -= 1


def a_slot_is_undone(stream: Stream) -> None:
    stream.storages[0][1][1::2] = 0


SABOTAGE: dict[Callable, str] = {
    one_byte: "pages in no block table changed: .* checksums differ",
    two_words_change_places: "pages in no block table changed",
    two_pages_change_places: "pages in no block table changed",
    a_fault_is_forgotten: "faults were counted",
    a_slot_is_undone: "replay .*: v_cache of layer 0 differs from the reference",
}


@pytest.mark.parametrize("spoil", SABOTAGE, ids=lambda spoil: spoil.__name__)
def test_the_soak_notices(spoil, monkeypatch, capsys):
    """Something happens once, between two comparisons with the reference; what lasts is found by the next."""
    replay, draws = Stream.replay, []
    draw = Stream.draw

    def draw_and_count(self):
        draws.append(1)
        draw(self)

    def replay_and_spoil(self):
        replay(self)
        if len(draws) == 14 or spoil is a_slot_is_undone:
            spoil(self)

    monkeypatch.setattr(Stream, "draw", draw_and_count)
    monkeypatch.setattr(Stream, "replay", replay_and_spoil)
    assert run_soak.main(["--dry-run"]) == 1
    out = capsys.readouterr().out
    assert "wrong  soak" in out
    assert re.search(SABOTAGE[spoil], out)


def test_checksums_are_of_the_pages_that_no_table_names():
    stream = Stream(run_soak.SHAPES[0], 4, 4, CPU, seed=0)
    for storages in stream.storages:
        for storage in storages:
            storage[1::2] = 0
    stream.check_guards()
    assert int(stream.changed_guards) == 0


def test_repeats_that_differ_are_noticed(monkeypatch):
    normal, calls = Stream._bind, []

    def bind(self):
        def launch():
            calls.append(1)
            launches[0]()
            if len(calls) == 3:
                self.q[0][0, 0, 0] += 1

        launches = normal(self)
        return [launch, *launches[1:]]

    monkeypatch.setattr(Stream, "_bind", bind)
    (wrong,) = run_soak.repeat(run_soak.DRY, CPU)["wrong"]
    assert wrong == "5 tokens: 1 of 3 repeats differ from the first"


def test_a_page_too_many_in_the_big_cache_is_noticed(monkeypatch):
    call = DecodeRope.__call__

    def and_one_more(self, q, k, v, k_cache, v_cache, positions, *, block_table):
        v_cache[17, 3, 2, 1] = 1
        return call(self, q, k, v, k_cache, v_cache, positions, block_table=block_table)

    monkeypatch.setattr(DecodeRope, "__call__", and_one_more)
    (wrong,) = run_soak.big_cache(run_soak.DRY, CPU)["wrong"]
    assert wrong.startswith("v_cache: pages [0, 1, 10, 17,") and "were written" in wrong


@pytest.mark.parametrize("tool", run_sanitizer.TOOLS)
def test_the_cases_of_the_sanitizer_are_right(tool, device, capsys):
    assert run_sanitizer.run_cases(tool, device) == 0
    names = run_sanitizer.DECODE | run_sanitizer.PREFILL
    assert capsys.readouterr().out.count("case right") == len(names) >= 20


@pytest.mark.parametrize("tool", run_sanitizer.TOOLS)
def test_cases_that_come_out_wrong_are_noticed(tool, monkeypatch, capsys):
    right = run_sanitizer.rope_append_decode

    def without_v(q, k, v, k_cache, v_cache, *args, **kwargs):
        return right(q, k, v, k_cache, None if v is None else v_cache.clone(), *args, **kwargs)

    monkeypatch.setattr(run_sanitizer, "rope_append_decode", without_v)
    bad = run_sanitizer.run_cases(tool, CPU)
    assert bad == len(run_sanitizer.DECODE) - 1  # one has no v
    assert "case wrong: NHD first: v_cache; again: v_cache; kernel[grid]: v_cache" in capsys.readouterr().out


READ = "=========     at rope_append_decode_kernel+0x2f0 in rotation.py:104"
BARE = "=========     at 0x110 in rope_append_decode_kernel"
OF_TORCH = "=========     at void at::native::elementwise_kernel<(int)128>(int)+0x90"
ALL_RIGHT = "".join(f"case right: {name} \n" for name in run_sanitizer.DECODE | run_sanitizer.PREFILL)
REPORTS = [
    ("memcheck", "cases", 0, ALL_RIGHT + "========= ERROR SUMMARY: 0 errors", "passed"),
    ("memcheck", "cases", 0, ALL_RIGHT + f"{READ}\n========= ERROR SUMMARY: 1 error", "failed"),
    ("memcheck", "cases", 0, ALL_RIGHT + f"{OF_TORCH}\n========= ERROR SUMMARY: 2 errors", "failed"),
    ("initcheck", "cases", 0, ALL_RIGHT + f"{READ}\n========= ERROR SUMMARY: 1 error", "failed"),
    ("initcheck", "cases", 0, ALL_RIGHT + f"{BARE}\n========= ERROR SUMMARY: 1 error", "failed"),
    ("initcheck", "cases", 0, ALL_RIGHT + f"{OF_TORCH}\n========= ERROR SUMMARY: 1 error", "passed"),
    ("initcheck", "cases", 1, ALL_RIGHT + "case wrong: x\n========= ERROR SUMMARY: 0 errors", "failed"),
    ("memcheck", "cases", 0, "case right: NHD \n========= ERROR SUMMARY: 0 errors", "failed"),
    ("memcheck", "cases", None, ALL_RIGHT, "failed"),
    ("memcheck", "cases", 1, "========= Error: Device not supported. Please refer to the manual\n", "skipped"),
    ("memcheck", "control", 1, f"{READ}\n========= ERROR SUMMARY: 96 errors", "passed"),
    ("memcheck", "control", 0, "========= ERROR SUMMARY: 0 errors", "failed"),
]


@pytest.mark.parametrize(("tool", "mode", "code", "text", "result"), REPORTS)
def test_reports_of_the_sanitizer_are_understood(tool, mode, code, text, result):
    assert run_sanitizer.read_report(tool, mode, code, text)["result"] == result


def test_every_mutant_can_be_made_and_parsed():
    """What this says of a mutant, `python tests/proofs/run_mutants.py` would say too, later."""
    assert len(MUTANTS) >= 25 and sum(m.fast for m in MUTANTS) >= 25
    stale = [m for m in MUTANTS if run_mutants.is_stale(m)]
    assert not stale, "the package has changed here; change mutants_*.py too"
    for mutant in MUTANTS:
        text = (run_mutants.ROOT / "decode_rope" / mutant.file).read_text()
        ast.parse(text.replace(mutant.old, mutant.new), mutant.file)
        paths = [test.split("::")[0] for test in mutant.tests if test.startswith("tests/")]
        assert paths and all((run_mutants.ROOT / path).exists() for path in paths), mutant


def test_the_mutation_run_tells_what_became_of_a_mutant(tmp_path, monkeypatch):
    monkeypatch.setattr(run_mutants, "SECONDS", 60)
    tests, found = ("tests/launch/test_driver.py",), "_STREAM_AT, _PARAMETERS_AT = 32, 56"
    tried = {
        "killed": Mutant("launch/driver.py", found, "_STREAM_AT, _PARAMETERS_AT = 40, 56", "the stream", PLAIN, tests),
        "survived": Mutant("launch/driver.py", found, "_PARAMETERS_AT, _STREAM_AT = 56, 32", "nothing", PLAIN, tests),
        "broken": Mutant("launch/driver.py", found, "_STREAM_AT, _PARAMETERS_AT = 32", "everything", PLAIN, tests),
    }
    shown = []
    outcomes = run_mutants.try_all(list(tried.values()), 1, tmp_path, shown.append)
    assert [o.result for o in outcomes] == list(tried) and len(shown) == 3
    assert outcomes[0].by == "tests/launch/test_driver.py::test_packed_launch_reads_back[-1-13000-False]"
    assert run_mutants.summary(outcomes[:1], 1.0, None) == 0
    assert [run_mutants.summary(outcomes[i : i + 1], 1.0, None) for i in (1, 2)] == [1, 1]
    assert run_mutants.summary([], 1.0, None) == 1


def test_a_test_that_is_red_anyway_has_seen_nothing(tmp_path):
    mutant = Mutant("launch/driver.py", "32, 56", "40, 56", "the stream", PLAIN, ("tests/launch/test_driver.py",))
    directory = tmp_path / "0"
    directory.mkdir()
    slot = run_mutants.Slot(directory)
    path = directory / "tests" / "launch" / "test_driver.py"
    path.write_text(path.read_text() + "\n\ndef test_always_red():\n    assert False\n")
    seen = [run_mutants.Outcome(mutant, "killed", by=f"tests/launch/test_driver.py::{name}") for name in (
        "test_always_red", "test_packed_launch_reads_back[-1-13000-False]"
    )]  # fmt: skip
    try:
        assert [o.result for o in run_mutants._without_red_tests(slot, seen)] == ["red before", "killed"]
    finally:
        slot.close()
