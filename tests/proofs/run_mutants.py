"""Do the tests notice? Small faults are put into a copy of the package, one at a time; each must turn some test red.

A green suite shows that the package agrees with its tests, and nothing about how much the tests see. Most of what can go wrong here
is silent: a mask that lets one more row through, a stride of the wrong tensor, a launch for memory of an earlier call. So every
promise that matters has a mutant, the line of code that keeps it with one word changed. A mutant that survives is a promise that
no test looks at, and a stale one is code that changed without anybody asking whether its test still does.

    python tests/proofs/run_mutants.py             every mutant of mutants_*.py, each against the tests meant to see it
    python tests/proofs/run_mutants.py --fast      a choice of them, for every commit
    python tests/proofs/run_mutants.py --only WORD ...  --list  --jobs N  --json FILE

Exit code 1 if a mutant survives, if its text no longer occurs exactly once (stale), if it does not even import (broken), or if
the test that saw it is red without it too. Mutants of the `gpu` lane need a CUDA device and are skipped without one.
"""

import argparse
import json
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import mutants_host
import mutants_kernels
import mutants_mla
import mutants_norm
from mutant import GPU, LANES, Mutant, mutants

MUTANTS = [m for module in (mutants_kernels, mutants_host, mutants_norm, mutants_mla) for m in mutants(module.FAULTS)]
ROOT = Path(__file__).resolve().parents[2]
COPIED = ("decode_rope", "tests", "pyproject.toml")
SECONDS = 300  # for the tests of one mutant; a mutant that hangs is one that was noticed
GOOD = ("killed", "hangs", "skipped")


class Outcome(NamedTuple):
    """result: killed, survived, stale, broken, hangs, skipped, or red before."""

    mutant: Mutant
    result: str
    seconds: float = 0.0
    by: str = ""  # the test that saw it
    output: str = ""


# The parent: copies, mutants, table.


class Slot:
    """A copy of the repository, and a worker for each lane that tests in it."""

    def __init__(self, directory: Path):
        self.root = directory
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, directory / name)
        self.workers: dict[str, subprocess.Popen] = {}

    def run(self, lane: str, tests: tuple[str, ...], stop_at_first: bool = True) -> dict:
        """What a worker says of the tests: see `in_child`."""
        if lane not in self.workers:
            # Bytecode of a file changed twice in one second would be taken for that of the first change.
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"} | LANES[lane].environment
            command = [sys.executable, str(self.root / "tests" / "proofs" / "run_mutants.py"), "--worker"]
            self.workers[lane] = subprocess.Popen(
                command, cwd=self.root, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        worker = self.workers[lane]
        arguments = [*tests, *LANES[lane].arguments, *(["-x"] if stop_at_first else [])]
        worker.stdin.write(json.dumps(arguments) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if not answer:
            raise RuntimeError(f"the worker of lane {lane} died")
        return json.loads(answer)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stdin.close()
            worker.wait()


def try_mutant(slot: Slot, mutant: Mutant) -> Outcome:
    path = slot.root / "decode_rope" / mutant.file
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    start = time.perf_counter()
    try:
        said = slot.run(mutant.lane, mutant.tests)
    finally:
        path.write_text(original)
    seconds = time.perf_counter() - start
    if said["timed_out"]:
        return Outcome(mutant, "hangs", seconds, said["running"])
    if said["failed"]:
        return Outcome(mutant, "killed", seconds, said["failed"][0])
    if said["signal"]:
        return Outcome(mutant, "killed", seconds, said["running"], f"signal {said['signal']}")
    return Outcome(mutant, "survived" if said["code"] == 0 else "broken", seconds, output=said["output"])


def is_stale(mutant: Mutant) -> bool:
    path = ROOT / "decode_rope" / mutant.file
    return not path.exists() or path.read_text().count(mutant.old) != 1 or mutant.old == mutant.new


def try_all(mutants: list[Mutant], jobs: int, directory: Path, report) -> list[Outcome]:
    """Every mutant, `jobs` at a time; then the tests that saw one, on the package as it is."""
    todo, outcomes, errors = queue.Queue(), [], []
    for mutant in mutants:
        todo.put(mutant)
    slots = [Slot(_made(directory / str(i))) for i in range(max(1, min(jobs, len(mutants))))]

    def work(slot: Slot) -> None:
        while not errors:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            try:
                outcomes.append(try_mutant(slot, mutant))
                report(outcomes[-1])
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in slots]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    outcomes = _without_red_tests(slots[0], outcomes)
    for slot in slots:
        slot.close()
    order = {mutant: i for i, mutant in enumerate(mutants)}
    return sorted(outcomes, key=lambda outcome: order[outcome.mutant])


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _without_red_tests(slot: Slot, outcomes: list[Outcome]) -> list[Outcome]:
    """A test that is red without any mutant has seen nothing."""
    red = set()
    for lane in LANES:
        tests = sorted({o.by for o in outcomes if o.mutant.lane == lane and o.result == "killed"})
        if tests:
            said = slot.run(lane, tuple(tests), stop_at_first=False)
            red |= {(lane, test) for test in said["failed"]}
            if said["signal"] or said["timed_out"] or said["code"] not in (0, 1):
                raise RuntimeError(f"the tests did not run to their end on the package as it is:\n{said['output']}")
    return [o._replace(result="red before") if (o.mutant.lane, o.by) in red else o for o in outcomes]


def show(outcome: Outcome) -> None:
    mutant = outcome.mutant
    by = outcome.by.removeprefix("tests/") + (f" ({outcome.output})" if outcome.output.startswith("signal") else "")
    print(f"{outcome.result:<10} {outcome.seconds:6.1f} s  {mutant.lane:<9} {mutant.file:<20} {mutant.breaks}", flush=True)
    if by:
        print(f"{'':<22}by {by[:150]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fast", action="store_true", help="only those chosen for every commit")
    parser.add_argument("--only", nargs="+", default=[], help="only mutants in whose file, lane or words one of these occurs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--json", help="write the outcomes there")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker()
    chosen = [m for m in MUTANTS if m.fast or not args.fast]
    chosen = [m for m in chosen if not args.only or any(word in " ".join((m.file, m.lane, m.breaks)) for word in args.only)]
    if args.list:
        for mutant in chosen:
            print(f"{'fast' if mutant.fast else '':<5}{mutant.lane:<10}{mutant.file:<20} {mutant.breaks}")
        return 0
    start = time.perf_counter()
    outcomes = [Outcome(m, "stale") for m in MUTANTS if is_stale(m)]
    ready = [m for m in chosen if not is_stale(m)]
    if any(m.lane == GPU for m in ready) and not _has_gpu():
        outcomes += [Outcome(m, "skipped") for m in ready if m.lane == GPU]
        ready = [m for m in ready if m.lane != GPU]
    for outcome in outcomes:
        show(outcome)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        outcomes += try_all(ready, args.jobs, Path(directory), show)
    return summary(outcomes, time.perf_counter() - start, args.json)


def summary(outcomes: list[Outcome], seconds: float, path: str | None) -> int:
    bad = [outcome for outcome in outcomes if outcome.result not in GOOD]
    counts = {result: sum(o.result == result for o in outcomes) for result in dict.fromkeys(o.result for o in outcomes)}
    print(f"\n{len(outcomes)} mutants in {seconds:.0f} s: {', '.join(f'{n} {result}' for result, n in counts.items())}")
    for outcome in bad:
        print(f"\n{outcome.result}: {outcome.mutant.file}: {outcome.mutant.breaks} {outcome.by}")
        print("".join(f"  - {line}\n" for line in outcome.mutant.old.splitlines()), end="")
        print("".join(f"  + {line}\n" for line in outcome.mutant.new.splitlines()), end="")
        if outcome.result == "broken":
            print(outcome.output)
    if path:
        rows = [{**o.mutant._asdict(), "result": o.result, "seconds": round(o.seconds, 2), "by": o.by} for o in outcomes]
        Path(path).write_text(json.dumps(rows, indent=1))
    return 1 if bad or not outcomes else 0


def _has_gpu() -> bool:
    command = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(command, check=False).returncode == 0


# The worker: imports what takes long once, and forks a child for every mutant.


def worker() -> int:
    """Answer every line of pytest arguments with a line of what came of them."""
    import hypothesis
    import pytest
    import torch
    import triton.language

    assert all((hypothesis, pytest, torch, triton.language))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(in_child(json.loads(line))), file=answers, flush=True)
    return 0


