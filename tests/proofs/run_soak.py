"""A long run on a GPU: does a cache stay whole over 100,000 graph replays?

    python tests/proofs/run_soak.py [--seconds 120] [--replays 100000] [--json FILE]

Two streams replay graphs of two launches each, with caches of their own. Before every replay positions, block table or slots are
drawn anew on the device, with padding, stale entries and garbage among them. Every second page of a cache is in no table:
checksums of those pages are taken all along; every 500th replay is compared with the reference, whole caches bit for bit; and the
faults counted at the end are those that were drawn. Before that: 250 repeats of one step, and a cache of more than 2^31 elements.

Exit code 1 on any difference. Without a GPU it says so and leaves with 0; `--dry-run` does all of it on the CPU reference, tiny.
"""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from decode_rope import DecodeRope, RopeTable, reference
from decode_rope.append.faults import fault_buffer

GARBAGE = (-1, -1, -2, -(2**31), 2**31 - 1, 1_000_003, 99_999)


class Sizes(NamedTuple):
    """How much of everything."""

    tokens: tuple[int, ...]  # of each stream
    width: int  # block-table columns
    check_every: int  # replays between two comparisons with the reference
    guard_every: int  # replays between two checksums
    repeats: int
    repeated_tokens: tuple[int, ...]
    big_pages: int  # of 16 tokens, 8 heads of 128


