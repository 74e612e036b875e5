"""What attention gets, q and k after norm and rotation and v, is what transformers' own attention modules give it.

A small model with random weights runs in transformers; every attention layer is then done again from what it was given, by
`rope_append_prefill`, and k and v are read back from the pages.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

pytest.importorskip("transformers")

from hf_attention import Prologue, config_named, model_of, prologues

import decode_rope
from decode_rope import QKNorm, RopeTable

T, PAGE, BLOCKS = 9, 4, (5, 2, 7)
POSITIONS = torch.tensor([0, 1, 2, 3, 17, 18, 99, 100, 126])
# Rows of time, height and width that differ, as those of image tokens do.
AXES = torch.stack([POSITIONS, POSITIONS.flip(0) // 2 + 1, (POSITIONS * 7) % 61])
TOLERANCE = 1e-5
SIZES = dict(
    hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1, vocab_size=64,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def projected(attention, hidden):
    """q, k and v of modules that project each on its own."""
    return [heads(getattr(attention, name)(hidden), attention.head_dim) for name in ("q_proj", "k_proj", "v_proj")]


def heads(x, head_dim: int):
    return x.unflatten(-1, (-1, head_dim))


def q_and_gate(attention, hidden):
    """q and a gate side by side in one projection: the rows of q lie 2 · head_dim apart."""
    q = heads(attention.q_proj(hidden), 2 * attention.head_dim)[..., : attention.head_dim]
    assert q.stride(1) == 2 * attention.head_dim
    return [q, *(heads(getattr(attention, name)(hidden), attention.head_dim) for name in ("k_proj", "v_proj"))]


def packed(attention, hidden):
    qkv, dim = attention.qkv_proj(hidden), attention.head_dim
    q_width = qkv.shape[-1] - 2 * attention.num_key_value_heads * dim
    return [heads(x, dim) for x in qkv.split([q_width, (qkv.shape[-1] - q_width) // 2, (qkv.shape[-1] - q_width) // 2], dim=-1)]


def side_by_side(attention, hidden):
    """q, k and v of one head beside each other."""
    return heads(attention.query_key_value(hidden), 3 * attention.head_size).chunk(3, dim=-1)


def normed_before(attention, hidden):
    """A norm over all heads together is a launch of its own."""
    q, k = attention.q_norm(attention.q_proj(hidden)), attention.k_norm(attention.k_proj(hidden))
    return [heads(x, attention.head_dim) for x in (q, k, attention.v_proj(hidden))]


def shared_or_own(attention, hidden):
    """Gemma 4: some layers take k and v of an earlier one, some take k before its norm as v."""
    q = heads(attention.q_proj(hidden), attention.head_dim)
    if attention.is_kv_shared_layer:
        return q, None, None
    k = heads(attention.k_proj(hidden), attention.head_dim)
    return q, k, k if attention.v_proj is None else heads(attention.v_proj(hidden), attention.head_dim)


def no_norm(attention):
    return None


def of_heads(**options) -> Callable:
    """The norm of modules with `q_norm` and `k_norm`."""

    def norm(attention):
        k_weight = attention.k_norm.weight if hasattr(attention, "k_norm") else None
        eps = getattr(attention.q_norm, "eps", None) or attention.q_norm.variance_epsilon
        return QKNorm(attention.q_norm.weight, k_weight, eps, **options)

    return norm


def of_hunyuan(attention):
    q_norm, k_norm = attention.query_layernorm, attention.key_layernorm
    return QKNorm(q_norm.weight, k_norm.weight, q_norm.variance_epsilon, order="after")


def of_llama4(attention):
    return QKNorm(None, None, attention.qk_norm.eps, order="after") if hasattr(attention, "qk_norm") else None


def temperature(attention, positions):
    """Llama 4's factor of q in the layers that do not rotate."""
    if attention.use_rope:
        return None
    return torch.log1p(torch.floor((positions.float() + 1) / attention.floor_scale)) * attention.attn_scale + 1


