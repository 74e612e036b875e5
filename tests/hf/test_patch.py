"""`enable` puts this package into transformers' own loops: same tokens, our launches, and everything else as before."""

import copy

import pytest
import torch
from small_llms import FAMILIES, hf_greedy, random_prompts, small_llm

from decode_rope import check_faults, hf
from decode_rope.hf import patch

transformers = pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture
def launches(monkeypatch):
    """What is launched: "append" with a cache, "rotate" without."""
    seen, launch = [], patch.rope_append_prefill

    def spy(q, k, v, k_cache, *rest, **options):
        seen.append("rotate" if k_cache is None else "append")
        return launch(q, k, v, k_cache, *rest, **options)

    monkeypatch.setattr(patch, "rope_append_prefill", spy)
    return seen


def loaded(model):
    """The same weights, loaded while enabled."""
    hf.enable()
    try:
        same = transformers.AutoModelForCausalLM.from_config(model.config)
    finally:
        hf.disable()
    same.load_state_dict(model.state_dict())
    same.generation_config.eos_token_id = None
    return same.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_generate_rotates_through_us(family, launches):
    model, (prompt,) = small_llm(family), random_prompts((33,))
    ours = loaded(model)
    wanted = hf_greedy(model, prompt, 24)
    assert not launches
    assert hf_greedy(ours, prompt, 24) == wanted
    rotating = 2 if family == "smollm3" else 3  # of three layers, one is NoPE
    assert launches == ["rotate"] * 24 * rotating
    check_faults()


def test_generate_of_a_left_padded_batch(launches):
    model, prompts = small_llm("qwen3"), random_prompts((5, 11))
    ids = torch.tensor([[0] * (11 - len(prompt)) + prompt for prompt in prompts])
    mask = (ids != 0).long()
    arguments = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    wanted = model.generate(ids, **arguments)
    assert torch.equal(loaded(model).generate(ids, **arguments), wanted)
    assert launches


def generate_batch(model, prompts, new_tokens=16):
    config = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64)
    greedy = transformers.GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    results = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=config)
    return [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.rsplit("_", 1)[1]))]


WINDOWS = {"phi3": 3, "gemma3_text": 2, "gpt_oss": 2}  # layers that transformers writes itself


# Not StableLM: its layers do not hand the paged cache's arguments on, so transformers cannot serve it.
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "phi3", "gpt_neox"])
@pytest.mark.skipif(not hasattr(transformers, "ContinuousBatchingConfig"), reason="needs a transformers with continuous batching")
def test_generate_batch_appends_through_us(family, launches):
    model, prompts = small_llm(family), random_prompts((5, 9, 20, 33))
    ours = loaded(model)
    # GPT-NeoX's own attention does not know the paged cache either; ours does.
    wanted = [hf_greedy(model, p, 16) for p in prompts] if family == "gpt_neox" else generate_batch(model, prompts)
    assert not launches
    assert generate_batch(ours, prompts) == wanted
    windows = WINDOWS.get(family, 0)
    steps = len(launches) // 3
    assert steps and launches.count("append") == (3 - windows) * steps and launches.count("rotate") == windows * steps
    check_faults()


def test_training_and_gradients_run_transformers_code(launches):
    model = small_llm("llama")
    ours = loaded(model)
    ids = torch.tensor(random_prompts((12,)))
    loss = ours(ids, labels=ids).loss
    loss.backward()
    assert not launches and ours.model.layers[0].self_attn.q_proj.weight.grad.norm() > 0
    with torch.no_grad():
        assert torch.allclose(ours(ids, labels=ids).loss, loss, atol=1e-5)
    assert launches


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_change_run_transformers_code(rope_type, launches):
    config = copy.deepcopy(small_llm("phi3" if rope_type == "longrope" else "llama").config)
    pairs = config.hidden_size // config.num_attention_heads // 2
    config.original_max_position_embeddings = 64
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if rope_type == "longrope":
        config.rope_parameters |= {"short_factor": [1.0] * pairs, "long_factor": [2.0] * pairs, "partial_rotary_factor": 1.0}
    hf.enable()
    try:
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    finally:
        hf.disable()
    with torch.no_grad():
        model(torch.tensor(random_prompts((12,))))
    assert not launches


def test_enable_and_disable_can_be_repeated():
    from transformers.monkey_patching import get_patch_mapping

    before = get_patch_mapping()
    hf.disable()
    hf.enable()
    hf.enable()
    assert {"LlamaAttention", "GPTNeoXAttention"} <= get_patch_mapping().keys()
    hf.disable()
    assert get_patch_mapping() == before
    assert (
        type(transformers.AutoModelForCausalLM.from_config(small_llm("llama").config).model.layers[0].self_attn).__mro__[1]
        is torch.nn.Module
    )


def test_a_paged_model_takes_what_was_loaded_enabled():
    model, (prompt,) = small_llm("qwen3"), random_prompts((9,))
    ours = hf.PagedModel(loaded(model), num_pages=8)
    assert ours.generate([prompt], 8) == [hf_greedy(model, prompt, 8)]