FULL = Sizes((256, 64), 16, 500, 100, 250, (60, 1024), 2**31 // (16 * 8 * 128) + 64)
DRY = Sizes((8, 4), 4, 5, 2, 3, (5, 20), 40)


class Shape(NamedTuple):
    heads: tuple[int, int]
    head_dim: int
    rotary_dim: int
    page_size: int
    is_neox: bool
    kv_layout: str
    paged: bool
    dtype: torch.dtype


SHAPES = (
    Shape((32, 8), 128, 128, 16, True, "NHD", True, torch.bfloat16),
    Shape((8, 1), 64, 32, 32, False, "HND", False, torch.float16),
)
LAYERS = 2  # launches in one graph, so that one depends on nothing of the other but runs behind it


class Stream:
    """One stream: buffers, guarded caches and a graph of `LAYERS` launches.

    A storage has a page more on either side than the cache in it, and only its odd pages, the cache's even ones, are ever named.
    """

    def __init__(self, shape: Shape, num_tokens: int, width: int, device: torch.device, seed: int):
        self.shape, self.num_tokens, self.width, self.device = shape, num_tokens, width, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.generator = torch.Generator(device).manual_seed(seed)
        self.open_pages = 1 << (num_tokens * width - 1).bit_length()
        self.num_pages = 2 * self.open_pages - 1
        self.max_position = (width + 1) * shape.page_size  # so that a good position may be past the block table
        (hq, hkv), d = shape.heads, shape.head_dim
        page = (shape.page_size, hkv) if shape.kv_layout == "NHD" else (hkv, shape.page_size)
        self.q, self.k, self.v = (
            [torch.zeros(num_tokens, h, d, dtype=shape.dtype, device=device) for _ in range(LAYERS)] for h in (hq, hkv, hkv)
        )
        self.storages = [[self._random(2 * self.open_pages + 1, *page, d).to(shape.dtype) for _ in range(2)] for _ in range(LAYERS)]
        self.positions = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        index = (num_tokens, width) if shape.paged else (num_tokens,)
        self.index = torch.full(index, -1, dtype=torch.int32 if shape.paged else torch.int64, device=device)
        self.table = RopeTable.build(shape.rotary_dim, self.max_position, is_neox=shape.is_neox, device=device)
        self.garbage = torch.tensor(GARBAGE, device=device)
        self.expected_faults = torch.zeros((), dtype=torch.int64, device=device)
        self.changed_guards = torch.zeros((), dtype=torch.int64, device=device)
        words = self.storages[0][0][0].numel() * shape.dtype.itemsize // 8
        # Odd, so that no bit of a word is lost; of pages and of words, so that nothing can change places.
        self.weights = [
            torch.randint(0, 2**62, (n,), generator=self.generator, device=device) | 1 for n in (words, self.open_pages + 1)
        ]
        self.guard_sum = self._checksum()
        self.launches = self._bind()
        self.graph = self._capture()

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.generator, device=self.device)

    def caches(self, storages: list[Tensor]) -> list[Tensor]:
        return [storage[1:-1] for storage in storages]

    def arguments(self, layer: int) -> tuple:
        return self.q[layer], self.k[layer], self.v[layer], *self.caches(self.storages[layer])

    def named(self) -> dict[str, Tensor]:
        return {"block_table" if self.shape.paged else "slot_mapping": self.index}

    def _bind(self) -> list:
        shape = self.shape
        op = DecodeRope(
            self.table, num_q_heads=shape.heads[0], num_kv_heads=shape.heads[1], head_dim=shape.head_dim,
            page_size=shape.page_size, kv_layout=shape.kv_layout, dtype=shape.dtype, device=self.device,
            addressing="block_table" if shape.paged else "slot_mapping", index_dtype=self.index.dtype,
        ).warmup(self.num_tokens)  # fmt: skip
        return [op.bind(*self.arguments(layer), self.positions, **self.named()) for layer in range(LAYERS)]

    def _capture(self):
        if self.stream is None:
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for launch in self.launches:
                launch()
        return graph

    def current(self):
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def replay(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for launch in self.launches:
            launch()

    def draw(self) -> None:
        """New numbers in every buffer; slots of good rows are all different."""
        g, page = self.generator, self.shape.page_size
        for x in (*self.q, *self.k, *self.v):
            x.normal_(generator=g)
        self.positions.random_(0, self.max_position, generator=g)
        self._spoil(self.positions, chance=8)
        # An odd factor permutes a power of two, so that no page or slot is drawn twice.
        factor, shift = torch.randint(0, 2**30, (2,), generator=g, device=self.device)
        size = self.open_pages * (1 if self.shape.paged else page)
        drawn = ((factor * 2 + 1) * torch.arange(self.index.numel(), device=self.device) + shift) & (size - 1)
        drawn = 2 * drawn if self.shape.paged else drawn // page * 2 * page + drawn % page
        self.index.copy_(drawn.view(self.index.shape))
        self._spoil(self.index, chance=8)
        self.expected_faults += LAYERS * self._faults()

    def _spoil(self, x: Tensor, chance: int) -> None:
        """One element in `chance` becomes garbage."""
        pick = torch.randint(0, chance * len(GARBAGE), x.shape, generator=self.generator, device=self.device)
        x.copy_(torch.where(pick < len(GARBAGE), self.garbage[pick % len(GARBAGE)], x))

    def _faults(self) -> Tensor:
        """How many rows of one launch are faults, by the words of the contract."""
        position, page = self.positions, self.shape.page_size
        past_table = position >= self.max_position
        good = (position >= 0) & ~past_table
        if not self.shape.paged:
            return (past_table | (good & (self.index >= self.num_pages * page))).sum()
        column = position // page
        entry = self.index.gather(1, column.clamp(0, self.width - 1)[:, None])[:, 0]
        past_width = column >= self.width
        return (past_table | (good & (past_width | (entry >= self.num_pages)))).sum()

    def _checksum(self) -> Tensor:
        """Of all bytes of the pages that no table names, and of where they are."""
        of_words, of_pages = self.weights
        sums = [s.view(torch.int64).view(len(s), -1)[::2] * of_words for pair in self.storages for s in pair]
        return torch.stack([(s.sum(1) * of_pages).sum() for s in sums])

    def check_guards(self) -> None:
        self.changed_guards += (self._checksum() != self.guard_sum).any()

    def replay_and_compare(self) -> list[str]:
        """Replay, and let the reference do the same to copies of everything."""
        want = [[x.clone() for x in (self.q[i], self.k[i], self.v[i], *self.storages[i])] for i in range(LAYERS)]
        self.replay()
        wrong = []
        for layer, (q, k, v, *storages) in enumerate(want):
            reference.rope_append_decode(
                q, k, v, *self.caches(storages), self.table, self.positions, **self.named(), kv_layout=self.shape.kv_layout
            )
            got = (self.q[layer], self.k[layer], self.v[layer], *self.storages[layer])
            for name, a, b in zip(("q", "k", "v", "k_cache", "v_cache"), got, (q, k, v, *storages), strict=True):
                if not same_bytes(a, b):
                    wrong.append(f"{name} of layer {layer} differs from the reference")
        return wrong


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def soak(sizes: Sizes, device: torch.device, replays: int, deadline: float) -> dict:
    """Replay until there have been enough or time is up."""
    record = fault_buffer(device)
    record.copy_(torch.tensor([0, reference.NO_RECORD]))
    shapes = zip(SHAPES, sizes.tokens, strict=True)
    streams = [Stream(shape, n, sizes.width, device, seed) for seed, (shape, n) in enumerate(shapes)]
    done = compared = checksums = 0
    wrong: list[str] = []
    while done < replays and time.monotonic() < deadline and not wrong:
        for stream in streams:
            with stream.current():
                stream.draw()
                if done % sizes.check_every < len(streams):
                    wrong += [f"replay {done}: {what}" for what in stream.replay_and_compare()]
                    compared += 1
                else:
                    stream.replay()
                if done % sizes.guard_every < len(streams):
                    stream.check_guards()
                    checksums += 1
            done += 1
    for stream in streams:
        with stream.current():
            stream.check_guards()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    changed = sum(int(stream.changed_guards) for stream in streams)
    expected, counted = sum(int(stream.expected_faults) for stream in streams), int(record[0])
    record.copy_(torch.tensor([0, reference.NO_RECORD]))
    if changed:
        wrong.append(f"pages in no block table changed: {changed} checksums differ")
    if counted != expected:
        wrong.append(f"{counted} faults were counted, {expected} rows were drawn faulty")
    return {
        "replays": done, "launches": done * LAYERS, "compared with the reference": compared, "checksums": checksums,
        "faults": counted, "rows": done // len(streams) * sum(sizes.tokens) * LAYERS, "wrong": wrong,
    }  # fmt: skip


def repeat(sizes: Sizes, device: torch.device) -> dict:
    """One step again and again leaves the same bytes."""
    wrong = []
    for num_tokens in sizes.repeated_tokens:
        stream = Stream(SHAPES[0], num_tokens, 2, device, seed=7)
        with stream.current():
            stream.draw()
            start = [x.clone() for x in (stream.q[0], *stream.storages[0])]
            first, differing = None, torch.zeros((), dtype=torch.int64, device=device)
            for _ in range(sizes.repeats):
                left = (stream.q[0], *stream.storages[0])
                for x, before in zip(left, start, strict=True):
                    x.copy_(before)
                stream.launches[0]()
                if first is None:
                    first = [x.clone() for x in left]
                for x, same in zip(left, first, strict=True):
                    differing += (x.view(torch.int16) != same.view(torch.int16)).any()
            if int(differing):
                wrong.append(f"{num_tokens} tokens: {int(differing)} of {sizes.repeats} repeats differ from the first")
    return {"repeats": sizes.repeats * len(sizes.repeated_tokens), "wrong": wrong}


def big_cache(sizes: Sizes, device: torch.device) -> dict:
    """K and V in one storage; both halves, and every step between pages, reach past 2^31 elements."""
    pages, (page_size, heads, d) = sizes.big_pages, (16, 8, 128)
    needed = 2 * pages * page_size * heads * d * 2
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 1.3 * needed:
        return {"skipped": f"less than {1.3 * needed / 2**30:.0f} GiB free", "wrong": []}
    kv = torch.zeros(2, pages, page_size, heads, d, dtype=torch.bfloat16, device=device)
    edges = {0, 1, pages - 1, pages - 2, pages // 2, pages // 2 - 1, pages // 4, 3 * pages // 4}
    touched = sorted(edges)
    num_tokens = len(touched)
    generator = torch.Generator(device).manual_seed(3)
    q, k, v = (torch.randn(num_tokens, h, d, generator=generator, device=device).bfloat16() for h in (32, heads, heads))
    table = RopeTable.build(d, 1024, device=device)
    positions = torch.arange(num_tokens, device=device) % page_size
    small = torch.zeros(2, num_tokens, page_size, heads, d, dtype=torch.bfloat16, device=device)
    want = q.clone()
    ones = torch.arange(num_tokens, dtype=torch.int32, device=device)[:, None]
    reference.rope_append_decode(want, k, v, *small, table, positions, block_table=ones)
    op = DecodeRope(table, num_q_heads=32, num_kv_heads=heads, head_dim=d, page_size=page_size, device=device)
    op(q, k, v, *kv, positions, block_table=torch.tensor(touched, dtype=torch.int32, device=device)[:, None])
    wrong = [] if same_bytes(q, want) else ["q differs from the reference"]
    for name, half, expected in zip(("k_cache", "v_cache"), kv, small, strict=True):
        if not same_bytes(half[touched], expected):
            wrong.append(f"{name}: the named pages differ from the reference")
        words = half.view(torch.int64).view(pages, -1)
        found = [i + start for start in range(0, pages, 8192)
                 for i in words[start : start + 8192].ne(0).any(1).nonzero().flatten().tolist()]  # fmt: skip
        if found != touched:
            wrong.append(f"{name}: pages {found[:20]} were written, {touched} were named")
    return {"elements": kv.numel(), "pages looked at": 2 * pages, "wrong": wrong}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--replays", type=int, default=100_000)
    parser.add_argument("--json", help="write the counts there")
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU reference")
    args = parser.parse_args(argv)
    if not args.dry_run and not torch.cuda.is_available():
        print("skipped: needs a GPU (--dry-run runs it tiny on the CPU)")
        return 0
    start = time.monotonic()
    device = torch.device("cpu") if args.dry_run else torch.device("cuda", torch.cuda.current_device())
    sizes, replays = (DRY, min(args.replays, 40)) if args.dry_run else (FULL, args.replays)
    counts = {"repeats": repeat(sizes, device), "big cache": big_cache(sizes, device)}
    counts["soak"] = soak(sizes, device, replays, start + args.seconds)
    for name, result in counts.items():
        shown = ", ".join(f"{number} {what}" for what, number in result.items() if what != "wrong")
        print(f"{'wrong' if result['wrong'] else 'right':<6} {name}: {shown}")
        for what in result["wrong"]:
            print(f"       {what}")
    counts["seconds"] = round(time.monotonic() - start, 1)
    if counts["soak"]["replays"] < replays:
        print(f"stopped after {counts['soak']['replays']} of {replays} replays")
    print(f"{counts['seconds']} s")
    if args.json:
        Path(args.json).write_text(json.dumps(counts, indent=1))
    return 1 if any(counts[name]["wrong"] for name in ("repeats", "big cache", "soak")) else 0


if __name__ == "__main__":
    raise SystemExit(main())
