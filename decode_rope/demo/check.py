"""Greedy decoders that know nothing of this package's pages: what the demo's tokens must equal."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_rope.demo.model import LlamaShape


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens in which two outputs agree."""
    length = 0
    for left, right in zip(a, b, strict=False):
        if left != right:
            break
        length += 1
    return length


def hugging_face_greedy(model: Any, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """New tokens of Hugging Face's own `generate`, one prompt at a time, with its contiguous cache."""
    ids = torch.tensor([list(prompt)], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    return out[0, len(prompt) :].tolist()


def dense_greedy(
    shape: LlamaShape,
    weights: Mapping[str, Tensor],
    cos_sin: Tensor,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: Collection[int] = (),
) -> list[int]:
    """New tokens from recomputing the whole sequence at every step, without a cache.

    Stands in for `hugging_face_greedy` where transformers is not installed; bias-free models only.

    Args:
        cos_sin: fp32 `[max_position, head_dim]`, cosines then sines.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(int(_last_logits(shape, weights, cos_sin, tokens).argmax()))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@torch.inference_mode()
def _last_logits(shape: LlamaShape, weights: Mapping[str, Tensor], cos_sin: Tensor, tokens: Sequence[int]) -> Tensor:
    embedding = weights["model.embed_tokens.weight"]
    x = embedding[torch.tensor(tokens, device=embedding.device)]
    cos, sin = (half.repeat(1, 2) for half in cos_sin[: len(tokens)].chunk(2, dim=-1))

    def linear(h: Tensor, name: str) -> Tensor:
        return h @ weights[name + ".weight"].T

    def norm(h: Tensor, name: str) -> Tensor:
        return F.rms_norm(h, (shape.hidden_size,), weights[name + ".weight"], shape.rms_norm_eps)

    def turned(h: Tensor) -> Tensor:
        left, right = h.float().chunk(2, dim=-1)
        return (h * cos + torch.cat((-right, left), dim=-1) * sin).to(h.dtype)

    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}."
        h = norm(x, layer + "input_layernorm")
        q, k, v = (linear(h, f"{layer}self_attn.{kind}_proj").unflatten(-1, (-1, shape.head_dim)).transpose(0, 1) for kind in "qkv")
        a = F.scaled_dot_product_attention(turned(q)[None], turned(k)[None], v[None], is_causal=True, enable_gqa=True)
        x = x + linear(a[0].transpose(0, 1).flatten(1), layer + "self_attn.o_proj")
        h = norm(x, layer + "post_attention_layernorm")
        gated = F.silu(linear(h, layer + "mlp.gate_proj")) * linear(h, layer + "mlp.up_proj")
        x = x + linear(gated, layer + "mlp.down_proj")
    head = weights.get("lm_head.weight", embedding)
    return norm(x[-1], "model.norm") @ head.T
