"""Llama's decode step in plain PyTorch; rotation and cache write are one `rope_append_decode` per layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode_rope import rope_append_decode
from decode_rope.cache import PagedKVCache
from decode_rope.demo.attention import Attention
from decode_rope.tables import RopeTable


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int

    @classmethod
    def from_config(cls, config: Any) -> LlamaShape:
        """Read a Hugging Face `LlamaConfig`.

        Raises:
            ValueError: the model is not a Llama, or one with another activation than SiLU.
        """
        if config.model_type != "llama":
            raise ValueError(f"model: expected a Llama (model_type 'llama'), got {config.model_type!r}")
        if config.hidden_act != "silu":
            raise ValueError(f"model: expected hidden_act 'silu', got {config.hidden_act!r}")
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    post_norm: Tensor
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class PagedLlama:
    """Decodes one token per batch row; row i is request i of `cache`.

    Args:
        shape: the sizes.
        weights: tensors under Hugging Face's names (`model.layers.0.self_attn.q_proj.weight`, …). They are
            shared, not copied, but for the Q, K and V projections, which are joined into one.
        table: cosines and sines on the weights' device.
        cache: pages in the weights' dtype.
        attention: reads those pages, see `decode_rope.demo.attention`.
    """

    def __init__(
        self,
        shape: LlamaShape,
        weights: Mapping[str, Tensor],
        table: RopeTable,
        cache: PagedKVCache,
        attention: Attention,
    ) -> None:
        self.shape = shape
        self.table = table
        self.cache = cache
        self.attention = attention
        self._embedding = weights["model.embed_tokens.weight"]
        self._final_norm = weights["model.norm.weight"]
        # Tied models may ship no head of their own.
        self._head = weights.get("lm_head.weight", self._embedding)
        self._layers = [_read_layer(weights, f"model.layers.{i}.") for i in range(shape.num_hidden_layers)]

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Logits `[B, vocab_size]` for int64 `tokens` and `positions` `[B]`, after writing the cache.

        The slots of `positions` must be reserved in the cache. Rows with a negative position are padding:
        nothing of them is written, and their logits mean nothing.
        """
        self.attention.begin_step(positions)
        x = F.embedding(tokens, self._embedding)
        for index, layer in enumerate(self._layers):
            x = x + self._attend(self._norm(x, layer.input_norm), index, layer, positions)
            h = self._norm(x, layer.post_norm)
            gated = F.silu(F.linear(h, layer.gate, layer.gate_bias)) * F.linear(h, layer.up, layer.up_bias)
            x = x + F.linear(gated, layer.down, layer.down_bias)
        return F.linear(self._norm(x, self._final_norm), self._head)

    def _attend(self, h: Tensor, index: int, layer: _Layer, positions: Tensor) -> Tensor:
        shape = self.shape
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads)
        # Three views of one projection: neither Q, K nor V is copied before the launch.
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).unflatten(-1, (sum(heads), shape.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        rope_append_decode(
            q,
            k,
            v,
            *self.cache.layer(index),
            self.table,
            positions,
            block_table=self.cache.block_table,
            kv_layout=self.cache.kv_layout,
        )
        return F.linear(self.attention(q, index).flatten(1), layer.out, layer.out_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.shape.rms_norm_eps)
        return weight * wide.to(x.dtype)


def _read_layer(weights: Mapping[str, Tensor], prefix: str) -> _Layer:
    def joined(kind: str) -> Tensor:
        return torch.cat([weights[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"])

    return _Layer(
        input_norm=weights[prefix + "input_layernorm.weight"],
        qkv=joined("weight"),
        qkv_bias=joined("bias") if prefix + "self_attn.q_proj.bias" in weights else None,
        out=weights[prefix + "self_attn.o_proj.weight"],
        out_bias=weights.get(prefix + "self_attn.o_proj.bias"),
        post_norm=weights[prefix + "post_attention_layernorm.weight"],
        gate=weights[prefix + "mlp.gate_proj.weight"],
        gate_bias=weights.get(prefix + "mlp.gate_proj.bias"),
        up=weights[prefix + "mlp.up_proj.weight"],
        up_bias=weights.get(prefix + "mlp.up_proj.bias"),
        down=weights[prefix + "mlp.down_proj.weight"],
        down_bias=weights.get(prefix + "mlp.down_proj.bias"),
    )
