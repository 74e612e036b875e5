"""Tables from model configurations are bit-equal to what transformers' own rotary modules compute, for its whole registry.

Known deviations, each with a test of its own below:

* llama4, deepseek_v2: transformers takes `torch.polar`, whose cos and sin are up to 1 ulp from `torch.cos` / `torch.sin`.
* nanochat: its `rotate_half` has the other sign; our frequencies are negative, so the usual rotation gives its result.
* ernie4_5_vl_moe: transformers stores the frequencies permuted and undoes it on cos and sin; only `inv_freq` differs.
* minimax_m3_vl: its class keeps `rotary_dim` without reading it; we rotate `rotary_dim` dims, as its documentation says.
* hunyuan_vl with different rows of positions: transformers splits the doubled head, so the two halves of one pair take
  different axes; we give each pair one axis, as the model's release and vLLM do. With equal rows all agree.
* phimoe past the trained length: transformers keeps the short factors and only changes the scale; we take the long ones.
* nested parameters with `truncate: false`: transformers reads the key at the top level only; we read the layer's own.
* mistral4 with the default rope type: transformers would rotate the whole head; we rotate `qk_rope_head_dim` as for YaRN.
"""

import copy
import json

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import (
    EXTRA,
    LATENT,
    MODEL_TYPES,
    MULTI_AXIS,
    NEWEST,
    NOT_COVERED,
    UNINTERLEAVES,
    Theirs,
    axes_of,
    config_class,
    config_of,
    each_parameters,
    kinds,
    their_rotation,
    transformers_version,
)  # fmt: skip
from hf_published import PUBLISHED

from decode_rope.tables import RopeTable
from decode_rope.tables import table as tables
from decode_rope.tables.hf import config as hf_config
from decode_rope.tables.hf import families as hf_families

ROWS = 4096
POSITIONS = (0, 1, 4095)
FAR = 131071
POLAR = ("llama4_text", "deepseek_v2")


def gathered(table, positions):
    """cos and sin `[T, pairs]` at `positions` `[axes, T]`, each pair from the row of its axis."""
    pairs = table.inv_freq.shape[0]
    rows = table.cos_sin_cache[positions[table.axis_map.long()].T, torch.arange(pairs)]
    return rows, table.cos_sin_cache[positions[table.axis_map.long()].T, torch.arange(pairs) + pairs]


def rotate(x, table, positions):
    """Rotary embedding of `x [T, D]` by the table's convention: the plain statement of what every kernel here does."""
    pairs, dim = table.inv_freq.shape[0], table.rotary_dim
    cos, sin = table.cos_sin_cache[torch.as_tensor(positions)].split(pairs, dim=-1)
    first, second = (slice(0, pairs), slice(pairs, dim)) if table.is_neox else (slice(0, dim, 2), slice(1, dim, 2))
    out = x.clone()
    out[:, first] = x[:, first] * cos - x[:, second] * sin
    out[:, second] = x[:, second] * cos + x[:, first] * sin
    return out


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_model_type_is_bit_equal(model_type):
    config = config_of(model_type)
    for layer_type in kinds(config):
        table = RopeTable.from_hf(config, max_position=ROWS, layer_type=layer_type)
        if model_type == "minimax_m3_vl_text":
            assert table.rotary_dim == config.rotary_dim == 64
            continue
        theirs = Theirs(model_type, config, layer_type)
        if theirs.inv_freq is not None and model_type != "ernie4_5_vl_moe_text":
            sign = -1 if model_type == "nanochat" else 1
            assert torch.equal(sign * theirs.inv_freq, table.inv_freq)
        if model_type in ("gptj", "codegen"):  # theirs is a table too, of max_position_embeddings rows
            compare_rows(theirs, table.cos_sin_cache[[0, 1, 2047]], [0, 1, 2047])
        else:
            compare_rows(theirs, table.cos_sin_cache[list(POSITIONS)], POSITIONS)
            compare_rows(theirs, tables.rows(table.inv_freq, table.attention_scaling, FAR, FAR + 1), [FAR])


def compare_rows(theirs, ours, positions):
    cos, sin = theirs.cos_sin(positions)
    expected = torch.cat((cos, -sin if theirs.model_type == "nanochat" else sin), dim=-1)
    if theirs.model_type not in POLAR:
        assert torch.equal(expected, ours)
        return
    ulp = torch.nextafter(ours.abs(), torch.tensor(torch.inf)) - ours.abs()
    assert ((expected - ours).abs() <= ulp).all()


