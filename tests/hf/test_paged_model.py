"""`PagedModel` gives transformers' greedy tokens for every family, however texts are cut into steps, and leaves the model alone."""

import pytest
import torch
from small_llms import FAMILIES, hf_greedy, is_hf_greedy, random_prompts, small_llm

from decode_rope import CacheFull, check_faults
from decode_rope.hf import PagedModel

pytest.importorskip("transformers")

LENGTHS = (1, 3, 17, 33, 8, 50, 23, 12)


def paged(model, **changes):
    return PagedModel(model, **(dict(num_pages=120, page_size=7, max_requests=8) | changes))


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_transformers(family, kv_layout):
    """Eight ragged prompts, read in chunks of 40 tokens, decode together for 64 tokens."""
    model = small_llm(family)
    prompts = random_prompts(LENGTHS)
    ours = paged(model, kv_layout=kv_layout)
    outputs = ours.generate(prompts, 64, prefill_tokens=40)
    assert [len(output) for output in outputs] == [64] * len(prompts)
    assert all(is_hf_greedy(model, prompts, outputs))
    assert outputs[2] == hf_greedy(model, prompts[2], 64)
    assert len({token for output in outputs for token in output}) > 8  # no trivial repetition
    assert ours.cache.requests == () and ours.cache.num_free_pages == ours.cache.num_pages
    check_faults()


@pytest.mark.anywhere
@pytest.mark.parametrize("family", ["glm4", "qwen3"])
def test_the_kernels_serve_models_as_the_reference_does(family, device):
    model, prompts = small_llm(family, device=device), random_prompts((5, 2))
    assert all(is_hf_greedy(model, prompts, paged(model).generate(prompts, 2)))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3_text", "gpt_oss", "phi3"])
def test_windows_matter_to_these_models(family):
    """The models above would not notice a wrong window if theirs were as good as none."""
    model, prompts = small_llm(family), random_prompts((50, 33, 40))
    ours = paged(model)
    ours.layers = [layer._replace(window=layer.window and layer.window + 1) for layer in ours.layers]
    assert not all(is_hf_greedy(model, prompts, ours.generate(prompts, 48)))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("gpt_oss", {"sinks": None}), ("qwen3", {"norm": None}), ("smollm3", {"table": None}), ("gemma3_text", {"table": None})],
)
def test_what_tells_families_apart_matters(family, changes):
    model, prompts = small_llm(family), random_prompts((50, 33, 40))
    ours = paged(model)
    ours.layers = [layer._replace(**changes) for layer in ours.layers]
    assert not all(is_hf_greedy(model, prompts, ours.generate(prompts, 24)))


def test_layers_are_read_as_the_models_say():
    kinds = {family: read(family) for family in FAMILIES}
    assert kinds["smollm3"] == [(True, None), (False, None), (True, None)]
    assert kinds["gemma3_text"] == [(True, 12), (True, None), (True, 12)]
    assert kinds["mistral"] == [(True, 20)] * 3
    layers = paged(small_llm("gemma3_text")).layers
    assert layers[0].table is layers[2].table is not layers[1].table
    assert layers[0].norm.weight_offset == 1.0
    assert paged(small_llm("glm4")).layers[0].table.is_neox is False


def read(family):
    return [(layer.table is not None, layer.window) for layer in paged(small_llm(family)).layers]


@pytest.mark.parametrize("cuts", [(31,), (1, 30), (7, 7, 17), (1,) * 31])
def test_logits_do_not_depend_on_how_a_prompt_is_cut(cuts):
    model, (prompt,) = small_llm("qwen3"), random_prompts((31,))
    ours = paged(model)
    request, first = ours.cache.allocate(), 0
    for count in cuts:
        logits = ours.prefill([request], [prompt[first : first + count]])
        first += count
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0, -1]
    assert torch.allclose(logits[0], wanted, atol=1e-4, rtol=1e-4)


def test_prefill_and_decode_take_requests_in_any_order_and_leave_others_alone():
    model, prompts = small_llm("llama"), random_prompts((9, 4, 13))
    ours = paged(model)
    a, b, c = (ours.cache.allocate() for _ in prompts)
    logits = ours.prefill([c, a], [prompts[2], prompts[0]])
    ours.prefill([b], [prompts[1]])
    kept = [cache.clone() for cache in ours.cache.gather(1, b)]
    following = ours.decode([c, a], logits.argmax(-1).tolist())
    assert all(torch.equal(x, y) for x, y in zip(kept, ours.cache.gather(1, b), strict=True))
    for row, request, prompt in ((0, c, prompts[2]), (1, a, prompts[0])):
        assert [int(logits[row].argmax()), int(following[row].argmax())] == hf_greedy(model, prompt, 2)
        assert ours.cache.length(request) == len(prompt) + 1


def test_a_fork_continues_on_its_own():
    model, (prompt,) = small_llm("qwen2"), random_prompts((10,))
    ours = paged(model)
    request = ours.cache.allocate()
    best = ours.prefill([request], [prompt])[0].topk(2).indices.tolist()
    fork = ours.cache.fork(request)
    after = ours.decode([request, fork], best).argmax(-1).tolist()
    for token, got in zip(best, after, strict=True):
        assert hf_greedy(model, [*prompt, token], 1) == [got]


def test_prompts_that_do_not_fit_together_follow_each_other():
    model, prompts = small_llm("llama"), random_prompts((20, 5, 30, 11, 2))
    ours = paged(model, num_pages=8, page_size=6, max_requests=3)
    outputs = ours.generate(prompts, 10)
    assert all(is_hf_greedy(model, prompts, outputs))
    assert ours.cache.num_free_pages == 8


