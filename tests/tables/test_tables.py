"""RopeTable: its fields, every spelling of a config, layer types, errors, and how far each exactness is from the truth."""

import json
import math

import pytest
import torch

from decode_rope.tables import RopeTable, axes, scaling
from decode_rope.tables import table as tables
from decode_rope.tables.hf import config as hf_config

LLAMA = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "max_position_embeddings": 256, "rope_theta": 5e5}
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
GEMMA3 = {
    "model_type": "gemma3_text",
    "head_dim": 64,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}


def same(first, second):
    return (
        torch.equal(first.cos_sin_cache, second.cos_sin_cache)
        and torch.equal(first.inv_freq, second.inv_freq)
        and (first.rotary_dim, first.is_neox, first.attention_scaling)
        == (second.rotary_dim, second.is_neox, second.attention_scaling)
        and (first.axis_map is None) == (second.axis_map is None)
        and (first.axis_map is None or torch.equal(first.axis_map, second.axis_map))
    )


def test_fields():
    table = RopeTable.build(64, 100, theta=1e6, scaling={"rope_type": "yarn", **QWEN_YARN})
    cache = table.cos_sin_cache
    assert (cache.shape, cache.dtype, cache.device.type) == ((100, 64), torch.float32, "cpu")
    assert cache.is_contiguous()
    assert (table.rotary_dim, table.max_position, table.is_neox, table.axis_map) == (64, 100, True, None)
    assert table.inv_freq.shape == (32,)
    assert table.attention_scaling == pytest.approx(0.1 * math.log(4) + 1)
    angles = torch.arange(100)[:, None].double() * table.inv_freq.double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * table.attention_scaling
    torch.testing.assert_close(cache.double(), expected, rtol=0, atol=1e-5)
    assert "yarn factor=4" in repr(table)
    assert "max_position=100" in repr(table)


def test_frozen_and_moved():
    table = RopeTable.build(8, 4, axis_map=[0, 1, 1, 2])
    with pytest.raises(AttributeError):
        table.rotary_dim = 4
    assert table.to("cpu") is table
    moved = table.to("meta")
    assert (moved.device.type, moved.axis_map.device.type, moved.inv_freq.device.type) == ("meta", "meta", "cpu")
    assert RopeTable.build(8, 4, device="meta").device.type == "meta"
    assert table.axis_map.tolist() == [0, 1, 1, 2]
    assert table.axis_map.dtype == torch.int8


def test_chunks_do_not_show(monkeypatch):
    whole = {exactness: RopeTable.build(32, 1000, exactness=exactness) for exactness in ("hf", "fp64")}
    monkeypatch.setattr(tables, "_ROWS_AT_A_TIME", 7)
    for exactness, table in whole.items():
        assert same(table, RopeTable.build(32, 1000, exactness=exactness))


def test_default_device_and_dtype_do_not_matter():
    expected = RopeTable.build(32, 64)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert same(expected, RopeTable.build(32, 64))
    finally:
        torch.set_default_dtype(torch.float32)


def test_fp64_rounds_once():
    table = RopeTable.build(64, 300, theta=1e6, scaling={"rope_type": "yarn", **QWEN_YARN}, exactness="fp64")
    angles = torch.arange(300)[:, None].double() * table.inv_freq.double()
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * table.attention_scaling
    assert torch.equal(table.cos_sin_cache, expected.float())