@pytest.mark.slow
def test_no_model_type_is_forgotten():
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if transformers_version() > NEWEST:
        pytest.skip(f"the list was made with transformers {NEWEST}")
    with_rope = set()
    for name in CONFIG_MAPPING:
        try:
            cls = CONFIG_MAPPING[name]
        except ImportError:
            continue
        rotates_images = getattr(cls, "default_rope_type", "default") == "axial" or "vision" in name or "pixtral" in name
        if "rope_parameters" in getattr(cls, "__dataclass_fields__", {}) and not rotates_images:
            with_rope.add(name)
    forgotten = with_rope - set(MODEL_TYPES) - set(NOT_COVERED)
    assert not forgotten, "add these to MODEL_TYPES, and what is special about them to hf_families"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_rotation_is_the_model_s(model_type):
    """Pairing, direction and place in the head: the model's own function on random activations gives what ours gives."""
    config = config_of(model_type)
    positions = [0, 1, 77, 2047]
    for layer_type in kinds(config):
        table = RopeTable.from_hf(config, max_position=ROWS, layer_type=layer_type)
        if model_type == "minimax_m3_vl_text":
            continue
        x = torch.randn(len(positions), table.rotary_dim, generator=torch.Generator().manual_seed(0))
        expected = their_rotation(Theirs(model_type, config, layer_type), x, positions)
        ours = rotate(x, table, positions)
        if model_type in UNINTERLEAVES:
            ours = torch.cat((ours[:, ::2], ours[:, 1::2]), dim=-1)  # transformers un-interleaves q and k alike
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("model_type", [name for name in MULTI_AXIS if name != "hunyuan_vl_text"])
def test_axis_maps(model_type):
    config = config_of(model_type)
    positions = torch.randint(0, ROWS, (axes_of(model_type), 5), generator=torch.Generator().manual_seed(1))
    for layer_type in kinds(config):
        table = RopeTable.from_hf(config, max_position=ROWS, layer_type=layer_type)
        assert table.axis_map.dtype == torch.int8
        cos, sin = Theirs(model_type, config, layer_type).cos_sin(positions)
        ours_cos, ours_sin = gathered(table, positions)
        assert torch.equal(cos, ours_cos)
        assert torch.equal(sin, ours_sin)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_config_json_reads_like_the_config_object(model_type):
    """The file that save_pretrained writes, which leaves out some defaults."""
    config = config_of(model_type)
    written = json.loads(config.to_json_string())
    assert hf_config.read(written) == hf_config.read(config)


NO_FACTOR = {*MULTI_AXIS, *LATENT, "gptj", "codegen"}  # sections, slices and tables of a size of their own


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in NO_FACTOR])
def test_partial_factor_is_honoured_where_the_model_honours_it(model_type):
    config = config_of(model_type)
    for parameters in each_parameters(config):
        parameters["partial_rotary_factor"] = 0.25
    for layer_type in kinds(config):
        theirs = Theirs(model_type, config, layer_type).inv_freq
        ours = RopeTable.from_hf(config, max_position=8, layer_type=layer_type).inv_freq
        assert torch.equal(-theirs if model_type == "nanochat" else theirs, ours)


@pytest.mark.parametrize("model_type", [name for name in MODEL_TYPES if name not in EXTRA])
def test_defaults_of_the_model_type(model_type):
    """A config.json that names neither rope parameters nor a head size gets what its class fills in, or an error."""
    config = config_of(model_type)
    bare = {
        key: value
        for key, value in config.to_dict().items()
        if key not in ("rope_parameters", "head_dim", "rope_theta", "compress_rope_theta", *hf_config.PARTIAL_KEYS)
    }
    family = model_type.replace("-", "_").removesuffix("_text")
    head_dim = getattr(type(config), "__dataclass_fields__", {}).get("head_dim")
    if head_dim is not None and isinstance(head_dim.default, int) and not hasattr(config, "qk_rope_head_dim"):
        assert hf_families.HEAD_DIM.get(family) == head_dim.default
    if family in hf_families.NEEDS_PARAMETERS:
        with pytest.raises(ValueError, match=r"rope_parameters: .* need them"):
            hf_config.read(bare)
    else:
        ours, theirs = hf_config.read(bare), hf_config.read(config)
        assert (ours.by_type, ours.by_layer) == (theirs.by_type, theirs.by_layer)


