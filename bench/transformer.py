"""A decode step of a real model's size: random weights, our launch or another one between QKV and attention."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.attention import Attention
from bench.buffers import Case, Layer, default_device
from bench.workloads import TINY, Model


@dataclass(frozen=True)
class Network:
    """Sizes of one model, or of one tensor-parallel rank of it (heads and MLP divided, no all-reduce)."""

    name: str
    layers: int
    model: Model
    mlp: int
    qk_norm: bool = False


NETWORKS = {
    network.name: network
    for network in (
        Network("llama-3.2-1b", 16, Model("llama-3.2-1b", 32, 8, 64, 2048), 8192),
        Network("qwen3-0.6b", 28, Model("qwen3-0.6b", 16, 8, 128, 1024), 3072, qk_norm=True),
        Network("llama-3-8b", 32, Model("llama-3-8b", 32, 8, 128, 4096), 14336),
        Network("bielik-11b", 50, Model("bielik-11b", 32, 8, 128, 4096), 14336),
        Network("llama-3-70b-tp8", 80, Model("llama-3-70b-tp8", 8, 1, 128, 8192), 3584),
    )
}
TINY_NETWORK = Network("tiny", 2, TINY, 32, qk_norm=True)  # of a dry run without a GPU
EPS = 1e-6


@triton.jit
def _add_rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, n, eps, BLOCK: tl.constexpr):
    """residual += x; out = rms_norm(residual) * weight. One program a row."""
    row = tl.program_id(0).to(tl.int64) * n
    column = tl.arange(0, BLOCK)
    live = column < n
    x = tl.load(x_ptr + row + column, mask=live, other=0.0).to(tl.float32)
    x += tl.load(residual_ptr + row + column, mask=live, other=0.0).to(tl.float32)
    tl.store(residual_ptr + row + column, x.to(residual_ptr.dtype.element_ty), mask=live)
    scale = tl.rsqrt(tl.sum(x * x, 0) / n + eps)
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _silu_mul(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """out = silu(first half of the row) * second half."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < n
    gate = tl.load(x_ptr + row * 2 * n + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * n + n + column, mask=live, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * n + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _head_rms_norm(x_ptr, weight_ptr, stride, eps, D: tl.constexpr, HEADS: tl.constexpr):
    """RMS norm over each head, in place. One program a row and HEADS heads."""
    head = tl.arange(0, HEADS)[:, None] + tl.program_id(1) * HEADS
    column = tl.arange(0, D)[None, :]
    at = x_ptr + tl.program_id(0).to(tl.int64) * stride + head * D + column
    x = tl.load(at).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)
    weight = tl.load(weight_ptr + column).to(tl.float32)
    tl.store(at, (x * scale[:, None] * weight).to(x_ptr.dtype.element_ty))


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """Adds x to `residual` in place and returns the normalised sum, [T, hidden]."""
    out, n = torch.empty_like(x), x.shape[1]
    block = triton.next_power_of_2(n)
    _add_rms_norm[(x.shape[0],)](x, residual, weight, out, n, EPS, BLOCK=block, num_warps=8)
    return out


def silu_mul(x: Tensor) -> Tensor:
    """[T, 2 n] -> [T, n]."""
    n = x.shape[1] // 2
    out = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _silu_mul[(x.shape[0], triton.cdiv(n, 1024))](x, out, n, BLOCK=1024)
    return out


def head_rms_norm(x: Tensor, weight: Tensor) -> None:
    """x [T, heads, D], normalised in place over D; rows may be strided."""
    tokens, heads, head_dim = x.shape
    at_once = 8 if heads % 8 == 0 else 1
    _head_rms_norm[(tokens, heads // at_once)](x, weight, x.stride(0), EPS, D=head_dim, HEADS=at_once)


@dataclass
class Weights:
    """One layer; every matrix is [in, out]."""

    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    q_norm: Tensor
    k_norm: Tensor


def make_weights(network: Network, dtype: torch.dtype) -> list[Weights]:
    generator = torch.Generator(device=default_device()).manual_seed(3)
    model = network.model
    attended = model.num_q_heads * model.head_dim

    def matrix(rows: int, width: int) -> Tensor:
        x = torch.empty((rows, width), dtype=dtype, device=default_device())
        return x.normal_(std=rows**-0.5, generator=generator)

    def gain(width: int) -> Tensor:
        return 1 + 0.1 * torch.randn(width, dtype=dtype, device=default_device(), generator=generator)

    return [
        Weights(
            gain(model.hidden),
            matrix(model.hidden, model.heads * model.head_dim),
            matrix(attended, model.hidden),
            gain(model.hidden),
            matrix(model.hidden, 2 * network.mlp),
            matrix(network.mlp, model.hidden),
            gain(model.head_dim),
            gain(model.head_dim),
        )
        for _ in range(network.layers)
    ]


def decoder_layer(
    case: Case,
    weights: Weights,
    layer: Layer,
    x: Tensor,
    residual: Tensor,
    launch: Callable[[], Tensor],
    attend: Attention,
) -> Tensor:
    """One layer of the step; `layer.q`, `k` and `v` are slices of the QKV buffer written here."""
    width = case.model.heads * case.model.head_dim
    qkv = layer.q.as_strided((case.tokens, width), (width, 1))
    torch.mm(add_rms_norm(x, residual, weights.norm), weights.qkv, out=qkv)
    q = launch().view(case.tokens, case.model.num_q_heads, case.model.head_dim)
    attended = attend(q, layer.k_cache, layer.v_cache).view(case.tokens, -1)
    hidden = add_rms_norm(torch.mm(attended, weights.out), residual, weights.mlp_norm)
    return torch.mm(silu_mul(torch.mm(hidden, weights.gate_up)), weights.down)
