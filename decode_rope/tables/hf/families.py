"""What a `model_type` decides about rotary embeddings that its config.json does not say: data only, read by `config` and `spec`.

Names are transformers' model types without a trailing `_text`. Types that are absent follow the general rules: NeoX pairs,
every partial factor honoured, theta 10000. tests/test_hf_parity.py compares all of it with the installed transformers.
"""

from dataclasses import dataclass
from typing import TypeVar

_Value = TypeVar("_Value")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(value: _Value, text: str) -> dict[str, _Value]:
    return dict.fromkeys(text.split(), value)


# Pairs (2i, 2i+1) instead of (i, i + R/2).
INTERLEAVED = _names("""
    blt blt_global_transformer blt_local_decoder blt_local_encoder blt_patcher chatglm codegen cohere cohere2 cohere2_moe
    deepseek_v2 deepseek_v4 ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe glm glm4 glm4v glm46v glm_ocr gptj helium
    hy_v4_vl llama4 moonshine moonshine_streaming openai_privacy_filter pe_audio_encoder pe_audio_video_encoder
    pe_video_encoder
""")

# Multi-head latent attention whose weights pair (2i, 2i+1) unless the config says `rope_interleave: false`.
INTERLEAVED_MLA = _names("""
    axk1 axk2 bailing_hybrid deepseek_v3 deepseek_v32 dots3_note glm4_moe_lite glm_moe_dsa kimi_k2 longcat_flash mistral4
    sarvam_mla youtu
""")

# Rotary dims are the last ones of the head, not the first.
ROTATES_TAIL = _names("deepseek_v4")

# Turn by -position: their rotate_half has the other sign.
BACKWARDS = _names("nanochat")

# Their rotary class does not read partial_rotary_factor for the default rope type (for scaled types everybody does).
IGNORES_PARTIAL = _names("""
    afmoe apertus apertus1p5 arcee aria axk1 axk2 bailing_hybrid beam bitnet blt blt_global_transformer blt_local_decoder
    blt_local_encoder blt_patcher chameleon cohere cohere2 cohere2_moe cohere_compass cosmos3_edge csm csm_depth_decoder_model
    cwm dbrx deepseek_ocr2 deepseek_ocr2_encoder deepseek_v2 deepseek_v3 deepseek_v32 dia_decoder dia_encoder diffllama doge
    dory dots1 embedding_gemma2 emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe esmc eurobert evolla
    exaone exaone4 exaone_moe falcon falcon_h1 flex_olmo flint gemma gemma2 gemma3 gemma3n gemma4 gemma4_unified glm_moe_dsa
    gpt_oss gradium_phonon_tts granite granite4_vision granite_docling granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared gte helium higgs_audio_v2 hrm hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl hy_v3 hy_v4 hy_v4_vl hyperclovax
    idefics internlm3 iquestcoder jais2 jetmoe jina_embeddings_v3 kimi_k2 kolibri1 kyutai_speech_to lara_mini lasr_encoder
    lfm2 lfm2_moe lfm3 llama llama4 longcat_flash mimi mimi_decoder mimi_encoder minicpm3 minimax ministral ministral3 mistral
    mistral4 mixtral mllama_text_model modernbert modernbert_decoder molmo2 moshi muse_glimmer muse_glimmer_assistant
    muse_spark nanochat neucodec nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe openai_privacy_filter paddleocr_vl
    pe_audio_encoder pe_audio_video_encoder pe_video_encoder phimoe pocket_tts pocket_tts_audio_tokenizer
    pocket_tts_audio_tokenizer_decoder pocket_tts_audio_tokenizer_encoder qwen2 qwen2_5_omni qwen2_5_omni_dit
    qwen2_5_omni_talker qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_omni_moe qwen3_omni_moe_talker
    qwen3_omni_moe_talker_code_predictor qwen3_vl qwen3_vl_moe sarvam_mla seed_oss smollm3 starcoder2 t5_gemma_module t5gemma2
    t5gemma2_decoder timesfm2_5 ultrabert unlimited_ocr vaultgemma voxtral_realtime voxtral_realtime_encoder xcodec2 youtu
    zamba2
""")

