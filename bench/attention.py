"""Paged decode attention to stand behind our launch: FlashInfer's when it is installed, else a small Triton one."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from bench.buffers import Case, Meta
from bench.providers import Unavailable, need

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@triton.jit
def _paged_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    table_ptr,
    length_ptr,
    q_stride,
    table_stride,
    scale,
    HKV: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: one request and one KV head; NHD caches; online softmax over blocks of tokens."""
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, D)
    q_at = request * q_stride + (head * GROUP + row)[:, None] * D + dim[None, :]
    q = tl.load(q_ptr + q_at, mask=(row < GROUP)[:, None], other=0.0)
    length = tl.load(length_ptr + request)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    start = 0
    while start < length:  # `range` of a tensor is more than Triton 3.6's interpreter can do with NumPy 2.5
        token = start + tl.arange(0, BLOCK)
        live = token < length
        page = tl.load(table_ptr + request * table_stride + token // PAGE, mask=live, other=0).to(tl.int64)
        at = ((page * PAGE + token % PAGE) * HKV + head) * D
        k = tl.load(k_ptr + at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=live[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(live[None, :], score, float("-inf"))
        new_best = tl.maximum(best, tl.max(score, 1))
        shrink = tl.exp(best - new_best)
        p = tl.exp(score - new_best[:, None])
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v.dtype), v)
        best = new_best
        start += BLOCK
    out_at = (request * HKV * GROUP + (head * GROUP + row)[:, None]) * D + dim[None, :]
    tl.store(out_ptr + out_at, (total / weight[:, None]).to(out_ptr.dtype.element_ty), mask=(row < GROUP)[:, None])


def triton_attention(case: Case, meta: Meta) -> Attention:
    """q [T, Hq, D] (rows may be strided), NHD caches -> [T, Hq, D]."""
    model = case.model
    group = model.num_q_heads // model.num_kv_heads
    rows = max(16, triton.next_power_of_2(group))
    lengths = meta.lengths

    def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        out = torch.empty((q.shape[0], model.num_q_heads, model.head_dim), dtype=q.dtype, device=q.device)
        _paged_attention[(q.shape[0], model.num_kv_heads)](
            q,
            k_cache,
            v_cache,
            out,
            meta.block_table,
            lengths,
            q.stride(0),
            meta.block_table.stride(0),
            model.head_dim**-0.5,
            HKV=model.num_kv_heads,
            GROUP=group,
            ROWS=rows,
            D=model.head_dim,
            PAGE=case.page_size,
            BLOCK=64,
        )
        return out

    return attend


def decode_wrapper(case: Case, csr):
    """FlashInfer's CUDA-core batch decode for the lengths in `csr`, safe to capture, not planned yet."""
    return need("flashinfer", "BatchDecodeWithPagedKVCacheWrapper")(
        torch.zeros(128 << 20, dtype=torch.uint8, device=case.device),
        "NHD",
        use_cuda_graph=True,
        paged_kv_indptr_buffer=csr.indptr.clone(),
        paged_kv_indices_buffer=csr.indices.clone(),
        paged_kv_last_page_len_buffer=csr.last_page_len.clone(),
    )


def flashinfer_attention(case: Case, meta: Meta, pdl: bool | None = None) -> Attention:
    """FlashInfer's CUDA-core batch decode, planned once for fixed lengths and safe to capture. `pdl` None is its own
    choice: programmatic dependent launch wherever there is such a thing."""
    model, csr = case.model, meta.csr
    wrapper = decode_wrapper(case, csr)
    wrapper.plan(
        csr.indptr,
        csr.indices,
        csr.last_page_len,
        model.num_q_heads,
        model.num_kv_heads,
        model.head_dim,
        case.page_size,
        q_data_type=case.dtype,
        kv_data_type=case.dtype,
    )
    return lambda q, k_cache, v_cache: wrapper.run(q, (k_cache, v_cache), enable_pdl=pdl)


def make_attention(case: Case, meta: Meta, pdl: bool | None = None) -> tuple[str, Attention]:
    """The first of FlashInfer's and ours that runs on this case, with its name."""
    model = case.model
    try:
        attend = flashinfer_attention(case, meta, pdl)
        shape = (int(meta.csr.indices.max()) + 1, case.page_size, model.num_kv_heads, model.head_dim)
        cache = torch.zeros(shape, dtype=case.dtype, device=case.device)
        q = torch.zeros((case.tokens, model.num_q_heads, model.head_dim), dtype=case.dtype, device=case.device)
        attend(q, cache, cache)
        torch.cuda.synchronize()
        return "flashinfer", attend
    except Unavailable:
        return "triton", triton_attention(case, meta)
    except Exception as error:  # a head ratio that FlashInfer's decode kernel was not built for
        print(f"  flashinfer attention: {type(error).__name__}: {str(error)[:100]}; using the Triton one")
        return "triton", triton_attention(case, meta)