@dataclass
class Model:
    """config, model: names of transformers' classes; `values` of the config beside SIZES.
    still: the layers that do not rotate. axes: whether positions have three rows."""

    config: str
    model: str
    values: dict = field(default_factory=dict)
    rows: Callable = projected
    norm: Callable = no_norm
    still: tuple[int, ...] = ()
    axes: bool = False
    scale: Callable | None = None
    positions: torch.Tensor = POSITIONS


GEMMA_LAYERS = dict(num_hidden_layers=2, head_dim=32, layer_types=["sliding_attention", "full_attention"], sliding_window=64)
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
MOE = dict(moe_intermediate_size=16, num_experts_per_tok=1)
MODELS = {
    "Llama": Model("LlamaConfig", "LlamaModel"),
    "Mistral": Model("MistralConfig", "MistralModel", dict(head_dim=32)),
    "Qwen2": Model("Qwen2Config", "Qwen2Model"),
    "Qwen3": Model("Qwen3Config", "Qwen3Model", dict(head_dim=32), norm=of_heads()),
    "Qwen3-Next": Model(
        "Qwen3NextConfig", "Qwen3NextModel", dict(head_dim=32, layer_types=["full_attention"], mlp_only_layers=[0]),
        rows=q_and_gate, norm=of_heads(weight_offset=1.0),
    ),
    "Gemma 3": Model("Gemma3TextConfig", "Gemma3TextModel", GEMMA_LAYERS, norm=of_heads(weight_offset=1.0)),
    "Gemma 4": Model(
        "Gemma4TextConfig", "Gemma4TextModel", GEMMA_LAYERS | dict(global_head_dim=64, hidden_size_per_layer_input=0),
        rows=shared_or_own, norm=of_heads(v_norm=True),
    ),
    "Gemma 4, K is V": Model(
        "Gemma4TextConfig", "Gemma4TextModel",
        GEMMA_LAYERS | dict(global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True, hidden_size_per_layer_input=0),
        rows=shared_or_own, norm=of_heads(v_norm=True),
    ),
    "Gemma 4, K and V of another layer": Model(
        "Gemma4TextConfig", "Gemma4TextModel",
        GEMMA_LAYERS | dict(
            num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
            global_head_dim=64, hidden_size_per_layer_input=8, vocab_size_per_layer_input=64,
        ),
        rows=shared_or_own, norm=of_heads(v_norm=True),
    ),
    "GLM-4": Model("Glm4Config", "Glm4Model", dict(head_dim=32)),
    "GLM-4.5": Model(
        "Glm4MoeConfig", "Glm4MoeModel", MOE | dict(head_dim=32, use_qk_norm=True, first_k_dense_replace=1, n_routed_experts=2),
        norm=of_heads(),
    ),
    "Cohere 2": Model(
        "Cohere2Config", "Cohere2Model", dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]), still=(1,)
    ),
    "OLMo 2": Model("Olmo2Config", "Olmo2Model", rows=normed_before),
    "Llama 4": Model(
        "Llama4TextConfig", "Llama4TextModel",
        dict(
            num_hidden_layers=2, head_dim=32, no_rope_layers=[1, 0], use_qk_norm=True, attn_temperature_tuning=True, floor_scale=2,
            attn_scale=0.3, moe_layers=[], intermediate_size_mlp=64, layer_types=["chunked_attention", "full_attention"],
        ),
        norm=of_llama4, still=(1,), scale=temperature, positions=torch.arange(T),
    ),
    "gpt-oss": Model("GptOssConfig", "GptOssModel", dict(head_dim=32, num_local_experts=2, num_experts_per_tok=1)),
    "Phi-3": Model("Phi3Config", "Phi3Model", rows=packed),
    "StableLM": Model("StableLmConfig", "StableLmModel"),
    "GPT-NeoX": Model("GPTNeoXConfig", "GPTNeoXModel", rows=side_by_side),
    "Qwen2.5-VL": Model(
        "Qwen2_5_VLTextConfig", "Qwen2_5_VLTextModel",
        dict(rope_parameters=PLAIN | {"mrope_section": [2, 3, 3]}), axes=True,
    ),
    "Qwen3-VL": Model(
        "Qwen3VLTextConfig", "Qwen3VLTextModel",
        dict(head_dim=32, rope_parameters=PLAIN | {"mrope_section": [8, 4, 4], "mrope_interleaved": True}),
        norm=of_heads(), axes=True,
    ),
    "HunYuan": Model("HunYuanDenseV1Config", "HunYuanDenseV1Model", dict(head_dim=32), norm=of_hunyuan),
    "SmolLM3": Model("SmolLM3Config", "SmolLM3Model", dict(num_hidden_layers=2, no_rope_layers=[1, 0]), still=(1,)),
}  # fmt: skip


