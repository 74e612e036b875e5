"""`decode --in-model`: what our launch adds between a QKV projection and attention.

Graphs of (projection, launch, attention) a layer are replayed in turn with graphs of (projection, attention);
the reported time is the difference of two replays of the same round, divided by the number of layers.

Attention is launched without PDL unless asked otherwise: with it, attention starts while the kernel before it still
runs, a GEMM in one graph and a short launch in the other, and the two graphs no longer differ by the launch alone (on
an H200, 8/1/128, B=128, any launch in between made a layer 12-18 of 60 µs faster).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.attention import Attention, make_attention
from bench.buffers import Case, Layer, Meta, context_for, decode_meta, make_layers
from bench.decode import Options
from bench.providers import Provider
from bench.report import columns, rounded
from bench.runner import Runner, cell, fastest, passed
from bench.stats import paired, summarize

BASE = "without"
OURS = ("ours", "ours-plain", "ours-last", "ours-meta")


def block(
    case: Case, weight: Tensor, hidden: Tensor, layer: Layer, qkv: Tensor, attend: Attention, launch: Callable | None
) -> Callable[[], Tensor]:
    """One layer: projection into `qkv`, of which layer.q, k and v are slices; the launch; attention."""

    def call() -> Tensor:
        torch.mm(hidden, weight, out=qkv)
        q = layer.q if launch is None else launch()
        return attend(q.view(case.tokens, case.model.num_q_heads, -1), layer.k_cache, layer.v_cache)

    return call


def projections(case: Case, count: int) -> tuple[Tensor, list[Tensor]]:
    """Hidden states [T, hidden] and one QKV weight a layer, scaled so that Q and K stay of order one."""
    model = case.model
    generator = torch.Generator(device=case.device).manual_seed(5)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=case.device, dtype=case.dtype)

    weights = [randn(model.hidden, model.heads * model.head_dim) * model.hidden**-0.5 for _ in range(count)]
    return randn(case.tokens, model.hidden), weights


def _packed(layer: Layer, case: Case) -> Tensor:
    """The [T, heads * D] tensor whose slices are the layer's q, k and v."""
    width = case.model.heads * case.model.head_dim
    return layer.q.as_strided((case.tokens, width), (width, 1))


def graphs(
    case: Case, meta: Meta, layers: list[Layer], providers: list[Provider], runner: Runner, pdl: bool
) -> tuple[str, dict[str, torch.cuda.CUDAGraph]]:
    """The attention's name, and graphs by provider, `without` being the one that leaves the launch out."""
    name, attend = make_attention(case, meta, pdl)
    hidden, weights = projections(case, len(layers))

    def build(provider: Provider | None) -> torch.cuda.CUDAGraph:
        calls = []
        for layer, weight in zip(layers, weights, strict=True):
            launch = None if provider is None else provider.bind(case, meta, layer)
            calls.append(block(case, weight, hidden, layer, _packed(layer, case), attend, launch))
        return timing.capture(calls, warm=2)

    by_name = {BASE: None, **{p.name: p for p in providers}}
    return name, runner.build_each(by_name, lambda key: build(by_name[key]), case)


def run(cases: list[Case], providers: list[Provider], options: Options, runner: Runner) -> None:
    report, providers = runner.report, runner.present(providers)
    names = [p.name for p in providers]
    widths = [15, 5, 11, 9, *(max(20, len(name)) for name in names), 10]
    report.say(f"added us per launch, median [p10, p90] of paired differences; {options.layers} layers a graph")
    report.say(columns(["model", "B", "attention", BASE, *names, "best peer"], widths))

    def one(case: Case) -> None:
        status = runner.verified(providers, case)
        right = passed(providers, status)
        # Short contexts keep attention from hiding a microsecond.
        context = context_for(case, options.layers, most=128)
        meta = decode_meta(case, context, options.seed)
        layers = make_layers(case, meta, options.layers, options.seed, fill=True)
        attention, captured = graphs(case, meta, layers, right, runner, options.attention_pdl)
        samples = runner.sample({name: graph.replay for name, graph in captured.items()}, target_us=500.0)
        row = row_of(case, samples, right, status, attention, context, options.layers)
        report.add(row, columns(line(row, names), widths))

    runner.each(cases, one)


def row_of(
    case: Case,
    samples: dict[str, list[float]],
    providers: list[Provider],
    status: dict[str, str],
    attention: str,
    context: int,
    layers: int,
) -> dict[str, Any]:
    """One JSON row; `added` is a paired difference a launch, in microseconds."""
    base = samples[BASE]
    differences = {name: [us / layers for us in paired(values, base)] for name, values in samples.items() if name != BASE}
    stats = {name: summarize(values) for name, values in differences.items()}
    peer = fastest(stats, providers, "peer")
    return {
        "model": case.model.name,
        "shape": case.model.shape,
        "tokens": case.tokens,
        "status": status,
        "attention": attention,
        "context": context,
        "layers": layers,
        "without_us": summarize([us / layers for us in base]).as_dict(),
        "added": {name: value.as_dict() for name, value in stats.items()},
        "best_peer": peer[0] if peer else None,
        "samples": {name: rounded(values) for name, values in samples.items()},
    }


def line(row: dict[str, Any], names: list[str]) -> list[str]:
    cells = [row["model"], str(row["tokens"]), row["attention"], f"{row['without_us']['median']:.2f}"]
    for name in names:
        value = row["added"].get(name)
        text = value and f"{value['median']:.2f} [{value['p10']:.2f}, {value['p90']:.2f}]"
        cells.append(cell(text, row["status"], name))
    return [*cells, row["best_peer"] or "-"]
