"""The adapters of `decode_rope/examples` write what the servers' own kernels would, seen from the servers' own tensors.

SGLang and vLLM are not needed: their tensors are built by hand, as they document them.
"""

import sys
import types

import pytest
import torch

from decode_rope import PagedKVCache, RopeTable, reference
from decode_rope.examples import flashinfer_csr, sglang_plugin, vllm_cache

T, HQ, HKV, D = 7, 6, 2, 16


def tokens(dtype=torch.float32, seed=0):
    """q, k, v as views of one projection, like every server's."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(T, (HQ + 2 * HKV) * D, generator=generator).to(dtype)
    return qkv.split([HQ * D, HKV * D, HKV * D], dim=-1)


def turned(x, table, positions, heads):
    return reference.apply_rope(x.reshape(T, heads, D), table, positions)


@pytest.mark.parametrize(("rotary_dim", "is_neox"), [(D, True), (D // 2, True), (D, False)])
@pytest.mark.parametrize("pool_dims", [2, 3])
def test_sglang(rotary_dim, is_neox, pool_dims):
    table = RopeTable.build(rotary_dim, 64, is_neox=is_neox)
    q, k, v = tokens()
    positions = torch.tensor([5, 0, 63, 7, 8, 9, 1])
    out_loc = torch.tensor([4, 9, 0, 30, 31, 2, -1])
    pools = [torch.full((32, HKV * D) if pool_dims == 2 else (32, HKV, D), 7.0) for _ in range(2)]
    wanted_q, wanted_k = turned(q, table, positions, HQ), turned(k, table, positions, HKV)
    before = v.clone()
    q3, k3 = q.view(T, HQ, D), k.view(T, HKV, D)
    sglang_plugin.apply_rope_inplace_with_kvcache(
        q3, k3, v, *pools, table.cos_sin_cache, positions, out_loc, is_neox=is_neox, rope_dim=rotary_dim
    )
    assert torch.equal(q3, wanted_q) and torch.equal(k3, wanted_k) and torch.equal(v, before)
    for pool, rows in zip(pools, (wanted_k, v.reshape(T, HKV, D)), strict=True):
        wanted = torch.full((32, HKV, D), 7.0)
        wanted[out_loc[:-1]] = rows[:-1]
        assert torch.equal(pool.view(32, HKV, D), wanted)


def test_sglang_refuses_a_slice_of_the_table():
    q, k, v = (x.view(T, -1, D) for x in tokens())
    pool, table = torch.zeros(8, HKV * D), RopeTable.build(D, 8).cos_sin_cache
    with pytest.raises(ValueError, match="rope_dim: expected 0 or the 16 columns"):
        sglang_plugin.apply_rope_inplace_with_kvcache(
            q, k, v, pool, pool.clone(), table, torch.arange(T), torch.arange(T), is_neox=True, rope_dim=8
        )


def test_sglangs_plugin_hook_replaces_one_function(monkeypatch):
    registered = []
    module = types.ModuleType("sglang.srt.plugins.hook_registry")
    module.HookType = types.SimpleNamespace(REPLACE="replace")
    module.HookRegistry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sglang_plugin.register()
    assert registered == [(sglang_plugin.TARGET, sglang_plugin.apply_rope_inplace_with_kvcache, "replace")]


# Physical orders of vLLM's logical [blocks, heads, block_size, 2 D].
ORDERS = {"BHNC": (0, 1, 2, 3), "BNHC": (0, 2, 1, 3), "HBNC": (1, 0, 2, 3)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vllm_k_beside_v(order, dtype):
    permutation = ORDERS[order]
    shape = (6, HKV, 4, 2 * D)
    back = [permutation.index(i) for i in range(4)]
    kv_cache = torch.full([shape[i] for i in permutation], 7.0, dtype=dtype).permute(back)
    table = RopeTable.build(D, 64)
    query, key, value = tokens(dtype)
    positions = torch.tensor([5, 0, 63, 7, 8, 9, 1])
    slot_mapping = torch.tensor([4, 9, 0, 23, -1, 2])  # shorter than T: the batch is padded for a graph
    wanted_q, wanted_k = turned(query, table, positions, HQ), turned(key, table, positions, HKV)
    values = value.reshape(T, HKV, D).clone()
    vllm_cache.rope_and_cache(query, key, value, positions, table, True, kv_cache, slot_mapping)
    assert torch.equal(query.reshape(T, HQ, D), wanted_q) and torch.equal(key.reshape(T, HKV, D), wanted_k)
    wanted = torch.full(shape, 7.0, dtype=dtype)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            wanted[slot // 4, :, slot % 4] = torch.cat([wanted_k[token], values[token]], dim=-1)
    assert torch.equal(kv_cache, wanted)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_vllm_quantised(name):
    codes = vllm_cache._CODES[name]
    kv_cache = torch.zeros(6, HKV, 4, 2 * D, dtype=torch.uint8)
    table = RopeTable.build(D, 64)
    query, key, value = tokens()
    positions, slots = torch.arange(T), torch.arange(T) + 3
    k_scale, v_scale = torch.tensor([0.5]), torch.tensor([0.25])
    wanted_k = (turned(key, table, positions, HKV) / k_scale).to(codes).float()
    wanted_v = (value.reshape(T, HKV, D) / v_scale).to(codes).float()
    vllm_cache.rope_and_cache(query, key, value, positions, table, True, kv_cache, slots, name, k_scale, v_scale)
    stored = kv_cache.view(codes).float()[slots // 4, :, slots % 4]
    assert torch.equal(stored[..., :D], wanted_k) and torch.equal(stored[..., D:], wanted_v)


def test_flashinfer_csr_gives_the_caches_own_slots():
    cache = PagedKVCache(
        num_layers=1, num_pages=20, page_size=3, num_kv_heads=HKV, head_dim=D, max_requests=4, dtype=torch.float32, device="cpu"
    )
    requests = [cache.allocate(n) for n in (4, 0, 6)]
    grown = cache.append_many(requests, [3, 2, 2])
    indptr, indices, last_page_len = cache.page_indices(requests)
    assert last_page_len.tolist() == [1, 2, 2]
    batch_indices = torch.tensor([0, 0, 0, 1, 1, 2, 2], dtype=torch.int32)
    positions = torch.tensor([position for row in grown for position in row], dtype=torch.int32)
    slots = flashinfer_csr.csr_slot_mapping(batch_indices, positions, indptr, indices, cache.page_size)
    assert torch.equal(slots, cache.slot_mapping(requests, [3, 2, 2]))


def test_flashinfer_csr_skips_padding_and_what_has_no_page():
    indptr, indices = torch.tensor([0, 2, 2, 3]), torch.tensor([5, 1, 7])
    batch_indices, positions = torch.tensor([0, 0, 1, 2, -1, 2]), torch.tensor([7, 8, 0, 3, 0, -1])
    slots = flashinfer_csr.csr_slot_mapping(batch_indices, positions, indptr, indices, page_size=4)
    assert slots.tolist() == [1 * 4 + 3, -1, -1, 7 * 4 + 3, -1, -1]
