"""Caches that this package has written, read by the attention kernels of others; on the CPU by their documented conventions."""

import pytest
import torch
import torch.nn.functional as F

from decode_rope import PagedKVCache, RopeTable, reference, rope_append_decode, rope_append_prefill

HQ, HKV, D, PAGE = 8, 2, 64, 16
LENGTHS = (37, 1, 16, 90)  # tokens of each request before the decode step


class Batch:
    """Four requests, prefilled and then decoded for one token; K and V as plain tensors beside the cache."""

    def __init__(self, device, dtype, kv_layout="NHD", five_dim=False):
        torch.manual_seed(0)
        self.cache = PagedKVCache(
            num_layers=1, num_pages=20, page_size=PAGE, num_kv_heads=HKV, head_dim=D, max_requests=4, dtype=dtype, device=device,
            kv_layout=kv_layout,
        )  # fmt: skip
        self.pages = self.cache.layer(0)
        if five_dim:  # FlashInfer's one tensor for K and V, [pages, 2, ...]
            self.both = torch.zeros(20, 2, *self.pages[0].shape[1:], dtype=dtype, device=device)
            self.pages = (self.both[:, 0], self.both[:, 1])
        self.table = RopeTable.build(D, 256, device=device)
        self.requests = [self.cache.allocate(length) for length in LENGTHS]
        make = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
        counts = torch.tensor([0, *LENGTHS])
        self.cu_seqlens = counts.cumsum(0).to(torch.int32).to(device)
        positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
        self.q, k, v = make(sum(LENGTHS), HQ, D), make(sum(LENGTHS), HKV, D), make(sum(LENGTHS), HKV, D)
        common = dict(block_table=self.cache.block_table, kv_layout=kv_layout)
        self.k = list(reference.apply_rope(k, self.table, positions).split(LENGTHS))
        self.v = list(v.split(LENGTHS))
        rope_append_prefill(self.q, k, v, *self.pages, self.table, positions, cu_seqlens_q=self.cu_seqlens, **common)
        self.prefill_indices = self.cache.page_indices(self.requests)
        self.cache.append_many(self.requests)
        positions = torch.tensor(LENGTHS, device=device)
        self.q_next, k, v = make(4, HQ, D), make(4, HKV, D), make(4, HKV, D)
        rotated = reference.apply_rope(k, self.table, positions)
        rope_append_decode(self.q_next, k, v, *self.pages, self.table, positions, **common)
        self.k_next = [torch.cat([old, rotated[i : i + 1]]) for i, old in enumerate(self.k)]
        self.v_next = [torch.cat([old, v[i : i + 1]]) for i, old in enumerate(self.v)]

    def prefilled(self):
        """Causal attention of the prefill, `[T, HQ, D]` in fp32."""
        rows = zip(self.q.split(LENGTHS), self.k, self.v, strict=True)
        return torch.cat([attention(q, k, v, is_causal=True) for q, k, v in rows])

    def decoded(self):
        rows = zip(self.q_next.split(1), self.k_next, self.v_next, strict=True)
        return torch.cat([attention(q, k, v) for q, k, v in rows])


