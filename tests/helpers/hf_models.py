"""transformers' models as tests see them: which there are, their configs by class, and what their rotary modules compute."""

import copy
import functools
import importlib
import inspect
import re

import pytest
import torch

from decode_rope.tables.hf import config as hf_config
from decode_rope.tables.hf import families as hf_families


def _names(text):
    return text.split()


MODEL_TYPES = _names("""
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bitnet blt_global_transformer
    blt_local_decoder blt_local_encoder blt_patcher chameleon codegen cohere cohere2 cohere2_moe cohere_compass_text
    cosmos3_edge_text csm csm_depth_decoder_model cwm dbrx deepseek_ocr2_encoder deepseek_ocr2_text deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 dia_decoder dia_encoder diffllama diffusion_gemma_text doge dory dots1 dots3_note_audio_encoder
    dots3_note_text embedding_gemma2_text emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text esmc eurobert evolla exaone
    exaone4 exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text
    glm glm4 glm4_moe glm4_moe_lite glm4v_moe_text glm4v_text glm_image_text glm_moe_dsa glm_ocr_text glmasr_encoder gpt_neox
    gpt_neox_japanese gpt_oss gptj gradium_phonon_tts granite granite4_vision_text granite_docling_text granite_swa granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared gte helium higgs_audio_v2 hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hunyuan_vl_text hy_v3 hy_v4 hy_v4_vl_text hyperclovax idefics internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kolibri1
    kyutai_speech_to_text laguna lara_mini lasr_encoder lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mellum mimi
    mimi_decoder mimi_encoder mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mistral4
    mixtral mllama_text_model modernbert modernbert-decoder molmo2_text moonshine moonshine_streaming moshi
    muse_glimmer_assistant muse_glimmer_text muse_spark_text nanochat nemotron nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio neomme neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid
    olmoe openai_privacy_filter paddleocr_vl_text pe_audio_encoder pe_audio_video_encoder pe_video_encoder persimmon phi phi3
    phi4_multimodal phimoe pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder
    pocket_tts_audio_tokenizer_encoder qwen2 qwen2_5_omni_dit qwen2_5_omni_talker qwen2_5_omni_text qwen2_5_vl_text qwen2_moe
    qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_talker_code_predictor
    qwen3_omni_moe_talker_text qwen3_omni_moe_text qwen3_vl_moe_text qwen3_vl_text qwen4_exp_text recurrent_gemma sarvam_mla
    sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 step3p5 t5_gemma_module t5gemma2_decoder t5gemma2_text timesfm2_5
    ultrabert unlimited_ocr_text vaultgemma voxtral_realtime_encoder voxtral_realtime_text xcodec2 youtu zamba2 zaya
""")

# Model types with rope_parameters that have no table, or whose config only wraps others.
NOT_COVERED = {
    "EvollaModel": "old name of evolla",
    "blt": "wraps blt_local_decoder and others",
    "efficientloftr": "image coordinates",
    "eomt_dinov3": "image coordinates",
    "fuyu": "wraps persimmon",
    "llama4_vision_model": "image coordinates",
    "mistral_large4_text": "learned frequencies (LeRoPE)",
    "musicflamingo": "time stamps of audio, not tokens",
}

_HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# What the class defaults lack, and published configs have.
EXTRA = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5e4}}},
    "glm4v_text": {"rope_parameters": _HALF},
    "glm_image_text": {"rope_parameters": _HALF},
    "glm4v_moe_text": {"head_dim": 128},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e3, "rope_theta": 1e4, "mrope_section": [16] * 4},
    },
    "recurrent_gemma": {"max_position_embeddings": 4096},
    "zamba2": {"use_mem_rope": True},
}

NEWEST = (5, 24)  # the version the lists here were made with
# Older versions read these configs in another way: no `alpha`, other axes, the partial factor or `rotary_dim` ignored.
SINCE = dict.fromkeys(("cohere_compass_text", "gpt_neox_japanese", "hunyuan_vl_text", "minimax_m2"), NEWEST)

# Rotary classes that do not live in the module of the config, or not under the config's name.
MODULES = {
    "exaone": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "glm4_moe",
}
CLASSES = {
    "dots3_note_audio_encoder": "Dots3NoteAudioRotaryEmbedding",
    "dots3_note_text": "Dots3NoteTextRotaryEmbedding",
    "evolla": "EvollaRotaryEmbedding",
    "granite4_vision_text": "Granite4VisionTextRotaryEmbedding",
    "qwen2_5_omni_dit": "Qwen2_5OmniDiTRotaryEmbedding",
    "qwen2_5_omni_talker": "Qwen2_5OmniRotaryEmbedding",
    "qwen2_5_omni_text": "Qwen2_5OmniRotaryEmbedding",
    "qwen3_omni_moe_talker_code_predictor": "Qwen3OmniMoeRotaryEmbedding",
    "qwen3_omni_moe_talker_text": "Qwen3OmniMoeTalkerRotaryEmbedding",
    "qwen3_omni_moe_text": "Qwen3OmniMoeThinkerTextRotaryEmbedding",
}
LATENT = _names("""
    axk1 axk2 bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4
    hy_v4_vl_text longcat_flash minicpm3 mistral4 sarvam_mla youtu
""")  # rotate a slice of qk_rope_head_dim
# Of those, the ones whose class takes pairs (2i, 2i + 1) and puts the halves one after the other.
UNINTERLEAVES = set(LATENT) - {"deepseek_v2", "deepseek_v4", "hy_v4", "hy_v4_vl_text", "minicpm3"}
MULTI_AXIS = [name for name in MODEL_TYPES if name.removesuffix("_text") in hf_families.MROPE]


