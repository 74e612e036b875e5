"""`step`: a whole decode step in a CUDA graph, ours against FlashInfer's separate rope and append.

Every layer: RMSNorm, QKV projection, rotate-and-append, attention, output projection, RMSNorm, MLP. Embedding
and LM head are left out. Both steps share weights, caches and attention; they are replayed in turn.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.attention import Attention, make_attention
from bench.buffers import Case, Layer, Meta, context_for, decode_meta, make_layers
from bench.in_model import OURS
from bench.providers import Provider, Unavailable, load
from bench.providers.ours import Bound
from bench.report import columns, rounded
from bench.runner import Runner, passed
from bench.stats import paired, summarize
from bench.transformer import EPS, NETWORKS, Network, Weights, decoder_layer, head_rms_norm, make_weights
from bench.workloads import STEP_CONTEXT, UsageError

BATCHES = (1, 8, 64)
BASELINE = "flashinfer"
TOLERANCE = 0.03  # bf16 through tens of layers: 0.024 in 80 of them (H200)

Launch = Callable[[], Tensor]


def find_networks(names: list[str] | None) -> list[Network]:
    """Networks by name; None or `all` is every one."""
    if not names or names == ["all"]:
        return list(NETWORKS.values())
    for name in names:
        if name not in NETWORKS:
            raise UsageError(f"--model: expected one of {', '.join(NETWORKS)}; got {name!r}")
    return [NETWORKS[name] for name in names]


def normed(launch: Launch, layer: Layer, weights: Weights) -> Launch:
    """QK-norm as two launches before `launch`."""

    def call() -> Tensor:
        head_rms_norm(layer.q, weights.q_norm)
        head_rms_norm(layer.k, weights.k_norm)
        return launch()

    return call


def bind_layer(provider: Provider, network: Network, case: Case, meta: Meta, layer: Layer, weights: Weights) -> Launch:
    """The provider's launch with the network's QK-norm: fused into ours where it can be, else in front of the launch."""
    if not network.qk_norm:
        return provider.bind(case, meta, layer)
    if isinstance(provider, Bound):
        with contextlib.suppress(Unavailable):
            return provider.bind_normed(case, meta, layer, weights.q_norm, weights.k_norm, EPS)
    return normed(provider.bind(case, meta, layer), layer, weights)


def make_step(
    provider: Provider,
    network: Network,
    case: Case,
    meta: Meta,
    layers: list[Layer],
    weights: list[Weights],
    attend: Attention,
) -> Launch:
    """The whole step, from the same hidden states in every call and for every provider; returns the last layer's."""
    generator = torch.Generator(device=case.device).manual_seed(2)
    start = torch.randn((case.tokens, case.model.hidden), device=case.device, generator=generator).to(case.dtype)
    launches = [bind_layer(provider, network, case, meta, layer, weight) for layer, weight in zip(layers, weights, strict=True)]

    def step() -> Tensor:
        x, residual = start, torch.zeros_like(start)
        for weight, layer, launch in zip(weights, layers, launches, strict=True):
            x = decoder_layer(case, weight, layer, x, residual, launch, attend)
        return x + residual

    return step


def agreeing(steps: dict[str, Launch], runner: Runner, where: object) -> dict[str, Launch]:
    """The steps whose result is within TOLERANCE of the first one's, by norm of the difference."""
    results = runner.build_each(steps, lambda name: steps[name]().float(), where)
    right, want = {}, None
    for name, got in results.items():
        want = got if want is None else want
        error = float((got - want).norm() / want.norm())
        if error <= TOLERANCE:
            right[name] = steps[name]
        else:
            runner.report.skip(name, f"fail: the step's result is off by {error:.2g}", str(where))
    return right


def measure(
    network: Network,
    batch: int,
    weights: list[Weights],
    providers: list[Provider],
    runner: Runner,
    pdl: bool | None = None,
    context: int = STEP_CONTEXT,
) -> dict[str, Any]:
    """One JSON row: microseconds a step by provider, and what each saves against the baseline."""
    case = Case(network.model, batch)
    meta = decode_meta(case, context_for(case, network.layers, most=context), 0, full=True)
    layers = make_layers(case, meta, network.layers, 0, fill=True)
    attention, attend = make_attention(case, meta, pdl)
    by_name = {p.name: p for p in passed(providers, runner.verified(providers, case))}

    def build(name: str) -> Launch:
        return make_step(by_name[name], network, case, meta, layers, weights, attend)

    steps = agreeing(runner.build_each(by_name, build, case), runner, case)
    replays = runner.build_each(steps, lambda name: timing.capture([steps[name]]).replay, case)
    samples = runner.sample(replays, target_us=2000.0)
    return row_of(network, batch, attention, int(meta.positions[0]) + 1, samples)


def row_of(network: Network, batch: int, attention: str, context: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    base = samples.get(BASELINE)
    saved = {
        name: summarize(paired(base, values)).as_dict() for name, values in samples.items() if base is not None and name != BASELINE
    }
    return {
        "network": network.name,
        "layers": network.layers,
        "tokens": batch,
        "context": context,
        "attention": attention,
        "us": {name: summarize(values).as_dict() for name, values in samples.items()},
        "saved_us": saved,
        "samples": {name: rounded(values) for name, values in samples.items()},
    }


def line(row: dict[str, Any], names: list[str]) -> list[str]:
    cells = [row["network"], str(row["tokens"]), row["attention"]]
    for name in names:
        cells.append(f"{row['us'][name]['median']:.1f}" if name in row["us"] else "-")
    base = row["us"].get(BASELINE)
    for name in names:
        saved = row["saved_us"].get(name)
        if name == BASELINE:
            continue
        if saved is None:
            cells.append("-")
        else:
            share = 100 * saved["median"] / base["median"]
            cells.append(f"{saved['median']:.1f} [{saved['p10']:.1f}, {saved['p90']:.1f}] {share:.1f}%")
    return cells


def run(
    networks: list[Network],
    batches: list[int],
    peers: list[str],
    runner: Runner,
    pdl: bool | None = None,
    context: int = STEP_CONTEXT,
) -> None:
    """`pdl`: of the attention; None is its own choice. `context`: tokens of every request, or fewer where memory ends."""
    report = runner.report
    names = list(dict.fromkeys((BASELINE, *OURS, *peers)))
    others = [name for name in names if name != BASELINE]
    providers = runner.present([load(name) for name in names])
    widths = [15, 4, 11, *(max(10, len(name)) for name in names), *(26 for _ in others)]
    report.say(f"us per decode step, medians; saved against {BASELINE}: median [p10, p90] of paired differences")
    report.say(columns(["network", "B", "attention", *names, *(f"{n} saves" for n in others)], widths))

    def one(network: Network) -> None:
        weights = make_weights(network, torch.bfloat16)

        def at(batch: int) -> None:
            row = measure(network, batch, weights, providers, runner, pdl, context)
            report.add(row, columns(line(row, names), widths))

        runner.each(batches, at)

    runner.each(networks, one)