@pytest.mark.parametrize("model_type", ["apertus", "apertus1p5_text", "cwm", "gpt_oss", "openai_privacy_filter", "lfm2", "cohere"])
def test_default_theta_beside_rope_scaling(model_type):
    published = {"model_type": model_type, "head_dim": 64, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config = config_class(model_type).from_dict(copy.deepcopy(published))
    assert hf_config.read(published).select().theta == config.rope_parameters["rope_theta"]


SCALED = {
    "linear": {"factor": 8.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn mscale": {"factor": 40, "original_max_position_embeddings": 4096, "mscale": 0.707, "mscale_all_dim": 0.6},
    "yarn plain": {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "attention_factor": 1.0},
    "yarn betas": {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0},
    "llama3": {
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "proportional": {"partial_rotary_factor": 0.25},
}
SCALED_MODELS = (
    "cohere", "ernie4_5", "gemma3_text", "glm4", "gpt_neox", "gpt_oss", "laguna", "llama", "mimo_v2_flash", "mistral", "olmo3",
    "phi", "qwen2_vl_text", "qwen3", "qwen3_5_text", "stablelm", "step3p5",
)  # fmt: skip
TURNS_ALL_PAIRS = ("qwen2_vl_text", "qwen3_5_text")  # sections and proportional frequencies do not go together


@pytest.mark.parametrize(
    ("model_type", "scaled"),
    [(m, s) for m in SCALED_MODELS for s in SCALED if not (m in TURNS_ALL_PAIRS and s == "proportional")],
)
def test_scaled_types_are_bit_equal(model_type, scaled):
    config = config_of(model_type)
    for parameters in each_parameters(config):
        parameters.update({"rope_type": scaled.split()[0], **SCALED[scaled]})
        if "truncate" not in SCALED[scaled]:
            parameters.pop("truncate", None)
    if scaled == "yarn plain":
        config.rope_parameters["truncate"] = False  # where parameters are nested, transformers reads it here only
    for layer_type in kinds(config):
        table = RopeTable.from_hf(config, max_position=2048, layer_type=layer_type)
        theirs = Theirs(model_type, config, layer_type)
        assert torch.equal(theirs.inv_freq, table.inv_freq)
        cos, sin = theirs.cos_sin([0, 1, 2047])
        assert torch.equal(torch.cat((cos, sin), dim=-1), table.cos_sin_cache[[0, 1, 2047]])


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("extra", [{}, {"factor": 32.0}, {"attention_factor": 1.19}])
@pytest.mark.parametrize("model_type", ["phi3", "llama", "glm4"])
def test_longrope_is_bit_equal_on_both_sides_of_the_switch(model_type, extra, long):
    config = config_of(model_type, max_position_embeddings=131072, original_max_position_embeddings=4096)
    partial = config.rope_parameters.get("partial_rotary_factor", 1.0)
    pairs = int(config.hidden_size // config.num_attention_heads * partial) // 2
    config.rope_parameters.update(
        rope_type="longrope",
        short_factor=[1.0 + 0.01 * j for j in range(pairs)],
        long_factor=[1.0 + j for j in range(pairs)],
        original_max_position_embeddings=4096,
        **extra,
    )
    last = 8191 if long else 4095
    table = RopeTable.from_hf(config, max_position=last + 1)
    assert f"{'long' if long else 'short'} factors" in table.description
    theirs = Theirs(model_type, config)
    cos, sin = theirs.cos_sin([0, 1, last])
    assert torch.equal(theirs.inv_freq, table.inv_freq)
    assert torch.equal(torch.cat((cos, sin), dim=-1), table.cos_sin_cache[[0, 1, last]])


def test_dynamic_frozen_at_a_length():
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = config_of("llama", max_position_embeddings=2048, rope_parameters={"rope_type": "dynamic", "factor": 4.0})
    frozen = {**config.rope_parameters, "seq_len": 8192}
    table = RopeTable.from_hf({**config.to_dict(), "rope_parameters": frozen}, max_position=8192)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=8192)
    assert torch.equal(expected, table.inv_freq)
    with pytest.raises(NotImplementedError, match=r"passes 2048 tokens.*seq_len=2049"):
        RopeTable.from_hf(config, max_position=2049)


@pytest.mark.parametrize("rope_type", ["default", "llama3", "yarn"])
def test_a_whole_table_is_bit_equal(rope_type):
    """Every row, so that the way rows are computed in pieces cannot matter."""
    rope = {"rope_type": rope_type, "rope_theta": 5e5, **SCALED.get(rope_type, {})}
    config = config_of("llama", head_dim=64, max_position_embeddings=FAR + 1, rope_parameters=rope)
    table = RopeTable.from_hf(config)
    assert table.max_position == FAR + 1
    cos, sin = Theirs("llama", config).cos_sin(range(FAR + 1))
    assert torch.equal(cos, table.cos_sin_cache[:, :32])
    assert torch.equal(sin, table.cos_sin_cache[:, 32:])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_read_as_transformers_reads_them(name):
    published = PUBLISHED[name]
    wrapper = config_class(published["model_type"])
    config = wrapper.from_dict(copy.deepcopy(published)).get_text_config()
    ours, converted = hf_config.read(published), hf_config.read(config)
    for layer_type in kinds(config):
        spec = ours.select(layer_type)
        theirs = converted.select(layer_type)
        assert (spec.is_neox, spec.axis_map) == (theirs.is_neox, theirs.axis_map)
        table = RopeTable.from_hf(published, max_position=2048, layer_type=layer_type)
        module = Theirs(config.model_type, config, layer_type)
        assert torch.equal(module.inv_freq, table.inv_freq)
        cos, sin = module.cos_sin([0, 1, 2047])
        assert torch.equal(torch.cat((cos, sin), dim=-1), table.cos_sin_cache[[0, 1, 2047]])


def test_deviation_hunyuan_vl_gives_each_pair_one_axis():
    config = config_of("hunyuan_vl_text")
    table = RopeTable.from_hf(config, max_position=ROWS)
    assert table.axis_map.tolist() == [0] * 16 + [1] * 16 + [2] * 16 + [3] * 16
    positions = torch.randint(0, ROWS, (4, 5), generator=torch.Generator().manual_seed(1))
    cos = Theirs("hunyuan_vl_text", config).outputs(positions)[0][0]
    assert not torch.equal(cos[:, :64], cos[:, 64:]), "both halves of a pair have one angle now: this deviation can go"


def test_deviation_phimoe_takes_the_long_factors():
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 64, "long_factor": [4.0] * 64,
        "short_mscale": 1.25, "long_mscale": 1.5, "original_max_position_embeddings": 4096,
    }  # fmt: skip
    config = config_of("phimoe", max_position_embeddings=131072, rope_parameters=rope)
    theirs = Theirs("phimoe", config)
    short = RopeTable.from_hf(config, max_position=4096)
    assert short.attention_scaling == 1.25
    assert torch.equal(torch.cat(theirs.cos_sin([0, 1, 4095]), dim=-1), short.cos_sin_cache[[0, 1, 4095]])
    long = RopeTable.from_hf(config, max_position=8192)
    assert long.attention_scaling == 1.5
    assert torch.equal(long.inv_freq * 4, short.inv_freq)
    theirs_long = torch.cat(theirs.cos_sin([8191]), dim=-1)
    short_but_rescaled = tables.rows(short.inv_freq, 1.5, 8191, 8192)
    assert torch.equal(theirs_long, short_but_rescaled), "transformers takes the long factors now: this deviation can go"


def test_deviation_truncate_is_read_from_the_layer_s_own_parameters():
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 32.0, "original_max_position_embeddings": 4096}
    default = {"rope_type": "default", "rope_theta": 5e5}

    def config(**extra):
        return config_of("olmo3", rope_parameters={"full_attention": {**yarn, **extra}, "sliding_attention": default})

    ours = [RopeTable.from_hf(config(**e), max_position=8, layer_type="full_attention") for e in ({}, {"truncate": False})]
    theirs = [Theirs("olmo3", config(**e), "full_attention").inv_freq for e in ({}, {"truncate": False})]
    assert not torch.equal(ours[0].inv_freq, ours[1].inv_freq)
    assert torch.equal(theirs[0], ours[0].inv_freq)
    assert torch.equal(theirs[1], theirs[0]), "transformers reads truncate per layer now: this deviation can go"


def test_deviation_latent_attention_rotates_its_slice():
    config = config_of("mistral4", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    assert RopeTable.from_hf(config, max_position=8).rotary_dim == config.qk_rope_head_dim == 64
    assert Theirs("mistral4", config).inv_freq.shape[0] == config.head_dim // 2 == 64
