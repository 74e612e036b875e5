"""Launches under NVIDIA's compute-sanitizer: no access outside an allocation (memcheck), no read of memory that nobody wrote
(initcheck). On a GPU:

    python tests/proofs/run_sanitizer.py [--json FILE]

Every tensor gets an allocation of its own that begins at its first byte and ends at its last one. For initcheck only what a
launch may read is filled in: neither caches nor outputs, nor rows of the table and entries of the block table that no token
needs. Both tools also look at a launch that is wrong on purpose, and must notice it. Without a GPU, or a tool that works on it, the
script says so and leaves with 0. `--dry-run` runs the cases without the tools, on the CPU if need be.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import triton
from cases import Case, Spec, View, bits, build, call_arguments, no_faults, prepare
from torch import Tensor

from decode_rope import reference, rope_append_decode, rope_append_prefill
from decode_rope.append.faults import fault_buffer

TOOLS = {"memcheck": ["--padding", "4096"], "initcheck": []}
OURS = re.compile(r"^=+ +at .*\b(rope_append_decode_kernel|rope_append_prefill_kernel)\b", re.M)
SECONDS = 300

HUGE = 2**62
TABLE = [[0, 5, -1], [7, 1, 2], [3, 6, 4]]
BASE = Spec([5, 8, 3], TABLE, heads=(8, 2), head_dim=128)
SLOTS = BASE.but(block_table=None, slots=[31, 0, 13], index_dtype=torch.int64)
DECODE = {
    "NHD": BASE,
    "HND": BASE.but(cache="HND", dtype=torch.float16),
    "flat slots": SLOTS.but(cache="flat", dtype=torch.float32),
    "[2, ...] views": BASE.but(cache="NHD [2, ...]"),
    "[pages, 2, ...] views": BASE.but(cache="HND [pages, 2, ...]", head_dim=64),
    "K beside V, packed q, k, v": SLOTS.but(cache="NHD beside", activations="packed"),
    "padded rows": BASE.but(cache="HND padded", activations="padded", v_head_dim=80),
    "K NHD, V HND": BASE.but(cache="K NHD, V HND", activations="heads first"),
    "GPT-J pairs, partial": BASE.but(is_neox=False, rotary_dim=48, head_dim=96),
    "NoPE": BASE.but(rotary_dim=0, q_out=True),
    "odd head sizes": BASE.but(head_dim=100, v_head_dim=33, rotary_dim=20, heads=(7, 3)),
    "a head of 3": BASE.but(head_dim=3, rotary_dim=2, heads=(5, 5), is_neox=False),
    "unaligned": BASE.but(shift=1, table_shift=1, head_dim=80),
    "outputs": BASE.but(q_out=True, k_out="own", rotary_dim=64, cache_positions=[4, 0, 11]),
    "garbage in the block table": Spec(
        [3, HUGE, -(2**63), 63, 5, 4], [[HUGE], [-HUGE], [7], [8], [-1], [2]], index_dtype=torch.int64,
        cache_positions=[3, 2**63 - 1, 0, 4, -(2**63), 1], heads=(3, 1),
    ),
    "garbage slots": Spec([3] * 6 + [64], slots=[HUGE, -(2**63), 31, 32, -1, 0, 7], index_dtype=torch.int64, heads=(3, 1)),
    "a short slot mapping": SLOTS.but(positions=[5, 8, 3, 9, 1], slots=[31, 0, 13]),
    "no k and v": BASE.but(block_table=None, heads=(8, 0), positions=[5, -1, 70]),
    "a large block table": Spec([8191 * 4 + 3, 5, 4100], [[7] * 8191 + [2], [0, 1] * 4096, [3] * 8192], max_position=8192 * 4),
    "several tokens a program": Spec([i % 4 for i in range(300)], [[i] for i in range(300)], num_pages=300, heads=(8, 1)),
    "requests of 3 tokens": Spec([3, 4, 5, 9, 10, 70, -1], TABLE, tokens_per_request=3, heads=(4, 1), positions_dtype=torch.int32),
}  # fmt: skip
GARBAGE = "prefill, cu_seqlens that do not ascend"  # which tokens of it are appended is left open
RAGGED = Spec([*range(7), *range(5, 10), *range(7), 33], [[5, 2, -1], [0, 6, 3], [-1, -1, -1], [4, 1, -1]])
PREFILL = {
    "prefill, ragged": RAGGED.but(options={"cu_seqlens_q": torch.tensor([0, 7, 12, 12, 19])}),
    GARBAGE: RAGGED.but(options={"cu_seqlens_q": torch.tensor([0, 100, 5, 2**31, 12])}),
    "prefill, slots, unaligned": Spec(list(range(20)), slots=list(range(31, 14, -1)), shift=1, head_dim=80, heads=(5, 1)),
    "prefill, outputs": BASE.but(q_out=True, k_out="own", rotary_dim=64),
}  # fmt: skip


# In the child: cases in memory that ends where they end.


def place(case: Case, device) -> Case:
    """The case with every storage cut to the bytes between its first and its last element; nothing filled in.

    On the CPU, where no tool looks on, all bytes are set, lest what a freed tensor left behind be taken for a result.
    """
    storages, views = {}, dict(case.views)
    for name in case.storages:
        here = {argument: view for argument, view in case.views.items() if view is not None and view.storage == name}
        if not here:
            continue
        size = next(iter(here.values())).dtype.itemsize
        first = min(view.offset for view in here.values()) * size
        first -= first % 16  # keeps a misaligned tensor misaligned
        last = max(view.offset + _reach(view) for view in here.values()) * size
        storages[name] = torch.empty(max(last - first, 0), dtype=torch.uint8, device=device)
        if storages[name].device.type == "cpu":
            storages[name].fill_(0xA5)
        views |= {argument: view._replace(offset=view.offset - first // size) for argument, view in here.items()}
    options = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in case.options.items()}
    return Case(storages, views, options, case.spec)


def _reach(view: View) -> int:
    if 0 in view.shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(view.shape, view.stride, strict=True))


def fill(placed: Case, case: Case, everything: bool) -> None:
    """The bytes of `case`; unless `everything`, only those that a launch may read."""
    if everything:
        for argument, view in case.views.items():
            if view is not None:
                start = (view.offset - placed.views[argument].offset) * view.dtype.itemsize
                target = placed.storages[view.storage]
                target.copy_(case.storages[view.storage][start:][: target.numel()])
        return
    for name in ("q", "k", "v", "positions", "cache_positions", "slot_mapping"):
        if case.views.get(name) is not None:
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in case.views[name].stride)
            placed[name][once].copy_(case[name][once])
    for name, rows in (("cos_sin_cache", _table_rows(case.spec)), ("block_table", _entries(case.spec))):
        if case.views.get(name) is not None and len(rows):
            at = tuple(torch.tensor(rows).T) if name == "block_table" else (torch.tensor(rows),)
            placed[name][tuple(i.to(placed.device) for i in at)] = case[name][at].to(placed.device)


def _table_rows(spec: Spec) -> list[int]:
    """Rows of the rotary table that positions name; a position outside stands for the nearest one."""
    return sorted({min(max(p, 0), spec.max_position - 1) for p in (*spec.positions, -1)})


def _entries(spec: Spec) -> list[tuple[int, int]]:
    """(row, column) of the block-table entries that tokens name. With cu_seqlens, all."""
    if spec.block_table is None:
        return []
    width = len(spec.block_table[0])
    if "cu_seqlens_q" in spec.options:
        return [(row, column) for row in range(len(spec.block_table)) for column in range(width)]
    places = spec.positions if spec.cache_positions is None else spec.cache_positions
    found = set()
    for token, (position, place_) in enumerate(zip(spec.positions, places, strict=True)):
        column = place_ // spec.page_size
        if position >= 0 and 0 <= column < width:
            found.add((token // spec.tokens_per_request, column))
    return sorted(found)


def differences(got: Case, want: Case, start: Case, everything: bool, caches: bool = True) -> list[str]:
    """What of the results is not what the reference leaves on the CPU. Unless `everything`, only what a launch has written is
    looked at."""
    wrong = [] if got.faults == want.faults else [f"faults: got {got.faults}, expected {want.faults}"]
    for name in ("q", "q_out", "k_out"):
        if want.views.get(name) is not None and not torch.equal(bits(got[name]).cpu(), bits(want[name])):
            wrong.append(name)
    for name in ("k_cache", "v_cache"):
        if want.views[name] is None or not caches:
            continue
        pages, expected, before = (reference.pages_first(case[name], want.options["kv_layout"]) for case in (got, want, start))
        if everything:
            same = torch.equal(bits(pages).cpu(), bits(expected))
        else:
            slots = (bits(expected) != bits(before)).flatten(2).any(-1).nonzero(as_tuple=True)
            same = torch.equal(bits(pages[tuple(i.to(got.device) for i in slots)]).cpu(), bits(expected[slots]))
        if not same:
            wrong.append(name)
    return wrong


def launches(case: Case, function):
    """(name, call) of every way to launch a case. The second launch is one that the first has packed."""
    yield "first", lambda: function(**case.arguments())
    yield "again", lambda: function(**case.arguments())
    hook = triton.knobs.runtime.launch_enter_hook

    def through_triton():
        hook.add(_look)
        try:
            function(**case.arguments())
        finally:
            hook.remove(_look)

    yield "kernel[grid]", through_triton
    if function is rope_append_decode:
        op = prepare(case)
        yield "bound", op.bind(**call_arguments(case))


def _look(metadata) -> None:
    """A launch hook; while there is one, launches go through `kernel[grid]`."""


def run_case(name: str, spec: Spec, device, everything: bool) -> list[str]:
    prefill = name in PREFILL
    oracle = reference.rope_append_prefill if prefill else reference.rope_append_decode
    start = build(spec, "cpu")
    want, faults = start.clone(), no_faults("cpu")
    oracle(**want.arguments(), faults=faults)
    want.faults = faults.tolist()
    placed, wrong = place(start, device), []
    fill(placed, start, everything)
    for way, call in launches(placed, rope_append_prefill if prefill else rope_append_decode):
        fill(placed, start, everything)
        record = fault_buffer(placed.device)
        record.copy_(no_faults("cpu"))
        call()
        placed.faults = record.tolist()
        wrong += [f"{way}: {what}" for what in differences(placed, want, start, everything, name != GARBAGE)]
    return wrong


def run_cases(tool: str, device) -> int:
    bad = 0
    for name, spec in (DECODE | PREFILL).items():
        wrong = run_case(name, spec, device, everything=tool == "memcheck")
        print(f"case {'wrong' if wrong else 'right'}: {name} {'; '.join(wrong)}", flush=True)
        bad += bool(wrong)
    return bad


def run_control(tool: str, device) -> int:
    """A launch that is wrong on purpose: the row after the rotary table is read, or positions that nobody wrote."""
    start = build(BASE.but(positions=[5, 64, 3], q_out=True), "cpu")
    placed = place(start, device)
    fill(placed, start, everything=tool == "memcheck")
    if tool == "initcheck":
        placed.storages["positions"] = torch.empty(24, dtype=torch.uint8, device=device)
        placed._tensors.clear()
    launch = prepare(placed).bind(**call_arguments(placed))
    if launch.plan is not None:
        width, row, tokens, max_position, *rest = launch.plan.integers
        launch.plan.integers = (width, row, tokens, max_position + (tool == "memcheck"), *rest)
    launch()
    if placed.device.type == "cuda":
        torch.cuda.synchronize()
    return 0


# The parent: tools, reports.


def find_tool() -> str | None:
    found = shutil.which("compute-sanitizer")
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda", *sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)]
    for path in (Path(home) / "bin" / "compute-sanitizer" for home in homes if home):
        found = found or (str(path) if path.exists() else None)
    return found


def start_child(tool_path: str, tool: str, mode: str, directory: str) -> tuple[subprocess.Popen, Path]:
    log = Path(directory) / f"{tool}-{mode}.log"
    command = [tool_path, "--tool", tool, *TOOLS[tool], "--target-processes", "application-only", "--report-api-errors", "no"]
    command += [sys.executable, str(Path(__file__).resolve()), "--child", tool, "--mode", mode]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # else a stray access would land in a cached block
    with log.open("w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment), log


def read_report(tool: str, mode: str, code: int | None, text: str) -> dict:
    """What a tool said of a child."""
    errors = sum(int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) error", text))
    ours = len(OURS.findall(text))
    right, wrong = (len(re.findall(rf"^case {word}:", text, re.M)) for word in ("right", "wrong"))
    report = {"tool": tool, "mode": mode, "exit": code, "errors": errors, "in our kernels": ours, "right": right, "wrong": wrong}
    if "ERROR SUMMARY" not in text:
        unsupported = re.search(r"Device not supported.*|not supported on .*|Failed to initialize.*", text)
        report["result"] = "skipped" if unsupported and right == 0 else "failed"
        report["why"] = unsupported[0] if unsupported else "the tool printed no summary"
    elif mode == "control":
        report["result"] = "passed" if ours else "failed"
        report["why"] = "" if ours else "a launch that is wrong on purpose was not noticed"
    else:
        # Kernels of PyTorch are another matter, but memory errors make everything after them doubtful.
        clean = ours == 0 and (errors == 0 or tool == "initcheck")
        whole = code == 0 and wrong == 0 and right == len(DECODE | PREFILL)
        report["result"] = "passed" if clean and whole else "failed"
        report["why"] = "" if whole else f"{right} of {len(DECODE | PREFILL)} cases came out right"
    return report


def run_tools(tool_path: str) -> tuple[list[dict], dict[str, str]]:
    """Both tools at once, each with the cases in one process and the control in another."""
    reports, texts = [], {}
    with tempfile.TemporaryDirectory() as directory:
        modes = [(tool, mode) for tool in TOOLS for mode in ("cases", "control")]
        started = [(tool, mode, *start_child(tool_path, tool, mode, directory)) for tool, mode in modes]
        deadline = time.monotonic() + SECONDS
        for tool, mode, process, log in started:
            try:
                code = process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
            texts[f"{tool}, {mode}"] = text = log.read_text(errors="replace")
            reports.append(read_report(tool, mode, code, text))
    return reports, texts


def dry_run() -> int:
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    bad = sum(run_cases(tool, device) for tool in TOOLS)
    if device.type == "cpu":
        run_control("initcheck", device)
    print(f"{2 * len(DECODE | PREFILL)} runs without the tools on {device}, {bad} wrong")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="write the reports there")
    parser.add_argument("--dry-run", action="store_true", help="run the cases without the tools")
    parser.add_argument("--child", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--mode", choices=("cases", "control"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        work = run_cases if args.mode == "cases" else run_control
        return 1 if work(args.child, torch.device("cuda", 0)) else 0
    if args.dry_run:
        return dry_run()
    tool_path = find_tool()
    if tool_path is None or not torch.cuda.is_available():
        print(f"skipped: {'no GPU' if tool_path else 'no compute-sanitizer'} on this machine")
        return 0
    start = time.perf_counter()
    reports, texts = run_tools(tool_path)
    for report in reports:
        print(
            "{result:<8} {tool:<10} {mode:<8} {right} cases right, {wrong} wrong, {errors} errors reported".format(**report),
            report["why"],
        )
        if report["result"] == "failed":
            print(texts[f"{report['tool']}, {report['mode']}"][-4000:])
    print(f"{time.perf_counter() - start:.0f} s")
    if args.json:
        Path(args.json).write_text(json.dumps(reports, indent=1))
    return 1 if any(report["result"] == "failed" for report in reports) else 0


if __name__ == "__main__":
    raise SystemExit(main())
