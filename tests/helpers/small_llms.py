"""Small random causal language models of transformers, one of each family that `decode_rope.hf` serves, and their greedy tokens."""

import functools

import torch

_SIZES = dict(vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
_SIZES |= dict(num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_SIZES |= dict(tie_word_embeddings=False)
_GQA = _SIZES | dict(head_dim=16)
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "rope_theta": 1.5e5, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 16}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]

# Family to class and config. Windows are shorter than the texts, partial rotation and sinks are what the families publish.
FAMILIES = {
    "llama": ("Llama", _GQA | dict(rope_parameters=_ROPE | dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
              high_freq_factor=4.0, original_max_position_embeddings=64))),
    "mistral": ("Mistral", _GQA | dict(sliding_window=20)),
    "qwen2": ("Qwen2", _SIZES | dict(use_sliding_window=True, sliding_window=12, layer_types=_KINDS)),
    "qwen3": ("Qwen3", _GQA),
    "gemma3_text": ("Gemma3", _GQA | dict(sliding_window=12, layer_types=_KINDS, query_pre_attn_scalar=16)),
    "glm4": ("Glm4", _GQA | dict(attention_bias=True)),
    "gpt_oss": ("GptOss", _GQA | dict(sliding_window=12, layer_types=_KINDS, num_local_experts=4, num_experts_per_tok=2,
                rope_parameters=_YARN)),
    "phi3": ("Phi3", _SIZES | dict(sliding_window=20)),
    "stablelm": ("StableLm", _SIZES | dict(qk_layernorm=True, rope_parameters=_ROPE | dict(partial_rotary_factor=0.5))),
    "gpt_neox": ("GPTNeoX", {k: v for k, v in _SIZES.items() if k != "num_key_value_heads"}),
    "smollm3": ("SmolLM3", _SIZES | dict(no_rope_layers=[1, 0, 1])),
}  # fmt: skip


@functools.cache
def small_llm(family, seed=0, device="cpu"):
    """A model of the family in fp32 and eval mode, whose attention matters to its tokens; treat it as read-only."""
    import transformers

    name, sizes = FAMILIES[family]
    config = getattr(transformers, f"{name}TextConfig" if family == "gemma3_text" else f"{name}Config")(**sizes)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                sharp = any(part in weight_name for part in ("q_proj", "k_proj", "qkv", "query_key_value"))
                weight.normal_(std=(2.0 if sharp else 1.2) / weight.shape[-1] ** 0.5)
            elif "norm" in weight_name:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return model.to(device)


def random_prompts(lengths, vocab_size=97, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def hf_greedy(model, prompt, max_new_tokens, stop_ids=()):
    """New tokens of transformers' own `generate`, one prompt at a time."""
    ids = torch.tensor([prompt], device=model.device)
    stop = dict(eos_token_id=list(stop_ids)) if stop_ids else {}
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=0, **stop
        )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def is_hf_greedy(model, prompts, outputs, stop_ids=(), batch=64):
    """Which outputs are greedy: each token is the likeliest after all before it, by transformers' forward on the whole text.

    By induction that is what `generate` returns, at a pass for each batch instead of one for each token.
    """
    answers = []
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(outputs[i]))
    for first in range(0, len(order), batch):
        chosen = order[first : first + batch]
        texts = [[*prompts[i], *outputs[i]] for i in chosen]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=model.device)
        likeliest = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.argmax(-1).tolist()
        for i, row in zip(chosen, likeliest, strict=True):
            start = len(prompts[i]) - 1
            early = any(token in stop_ids for token in outputs[i][:-1])
            answers.append((i, not early and row[start : start + len(outputs[i])] == list(outputs[i])))
    return [answer for _, answer in sorted(answers)]
