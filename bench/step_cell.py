"""One cell of `step`: a whole decode step of one network, batch and context in a CUDA graph, measured in this process.

Every layer: RMSNorm, QKV projection, rotate-and-append, attention, output projection, RMSNorm, MLP. Embedding and LM head are left
out. All steps share weights, caches and attention; they are replayed in turn.
"""

import contextlib
import ctypes
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.attention import Attention, make_attention
from bench.buffers import Case, Layer, Meta, decode_meta, default_device, make_layers
from bench.providers import Provider, Unavailable, load
from bench.providers.ours import Bound
from bench.report import rounded
from bench.runner import Runner, passed
from bench.stats import summarize
from bench.transformer import EPS, Network, Weights, decoder_layer, head_rms_norm, make_weights
from bench.workloads import PAGE_SIZE

TOLERANCE = 0.03  # bf16 through tens of layers: 0.024 in 80 of them (H200)
_ROOM = 6 << 30  # bytes for libraries, workspaces, graphs and what is allocated first

Launch = Callable[[], Tensor]


@dataclass(frozen=True)
class Cell:
    """context: tokens of every request."""

    network: Network
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.network.name} B={self.batch} context={self.context}"

    def bytes(self) -> int:
        """Of the weights and the caches."""
        network, model = self.network, self.network.model
        projections = model.hidden * (model.heads + model.num_q_heads) * model.head_dim
        pages = self.batch * -(-self.context // PAGE_SIZE)
        cached = 2 * pages * PAGE_SIZE * model.num_kv_heads * model.head_dim
        return 2 * network.layers * (projections + 3 * model.hidden * network.mlp + cached)

    def too_large(self) -> str | None:
        """Why it does not fit on the GPU, or None. Known without touching the GPU's memory."""
        if not torch.cuda.is_available():
            return None
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        if self.bytes() + _ROOM <= there:
            return None
        return f"needs {self.bytes() / 1e9:.1f} GB and {_ROOM / 1e9:.1f} GB of room; the GPU has {there / 1e9:.1f} GB"


def first_sizes(process: int) -> list[int]:
    """Bytes that process number `process` allocates before anything else, so that all that comes later lies elsewhere.

    None in process 0; in the others some hundred MB in odd sizes, the same ones in every run.
    """
    if process == 0:
        return []
    draw = random.Random(process).randrange
    small, middle, large = ([draw(1 << low, 1 << high) for _ in range(4)] for low, high in ((9, 20), (20, 24), (24, 27)))
    return [*small, *middle, *large]


def die_with_parent() -> None:
    """A child that outlives the mode would disturb whoever measures next."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


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
    start: Tensor,
) -> Launch:
    """The whole step, from the same hidden states `start` in every call and for every provider; returns the last layer's."""
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


def measure(cell: Cell, providers: list[Provider], runner: Runner, process: int, pdl: bool | None, dry: bool) -> dict[str, Any]:
    """One JSON row: microseconds a step by provider. A dry run verifies and times nothing.

    `pdl`: of the attention; None is its own choice.
    """
    sizes = first_sizes(process) if torch.cuda.is_available() else []
    kept = [torch.empty(size, dtype=torch.uint8, device=default_device()) for size in sizes]
    network = cell.network
    # Triton's interpreter knows no bf16 matrix product.
    case = Case(network.model, cell.batch, dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    weights = make_weights(network, case.dtype)
    meta = decode_meta(case, cell.context, 0, full=True)
    layers = make_layers(case, meta, network.layers, 0, fill=True)
    attention, attend = make_attention(case, meta, pdl)
    generator = torch.Generator(device=case.device).manual_seed(2)
    start = torch.randn((case.tokens, case.model.hidden), device=case.device, generator=generator).to(case.dtype)
    status = runner.verified(providers, case)
    by_name = {p.name: p for p in passed(providers, status)}

    def build(name: str) -> Launch:
        def make() -> Launch:
            return make_step(by_name[name], network, case, meta, layers, weights, attend, start)

        step = make()
        if getattr(by_name[name], "tuned", False) and not dry:
            by_name[name].tune(lambda: make()(), case, meta)
            step = make()
        return step

    steps = agreeing(runner.build_each(by_name, build, case), runner, case)
    status |= {name: "fail" for name in by_name if name not in steps}
    samples: dict[str, list[float]] = {}
    if not dry:
        replays = runner.build_each(steps, lambda name: timing.capture([steps[name]]).replay, case)
        samples = runner.sample(replays, target_us=2000.0)
    row = {"network": network.name, "layers": network.layers, "tokens": cell.batch, "context": cell.context, "attention": attention}
    row |= {"process": process, "allocated_first_bytes": sum(x.numel() for x in kept), "status": status}
    row["us"] = {name: summarize(values).as_dict() for name, values in samples.items()}
    return row | {"samples": {name: rounded(values) for name, values in samples.items()}}


def run(cell: Cell, names: tuple[str, ...], runner: Runner, process: int, pdl: bool | None, dry: bool) -> bool:
    """Measures the cell as process number `process`; whether it could."""
    die_with_parent()
    providers = runner.present([load(name) for name in dict.fromkeys(names)])
    runner.each([cell], lambda _: runner.report.add(measure(cell, providers, runner, process, pdl, dry), str(cell)))
    return bool(runner.report.rows)