def in_child(arguments: list[str]) -> dict:
    """Run pytest in a forked process. Its exit code or signal, the tests that failed, the one that ran last, its output."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            os.setsid()  # with what it starts, a group that can be ended as one
            os.close(read_end)
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            os._exit(_pytest(arguments, write_end))
        os.close(write_end)
        said = {"failed": [], "running": "", "timed_out": False, "signal": 0}
        _listen(read_end, said, child)
        _, status = os.waitpid(child, 0)
        said["code"] = os.waitstatus_to_exitcode(status)
        if said["code"] < 0 and not said["timed_out"]:
            said["signal"] = -said["code"]
        output.seek(0)
        said["output"] = output.read()[-3000:]
    return said


def _listen(read_end: int, said: dict, child: int) -> None:
    """Read the child's reports until it ends; kill it when its time is up."""
    deadline, rest = time.monotonic() + SECONDS, b""
    while True:
        ready, _, _ = select.select([read_end], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            said["timed_out"] = True
            os.killpg(child, signal.SIGKILL)
            break
        chunk = os.read(read_end, 65536)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            kind, test = json.loads(line)
            if kind == "failed":
                said["failed"].append(test)
            else:
                said["running"] = test
    os.close(read_end)


class Reporter:
    """A pytest plugin that writes what runs and what fails to a pipe, at once, so that a crash loses nothing."""

    def __init__(self, write_end: int):
        self.write_end = write_end

    def say(self, kind: str, test: str) -> None:
        os.write(self.write_end, json.dumps([kind, test]).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid):
        self.say("running", nodeid)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.say("failed", report.nodeid)


def _pytest(arguments: list[str], write_end: int) -> int:
    """pytest's exit code, in a child that has imported nothing of the package yet."""
    import pytest

    options = ["-q", "--tb=short", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::RuntimeWarning", "--rootdir=."]
    code = int(pytest.main([*arguments, *options], plugins=[Reporter(write_end)]))
    package = sys.modules.get("decode_rope")
    if package is not None and not Path(package.__file__).is_relative_to(Path.cwd()):
        print(f"the tests ran on {package.__file__}, not on the copy")
        return 99
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
