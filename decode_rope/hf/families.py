"""Model families: how their attention modules project, and what of them is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import QKNorm, RopeTable

Heads = tuple[Tensor, Tensor, Tensor]


def _separate(module: Any, x: Tensor, head_dim: int) -> Heads:
    q, k, v = (project(x).unflatten(-1, (-1, head_dim)) for project in (module.q_proj, module.k_proj, module.v_proj))
    return q, k, v


def _separate_layer_norm(module: Any, x: Tensor, head_dim: int) -> Heads:
    q, k, v = _separate(module, x, head_dim)
    if module.qk_layernorm:  # a LayerNorm for each head, with weights of its own: not what `QKNorm` is
        q, k = (
            norm(heads[None].transpose(1, 2)).transpose(1, 2)[0].contiguous()
            for norm, heads in ((module.q_layernorm, q), (module.k_layernorm, k))
        )
    return q, k, v


def _stacked(module: Any, x: Tensor, head_dim: int) -> Heads:
    config = module.config
    heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
    q, k, v = module.qkv_proj(x).unflatten(-1, (-1, head_dim)).split(heads, dim=1)
    return q, k, v


def _head_by_head(module: Any, x: Tensor, head_dim: int) -> Heads:
    q, k, v = module.query_key_value(x).unflatten(-1, (-1, 3 * head_dim)).chunk(3, dim=-1)
    return q, k, v


class Family(NamedTuple):
    """What tells the attention module of one family from Llama's.

    Attributes:
        attention: name of its class, in the `modeling_` file of the family.
        project: module, input `[T, hidden]` and head_dim to q, k, v `[T, heads, head_dim]`.
        output: attribute with the projection of the result.
        windowed: whether all layers attend within `config.sliding_window`, where there is one; else the module says.
        rope_of_layers: whether layer types have rotary tables of their own.
        weight_offset: added to the weights of QK-norm.
    """

    attention: str
    project: Callable[[Any, Tensor, int], Heads] = _separate
    output: str = "o_proj"
    windowed: bool = False
    rope_of_layers: bool = False
    weight_offset: float = 0.0


FAMILIES = {
    "llama": Family("LlamaAttention"),
    "mistral": Family("MistralAttention", windowed=True),
    "qwen2": Family("Qwen2Attention"),
    "qwen3": Family("Qwen3Attention"),
    "gemma3_text": Family("Gemma3Attention", rope_of_layers=True, weight_offset=1.0),
    "glm4": Family("Glm4Attention"),
    "gpt_oss": Family("GptOssAttention"),
    "phi3": Family("Phi3Attention", _stacked, windowed=True),
    "stablelm": Family("StableLmAttention", _separate_layer_norm),
    "gpt_neox": Family("GPTNeoXAttention", _head_by_head, "dense"),
    "smollm3": Family("SmolLM3Attention"),
}

_LATENT = "its cache holds one latent per token (MLA), not K and V heads"
_IMAGES = "its prompts hold images, whose tokens have positions or masks of their own; load its text model alone"
_WIDE_NORM = "its QK-norm is over all heads at once, and `QKNorm` is over each head"
_STATES = "some of its layers keep a recurrent state instead of K and V"
_NO_ROPE = "it has no rotary embedding"
REASONS = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k25", "minicpm3", "longcat_flash"), _LATENT),
    **dict.fromkeys(("gemma3", "llama4", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "mllama"), _IMAGES),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe"), _WIDE_NORM),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "jamba", "bamba", "falcon_h1", "mamba", "mamba2", "lfm2", "zamba2"), _STATES),
    **dict.fromkeys(("gpt2", "opt", "bloom", "mpt", "gpt_neo"), _NO_ROPE),
    **dict.fromkeys(("gemma2", "gemma3n_text"), "its scores pass through tanh (softcapping)"),
    "llama4_text": "its layers attend within chunks",
    "gemma4_text": "its kinds of layers have heads of two sizes, and some use another layer's K and V",
}


@dataclass(frozen=True)
class Support:
    """The answer of `supports`: true if supported; else `reason` says why not."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        return self.reason or "supported"


def supports(model_or_config: Any) -> Support:
    """Whether `PagedModel` and `enable` serve a model, or why they do not.

    Args:
        model_or_config: a transformers model, or its config. A model is looked at more closely: mode and devices too.

    Returns:
        `Support()`, which is true, or `Support(reason)`, which is false.
    """
    is_model = isinstance(model_or_config, nn.Module)
    config = getattr(model_or_config, "config", None) if is_model else model_or_config
    reason = _config_reason(config)
    if not reason and is_model:
        reason = _model_reason(model_or_config)
    return Support(reason)