SPELLINGS = {
    "rope_parameters": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, **QWEN_YARN}},
    "theta beside": {"rope_parameters": {"rope_type": "yarn", **QWEN_YARN}},
    "rope_scaling": {"rope_scaling": {"rope_type": "yarn", **QWEN_YARN}},
    "type": {"rope_scaling": QWEN_YARN},
    "deepseek_yarn": {"rope_scaling": {**QWEN_YARN, "type": "deepseek_yarn"}},
    "original length at the top": {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 128,
    },
    "inside text_config": None,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings_of_one_rope(name):
    config = {**LLAMA, **(SPELLINGS[name] or SPELLINGS["type"])}
    if name == "inside text_config":
        config = {"model_type": "llava", "vision_config": {"hidden_size": 3}, "text_config": config}
    expected = RopeTable.build(64, 512, 5e5, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    assert same(RopeTable.from_hf(config), expected)


def test_su_is_longrope():
    factors = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    config = {**LLAMA, "original_max_position_embeddings": 128}
    old = RopeTable.from_hf({**config, "rope_scaling": {"type": "su", **factors}})
    assert old.description == "longrope, long factors"
    assert same(old, RopeTable.from_hf({**config, "rope_scaling": {"type": "longrope", **factors}}))
    phi3 = RopeTable.from_hf({**config, "model_type": "phi3", "rope_scaling": {"type": "yarn", **factors}})
    assert same(old, phi3)


@pytest.mark.parametrize(("rows", "long", "factor"), [(128, None, 1.0), (129, None, 2.0), (128, True, 2.0), (129, False, 1.0)])
def test_long_is_decided_by_the_length_unless_given(rows, long, factor):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
    config = {**LLAMA, "original_max_position_embeddings": 128, "rope_scaling": rope}
    table = RopeTable.from_hf(config, max_position=rows, long=long)
    assert torch.equal(table.inv_freq, scaling.default(64, 5e5)[0] / factor)
    built = RopeTable.build(64, rows, 5e5, {**rope, "original_max_position_embeddings": 128, "factor": 2.0, "long": long})
    assert same(table, built)


PARTIAL = {
    "partial_rotary_factor": ({"model_type": "phi", "partial_rotary_factor": 0.4}, 80, 32),
    "in rope_parameters": ({"model_type": "phi", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}, 80, 32),
    "rotary_pct": ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 1e4}, 96, 24),
    "rotary_pct of the class": ({"model_type": "gpt_neox"}, 96, 24),
    "rotary_emb_fraction": ({"model_type": "own", "rotary_emb_fraction": 0.5, "rope_theta": 1e4}, 64, 32),
    "rotary_dim": ({"model_type": "gptj", "rotary_dim": 64}, 256, 64),
    "rotary_dim of MiniMax": ({"model_type": "minimax_m2", "rotary_dim": 64}, 128, 64),
    "rope_dim": ({"model_type": "own", "rope_parameters": {"rope_theta": 1e4, "rope_dim": 16}}, 64, 16),
    "rounded down": ({"model_type": "own", "rope_theta": 1e4, "partial_rotary_factor": 0.334}, 192, 64),
    "odd, rounded up": ({"model_type": "own", "rope_theta": 1e4, "partial_rotary_factor": 0.25}, 60, 16),
    "ignored by Llama": ({"model_type": "llama", "partial_rotary_factor": 0.5}, 64, 64),
    "not for a scaled type": (
        {"model_type": "llama", "partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64, 32,
    ),
    "MLA": ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "rope_theta": 1e4}, 192, 64),
    "ChatGLM": ({"model_type": "chatglm", "kv_channels": 128, "rope_ratio": 500}, 128, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_factors_under_all_their_names(name):
    config, head_dim, rotary_dim = PARTIAL[name]
    sizes = {} if "kv_channels" in config else {"head_dim": head_dim}
    assert RopeTable.from_hf({**config, **sizes}, max_position=8).rotary_dim == rotary_dim


def test_chatglm_multiplies_theta():
    table = RopeTable.from_hf({"model_type": "chatglm", "kv_channels": 128, "rope_ratio": 500, "seq_length": 16})
    assert same(table, RopeTable.build(64, 16, theta=5e6, is_neox=False))


@pytest.mark.parametrize(
    ("config", "is_neox"),
    [
        ({"model_type": "llama"}, True),
        ({"model_type": "cohere2"}, False),
        ({"model_type": "glm4"}, False),
        ({"model_type": "glm4_moe"}, True),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, False),
        ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64, "rope_interleave": False}, True),
        ({"model_type": "minicpm3", "qk_rope_head_dim": 32}, True),
        ({"model_type": "someone_s_mla", "qk_rope_head_dim": 64}, False),
    ],
)
def test_pairing_by_model_type(config, is_neox):
    assert RopeTable.from_hf({"head_dim": 64, "rope_theta": 1e4, **config}, max_position=8).is_neox is is_neox


