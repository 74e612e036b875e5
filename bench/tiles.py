"""`tiles`: how the shape of a program's tile changes time, decode or prefill, beside the shape that the package chooses.

Every shape must leave the bits that the chosen one leaves before it is timed. What this shows is where the rules in
`decode_rope/geometry.py` and `geometry_prefill.py` come from.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from bench import timing
from bench.buffers import Case, Layer, Meta, context_for, decode_meta, make_layers
from bench.prefill import least_bytes, prompts, sets_for
from bench.providers import load, need
from bench.report import columns
from bench.runner import Runner
from bench.sweep import right_ones, time_ways
from bench.verify import equal
from bench.workloads import Model, traffic

CHOSEN = "chosen"
DECODE_LAYERS = 32
SHOWN = 8
ROWS = 256  # of a tile, at most


def decode_tiles(model: Model, tokens: int) -> Iterator[Any]:
    """Geometries of 2 to 16 elements a thread in each half of a head, from wide to high."""
    module = "decode_rope.geometry"
    geometry, chosen, power_of_two = (need(module, name) for name in ("Geometry", "decode_geometry", "power_of_two"))

    def tile(num_heads: int, rows: int, most_heads: int) -> tuple[int, int]:
        heads = min(power_of_two(num_heads), most_heads, rows)
        high = min(rows // heads, power_of_two(tokens))
        return (high, heads) if high * heads >= 2 else (1, 2)

    alike = chosen(tokens, *_heads(model))[5:]  # but for tiles and warps
    for warps, elements, most_heads in product((1, 2, 4), (2, 4, 8, 16), (1, 4, 16, 64)):
        rows = max(2, elements * 32 * warps // (model.head_dim // 2))
        yield geometry(*tile(model.num_q_heads, rows, most_heads), *tile(model.num_kv_heads, rows, most_heads), warps, *alike)


def prefill_tiles(model: Model, tokens: int) -> Iterator[Any]:
    module = "decode_rope.geometry_prefill"
    geometry, tiles = need(module, "PrefillGeometry"), need(module, "Tiles")
    for warps, heads, loop, fill, pdl in product((4, 8), (2, 4, 8), (1, 2, 4), (1, 2), (False, True)):
        rows = fill * 8 * 32 * warps // (model.head_dim // 2)
        if rows // heads < 2 or rows > ROWS or heads * loop > model.num_q_heads:
            continue
        few = min(heads, model.num_kv_heads & -model.num_kv_heads)
        kv_loop = min(loop, model.num_kv_heads // few)
        yield geometry(tiles(rows // heads, heads, loop), tiles(rows // few, few, kv_loop & -kv_loop), warps, pdl)


def _heads(model: Model) -> tuple[int, int, int]:
    return model.num_q_heads, model.num_kv_heads, model.head_dim


def decode_call(case: Case, meta: Meta, geometry: Any) -> Callable[[Layer], Callable[[], object]]:
    provider = load("ours")
    op = provider.make_op(case, meta, geometry=geometry)
    return lambda layer: provider.launch_object(case, meta, layer, op)


def prefill_call(case: Case, meta: Meta, geometry: Any) -> Callable[[Layer], Callable[[], object]]:
    function = need("decode_rope", "rope_append_prefill")

    def bind(layer: Layer) -> Callable[[], object]:
        arguments = (*vars(layer).values(), meta.cos_sin, meta.positions)
        return lambda: function(*arguments, slot_mapping=meta.slots, geometry=geometry)

    return bind


def kind(case: Case, prefill: bool) -> tuple[Meta, int, Callable, Callable]:
    """Metadata, buffer sets, and for this kernel the geometries to try and how to call it."""
    if prefill:
        meta, sets = prompts(case), sets_for(case.model, case.tokens, timing.l2_bytes())
        return meta, sets, prefill_tiles, prefill_call
    return decode_meta(case, context_for(case, DECODE_LAYERS), 0), DECODE_LAYERS, decode_tiles, decode_call


def label(geometry: Any) -> str:
    numbers = [n if isinstance(n, int) else "x".join(map(str, n)) for n in geometry]
    return "/".join(str(int(n)) if isinstance(n, bool) else str(n) for n in numbers)


def measure(case: Case, prefill: bool, runner: Runner) -> dict[str, Any]:
    """One JSON row: microseconds by tile shape; a shape whose result differs from the chosen one's is left out."""
    meta, sets, tiles, make_call = kind(case, prefill)
    layers = make_layers(case, meta, sets, 0)
    calls = {CHOSEN: make_call(case, meta, None)}
    calls |= {label(geometry): make_call(case, meta, geometry) for geometry in tiles(case.model, case.tokens)}
    start = layers[0].clone()
    want = start.clone()
    calls[CHOSEN](want)()

    def same(name: str) -> bool:
        got = start.clone()
        calls[name](got)()
        return all(equal(a, b) for a, b in zip(vars(got).values(), vars(want).values(), strict=True))

    right = right_ones(calls, same, runner, case, "not the bits of the chosen tile")
    ways = {name: lambda i, call=calls[name]: call(layers[i]) for name in right}
    timed = time_ways(ways, sets, runner, case, target_us=200.0)
    moved = least_bytes(case.model, case.tokens) if prefill else traffic(case.model, case.tokens).total
    return {"model": case.model.name, "shape": case.model.shape, "tokens": case.tokens, "bytes": moved, **timed}


def run(cases: list[Case], prefill: bool, runner: Runner) -> None:
    report, bandwidth = runner.report, timing.copy_bandwidth()
    report.summary["copy_bytes_per_second"] = bandwidth
    shape = (
        "(tokens x heads x loop) of q/of k and v/warps/pdl"
        if prefill
        else "tokens/heads of q/tokens/heads of k and v/warps/pdl/carveout"
    )
    report.say(f"us a call, medians, and time / chosen; the {SHOWN} best and the chosen; {shape}")
    widths = [16, 7, 24, 9, 6]
    report.say(columns(["model", "tokens", "tile", "us", "ratio"], widths))

    def one(case: Case) -> None:
        row = measure(case, prefill, runner)
        medians = {name: us["median"] for name, us in row["us"].items()}
        best = sorted(medians, key=medians.__getitem__)
        base = medians.get(CHOSEN, float("nan"))
        lines = [
            columns([row["model"], str(row["tokens"]), name, f"{medians[name]:.2f}", f"{medians[name] / base:.3f}"], widths)
            for name in best
            if name == CHOSEN or name in best[:SHOWN]
        ]
        report.add(row, "\n".join(lines))

    runner.each(cases, one)
