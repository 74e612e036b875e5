"""`python -m decode_rope table` prints what it understood, as text and as JSON, and draws it."""

import argparse
import json

import pytest

from decode_rope.cli import table

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
}
GEMMA4 = {
    "model_type": "gemma4",
    "text_config": {
        "model_type": "gemma4_text",
        "head_dim": 64,
        "global_head_dim": 128,
        "max_position_embeddings": 2048,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
}
SMOLLM3 = {**LLAMA, "model_type": "smollm3", "num_hidden_layers": 4, "rope_scaling": None}


@pytest.fixture
def command(tmp_path, capsys):
    def run(config, *options):
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        parser = argparse.ArgumentParser()
        table.add_arguments(parser)
        code = table.run(parser.parse_args(["--config", str(tmp_path), *options]))
        return code, *capsys.readouterr()

    return run


def test_text(command):
    code, out, err = command(LLAMA)
    assert (code, err) == (0, "")
    assert "yarn factor=4, theta 500000" in out
    assert "all 64 dims of a head, pairs (i, i + 32), NeoX" in out
    assert "multiplied by 1.13863" in out
    assert "4096 positions, 1 MiB in fp32" in out


def test_every_layer_type(command):
    _, out, _ = command(GEMMA4)
    assert "sliding_attention, 2 of 3 layers" in out
    assert "full_attention, 1 of 3 layers" in out
    assert "stands still 48 of 64 pairs" in out
    _, out, _ = command(GEMMA4, "--layer-type", "2")
    assert "layer 2" in out
    assert "sliding_attention" not in out


def test_layers_without_rope_are_said(command):
    _, out, _ = command(SMOLLM3)
    assert "layer 0\n" in out
    assert "layer 3\n  no rotary embedding (NoPE): pass cos_sin_cache=None" in out


def test_json(command):
    code, out, _ = command(GEMMA4, "--json", "--max-position", "512", "--exactness", "fp64")
    assert code == 0
    printed = json.loads(out)
    assert printed["model_type"] == "gemma4_text"
    full = printed["layer_types"]["full_attention"]
    assert (full["rotary_dim"], full["pairs_that_turn"], full["max_position"]) == (128, 16, 512)
    assert full["table_bytes"] == 512 * 128 * 4
    assert full["exactness"] == "fp64"
    assert 0 < full["angle_error_within_1024_tokens"] < 1e-4


@pytest.mark.parametrize("config", [LLAMA, GEMMA4], ids=["one kind", "two kinds"])
def test_plot(command, tmp_path, config):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "rope.png"
    code, out, _ = command(config, "--plot", str(picture))
    assert code == 0
    assert f"drawn: {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("{", [], "config.json is not JSON"),
        ("[]", [], "expected a JSON object, got list"),
        ({"model_type": "gpt2"}, [], "nothing in it says that model type 'gpt2' has a rotary embedding"),
        (GEMMA4, ["--layer-type", "7"], "expected a layer index below 3, got 7"),
        (LLAMA, ["--max-position", "-3"], "--max-position: expected a number of rows above 0, got -3"),
        ({"model_type": "llama", "head_dim": 64}, [], "pass --max-position"),
    ],
)
def test_errors(command, config, options, message):
    code, out, err = command(config, *options)
    assert (code, out) == (2, "")
    assert err.startswith("table: ")
    assert message in err


def test_missing_file(capsys):
    parser = argparse.ArgumentParser()
    table.add_arguments(parser)
    assert table.run(parser.parse_args(["--config", "/nowhere/config.json"])) == 2
    assert "table: " in capsys.readouterr().err