def test_stop_tokens_end_a_text():
    model, prompts = small_llm("mistral"), random_prompts((5, 12))
    plain = paged(model).generate(prompts, 30)
    stop = plain[0][4]
    wanted = [output[: output.index(stop) + 1] if stop in output else output for output in plain]
    assert paged(model).generate(prompts, 30, stop_ids=[stop]) == wanted
    model.generation_config.eos_token_id = [stop]
    try:
        assert paged(model).generate(prompts, 30) == wanted
    finally:
        model.generation_config.eos_token_id = None


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_quantised_cache_holds_codes_and_stays_near(codes):
    model, (prompt,) = small_llm("llama"), random_prompts((25,))
    exact, ours = paged(model), paged(model, kv_dtype=codes)
    assert ours.cache.k_storage.dtype == codes
    logits = [m.prefill([m.cache.allocate()], [prompt]) for m in (exact, ours)]
    distance = (logits[0] - logits[1]).norm() / logits[0].norm()
    assert 0 < distance < 0.3


def test_the_model_is_left_as_it_was():
    model, (prompt,) = small_llm("gemma3_text"), random_prompts((9,))
    before = [(name, set(module.__dict__)) for name, module in model.named_modules()]
    wanted = hf_greedy(model, prompt, 6)
    ours = paged(model)
    assert ours.generate([prompt], 6) == [wanted]
    assert [(name, set(module.__dict__)) for name, module in model.named_modules()] == before
    assert hf_greedy(model, prompt, 6) == wanted
    with pytest.raises(CacheFull):
        full = paged(model, num_pages=1, max_tokens=40)
        full.prefill([full.cache.allocate()], [prompt])
    assert [(name, set(module.__dict__)) for name, module in model.named_modules()] == before


def test_no_page_is_lost_when_a_pass_fails(monkeypatch):
    model = small_llm("llama")
    ours = paged(model)
    monkeypatch.setattr(type(ours), "decode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours.generate(random_prompts((5, 6)), 4)
    assert ours.cache.num_free_pages == ours.cache.num_pages and ours.cache.requests == ()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.prefill([0], [[]]), "tokens: expected at least one token for each of 1 requests"),
        (lambda m: m.prefill([0], [[3], [4]]), "tokens: expected at least one token for each of 1 requests"),
        (lambda m: m.prefill([5], [[3]]), "request: 5 is not allocated"),
        (lambda m: m.decode([0], []), "tokens: expected one for each of 1 requests, got 0"),
        (lambda m: m.prefill([0], [[3] * 31]), "tokens: request 0 would have 31, more than max_tokens=30"),
        (lambda m: m.generate([[]], 4), "prompts: expected tokens and max_new_tokens of at least 1, got 0, 4"),
        (lambda m: m.generate([[3]], 0), "prompts: expected tokens and max_new_tokens of at least 1, got 1, 0"),
        (lambda m: m.generate([[3] * 20], 12), "prompt 0 and its new tokens are 31, more than max_tokens=30"),
    ],
)
def test_bad_calls_are_named_and_change_nothing(call, message):
    ours = paged(small_llm("llama"), max_tokens=30)
    request = ours.cache.allocate()
    with pytest.raises(ValueError, match=message):
        call(ours)
    assert ours.cache.length(request) == 0 and ours.cache.num_free_pages == ours.cache.num_pages


def test_a_prompt_that_other_requests_leave_no_room_for_is_named():
    ours = paged(small_llm("llama"), num_pages=4)
    ours.cache.allocate(20)
    with pytest.raises(ValueError, match="prompt 0 needs 2 pages and a request id; free are 1 and 7"):
        ours.generate([[3] * 8], 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kv_dtype=torch.int8), "kv_dtype: expected None, torch.float32 or one of"),
        (dict(page_size=0), "page_size: expected at least 1, got 0"),
        (dict(max_tokens=0), "max_tokens: expected at least 1, got 0"),
        (dict(attention="flash"), 'attention: expected "auto", "flashinfer" or "sdpa"'),
        (dict(graphs=True), "graphs: expected None or False, because the model is on cpu"),
        (dict(kv_layout="DNH"), "kv_layout: expected one of"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        paged(small_llm("llama"), **changes)


def test_flashinfer_is_not_for_the_cpu():
    with pytest.raises(ValueError, match="attention: FlashInfer cannot serve this model: "):
        paged(small_llm("llama"), attention="flashinfer")


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_give_transformers_tokens_on_a_gpu(family):
    model = small_llm(family, device="cuda")
    prompts = random_prompts(LENGTHS)
    ours = paged(model)
    ours.warmup()
    outputs = ours.generate(prompts, 64, prefill_tokens=40)
    assert all(is_hf_greedy(model, prompts, outputs))
    check_faults()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_a_graphs_spare_rows_write_nothing(rows):
    model = small_llm("llama", device="cuda")
    eager, ours = paged(model, graphs=False), paged(model)
    prompts = random_prompts(range(3, 3 + rows))
    for m in (eager, ours):
        requests = [m.cache.allocate() for _ in prompts]
        tokens = m.prefill(requests, prompts).argmax(-1).tolist()
        for _ in range(4):
            tokens = m.decode(requests, tokens).argmax(-1).tolist()
    assert torch.equal(eager.cache.block_table, ours.cache.block_table)
    for x, y in ((eager.cache.k_storage, ours.cache.k_storage), (eager.cache.v_storage, ours.cache.v_storage)):
        assert torch.equal(x == 0, y == 0)  # the same slots are written, and no others