def table_of(model: Model, config, layer: int) -> RopeTable | None:
    if layer not in model.still:
        return RopeTable.from_hf(config, layer_type=layer)
    with pytest.raises(ValueError, match="no rotary embedding"):
        RopeTable.from_hf(config, layer_type=layer)
    return None


def positions_of(model: Model) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions as we take them and as the model does."""
    return (AXES, AXES[:, None]) if model.axes else (model.positions, model.positions[None])


@torch.no_grad()
def ours(model: Model, config, layer: int, theirs: Prologue, prefill: bool):
    """q, and k and v as the pages hold them; no k and v where the layer has none of its own."""
    attention, positions = theirs.module, positions_of(model)[0]
    q, k, v = model.rows(attention, theirs.hidden)
    options = dict(norm=model.norm(attention), q_token_scale=model.scale and model.scale(attention, positions))
    table = table_of(model, config, layer)
    if k is None:
        return decode_rope.rope_append_prefill(q, None, None, None, None, table, positions, **options), None, None
    pages = torch.full((2, 8, PAGE, k.shape[1], k.shape[2]), float("nan"))
    options |= dict(block_table=torch.tensor([BLOCKS]), cache_positions=torch.arange(T))
    if prefill:
        q = decode_rope.rope_append_prefill(q, k, v, *pages, table, positions, cu_seqlens_q=torch.tensor([0, T]), **options)
    else:
        q = decode_rope.rope_append_decode(q, k, v, *pages, table, positions, tokens_per_request=T, **options)
    return q, *(cache[list(BLOCKS)].flatten(0, 1)[:T] for cache in pages)


@pytest.mark.parametrize("function", ["prefill", "decode"])
@pytest.mark.parametrize("name", MODELS)
def test_attention_gets_what_the_model_gives_it(name, function):
    model = MODELS[name]
    config = config_named(model.config, **{**SIZES, **model.values})
    found = prologues(model_of(config, model.model), input_ids=torch.arange(3, 3 + T)[None], position_ids=positions_of(model)[1])
    assert len(found) == config.num_hidden_layers
    for layer, theirs in enumerate(found):
        got = ours(model, config, layer, theirs, function == "prefill")
        for what, x, y in zip("qkv", got, (theirs.q, theirs.k, theirs.v), strict=True):
            if x is not None:
                torch.testing.assert_close(x, y, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, at=(what, layer): f"{at}: {text}")


def test_a_norm_over_all_heads_together_is_an_error_that_says_what_to_do():
    """OLMo 2's weights have num_heads · head_dim elements."""
    config = config_named("Olmo2Config", **SIZES)
    attention = model_of(config, "Olmo2Model").layers[0].self_attn
    q = torch.randn(T, 4, 16)
    for name, projection in (("q_weight", attention.q_norm), ("k_weight", attention.k_norm)):
        norm = QKNorm(None, None, 1e-6)._replace(**{name: projection.weight.detach()})
        said = rf"norm\.{name}: expected shape \[16\].*over all heads together needs a launch of its own"
        with pytest.raises(ValueError, match=said):
            decode_rope.rope_append_prefill(q, None, None, None, None, RopeTable.from_hf(config), POSITIONS, norm=norm)
