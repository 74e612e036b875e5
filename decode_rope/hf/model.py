"""`PagedModel`: an unmodified transformers model that prefills and decodes through a `PagedKVCache`."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import PagedKVCache, rope_append_decode, rope_append_prefill
from .attention import Attention, SdpaAttention, Step
from .families import Layer, read_layers, supports
from .flashinfer_attention import FlashInferAttention, why_not
from .graphs import DecodeGraphs

_KV_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class PagedModel:
    """A transformers causal language model whose attention writes and reads a paged cache.

    The model is used as it is and left as it is: its weights are shared, its attention modules are routed through
    `rope_append_prefill` and `rope_append_decode` only while a method here runs, and its own `generate` goes on
    working. Requests are those of `cache`: `cache.allocate()` starts one, `cache.free(request)` ends it.

    Args:
        model: an instance of a supported family (see `decode_rope.hf.supports`), in eval mode, on one device.
        num_pages, page_size: size of the cache, in pages and in tokens a page.
        max_requests: requests that can live at one time, and rows of the largest decode step.
        max_tokens: longest request; `config.max_position_embeddings` if None, but not more than all pages hold. LongRoPE models
            (Phi-3) use their long factors exactly if it is above `original_max_position_embeddings`; transformers
            switches between two sets in the middle of a text, which leaves the keys before it on the other.
        kv_dtype: of the cache: None for the model's, or torch.float8_e4m3fn or float8_e5m2 (codes with scale 1).
        kv_layout: "NHD" or "HND".
        attention: "flashinfer", "sdpa", or "auto": FlashInfer where it can serve, else SDPA over gathered pages.
        graphs: decode steps are CUDA graphs, one for each power of two of rows, padded; None: on a GPU.

    Attributes:
        cache: the `PagedKVCache`.
        attention: name of what attends, "flashinfer" or "sdpa".

    Raises:
        ValueError: the model is not supported, with the reason; or an argument is at fault.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        num_pages: int,
        page_size: int = 16,
        max_requests: int = 64,
        max_tokens: int | None = None,
        kv_dtype: torch.dtype | None = None,
        kv_layout: str = "NHD",
        attention: str = "auto",
        graphs: bool | None = None,
    ) -> None:
        support = supports(model)
        if not support:
            raise ValueError(f"model: {support.reason}")
        sizes = {"num_pages": num_pages, "page_size": page_size, "max_requests": max_requests, "max_tokens": max_tokens}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        parameter = next(model.parameters())
        if kv_dtype not in (None, parameter.dtype, *_KV_DTYPES):
            raise ValueError(f"kv_dtype: expected None, {parameter.dtype} or one of {_KV_DTYPES}, got {kv_dtype}")
        if graphs and not parameter.is_cuda:
            raise ValueError(f"graphs: expected None or False, because the model is on {parameter.device}")
        self.model: Any = model
        self.device, self.dtype = parameter.device, parameter.dtype
        longest = model.config.max_position_embeddings if max_tokens is None else max_tokens
        if max_tokens is None:
            longest = min(longest, num_pages * page_size)
        self.layers = read_layers(model, longest)
        layer = self.layers[0]
        self.cache = PagedKVCache(
            num_layers=len(self.layers),
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            max_requests=max_requests,
            max_pages_per_request=-(-longest // page_size),
            dtype=kv_dtype or self.dtype,
            device=self.device,
            kv_layout=kv_layout,
        )
        self.max_tokens = longest
        self._attend = self._attention(attention)
        self.attention = "flashinfer" if isinstance(self._attend, FlashInferAttention) else "sdpa"
        self._rotary = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
        # Four dimensions: transformers takes such a mask as it is, and neither builds one nor looks at positions.
        self._mask = torch.zeros(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        use_graphs = parameter.is_cuda if graphs is None else graphs
        self._graphs = DecodeGraphs(self._decode_logits, self._attend, self.cache) if use_graphs else None

    def prefill(self, requests: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append `tokens[i]` to `requests[i]`: a whole prompt, or a chunk of one; and return the logits after each.

        Writes K and V of all layers into pages that it reserves.

        Args:
            requests: distinct live ids of `cache`.
            tokens: token ids, at least one for each request.

        Returns:
            `[len(requests), vocab_size]`: what follows the last token of each request.

        Raises:
            CacheFull: fewer free pages than needed; nothing has changed.
            ValueError: an empty list of tokens, or a request would become longer than `max_tokens`.
        """
        counts = [len(row) for row in tokens]
        if len(counts) != len(requests) or not all(counts):
            raise ValueError(f"tokens: expected at least one token for each of {len(requests)} requests, got {counts} tokens")
        grown = self._reserve(requests, counts)
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        step = Step(
            positions=self._to_device([position for row in grown for position in row]),
            block_table=self.cache.block_table[self._to_device(list(requests))],
            requests=requests,
            cu_seqlens=starts.to(self.device),
            counts=counts,
        )
        self._attend.plan(step)
        ids = self._to_device([token for row in tokens for token in row])
        return self._forward(ids, step, starts[1:].long().sub(1).to(self.device))

    def decode(self, requests: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """Append one token to each request and return the logits after it, `[len(requests), vocab_size]`.

        With graphs, the result is part of a buffer that the next `decode` overwrites. Writes and raises as `prefill` does.
        """
        if len(tokens) != len(requests):
            raise ValueError(f"tokens: expected one for each of {len(requests)} requests, got {len(tokens)}")
        grown = self._reserve(requests, [1] * len(requests))
        positions = [row[0] for row in grown]
        if self._graphs is not None:
            return self._graphs(requests, tokens, positions)[: len(requests)]
        # No wider than the longest request, because every column is gathered.
        width = -(-(max(positions, default=0) + 1) // self.cache.page_size)
        rows = self._to_device(list(requests))
        step = Step(self._to_device(positions), self.cache.block_table[rows, :width], requests)
        self._attend.plan(step)
        return self._forward(self._to_device(list(tokens)), step, 0)

    def warmup(self) -> None:
        """Capture the graphs of all numbers of rows, so that no `decode` has to. Does nothing without graphs."""
        if self._graphs is not None:
            self._graphs.capture_all()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop_ids: Collection[int] | None = None,
        prefill_tokens: int = 2048,
    ) -> list[list[int]]:
        """The likeliest tokens after each prompt, which are those of transformers' greedy `generate`.

        As many prompts as surely fit decode together; the others follow. See `decode_rope.examples.server` for a loop in
        which requests come and go.

        Args:
            prompts: token ids, at least one each.
            max_new_tokens: at most, for each prompt.
            stop_ids: a prompt ends with the first of these, which stays in its result; None: the model's end tokens.
            prefill_tokens: most prompt tokens in one forward pass; longer prompts are read in chunks.

        Returns:
            The new tokens of each prompt, without the prompt.

        Raises:
            ValueError: a prompt is empty or, with its new tokens, longer than `max_tokens` or than all free pages hold.
        """
        if stop_ids is None:
            stop = self.model.generation_config.eos_token_id
            stop_ids = () if stop is None else (stop,) if isinstance(stop, int) else tuple(stop)
        sizes = [self._pages_needed(index, prompt, max_new_tokens) for index, prompt in enumerate(prompts)]
        outputs: list[list[int]] = []
        while len(outputs) < len(prompts):
            first = last = len(outputs)
            free, ids = self.cache.num_free_pages, self.cache.max_requests - len(self.cache.requests)
            while last < len(prompts) and last - first < ids and sum(sizes[first : last + 1]) <= free:
                last += 1
            if last == first:
                raise ValueError(f"prompts: prompt {first} needs {sizes[first]} pages and a request id; free are {free} and {ids}")
            outputs += self._generate_together(prompts[first:last], max_new_tokens, stop_ids, prefill_tokens)
        return outputs

    def _pages_needed(self, index: int, prompt: Sequence[int], max_new_tokens: int) -> int:
        if not len(prompt) or max_new_tokens < 1:
            raise ValueError(f"prompts: expected tokens and max_new_tokens of at least 1, got {len(prompt)}, {max_new_tokens}")
        tokens = len(prompt) + max_new_tokens - 1  # the last new token is never fed
        if tokens > self.max_tokens:
            raise ValueError(f"prompts: prompt {index} and its new tokens are {tokens}, more than max_tokens={self.max_tokens}")
        return -(-tokens // self.cache.page_size)

    def _generate_together(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Collection[int], prefill_tokens: int
    ) -> list[list[int]]:
        requests = [self.cache.allocate() for _ in prompts]
        outputs: dict[int, list[int]] = {request: [] for request in requests}
        try:
            unread = {request: list(prompt) for request, prompt in zip(requests, prompts, strict=True)}
            while unread:
                chunks, room = {}, prefill_tokens
                for request, rest in unread.items():
                    if room:
                        chunks[request], unread[request] = rest[:room], rest[room:]
                        room -= len(chunks[request])
                likeliest = self.prefill(list(chunks), list(chunks.values())).argmax(-1).tolist()
                for request, token in zip(chunks, likeliest, strict=True):
                    if not unread[request]:
                        del unread[request]
                        outputs[request].append(token)
            running = requests
            while running := [r for r in running if outputs[r][-1] not in stop_ids and len(outputs[r]) < max_new_tokens]:
                likeliest = self.decode(running, [outputs[request][-1] for request in running]).argmax(-1).tolist()
                for request, token in zip(running, likeliest, strict=True):
                    outputs[request].append(token)
        finally:
            for request in requests:
                self.cache.free(request)
        return list(outputs.values())

    def _reserve(self, requests: Sequence[int], counts: Sequence[int]) -> list[range]:
        for request, count in zip(requests, counts, strict=True):
            if (length := self.cache.length(request) + count) > self.max_tokens:
                raise ValueError(f"tokens: request {request} would have {length}, more than max_tokens={self.max_tokens}")
        return self.cache.append_many(requests, counts)

    def _attention(self, wanted: str) -> Attention:
        if wanted not in ("auto", "flashinfer", "sdpa"):
            raise ValueError(f'attention: expected "auto", "flashinfer" or "sdpa", got {wanted!r}')
        reason = why_not(self.cache, self.layers, self.dtype)
        if wanted == "flashinfer" and reason:
            raise ValueError(f"attention: FlashInfer cannot serve this model: {reason}")
        if wanted == "sdpa" or reason:
            return SdpaAttention(self.cache)
        return FlashInferAttention(self.cache, self.layers, self.dtype)

    def _to_device(self, numbers: list[int]) -> Tensor:
        host = torch.tensor(numbers, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        return host.to(self.device, non_blocking=True)

    def _decode_logits(self, tokens: Tensor, positions: Tensor, block_table: Tensor) -> Tensor:
        """A decode step with everything already on the device: what a graph holds."""
        return self._forward(tokens, Step(positions, block_table, ()), 0)

    @torch.inference_mode()
    def _forward(self, tokens: Tensor, step: Step, logits_to_keep: Tensor | int) -> Tensor:
        with self._routed(step):
            return self.model(
                input_ids=tokens[None],
                attention_mask=self._mask,
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=logits_to_keep,
            ).logits[0]

    @contextlib.contextmanager
    def _routed(self, step: Step) -> Iterator[None]:
        """The model's attention modules run `_attention_forward`, and no angles are computed, which nobody would use."""
        routes = [(layer.module, self._attention_forward(layer, step)) for layer in self.layers]
        routes += [(module, lambda *args, **kwargs: None) for module in self._rotary]
        before = [module.__dict__.get("forward") for module, _ in routes]
        try:
            for module, forward in routes:
                module.forward = forward
            yield
        finally:
            for (module, _), forward in zip(routes, before, strict=True):
                if forward is not None:
                    module.forward = forward
                else:
                    module.__dict__.pop("forward", None)

    def _attention_forward(self, layer: Layer, step: Step):
        def forward(hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
            q, k, v = layer.project(hidden_states[0])
            common: dict[str, Any] = dict(block_table=step.block_table, kv_layout=self.cache.kv_layout, norm=layer.norm)
            tensors = (q, k, v, *self.cache.layer(layer.index), layer.table, step.positions)
            if step.cu_seqlens is None:
                rope_append_decode(*tensors, **common)
            else:
                rope_append_prefill(*tensors, cu_seqlens_q=step.cu_seqlens, **common)
            return layer.output(self._attend(q, layer, step))[None], None

        return forward