def test_layer_types():
    sliding = RopeTable.from_hf(GEMMA3, layer_type="sliding_attention")
    full = RopeTable.from_hf(GEMMA3, layer_type="full_attention")
    assert same(sliding, RopeTable.build(64, 256))
    assert same(full, RopeTable.build(64, 256, 1e6, {"rope_type": "linear", "factor": 8.0}))
    assert same(RopeTable.from_hf(GEMMA3, layer_type=1), sliding)
    assert same(RopeTable.from_hf(GEMMA3, layer_type=2), full)
    both = GEMMA3["rope_parameters"]["sliding_attention"]
    alike = {**GEMMA3, "rope_parameters": {"sliding_attention": both, "full_attention": dict(both)}}
    assert same(RopeTable.from_hf(alike), sliding)


def test_layer_types_of_lists():
    config = {
        "model_type": "step3p5", "head_dim": 64, "max_position_embeddings": 32,
        "rope_theta": [5e6, 1e4, 1e4], "partial_rotary_factors": [0.5, 1.0, 1.0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip
    full = RopeTable.build(32, 32, 5e6, {"rope_type": "linear", "factor": 2.0})
    assert same(RopeTable.from_hf(config, layer_type=0), full)
    assert same(RopeTable.from_hf(config, layer_type="full_attention"), full)
    assert same(RopeTable.from_hf(config, layer_type=2), RopeTable.build(64, 32, 1e4))
    differing = {**config, "rope_theta": [5e6, 1e4, 2e4]}
    assert same(RopeTable.from_hf(differing, layer_type=2), RopeTable.build(64, 32, 2e4))
    with pytest.raises(ValueError, match="layers of type 'sliding_attention' differ; pass the index"):
        RopeTable.from_hf(differing, layer_type="sliding_attention")


def test_layer_theta_of_zero_is_nope():
    config = {**LLAMA, "model_type": "granite_swa", "layer_rope_theta": [1e4, 0, 5e5]}
    assert same(RopeTable.from_hf(config, layer_type=2), RopeTable.build(64, 256, 5e5))
    with pytest.raises(ValueError, match=r"layer_type=1 of model type 'granite_swa' .*cos_sin_cache=None"):
        RopeTable.from_hf(config, layer_type=1)
    with pytest.raises(ValueError, match=r"several kinds of layers; expected .*a layer index below 3, got None"):
        RopeTable.from_hf(config)


def test_molmo2_scales_some_layers():
    config = {**LLAMA, "model_type": "molmo2", "head_dim": 64, "num_hidden_layers": 3, "rope_scaling_layers": [1]}
    config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}
    assert same(RopeTable.from_hf(config, layer_type=0), RopeTable.build(64, 256, 1e6))
    assert same(RopeTable.from_hf(config, layer_type=1), RopeTable.build(64, 256, 1e6, {"rope_type": "linear", "factor": 2.0}))


@pytest.mark.parametrize(
    ("config", "rope", "nope"),
    [
        ({"model_type": "smollm3", "num_hidden_layers": 8}, [0, 1, 2, 4], [3, 7]),
        ({"model_type": "llama4", "no_rope_layers": [1, 0, 1]}, [0, 2], [1]),
        ({"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"]}, [0, "sliding_attention"], [1]),
        ({"model_type": "cohere2"}, ["sliding_attention"], ["full_attention"]),
        (
            {"model_type": "exaone4", "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
            [0],
            ["full_attention"],
        ),
        ({"model_type": "exaone4", "sliding_window": None, "layer_types": ["full_attention"]}, [0, "full_attention"], []),
        (
            {
                "model_type": "cohere2_moe",
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"],
            },
            [0, 1],
            [2],
        ),
    ],
)
def test_nope_layers(config, rope, nope):
    config = {**LLAMA, **config, "head_dim": 64}
    expected = RopeTable.from_hf(config)
    assert expected.rotary_dim == 64
    for layer_type in rope:
        assert same(RopeTable.from_hf(config, layer_type=layer_type), expected)
    for layer_type in nope:
        with pytest.raises(ValueError, match=r"no rotary embedding .*pass cos_sin_cache=None"):
            RopeTable.from_hf(config, layer_type=layer_type)


def test_per_layer_head_sizes():
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
    config = {"model_type": "gemma4_text", "head_dim": 256, "rope_parameters": rope, "max_position_embeddings": 8}
    config["layer_types"] = ["sliding_attention", "full_attention"]
    for extra, size in (({}, 512), ({"global_head_dim": 384}, 384), ({"per_layer_config": {"01": {"head_dim": 448}}}, 448)):
        table = RopeTable.from_hf({**config, **extra}, layer_type="full_attention")
        assert table.rotary_dim == size
        assert torch.count_nonzero(table.inv_freq) == size // 8
        assert RopeTable.from_hf({**config, **extra}, layer_type=0).rotary_dim == 256
    assert RopeTable.from_hf({**config, "per_layer_config": {}}, layer_type="full_attention").rotary_dim == 256


def test_per_layer_head_sizes_of_one_rope():
    config = {**LLAMA, "layer_types": ["full_attention"] * 3, "per_layer_config": {"2": {"head_dim": 32}}}
    assert [RopeTable.from_hf(config, layer_type=i).rotary_dim for i in range(3)] == [64, 64, 32]
    with pytest.raises(ValueError, match="several kinds of layers"):
        RopeTable.from_hf(config)


def test_axes():
    assert axes.chunked([2, 3, 1]) == (0, 0, 1, 1, 1, 2)
    assert axes.interleaved([3, 2, 2], 9) == (0, 1, 2, 0, 1, 2, 0, 0, 0)
    assert axes.ernie([2, 2, 3]) == (1, 2, 1, 2, 0, 0, 0)
    assert axes.alternating(4) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({"mrope_section": [8, 12, 12]}, axes.chunked([8, 12, 12])),
        ({"mrope_section": [12, 10, 10], "mrope_interleaved": True}, axes.interleaved([12, 10, 10], 32)),
        ({"xdrope_section": [8.0, 8.0, 8.0, 8.0]}, axes.chunked([8, 8, 8, 8])),
    ],
)
def test_axis_map_of_an_unknown_model_type(extra, expected):
    config = {**LLAMA, "model_type": "someone_s_vl", "rope_scaling": {"type": "default", **extra}}
    assert tuple(RopeTable.from_hf(config).axis_map.tolist()) == expected