# Their rotary class does read it.
HONOURS_PARTIAL = _names("""
    bamba chatglm codegen deepseek_v4 diffusion_gemma dots3_note dots3_note_audio_encoder glm glm4 glm4_moe glm4_moe_lite glm4v
    glm46v glm4v_moe glm_image glm_ocr glmasr_encoder gpt_neox gpt_neox_japanese gptj laguna mellum mimo_v2_flash minimax_m2
    minimax_m3_vl moonshine moonshine_streaming nemotron nemotron3_5_transcribe_asr_audio
    nemotron3_5_transcribe_word_timestamp nemotron3_diarization_audio neomme persimmon phi phi3 phi4_multimodal qwen3_5
    qwen3_5_moe qwen3_next qwen4_exp recurrent_gemma sarvam_moe solar_open stablelm step3p5 zaya
""")

# theta where the config has none; everyone else 10000.
THETA = (
    _each(5e5, "bitnet blt blt_global_transformer blt_local_decoder blt_local_encoder cohere csm csm_depth_decoder_model")
    | _each(5e5, "ernie4_5 ernie4_5_moe ernie4_5_moe_vl ernie4_5_vl_moe evolla exaone flex_olmo llama4 mllama_text_model")
    | _each(5e5, "muse_glimmer_assistant muse_spark olmo3 paddleocr_vl qwen3_vl qwen3_vl_moe")
    | _each(1e6, "cwm emu3_text_model lfm2 lfm2_moe lfm3 minimax mixtral phimoe qwen2_5_omni qwen2_5_omni_talker")
    | _each(1e6, "qwen2_5_vl qwen2_vl qwen3_omni_moe solar_open")
    | _each(2e4, "jina_embeddings_v3 pe_audio_encoder pe_audio_video_encoder pe_video_encoder")
    | _each(1.5e5, "gpt_oss openai_privacy_filter")
    | _each(5e6, "minimax_m2 minimax_m3_vl")
    | _each(12e6, "apertus apertus1p5")
    | {"bailing_hybrid": 6e6, "cosmos3_edge": 1e8, "dots3_note": 8e7, "gte": 1.6e5, "helium": 1e5, "hy_v3": 11_158_840.0}
    | {"longcat_flash": 1e7, "nomic_bert": 1e3, "sarvam_moe": 8e6, "smollm3": 2e6}
)

# Partial rotary factor where the config has none; everyone else 1.
PARTIAL = (
    _each(0.5, "bamba chatglm dots3_note_audio_encoder glm glm4 glm4_moe glm4v_moe glmasr_encoder nemotron persimmon phi")
    | _each(0.5, "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_word_timestamp recurrent_gemma")
    | _each(0.25, "gpt_neox qwen3_5 qwen3_5_moe qwen3_next stablelm")
    | {"deepseek_v4": 0.125, "mimo_v2_flash": 0.334, "moonshine": 0.9, "moonshine_streaming": 0.8}
)

# Head size where the config has none and transformers does not divide hidden_size by the heads.
HEAD_DIM = (
    _each(64, "gpt_oss muse_spark neomme neucodec openai_privacy_filter qwen2_5_omni_dit sarvam_moe voxtral_realtime_encoder")
    | _each(64, "xcodec2")
    | _each(128, "afmoe beam cohere2_moe cosmos3_edge cwm dia_decoder dia_encoder ernie4_5 flint glm glm4 helium")
    | _each(128, "higgs_audio_v2 hrm hy_v3 internlm3 iquestcoder kolibri1 laguna lara_mini lfm3 llama4 mellum minimax_m2")
    | _each(128, "minimax_m3_vl ministral3 molmo2 muse_glimmer muse_glimmer_assistant paddleocr_vl pe_audio_encoder")
    | _each(128, "pe_audio_video_encoder pe_video_encoder qwen2_5_omni_talker qwen3 qwen3_omni_moe_talker_code_predictor")
    | _each(128, "qwen3_vl seed_oss solar_open step3p5 zaya")
    | _each(256, "diffusion_gemma dory embedding_gemma2 gemma gemma2 gemma3 gemma3n gemma4 gemma4_unified qwen3_5")
    | _each(256, "qwen3_5_moe qwen3_next qwen4_exp t5_gemma_module t5gemma2 t5gemma2_decoder vaultgemma")
    | {"deepseek_v4": 512, "mimo_v2_flash": 192, "timesfm2_5": 80}
)

# Head size of full-attention layers where the config has neither per_layer_config nor global_head_dim.
GLOBAL_HEAD_DIM = _each(512, "diffusion_gemma embedding_gemma2 gemma4 gemma4_unified")