def _config_reason(config: Any) -> str:
    name = getattr(config, "model_type", None)
    if not isinstance(name, str):
        return f"model: expected a transformers model or config with a model_type, got {type(config).__name__}"
    if name not in FAMILIES:
        why = REASONS.get(name, "nothing here knows its attention")
        return f"{name}: {why}. Supported: {', '.join(FAMILIES)}"
    if getattr(config, "use_bidirectional_attention", False):
        return f"{name}: use_bidirectional_attention lets tokens attend to later ones, which are not in the cache yet"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"{name}: attn_logit_softcapping={config.attn_logit_softcapping}: its scores pass through tanh"
    try:
        _table(config, 0, max_position=1, device="cpu")
    except (ValueError, NotImplementedError) as error:
        return f"{name}: {error}"
    return ""


def _model_reason(model: Any) -> str:
    name = model.config.model_type
    if model.training:
        return f"{name}: the model is in training mode, and dropout has no place here; call model.eval()"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return f"{name}: its weights are on {len(devices)} devices, and one cache is on one; load it with device_map={{'': 0}}"
    dtypes = {module.weight.dtype for module in model.modules() if type(module) is nn.Linear}
    if dtypes - {torch.float32, torch.float16, torch.bfloat16}:
        return f"{name}: expected weights of float32, float16 or bfloat16, got {', '.join(map(str, dtypes))}"
    return ""


class Layer(NamedTuple):
    """One attention layer of a model: its module, and what an append and an attention must know of it.

    Attributes:
        table: a `RopeTable`, or None where nothing rotates.
        norm: a `QKNorm` or None.
        scale: factor of the scores.
        window: a token sees itself and `window - 1` before it; None: all.
        sinks: `[num_q_heads]` logits beside the scores (gpt-oss), or None.
    """

    index: int
    module: Any
    family: Family
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    table: RopeTable | None
    norm: QKNorm | None
    scale: float
    window: int | None
    sinks: Tensor | None

    def project(self, x: Tensor) -> Heads:
        """q, k, v `[T, heads, head_dim]` of the hidden states `[T, hidden]`."""
        return self.family.project(self.module, x, self.head_dim)

    def output(self, x: Tensor) -> Tensor:
        """The hidden states of attention's result `[T, num_q_heads, head_dim]`."""
        return getattr(self.module, self.family.output)(x.flatten(1))


def attention_modules(model: nn.Module) -> list[Any]:
    """The attention modules of a supported model, in the order of its layers."""
    name = FAMILIES[model.config.model_type].attention
    found = [module for module in model.modules() if name in (base.__name__ for base in type(module).__mro__)]
    return sorted(found, key=lambda module: module.layer_idx)


def read_layers(model: nn.Module, max_position: int) -> list[Layer]:
    """The layers of a supported model, with rotary tables of `max_position` rows on its device."""
    tables: dict[str, RopeTable | None] = {}
    return [read_layer(module, max_position, tables) for module in attention_modules(model)]


def read_layer(module: Any, max_position: int, tables: dict[str, RopeTable | None]) -> Layer:
    """What `module` is; its table is taken from `tables`, or built and put there."""
    config = module.config
    family = FAMILIES[config.model_type]
    weight = next(module.parameters())
    kind = kind_of(module)
    if kind not in tables:
        rotates = kind != "none"
        tables[kind] = _table(config, module.layer_idx, max_position=max_position, device=weight.device) if rotates else None
    norm = None
    if hasattr(module, "q_norm"):
        # Rounded where the model's own modules round.
        norm = QKNorm(
            module.q_norm.weight.detach(), module.k_norm.weight.detach(), config.rms_norm_eps, family.weight_offset, rounded=True
        )
    head_dim = module.head_dim if hasattr(module, "head_dim") else module.head_size
    window = config.sliding_window if family.windowed else getattr(module, "sliding_window", None)
    sinks = getattr(module, "sinks", None)
    return Layer(
        index=module.layer_idx,
        module=module,
        family=family,
        num_q_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        table=tables[kind],
        norm=norm,
        scale=module.scaling,
        window=window,
        sinks=None if sinks is None else sinks.detach(),
    )


def kind_of(module: Any) -> str:
    """Layers of one kind share a rotary table; "none" has none."""
    if not getattr(module, "use_rope", True):
        return "none"
    return module.layer_type if FAMILIES[module.config.model_type].rope_of_layers else "all"


def _table(config: Any, index: int, *, max_position: int, device: torch.device | str) -> RopeTable:
    per_layer = FAMILIES[config.model_type].rope_of_layers
    layer_type = config.layer_types[index] if per_layer else None
    return RopeTable.from_hf(config, max_position=max_position, layer_type=layer_type, device=device)