def config_of(model_type, **overrides):
    values = copy.deepcopy({**EXTRA.get(model_type, {}), **overrides})
    try:
        return config_class(model_type)(**values)
    except ImportError as error:
        pytest.skip(f"{model_type} needs {error}")


def config_class(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING or transformers_version() < SINCE.get(model_type, (0, 0)):
        pytest.skip(f"this transformers has no {model_type} of today")
    return CONFIG_MAPPING[model_type]


def transformers_version():
    from transformers import __version__

    return tuple(int(part) for part in __version__.split(".")[:2])


@functools.cache
def module_of(model_type):
    config = config_of(model_type)
    name = MODULES.get(model_type)
    path = type(config).__module__.replace(".configuration_", ".modeling_")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}" if name else path)


def rotary_class(model_type):
    module = module_of(model_type)
    if model_type in CLASSES and hasattr(module, CLASSES[model_type]):
        return getattr(module, CLASSES[model_type])
    found = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and re.search(r"RotaryEmbedding$", name) and "Vision" not in name
    ]
    if not found:
        pytest.skip(f"this transformers has no rotary class of {model_type}")
    return found[0]


class Theirs:
    """One kind of layer of a transformers model: its frequencies, and cos and sin `[T, rotary_dim / 2]` at given positions."""

    def __init__(self, model_type, config, layer_type=None):
        self.model_type = model_type
        self.rotary = rotary_class(model_type)(config)
        self.layer = {} if layer_type is None else {"layer_type": layer_type}

    @property
    def inv_freq(self):
        prefix = f"{self.layer['layer_type']}_" if self.layer else ""
        return getattr(self.rotary, f"{prefix}inv_freq", None)

    def outputs(self, positions):
        """What the module returns for fp32 activations; `positions` is `[T]` or, with several axes, `[axes, T]`."""
        positions = torch.as_tensor(positions)[..., None, :]
        if positions.dim() == 2 and self.model_type in MULTI_AXIS:
            positions = positions.expand(axes_of(self.model_type), 1, -1)
        x = torch.zeros(1, positions.shape[-1], 4)
        out = self.rotary(x, positions, **self.layer)
        return out[::-1] if self.model_type in ("gptj", "codegen") else out

    def cos_sin(self, positions):
        out = self.outputs(positions)
        if isinstance(out, torch.Tensor):
            return out.real[0], out.imag[0]
        cos, sin = (half.reshape(half.shape[-2:]) for half in out)
        pairs = self.inv_freq.shape[0] if self.inv_freq is not None else cos.shape[-1]
        if cos.shape[-1] == pairs:
            return cos, sin
        step = slice(None, pairs) if torch.equal(cos[:, :pairs], cos[:, pairs:]) else slice(None, None, 2)
        return cos[:, step], sin[:, step]


def axes_of(model_type):
    return {"hunyuan_vl_text": 4, "neomme": 2}.get(model_type, 3)


def kinds(config):
    """Layer types to ask for: those with a rotary embedding when the config is nested, else None."""
    read = hf_config.read(config)
    return [name for name, spec in read.by_type.items() if spec is not None] if read.nested else [None]


def their_rotation(theirs, x, positions):
    """`x [T, rotary_dim]` rotated by the function of the model's own module."""
    module = module_of(theirs.model_type)
    out = theirs.outputs(positions)
    heads_first, tokens_first = x[None, None], x[None, :, None]  # [1, 1, T, D] and [1, T, 1, D]
    if theirs.model_type == "llama4_text":
        return module.apply_rotary_emb(tokens_first, tokens_first, out)[0][0, :, 0]
    if theirs.model_type == "deepseek_v2":
        return module.apply_rotary_emb(heads_first, heads_first, out)[0][0, 0]
    if theirs.model_type in ("gptj", "codegen"):
        cos, sin = out
        return module.apply_rotary_pos_emb(tokens_first, sin, cos)[0, :, 0]
    if theirs.model_type in UNINTERLEAVES:
        return module.apply_rotary_pos_emb_interleave(heads_first, heads_first, *out)[0][0, 0]
    if next(iter(inspect.signature(module.apply_rotary_pos_emb).parameters)) == "x":
        return module.apply_rotary_pos_emb(heads_first, *out)[0, 0]
    return module.apply_rotary_pos_emb(heads_first, heads_first, *out)[0][0, 0]


def each_parameters(config):
    """The dicts of rope parameters in a config: one, or one per kind of layer."""
    return [value for value in config.rope_parameters.values() if isinstance(value, dict)] or [config.rope_parameters]
