"""`supports` says yes, or which model it was and why not."""

import pytest
from small_llms import FAMILIES, small_llm

from decode_rope.hf import PagedModel, Support, supports

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_supported_by_config_and_by_model(family):
    model = small_llm(family)
    assert supports(model.config) and supports(model)
    assert str(supports(model)) == "supported"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV3Config", "deepseek_v3: its cache holds one latent per token"),
        ("Gemma2Config", "gemma2: its scores pass through tanh"),
        ("Olmo2Config", "olmo2: its QK-norm is over all heads at once"),
        ("Gemma3Config", "gemma3: its prompts hold images"),
        ("Llama4TextConfig", "llama4_text: its layers attend within chunks"),
        ("Qwen3NextConfig", "qwen3_next: some of its layers keep a recurrent state"),
        ("GPT2Config", "gpt2: it has no rotary embedding"),
        ("CohereConfig", "cohere: nothing here knows its attention. Supported: llama, mistral"),
    ],
)
def test_others_are_refused_by_name_with_the_reason(name, reason):
    answer = supports(getattr(transformers, name)())
    assert not answer and answer.reason.startswith(reason)


def changed(family, **changes):
    config = small_llm(family).config.__class__(**(small_llm(family).config.to_dict() | changes))
    return config


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("gemma3_text", dict(use_bidirectional_attention=True), "use_bidirectional_attention lets tokens attend to later ones"),
        ("gemma3_text", dict(attn_logit_softcapping=30.0), "attn_logit_softcapping=30.0"),
    ],
)
def test_configurations_of_a_supported_family_that_are_not(family, changes, reason):
    answer = supports(changed(family, **changes))
    assert not answer and reason in answer.reason


def test_a_model_in_training_mode_is_refused():
    model = transformers.LlamaForCausalLM(small_llm("llama").config)
    assert supports(model.config)
    assert "call model.eval()" in supports(model).reason
    with pytest.raises(ValueError, match=r"model: llama: the model is in training mode, .* call model.eval\(\)"):
        PagedModel(model, num_pages=4)


def test_what_is_no_model_is_named():
    assert "expected a transformers model or config with a model_type, got dict" in supports({}).reason


def test_support_is_true_or_a_reason():
    assert Support() and not Support("why")