class ConfigObject:
    """What a transformers config looks like from outside."""

    def __init__(self, values):
        self.values = values

    def to_dict(self):
        return self.values


def test_config_objects_and_dicts_read_alike():
    assert same(RopeTable.from_hf(ConfigObject(LLAMA)), RopeTable.from_hf(LLAMA))
    unchanged = json.dumps(GEMMA3)
    hf_config.read(GEMMA3)
    assert json.dumps(GEMMA3) == unchanged


def llama(**extra):
    return {**LLAMA, **extra}


@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (3, {}, TypeError, "config: expected the dict of a config.json or a transformers config, got int"),
        (GEMMA3, {}, ValueError, "'gemma3_text' has several kinds of layers; expected 'sliding_attention', 'full_attention', "
         "a layer index below 3, got None"),
        (GEMMA3, {"layer_type": "global"}, ValueError, "expected 'sliding_attention', 'full_attention'.*, got 'global'"),
        (GEMMA3, {"layer_type": 3}, ValueError, "expected a layer index below 3, got 3"),
        (LLAMA, {"layer_type": "sliding_attention"}, ValueError, "expected 'full_attention', got 'sliding_attention'"),
        (LLAMA, {"long": True}, ValueError, "long: only LongRoPE .* this rope_type is 'default'"),
        (LLAMA, {"exactness": "fp32"}, ValueError, "exactness: expected 'hf' or 'fp64', got 'fp32'"),
        (LLAMA, {"max_position": 0}, ValueError, "max_position: expected a number of rows above 0, got 0"),
        ({"model_type": "llama", "head_dim": 64}, {}, ValueError, "max_position: the config has no max_position_embeddings"),
        ({"model_type": "llama"}, {"max_position": 8}, ValueError, "head_dim: the config has neither it nor both hidden_size"),
        ({"model_type": "gpt2", "n_embd": 64, "n_head": 1}, {}, ValueError, "nothing in it says that model type 'gpt2' has a"),
        ({"model_type": "gemma4_text"}, {}, ValueError, "rope_parameters: 'gemma4' configs need them; pass transformers"),
        ({"model_type": "kimi_linear"}, {}, ValueError, "'kimi_linear' has no rotary embedding .*pass cos_sin_cache=None"),
        (llama(alibi=True), {}, ValueError, "has no rotary embedding"),
        (llama(position_embedding_type="nope"), {}, ValueError, "has no rotary embedding"),
        (llama(model_type="granitemoehybrid"), {}, ValueError, "has no rotary embedding"),
        (llama(model_type="zamba2", use_mem_rope=False), {}, ValueError, "has no rotary embedding"),
        (llama(model_type="glm_x", qk_rope_head_dim=0), {}, ValueError, "has no rotary embedding"),
        (
            {**GEMMA3, "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_theta": 1e4}}},
            {"layer_type": "full_attention"}, ValueError, r"no rotary embedding \(NoPE\); pass cos_sin_cache=None",
        ),
        ({"model_type": "olmo_hybrid", "head_dim": 8, "rope_parameters": {"rope_theta": None, "rope_type": "default"}}, {},
         ValueError, "no rotary embedding"),
        (llama(rope_scaling={"type": "fancy"}), {}, ValueError, "rope_type: expected one of .* got 'fancy'"),
        (llama(rope_scaling={"type": "linear"}), {}, ValueError, "'linear': missing factor"),
        (llama(rope_scaling={"type": "axial"}), {}, NotImplementedError, "vision tower"),
        (llama(rope_scaling={"type": "dynamic", "factor": 2.0}), {"max_position": 257}, NotImplementedError,
         "passes 256 tokens, and max_position is 257; pass max_position=256, or freeze it with seq_len=257"),
        (llama(rope_scaling={"rope_type": "default", "fope_init_factor": 0.5}), {}, NotImplementedError, "FoPE"),
        (llama(dual_chunk_attention_config={"chunk_size": 8}), {}, NotImplementedError, "dual chunk"),
        (llama(yarn={"factor": 4}), {}, NotImplementedError, r"params\.json"),
        (llama(model_type="mistral_large4_text"), {}, NotImplementedError, "LeRoPE"),
        (llama(model_type="dinov3_vit"), {}, NotImplementedError, "image"),
        (llama(model_type="qwen2_vl"), {}, ValueError, r"expected sections that add up to 32 pairs, got \[16, 24, 24\]"),
        (llama(model_type="own", partial_rotary_factor=4.0), {}, ValueError, "expected pairs within head_dim 64, got 256"),
        ({**GEMMA3, "layer_types": None, "per_layer_config": {"2": {"head_dim": 128}}}, {"layer_type": "full_attention"},
         ValueError, "layer_types: needed to read per_layer_config"),
    ],
)  # fmt: skip
def test_errors_of_from_hf(config, options, error, message):
    with pytest.raises(error, match=message):
        RopeTable.from_hf(config, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rotary_dim": 63}, "rotary_dim: expected an even number above 0, got 63"),
        ({"rotary_dim": 64.0}, "rotary_dim: expected an even number above 0, got 64.0"),
        ({"max_position": -1}, "max_position: expected a number of rows above 0, got -1"),
        ({"theta": 0}, "theta: expected a number above 0, got 0"),
        (
            {"theta": 5e5, "scaling": {"rope_theta": 1e6}},
            "theta: got 500000.0, but scaling has rope_theta=1000000.0; give it once",
        ),
        ({"axis_map": [0, 1]}, r"axis_map: expected 32 axes \(rotary_dim / 2\) of 0..127, got \[0, 1\]"),
        ({"axis_map": [-1] * 32}, "axis_map: expected 32 axes"),
        ({"scaling": {"rope_type": "yarn", "factor": 2.0}}, "'yarn': missing original_max_position_embeddings"),
        ({"scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope': missing short_factor, long_factor, original_max"),
        ({"scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic': missing max_position_embeddings"),
        ({"exactness": "exact"}, "exactness: expected 'hf' or 'fp64', got 'exact'"),
    ],
)
def test_errors_of_build(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeTable.build(**{"rotary_dim": 64, "max_position": 8, **arguments})


def test_theta_inside_scaling():
    assert same(RopeTable.build(64, 8, scaling={"rope_theta": 1e6}), RopeTable.build(64, 8, 1e6))


@pytest.mark.slow
def test_a_million_positions():
    table = RopeTable.build(32, 2**20, theta=1e7, exactness="fp64")
    angles = torch.tensor([[2**19], [2**20 - 1]]).double() * table.inv_freq.double()
    assert torch.equal(table.cos_sin_cache[[2**19, -1]], torch.cat((angles.cos(), angles.sin()), dim=-1).float())
