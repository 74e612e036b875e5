"""On a GPU: graphs, early launches, and FlashInfer's attention over latent caches that this package wrote."""

import pytest
import torch
from cases import assert_same_storages
from latents import LatentSpec, build, function_of, prepare, run_reference

import decode_rope
from decode_rope import LatentNorm, RopeTable, reference

pytestmark = pytest.mark.gpu
H, L, R = 16, 512, 64


def deepseek(num_tokens: int, seed: int = 0, **changes) -> LatentSpec:
    table = [[(7 * token) % num_tokens, num_tokens + token] for token in range(num_tokens)]
    spec = LatentSpec(
        [(token * 11) % 128 for token in range(num_tokens)], table, heads=H, rope_dim=R, latent_dim=L, page_size=64,
        num_pages=2 * num_tokens, max_position=128, norm=torch.bfloat16, seed=seed,
    )  # fmt: skip
    return spec.but(**changes)


@pytest.mark.parametrize("changes", [{}, dict(interleaved_out=False), dict(heads=128), dict(dtype=torch.float32)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 300])
def test_sizes_of_deepseek(num_tokens, changes, device):
    case = build(deepseek(num_tokens, **changes), device)
    want = run_reference(case.clone())
    function_of(case)(**case.arguments())
    assert_same_storages(case, want)


@pytest.mark.parametrize("num_tokens", [1, 8, 70])
def test_replays_read_their_inputs_anew(num_tokens, device):
    case = build(deepseek(num_tokens), device)
    op = prepare(case, metadata_ready=True).warmup(num_tokens)
    names = ("q_pe", "k_pe", "kv_c", "cache", "positions", "block_table")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(**{name: case[name] for name in names})
    for seed in (1, 2, 3):
        other = build(deepseek(num_tokens, seed, positions=[(token * 11 + seed) % 128 for token in range(num_tokens)]), device)
        for name, storage in other.storages.items():
            if name != "weight":  # the op's own
                case.storages[name].copy_(storage)
        want = run_reference(case.clone())
        graph.replay()
        torch.cuda.synchronize()
        assert_same_storages(case, want)


def test_a_first_use_inside_a_capture_is_an_error(device):
    case = build(deepseek(3, heads=13), device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="first time inside a CUDA graph capture"), torch.cuda.graph(graph):
        decode_rope.rope_append_mla_decode(**case.arguments())


def test_a_chain_of_early_launches(device):
    """Sixteen layers in a row, each launched before the one before it has ended."""
    cases = [build(deepseek(32, seed), device) for seed in range(16)]
    wants = [run_reference(case.clone()) for case in cases]
    for case in cases:
        decode_rope.rope_append_mla_decode(**case.arguments(), enable_pdl=torch.cuda.get_device_capability()[0] >= 9)
    torch.cuda.synchronize()
    for case, want in zip(cases, wants, strict=True):
        assert_same_storages(case, want)


def test_flashinfer_reads_the_cache(device):
    flashinfer = pytest.importorskip("flashinfer")
    lengths, page = [37, 1, 64, 130], 64
    pages = [-(-length // page) for length in lengths]
    table, first = torch.full((len(lengths), max(pages)), -1, dtype=torch.int32), 0
    for request, count in enumerate(pages):
        table[request, :count] = torch.arange(first, first + count)
        first += count
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    torch.manual_seed(0)
    make = lambda *shape: torch.randn(*shape, device=device).bfloat16()  # noqa: E731
    total = sum(lengths)
    q_pe, kv, cache = make(total, H, R), make(total, L + R), torch.zeros(first, page, L + R, dtype=torch.bfloat16, device=device)
    rope = RopeTable.build(R, 256, is_neox=False, device=device)
    options = dict(block_table=table.to(device), cu_seqlens_q=cu_seqlens.to(device), kv_norm=LatentNorm(make(L), 1e-6))
    wanted_cache, wanted_q = cache.clone(), torch.empty_like(q_pe)
    reference.rope_append_mla_prefill(q_pe, kv[:, L:], kv[:, :L], wanted_cache, rope, positions, q_out=wanted_q, **options)
    decode_rope.rope_append_mla_prefill(q_pe, kv[:, L:], kv[:, :L], cache, rope, positions, **options)
    last = (cu_seqlens[1:] - 1).to(device)
    q_nope, scale = make(len(lengths), H, L), (128 + R) ** -0.5
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(
        torch.empty(128 * 2**20, dtype=torch.uint8, device=device), backend="fa2"
    )
    bounds = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, *pages]).cumsum(0).int().to(device)
    wrapper.plan(
        bounds, indptr, torch.arange(first, device=device).int(), torch.tensor(lengths, device=device).int(),
        H, L, R, page, False, scale, torch.bfloat16, torch.bfloat16,
    )  # fmt: skip
    got = wrapper.run(q_nope, q_pe[last], cache[..., :L], cache[..., L:])
    for request, length in enumerate(lengths):
        rows = wanted_cache[table[request, : pages[request]].long()].view(-1, L + R)[:length].float()
        query = torch.cat([q_nope[request], wanted_q[last[request]]], -1).float()
        weights = (query @ rows.t() * scale).softmax(-1)
        torch.testing.assert_close(got[request].float(), weights @ rows[:, :L], atol=2e-2, rtol=2e-2)
