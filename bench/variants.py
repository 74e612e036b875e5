"""`variants`: what other pairings, head sizes, dtypes and layouts cost beside NeoX in bf16; long sequences, cold buffers.

Every way is compared with the reference, bit for bit, before it is timed. A share is GB/s of the way divided by GB/s of
the first way of its group; bytes are those a way has to move.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bench import timing
from bench.buffers import Case, Layer, cos_sin_table, make_layers
from bench.prefill import SEQUENCE, least_bytes, prompts, sets_for
from bench.providers import need
from bench.report import columns
from bench.runner import Runner
from bench.sweep import Way, right_ones, time_ways
from bench.verify import equal
from bench.workloads import Model

TOKENS = (16384, 131072)


class Variant(NamedTuple):
    """One prefill: q and k of `head_dim`, of which `rotary_dim` turn; placed by slots, in shuffled pages or one after the other, or
    by sequences and a block table."""

    name: str
    head_dim: int = 128
    rotary_dim: int = 128
    is_neox: bool = True
    dtype: torch.dtype = torch.bfloat16
    ragged: bool = False
    in_order: bool = False


PREFILL = (
    Variant("NeoX bf16"),
    Variant("GPT-J pairs", is_neox=False),
    Variant("partial 64 of 128", rotary_dim=64),
    Variant("heads of 96", head_dim=96, rotary_dim=96),
    Variant("fp16", dtype=torch.float16),
    Variant("no rotation", rotary_dim=0),
    Variant("cu_seqlens", ragged=True),
    Variant("slots in order", in_order=True),
)
LAYOUTS = ("[B, S, H, D]", "[B, H, S, D]")


class Timed(NamedTuple):
    """A way, what it has to move, and whether its result is the reference's."""

    name: str
    bytes: int
    way: Way
    right: Callable[[], bool]


def prefill_ways(model: Model, tokens: int, sets: int, device: torch.device) -> Iterator[Timed]:
    ours, reference = (need(name, "rope_append_prefill") for name in ("decode_rope", "decode_rope.reference"))
    for variant in PREFILL:
        shape = Model(variant.name, model.num_q_heads, model.num_kv_heads, variant.head_dim, model.hidden)
        case = Case(shape, tokens, device, variant.dtype)
        meta = prompts(case)
        table = cos_sin_table(variant.rotary_dim, 8192, device) if variant.rotary_dim else None
        layers = make_layers(case, meta, sets, 0)
        if variant.ragged:
            options = {"block_table": meta.block_table, "cu_seqlens_q": meta.starts}
        else:
            options = {"slot_mapping": torch.arange(tokens, device=device) if variant.in_order else meta.slots}
        options["is_neox"] = variant.is_neox

        def call(function, layer: Layer, last=(table, meta.positions), options=options) -> Callable[[], object]:
            arguments = (*vars(layer).values(), *last)
            return lambda: function(*arguments, **options)

        def right(layers=layers, call=call) -> bool:
            want, got = layers[0].clone(), layers[0].clone()
            call(reference, want)()
            call(ours, got)()
            return all(equal(a, b) for a, b in zip(vars(got).values(), vars(want).values(), strict=True))

        moved = least_bytes(shape, tokens, variant.rotary_dim)
        yield Timed(variant.name, moved, lambda i, call=call, layers=layers: call(ours, layers[i]), right)


def layout_ways(model: Model, tokens: int, sets: int, device: torch.device) -> Iterator[Timed]:
    """`apply_rope` of Q alone into another tensor, heads inside or outside of the sequence."""
    ours, reference = (need(name, "apply_rope") for name in ("decode_rope", "decode_rope.reference"))
    heads, dim, batch = model.num_q_heads, model.head_dim, max(1, tokens // SEQUENCE)
    sequence = tokens // batch
    table = cos_sin_table(dim, 8192, device)
    generator = torch.Generator(device=device).manual_seed(0)
    for name, layout in zip(LAYOUTS, ("NHD", "HND"), strict=True):
        shape = (batch, sequence, heads, dim) if layout == "NHD" else (batch, heads, sequence, dim)
        xs = [torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(sets)]
        outs = [torch.empty_like(x) for x in xs]

        def call(function, x: Tensor, out: Tensor, layout=layout) -> Callable[[], object]:
            return lambda: function(x, table, layout=layout, out=out)

        def right(xs=xs, call=call) -> bool:
            got, want = torch.empty_like(xs[0]), torch.empty_like(xs[0])
            call(ours, xs[0], got)()
            call(reference, xs[0], want)()
            return equal(got, want)

        moved = tokens * 2 * heads * dim * 2 + sequence * 4 * dim
        yield Timed(name, moved, lambda i, call=call, xs=xs, outs=outs: call(ours, xs[i], outs[i]), right)


GROUPS = {"prefill": prefill_ways, "apply_rope": layout_ways}


def measure(group: str, model: Model, tokens: int, runner: Runner) -> dict:
    """One JSON row: GB/s and share of the first by name; what is wrong or cannot run is reported and left out."""
    sets = sets_for(model, tokens, timing.l2_bytes())
    timed = {way.name: way for way in GROUPS[group](model, tokens, sets, Case(model, tokens).device)}
    where = f"{group} {model.shape} tokens={tokens}"
    right = right_ones(timed, lambda name: timed[name].right(), runner, where, "not the reference's bits")
    row = time_ways({name: timed[name].way for name in right}, sets, runner, where)
    speed = {name: timed[name].bytes / us["median"] / 1e3 for name, us in row["us"].items()}
    first = next(iter(speed.values()), None)
    gbps = {name: round(value, 1) for name, value in speed.items()}
    share = {name: round(value / first, 4) for name, value in speed.items()}
    return {"group": group, "shape": model.shape, "tokens": tokens, "gbps": gbps, "share": share, **row}


def run(models: list[Model], batches: list[int], runner: Runner) -> None:
    report, bandwidth = runner.report, timing.copy_bandwidth()
    report.summary["copy_bytes_per_second"] = bandwidth
    report.say(f"GB/s, medians, and share of the first of its group; copy {bandwidth / 1e9:.0f} GB/s")
    widths = [11, 9, 7, 18, 7, 6]
    report.say(columns(["group", "shape", "tokens", "way", "GB/s", "share"], widths))

    def one(item: tuple[str, Model, int]) -> None:
        row = measure(*item, runner)
        lines = [
            columns([row["group"], row["shape"], str(row["tokens"]), name, f"{speed:.0f}", f"{row['share'][name]:.2f}"], widths)
            for name, speed in row["gbps"].items()
        ]
        report.add(row, "\n".join(lines))

    runner.each([(group, model, tokens) for model in models for tokens in batches for group in GROUPS], one)
