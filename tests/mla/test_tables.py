"""Rotary tables of models with multi-head latent attention: the pairing, YaRN's two factors, each in one place."""

import math

import pytest
import torch

from decode_rope import RopeTable

SIZES = dict(
    hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512,
    q_lora_rank=1536, v_head_dim=128,
)  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def g(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1


# name -> (config, attention_scaling, softmax_factor)
CONFIGS = {
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", "rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        1.0, g(40, 0.707) ** 2,
    ),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        1.0, g(40, 1) ** 2,
    ),
    "DeepSeek-V3.2": (
        {"model_type": "deepseek_v32", "rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        1.0, g(40, 1) ** 2,
    ),
    "Kimi-K2": (
        {"model_type": "kimi_k2", "rope_theta": 5e4,
         "rope_scaling": YARN | {"factor": 32.0, "beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        1.0, g(32, 1) ** 2,
    ),
    "GLM-4.7-Flash": ({"model_type": "glm4_moe_lite", "rope_theta": 1e6, "rope_interleave": True}, 1.0, 1.0),
    "GLM-5": ({"model_type": "glm_moe_dsa", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1.0, 1.0),
    "two mscales": (
        {"model_type": "deepseek_v3", "rope_theta": 1e4, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
        g(40, 1) / g(40, 0.5), g(40, 0.5) ** 2,
    ),
    "no mscale_all_dim": ({"model_type": "deepseek_v3", "rope_theta": 1e4, "rope_scaling": YARN}, g(40, 1), 1.0),
    "a factor of 1": (
        {"model_type": "deepseek_v3", "rope_theta": 1e4,
         "rope_scaling": YARN | {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        1.0, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_table_pairs_as_the_weights_do_and_holds_one_factor(name):
    config, in_the_table, in_the_softmax = CONFIGS[name]
    table = RopeTable.from_hf(SIZES | {"max_position_embeddings": 8192} | config, max_position=64)
    assert (table.rotary_dim, table.is_neox, table.axis_map) == (64, False, None)
    assert table.attention_scaling == pytest.approx(in_the_table)
    assert table.softmax_factor == pytest.approx(in_the_softmax)
    assert table.cos_sin_cache[0, :32].max().item() == pytest.approx(in_the_table), "cos 0 shows what is multiplied in"


def test_weights_of_halves():
    config = SIZES | {"model_type": "deepseek_v3", "max_position_embeddings": 64, "rope_theta": 1e4, "rope_interleave": False}
    assert RopeTable.from_hf(config).is_neox


def test_a_moved_table_keeps_its_factor():
    config, _, factor = CONFIGS["DeepSeek-V3"]
    table = RopeTable.from_hf(SIZES | config, max_position=8).to(torch.device("meta"))
    assert table.softmax_factor == pytest.approx(factor)