# Multi-axis positions: how pairs are given to axes, and the sections where the config has none.
MROPE: dict[str, tuple[str, tuple[int, ...] | None]] = (
    _each(("chunked", (16, 24, 24)), "paddleocr_vl qwen2_5_omni qwen2_5_omni_talker qwen2_5_vl qwen2_vl")
    | _each(("chunked", (8, 12, 12)), "glm46v glm4v glm4v_moe glm_image glm_ocr")
    | _each(("interleaved", (24, 20, 20)), "cohere_compass cosmos3_edge qwen3_omni_moe qwen3_omni_moe_talker qwen3_vl")
    | _each(("interleaved", (24, 20, 20)), "qwen3_vl_moe")
    | _each(("interleaved", (12, 10, 10)), "hy_v4_vl")
    | _each(("interleaved", (11, 11, 10)), "qwen3_5 qwen3_5_moe qwen4_exp")
    | _each(("ernie", (22, 22, 20)), "ernie4_5_moe_vl ernie4_5_vl_moe")
    | {"hunyuan_vl": ("chunked", None), "neomme": ("alternating", None)}
)

# Full-attention layers carry no rotary embedding; True: only where the config has a sliding window.
NOPE_FULL_ATTENTION = _each(False, "afmoe cohere2 cohere2_moe flint lara_mini") | _each(True, "exaone4 exaone_moe kolibri1")

# No rotary embedding at all.
NOPE = _names("glm5_next kimi_linear")

# Every n-th layer is NoPE where the config has neither `no_rope_layers` nor `no_rope_layer_interval`.
NOPE_INTERVAL = {"llama4": 4, "smollm3": 4}

# transformers fills in scaled or per-layer parameters when the config has none: a bare theta would be a wrong table.
NEEDS_PARAMETERS = _names("""
    apertus apertus1p5 beam cwm diffusion_gemma dory embedding_gemma2 gemma4 gemma4_unified gpt_oss higgs_audio_v2 laguna lfm3
    mellum ministral3 mistral4 neomme openai_privacy_filter ultrabert zaya
""")

# Frequencies that no table of this package can hold, and why.
UNSUPPORTED = {"mistral_large4": "its frequencies are multiplied by exp(alpha), learned in the checkpoint (LeRoPE)"} | _each(
    "it rotates by image or space coordinates",
    "dinov3_vit efficientloftr eomt_dinov3 esmfold2 llama4_vision_model sapiens2",
)


@dataclass(frozen=True)
class Split:
    """Older spelling of a model with two kinds of layers: one theta key per kind, one `rope_scaling` for some of them.

    `thetas` maps the kind to (key, default); `scaled` are the kinds that `rope_scaling` applies to; `extra` is set for those
    when missing."""

    thetas: dict[str, tuple[str, float]]
    scaled: tuple[str, ...] = ("full_attention",)
    extra: tuple[tuple[str, float], ...] = ()


_GEMMA3 = Split({"sliding_attention": ("rope_local_base_freq", 1e4), "full_attention": ("rope_theta", 1e6)})
_MODERNBERT = Split(
    {"sliding_attention": ("local_rope_theta", 1e4), "full_attention": ("global_rope_theta", 1.6e5)},
    scaled=("full_attention", "sliding_attention"),
)

SPLIT = {
    **_each(_GEMMA3, "gemma3 gemma3n t5gemma2 t5gemma2_decoder"),
    **_each(_MODERNBERT, "modernbert modernbert_decoder"),
    "olmo3": Split({"sliding_attention": ("rope_theta", 5e5), "full_attention": ("rope_theta", 5e5)}),
    "mimo_v2_flash": Split({"sliding_attention": ("swa_rope_theta", 1e4), "full_attention": ("rope_theta", 5e6)}),
    "dots3_note": Split(
        {"sliding_attention": ("swa_rope_theta", 5e4), "indexed_attention": ("rope_theta", 8e7)},
        scaled=("sliding_attention", "indexed_attention"),
    ),
    "deepseek_v4": Split(
        {"main": ("rope_theta", 1e4), "compress": ("compress_rope_theta", 1.6e5)},
        scaled=("compress",),
        extra=(("attention_factor", 1.0),),
    ),
}

# Kind of rope of a layer type, where the two are named apart.
LAYER_ALIASES = {
    "deepseek_v4": {
        "sliding_attention": "main",
        "compressed_sparse_attention": "compress",
        "heavily_compressed_attention": "compress",
    },
}
