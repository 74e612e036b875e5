"""One attention layer of transformers' DeepSeek-V2 and V3 against this package, up to its latent cache: the rotated parts of q, the
latents and the keys that it caches, and the factor of its softmax."""

import pytest
import torch

import decode_rope
from decode_rope import LatentNorm, RopeTable

pytest.importorskip("transformers")
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.7}
SIZES = dict(
    hidden_size=48, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
    qk_rope_head_dim=8, v_head_dim=16, head_dim=8, max_position_embeddings=256, num_hidden_layers=1, attn_implementation="eager",
)  # fmt: skip


class Seen(Exception):
    """What a layer would put into its cache."""


class Spy:
    def update(self, latents, keys, layer, **_):
        raise Seen(latents, keys)


def seen_by(attention, hidden, embeddings) -> tuple[torch.Tensor, torch.Tensor]:
    """(latents `[T, L]`, rotated keys `[T, R]`) that a layer caches."""
    try:
        attention(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None, cache=Spy())
    except Seen as found:
        latents, keys = found.args
        return latents[0, 0], keys[0, 0]
    raise AssertionError("the layer cached nothing")


def layer_of(version: int, rope: dict, **options):
    """(attention, config, rotary embedding, its rotation of (q, k, embeddings)) of a small random layer."""
    if version == 2:
        from transformers.models.deepseek_v2 import configuration_deepseek_v2 as configuration
        from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling

        config = configuration.DeepseekV2Config(**SIZES, **options, rope_parameters={"rope_theta": 1e4} | rope)
        attention, embedding = modeling.DeepseekV2Attention(config, 0), modeling.DeepseekV2RotaryEmbedding(config)
        rotation = modeling.apply_rotary_emb
    else:
        from transformers.models.deepseek_v3 import configuration_deepseek_v3 as configuration
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modeling

        config = configuration.DeepseekV3Config(**SIZES, **options, rope_parameters={"rope_theta": 1e4} | rope)
        attention, embedding = modeling.DeepseekV3Attention(config, 0), modeling.DeepseekV3RotaryEmbedding(config)
        interleaved = config.rope_interleave
        apply = modeling.apply_rotary_pos_emb_interleave if interleaved else modeling.apply_rotary_pos_emb

        def rotation(q, k, embeddings):
            return apply(q, k, *embeddings)

    return attention.eval(), config, embedding, rotation


CASES = {
    "V3": (3, {"rope_type": "default"}, {}, False),
    "V3, yarn": (3, YARN, {}, False),
    "V3, halves": (3, YARN, {"rope_interleave": False}, None),
    "V2": (2, {"rope_type": "default"}, {}, None),
    "V2, yarn": (2, YARN, {}, None),
}


@pytest.mark.anywhere
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_layer_caches_what_this_package_caches(name, device):
    version, rope, options, interleaved_out = CASES[name]
    torch.manual_seed(0)
    attention, config, embedding, rotation = layer_of(version, rope, **options)
    attention.kv_a_layernorm.weight.copy_(torch.rand_like(attention.kv_a_layernorm.weight) + 0.5)
    attention, embedding = attention.to(device), embedding.to(device)
    num_tokens, nope, rope_dim, latent_dim = 7, SIZES["qk_nope_head_dim"], SIZES["qk_rope_head_dim"], SIZES["kv_lora_rank"]
    hidden = torch.randn(1, num_tokens, SIZES["hidden_size"], device=device)
    positions = torch.tensor([0, 1, 2, 40, 41, 200, 255], device=device)
    embeddings = embedding(hidden, positions[None])
    latents, keys = seen_by(attention, hidden, embeddings)
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))[0].view(num_tokens, 4, nope + rope_dim)
    kv = attention.kv_a_proj_with_mqa(hidden)[0]
    wanted_q, _ = rotation(q[None, ..., nope:].transpose(1, 2), q[None, :, :1, nope:].transpose(1, 2), embeddings)

    table = RopeTable.from_hf(config.to_dict(), device=device)
    assert table.rotary_dim == rope_dim and table.softmax_factor * (nope + rope_dim) ** -0.5 == pytest.approx(attention.scaling)
    cache = torch.zeros(4, 4, latent_dim + rope_dim, device=device)
    norm = LatentNorm(attention.kv_a_layernorm.weight, attention.kv_a_layernorm.variance_epsilon)
    got = decode_rope.rope_append_mla_decode(
        q[..., nope:], kv[:, latent_dim:], kv[:, :latent_dim], cache, table, positions,
        slot_mapping=torch.arange(num_tokens, device=device), kv_norm=norm, interleaved_out=interleaved_out,
    )  # fmt: skip
    rows = cache.view(-1, latent_dim + rope_dim)[:num_tokens]
    torch.testing.assert_close(rows[:, :latent_dim], latents, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows[:, latent_dim:], keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got, wanted_q[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_without_a_change_of_order_scores_are_the_same():
    """The pairing that is written permutes q and keys alike."""
    torch.manual_seed(0)
    table = RopeTable.build(8, 64, is_neox=False)
    scores = []
    for interleaved_out in (True, False):
        generator = torch.Generator().manual_seed(1)
        q, k, kv = (torch.randn(shape, generator=generator) for shape in ((5, 3, 8), (5, 8), (5, 16)))
        cache = torch.zeros(5, 1, 24)
        decode_rope.rope_append_mla_decode(
            q, k, kv, cache, table, torch.arange(5) * 7, slot_mapping=torch.arange(5), interleaved_out=interleaved_out
        )
        scores.append(torch.einsum("thr,sr->ths", q, cache[:, 0, 16:]))
    torch.testing.assert_close(*scores)
