"""The server loop: whatever arrives and however few pages there are, every answer is transformers' and no page is lost."""

import random

import pytest
import torch
from small_llms import hf_greedy, is_hf_greedy, random_prompts, small_llm

from decode_rope import check_faults
from decode_rope.examples import server
from decode_rope.examples.server import Request, Server
from decode_rope.hf import PagedModel

pytest.importorskip("transformers")


def serve(loop, requests, seed=0, most=4):
    """Requests arrive a few at a time while others run; between steps, the pages in use are those of what runs."""
    rng, coming, steps = random.Random(seed), list(requests), 0
    while coming or loop.running or loop.waiting:
        for _ in range(rng.randint(0, most)):
            if coming:
                loop.submit(coming.pop(0))
        loop.step()
        steps += 1
        cache = loop.cache
        assert sorted(cache.requests) == sorted(request.row for request in loop.running)
        assert cache.num_free_pages == cache.num_pages - sum(len(cache.pages(request)) for request in cache.requests)
    return steps


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3"])
def test_hundreds_of_requests_with_too_few_pages(family):
    """500 a family, 1,000 in all."""
    rng, model = random.Random(1), small_llm(family)
    paged = PagedModel(model, num_pages=44, page_size=4, max_requests=24, max_tokens=40)
    loop = Server(paged, stop_ids=(5, 6), prefill_tokens=48)
    prompts = random_prompts([rng.randint(1, 24) for _ in range(500)])
    requests = [Request(prompt, rng.randint(1, 12)) for prompt in prompts]
    serve(loop, requests)
    assert all(is_hf_greedy(model, prompts, [request.output for request in requests], stop_ids=(5, 6)))
    for request in requests:
        assert request.done and request.row is None
        ended = request.output[-1] in (5, 6)
        assert len(request.output) == request.max_new_tokens or (ended and len(request.output) < request.max_new_tokens)
    assert loop.preemptions > 20
    assert paged.cache.num_free_pages == 44 and paged.cache.requests == ()
    check_faults()


def test_a_preempted_request_loses_nothing_and_tokens_come_once():
    model, prompts = small_llm("llama"), random_prompts((9, 10, 11))
    loop = Server(PagedModel(model, num_pages=6, page_size=4, max_requests=3, max_tokens=24))
    heard = [[] for _ in prompts]
    requests = [Request(prompt, 12, on_token=heard[i].append) for i, prompt in enumerate(prompts)]
    serve(loop, requests, most=3)
    assert loop.preemptions
    assert [request.output for request in requests] == heard == [hf_greedy(model, prompt, 12) for prompt in prompts]


def test_long_prompts_are_read_in_chunks_while_others_decode():
    model, (short, long) = small_llm("mistral"), random_prompts((3, 60))
    loop = Server(PagedModel(model, num_pages=30, page_size=4, max_requests=2), prefill_tokens=16)
    first, second = Request(short, 20), Request(long, 4)
    loop.submit(first)
    loop.step()
    loop.submit(second)
    seen = []
    while not second.output:
        loop.step()
        seen.append(len(first.output))
    assert seen == [3, 4, 5, 6]  # 16 + 16 + 16 + 12 tokens: four steps, in each of which the other went on
    while loop.step():
        pass
    assert [first.output, second.output] == [hf_greedy(model, short, 20), hf_greedy(model, long, 4)]


@pytest.mark.parametrize(("prompt", "new"), [([], 4), ([3], 0), ([3] * 20, 14), ([3] * 40, 1)])
def test_what_can_never_fit_is_refused_when_it_comes(prompt, new):
    loop = Server(PagedModel(small_llm("llama"), num_pages=8, page_size=4, max_tokens=64))
    with pytest.raises(ValueError, match=r"request: \d+ tokens and \d+ new ones; expected at least 1 of each, and 32 in all"):
        loop.submit(Request(prompt, new))
    assert not loop.step()


def test_the_command_streams_texts_and_compares(capsys):
    argv = ["--model", "random", "--device", "cpu", "--requests", "4", "--max-new-tokens", "5", "--num-pages", "7"]
    assert server.main([*argv, "--every", "1", "--compare"]) == 0
    out = capsys.readouterr().out
    assert out.index("> What is the capital") < out.index("> Name the three") < out.index("> Why is the sea")
    assert out.count("tokens/s, ") == 4 and "7 of 7 pages free" in out
    assert "4 requests, 20 new tokens, " in out
    assert "compare: 4 of 4 equal transformers' generate (torch.float32)" in out


def test_the_comparison_fails_for_a_wrong_answer(capsys, monkeypatch):
    give = Server._give
    monkeypatch.setattr(Server, "_give", lambda self, request, token: give(self, request, (token + 1) % 256))
    argv = ["--model", "random", "--device", "cpu", "--requests", "1", "--max-new-tokens", "3", "--compare"]
    assert server.main(argv) == 1
    assert "compare: 0 of 1 equal" in capsys.readouterr().out


@pytest.mark.gpu
def test_the_loop_over_graphs_on_a_gpu():
    rng, model = random.Random(2), small_llm("llama", device=torch.device("cuda"))
    paged = PagedModel(model, num_pages=60, page_size=4, max_requests=24, max_tokens=60)
    paged.warmup()
    prompts = random_prompts([rng.randint(1, 40) for _ in range(300)])
    requests = [Request(prompt, rng.randint(1, 20)) for prompt in prompts]
    serve(Server(paged, prefill_tokens=64), requests)
    assert all(is_hf_greedy(model, prompts, [request.output for request in requests]))
    assert paged.cache.num_free_pages == 60