def attention(q, k, v, **options):
    heads_first = (x.float().transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(*heads_first, enable_gqa=True, **options)[0].transpose(0, 1)


def assert_near(got, wanted):
    assert torch.allclose(got.float(), wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.anywhere
def test_flash_attentions_block_table_convention(device):
    """`k_cache [pages, page_size, heads, head_dim]`, `block_table` int32 `[batch, pages]`, `cache_seqlens` with the new token."""
    batch = Batch(device, torch.float32)
    cache_seqlens = [length + 1 for length in LENGTHS]
    k_cache, v_cache = batch.pages
    assert k_cache.shape == (20, PAGE, HKV, D) and batch.cache.block_table.dtype == torch.int32
    for row, length in enumerate(cache_seqlens):
        pages = batch.cache.block_table[row, : -(-length // PAGE)].long()
        assert torch.equal(k_cache[pages].flatten(0, 1)[:length], batch.k_next[row])
        assert torch.equal(v_cache[pages].flatten(0, 1)[:length], batch.v_next[row])


@pytest.mark.anywhere
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_gather_is_what_sdpa_wants(device, kv_layout):
    batch = Batch(device, torch.float32, kv_layout)
    for row, request in enumerate(batch.requests):
        k, v = batch.cache.gather(0, request)
        assert torch.equal(attention(batch.q_next[row : row + 1], k, v), batch.decoded()[row : row + 1])


LAYOUTS = [("NHD", False), ("HND", False), ("NHD", True), ("HND", True)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_layout", "five_dim"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_flashinfer_decodes_over_our_pages(kv_layout, five_dim, dtype):
    flashinfer = pytest.importorskip("flashinfer")
    batch = Batch(torch.device("cuda"), dtype, kv_layout, five_dim)
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, kv_layout, use_tensor_cores=True)
    indices = batch.cache.page_indices(batch.requests)
    wrapper.plan(*indices, HQ, HKV, D, PAGE, q_data_type=dtype, kv_data_type=dtype)
    assert_near(wrapper.run(batch.q_next, batch.both if five_dim else batch.pages), batch.decoded())


@pytest.mark.gpu
@pytest.mark.parametrize(("kv_layout", "five_dim"), LAYOUTS)
def test_flashinfer_prefills_over_our_pages(kv_layout, five_dim):
    flashinfer = pytest.importorskip("flashinfer")
    batch = Batch(torch.device("cuda"), torch.bfloat16, kv_layout, five_dim)
    workspace = torch.zeros(128 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout)
    types = dict(q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)
    wrapper.plan(batch.cu_seqlens.cpu(), *batch.prefill_indices, HQ, HKV, D, PAGE, causal=True, **types)
    assert_near(wrapper.run(batch.q, batch.both if five_dim else batch.pages), batch.prefilled())


@pytest.mark.gpu
def test_flash_attn_reads_our_block_table():
    flash_attn = pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    k_cache, v_cache = torch.zeros(2, 8, 256, HKV, D, dtype=torch.bfloat16, device="cuda")  # its pages are multiples of 256
    q, k, v = (torch.randn(2, heads, D, device="cuda").bfloat16() for heads in (HQ, HKV, HKV))
    block_table = torch.tensor([[5, 1], [2, -1]], dtype=torch.int32, device="cuda")
    table, positions = RopeTable.build(D, 512, device="cuda"), torch.tensor([256, 0], device="cuda")
    rope_append_decode(q, k, v, k_cache, v_cache, table, positions, block_table=block_table)
    seqlens = (positions + 1).to(torch.int32)
    got = flash_attn.flash_attn_with_kvcache(
        q[:, None], k_cache, v_cache, cache_seqlens=seqlens, block_table=block_table.clamp(min=0)
    )
    keys, values = torch.cat([k_cache[5], k_cache[1, :1]]), torch.cat([v_cache[5], v_cache[1, :1]])
    assert_near(got[0], attention(q[:1], keys, values))
    assert_near(got[1], attention(q[1:], k_cache[2, :1], v_cache[2, :1]))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_models_flashinfer_attention_is_its_sdpa_attention(window, sinks):
    pytest.importorskip("flashinfer")
    from small_llms import small_llm

    from decode_rope.hf import PagedModel
    from decode_rope.hf.attention import SdpaAttention, Step
    from decode_rope.hf.flashinfer_attention import FlashInferAttention

    batch = Batch(torch.device("cuda"), torch.bfloat16)
    layer = PagedModel(small_llm("llama", device="cuda"), num_pages=8).layers[0]
    logits = torch.randn(HQ, device="cuda") if sinks else None
    layer = layer._replace(num_q_heads=HQ, num_kv_heads=HKV, head_dim=D, window=window, sinks=logits, scale=D**-0.5, index=0)
    step = Step(torch.tensor(LENGTHS, device="cuda"), batch.cache.block_table, batch.requests)
    ours, theirs = SdpaAttention(batch.cache), FlashInferAttention(batch.cache, [layer], torch.bfloat16)
    theirs.plan(step)
    assert_near(theirs(batch.q_next, layer, step), ours(batch.q_next, layer, step).float())
