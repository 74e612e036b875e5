"""Where attention's programs land behind each launch, and what that costs a step.

    python -m bench.investigations.placement [--network llama-3-8b] [--batch 1,4] [--context 1024] [--json FILE]

FlashInfer's decode attention is built a second time from a copy of its headers in which every program notes `%smid` and
`%globaltimer`: at its start, when its wait for the kernel before it is over, and at its end. So does ours, from a copy of its
source. Attention keeps its registers, so its grid stays. Without FlashInfer a CUDA stand-in of the same shape takes its place.

What was known before the first run, from FlashInfer 0.6.13's source and nvcc (sm_90a, bf16, heads of 128, four query heads to a KV
head):

* Attention has 128 threads of 59 registers, 64 as they are allocated, and 9,216 bytes of shared memory: eight programs take all
  registers of a multiprocessor. Planned for a graph, its grid is (8 · 132 / KV heads, KV heads): whatever there is to do, one full
  wave, of which x below the number of chunks has work and the rest leaves without a wait. A chunk is 128 tokens or more.
* With eight KV heads the grid is (132, 8), and programs of the same x are 132 apart. Dealt out in turn to 132 multiprocessors, the
  eight heads of a chunk land on one of them: with one request of 1,024 tokens eight multiprocessors have eight programs each, and
  124 have none. Dealt out to fewer, because ours hold some, they spread.

The model (`place`): the next program goes to the multiprocessor with the most free slots, in a fixed order among equals. One with a
program of ours has no slot while ours runs, if our launch leaves the split of L1 to the driver, and one slot less if it asks for
shared memory. Predictions (`--model` prints them, with no GPU):

* attention scheduled behind the end of the kernel before it (no PDL, ours triggering last, peers): 8, 16, 32 and 64 multiprocessors
  of 8 programs each for B = 1, 2, 4 and 8 with 1,024 tokens, whatever the kernel before it was;
* behind programs of ours that trigger at once and keep the driver's split: spread over many more;
* the same, asking for shared memory: as behind the end, because only the first round leaves ours out;
* a grid cut to the programs that have work (`grid` below) spreads the same way behind every launch, and differences go away.

Whole steps measured earlier (Llama-3-8B, 1,024 tokens, tiles of one warp) rank as the model's fullest multiprocessor or its number
of used ones does at B = 2, 4 and 8 (rank correlation 0.8 to 0.93), and the other way round at B = 1 (-0.56), where concentration
seems to cost nothing; tiles of four and eight warps fit worse. So `fit` lets the price of concentration depend on the work.
"""

import argparse
import contextlib
import ctypes
import functools
import heapq
import importlib.util
import inspect
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench import timing
from bench.attention import decode_wrapper
from bench.buffers import Case, Layer, Meta, decode_meta, make_layers
from bench.providers import Unavailable, first_line, load, missing
from bench.report import environment
from bench.stats import interleave, summarize
from bench.step_cell import bind_layer
from bench.transformer import NETWORKS, Network, Weights, decoder_layer, make_weights
from bench.workloads import PAGE_SIZE

# Internals of the package.
from decode_rope.api import prepared
from decode_rope.launch.decode import Geometry, decode_geometry

LAYERS, MOST_LAYERS = 8, 32
PROGRAMS, MERGES, OURS = 2112, 1056, 4096  # most that are recorded a layer, of attention, its merge, and ours
FIELDS = 4  # multiprocessor + 1, start, wait over, end
CANDIDATES = (
    "ours",
    "ours@1/4/1/4/1/1/100",
    "ours-late",
    "ours-last",
    "ours-plain",
    "ours@1/16/1/8/4/1/-1",
    "ours@1/16/1/8/4/1/100",
    "ours@1/2/1/2/1/1/-1",
    "ours@1/32/1/8/8/1/-1",
    "flashinfer",
    "sglang",
    "tokenspeed",
)
HELD_OUT = ((2, 1024), (8, 1024), (1, 3000), (4, 3000), (16, 1024))
REPLAYS, ROUNDS = 4, 12

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Expect = Callable[[float, float, float], float]  # tokens a chunk, chunks, most on one: attention's us


# ---- The copy of FlashInfer that records

_RECORDS = (
    """
#ifndef PLACEMENT_RECORDS
#define PLACEMENT_RECORDS
#include <cstdint>
#include <cuda_runtime.h>
constexpr uint32_t kPlacementLayers = @LAYERS, kPlacementPrograms = @PROGRAMS, kPlacementMerges = @MERGES;
static __device__ unsigned long long placement_attention[kPlacementLayers * kPlacementPrograms * 4];
static __device__ unsigned long long placement_merge[kPlacementLayers * kPlacementMerges * 4];
__device__ __forceinline__ unsigned long long placement_now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ unsigned long long placement_sm() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
  return sm + 1;
}
__device__ __forceinline__ void placement_note(unsigned long long* records, uint32_t most, uint32_t layer, uint32_t field,
                                               unsigned long long value) {
  uint32_t program = blockIdx.x + blockIdx.y * gridDim.x;
  if (threadIdx.x + threadIdx.y + threadIdx.z == 0 && layer < kPlacementLayers && program < most)
    records[(layer * most + program) * 4 + field] = value;
}
#define PLACEMENT_A(layer, field, value) placement_note(placement_attention, kPlacementPrograms, layer, field, value)
#define PLACEMENT_M(layer, field, value) placement_note(placement_merge, kPlacementMerges, layer, field, value)
extern "C" __attribute__((weak, visibility("default"))) int placement_copy(int which, void* host, size_t bytes) {
  return which ? cudaMemcpyFromSymbol(host, placement_merge, bytes) : cudaMemcpyFromSymbol(host, placement_attention, bytes);
}
extern "C" __attribute__((weak, visibility("default"))) int placement_clear() {
  void* at = nullptr;
  int code = cudaGetSymbolAddress(&at, placement_attention);
  if (!code) code = cudaMemset(at, 0, sizeof(placement_attention));
  if (!code) code = cudaGetSymbolAddress(&at, placement_merge);
  if (!code) code = cudaMemset(at, 0, sizeof(placement_merge));
  return code;
}
#endif
""".replace("@LAYERS", str(MOST_LAYERS))
    .replace("@PROGRAMS", str(PROGRAMS))
    .replace("@MERGES", str(MERGES))
)
_WAIT = 'asm volatile("griddepcontrol.wait;");'
_TRIGGER = 'asm volatile("griddepcontrol.launch_dependents;");'
_LAYER = "static_cast<uint32_t>(params.logits_soft_cap)"  # of no use to this attention, so it tells the layer


def _substitute(pattern: str, replace: Callable[[re.Match], str], text: str, times: int = 1) -> str:
    text, found = re.subn(pattern, replace, text, count=times, flags=re.S)
    if found != times:
        raise Unavailable(f"flashinfer's source is another one: {found} instead of {times} of {pattern[:60]}")
    return text


def _between(text: str, start: str, end: str) -> tuple[str, str, str]:
    at = text.find(start)
    to = text.find(end, at + len(start)) if at >= 0 else -1
    if to < 0:
        raise Unavailable(f"flashinfer's source is another one: no {start[:60]}")
    return text[:at], text[at:to], text[to:]


def recording_headers(source: Path, target: Path) -> None:
    """A copy of FlashInfer's headers whose decode attention and merge record themselves."""
    shutil.copytree(source, target)
    decode = target / "flashinfer/attention/decode.cuh"
    text = _substitute(r'#include "state\.cuh"\n', lambda m: m[0] + _RECORDS, decode.read_text())
    before, body, after = _between(text, "void BatchDecodeWithPagedKVCacheDevice(", "get_heuristic_num_threads")
    body = _substitute(re.escape(_WAIT), lambda m: f"{m[0]} PLACEMENT_A({_LAYER}, 2, placement_now());", body, times=2)
    body = _substitute(
        r"BatchDecodeWithPagedKVCacheDevice<POS_ENCODING_MODE.*?\(params, smem\);",
        lambda m: (
            f"const uint32_t placement_layer = {_LAYER};\n"
            "PLACEMENT_A(placement_layer, 0, placement_sm());\nPLACEMENT_A(placement_layer, 1, placement_now());\n"
            f"{m[0]}\nPLACEMENT_A(placement_layer, 3, placement_now());"
        ),
        body,
    )
    after = _substitute(
        r"(VariableLengthMergeStates\(\s*tmp_v, tmp_s, params\.o_indptr, o, lse, params\.paged_kv\.batch_size,\s*)nullptr",
        lambda m: f"{m[1]}reinterpret_cast<uint32_t*>(static_cast<uintptr_t>(params.logits_soft_cap))",
        after,
    )
    decode.write_text(before + body + after)

    cascade = target / "flashinfer/attention/cascade.cuh"
    head, first, text = _between(cascade.read_text(), "namespace flashinfer", "__global__ void PersistentVariableLengthMergeStates")
    before, body, after = _between(text, "__global__ void PersistentVariableLengthMergeStates", "template <")
    body = _substitute(
        r"seq_len_ptr \? \*seq_len_ptr : max_seq_len;",
        lambda m: (
            "max_seq_len;\n"
            "const uint32_t placement_layer = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(seq_len_ptr));\n"
            "PLACEMENT_M(placement_layer, 0, placement_sm());\nPLACEMENT_M(placement_layer, 1, placement_now());"
        ),
        body,
    )
    body = _substitute(re.escape(_WAIT), lambda m: f"{m[0]} PLACEMENT_M(placement_layer, 2, placement_now());", body)
    body = _substitute(re.escape(_TRIGGER), lambda m: f"PLACEMENT_M(placement_layer, 3, placement_now()); {m[0]}", body)
    cascade.write_text(head + _RECORDS + first + before + body + after)


@functools.cache
def start_build() -> SimpleNamespace:
    """Starts to build the copy that records, in folders of its own; the modules that run without records are built beside it."""
    reason = missing(("flashinfer",))
    if reason is not None:
        raise Unavailable(reason)
    from flashinfer.jit import env
    from flashinfer.jit.attention.modules import gen_batch_decode_module

    facts = (*[torch.bfloat16] * 3, torch.int32, 128, 128, 0, False, False)
    folder = Path(tempfile.mkdtemp(prefix="placement-"))
    recording_headers(Path(env.FLASHINFER_INCLUDE_DIR), folder / "include")
    own = {
        "FLASHINFER_INCLUDE_DIR": folder / "include",
        "FLASHINFER_JIT_DIR": folder / "cached_ops",
        "FLASHINFER_GEN_SRC_DIR": folder / "generated",
        "FLASHINFER_AOT_DIR": folder / "none",
    }
    kept = {name: getattr(env, name) for name in own}
    try:
        for name, path in own.items():
            setattr(env, name, path)
        spec = gen_batch_decode_module(*facts)
        spec.write_ninja()
        path, ninja = Path(spec.jit_library_path), Path(spec.ninja_path)
    finally:
        for name, before in kept.items():
            setattr(env, name, before)
    log = open(folder / "ninja.log", "w")  # noqa: SIM115
    process = subprocess.Popen(["ninja", "-C", str(ninja.parent), "-f", str(ninja)], stdout=log, stderr=subprocess.STDOUT)
    for build in (lambda: gen_batch_decode_module(*facts).build(False), _build_rope, _build_page):
        threading.Thread(target=_quietly, args=(build,), daemon=True).start()
    return SimpleNamespace(process=process, path=path, log=folder / "ninja.log", load=spec.load)


def _build_rope() -> None:
    from flashinfer.jit.rope import gen_rope_module

    gen_rope_module().build(False)


def _build_page() -> None:
    from flashinfer.jit.page import gen_page_module

    gen_page_module().build(False)


def _quietly(build: Callable[[], None]) -> None:
    with contextlib.suppress(Exception):  # who needs the module builds it again and says what is wrong
        build()


@functools.cache
def recording_flashinfer() -> SimpleNamespace:
    """`run` in the form that a wrapper calls, and the `library` that holds the records."""
    build = start_build()
    if build.process.wait(timeout=300) or not build.path.exists():
        errors = [line for line in build.log.read_text().splitlines() if "error" in line.lower()]
        raise Unavailable(f"ninja: {(errors or ['no library'])[0][:200]}")
    module, library = build.load(build.path), ctypes.CDLL(str(build.path))

    def run(*arguments: Any) -> None:
        *others, rope_scale, rope_theta = arguments
        module.run(*others, 1.0 / rope_scale, 1.0 / rope_theta)

    return SimpleNamespace(run=run, plan=module.plan, library=library)


# ---- A stand-in for attention

_STAND_IN = """
#include <algorithm>
#include <cuda_bf16.h>
@RECORDS
// One program: `chunk` tokens of one request and one KV head of 128, 8 tokens at a time, two groups in flight.
__global__ void __launch_bounds__(128, 8) attention_stand_in(const __nv_bfloat16* q, const uint4* k, const uint4* v, float* partial,
    const int* table, int columns, int page, int heads, int group, int length, int chunk, int chunks, int used, int q_stride,
    uint32_t layer) {
  PLACEMENT_A(layer, 0, placement_sm());
  PLACEMENT_A(layer, 1, placement_now());
  if (blockIdx.x < used) {
    int request = blockIdx.x / chunks, from = blockIdx.x % chunks * chunk, to = min(length, from + chunk), head = blockIdx.y;
    int lane = threadIdx.x % 16, row = threadIdx.x / 16;
    const int* pages = table + request * columns;
    asm volatile("griddepcontrol.wait;");
    PLACEMENT_A(layer, 2, placement_now());
    float part[8], sum[8] = {};
    for (int i = 0; i < 8; i++) part[i] = __bfloat162float(q[(size_t)request * q_stride + head * group * 128 + lane * 8 + i]);
    uint4 ks[2], vs[2];
    for (int s = 0; s < 2; s++) {
      int t = min(from + s * 8 + row, length - 1);
      size_t at = (((size_t)pages[t / page] * page + t % page) * heads + head) * 16 + lane;
      ks[s] = k[at];
      vs[s] = v[at];
    }
    for (int t0 = from; t0 < to; t0 += 16) {
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const __nv_bfloat16* a = reinterpret_cast<const __nv_bfloat16*>(&ks[s]);
        const __nv_bfloat16* b = reinterpret_cast<const __nv_bfloat16*>(&vs[s]);
        for (int g = 0; g < group; g++) {
          float score = 0.f;
          for (int i = 0; i < 8; i++) score += (part[i] + g) * __bfloat162float(a[i]);
          for (int o = 8; o; o /= 2) score += __shfl_xor_sync(~0u, score, o);
          for (int i = 0; i < 8; i++) sum[i] += score * 1e-4f * __bfloat162float(b[i]);
        }
        int t = min(t0 + (s + 2) * 8 + row, length - 1);
        size_t at = (((size_t)pages[t / page] * page + t % page) * heads + head) * 16 + lane;
        ks[s] = k[at];
        vs[s] = v[at];
      }
    }
    float* out = partial + ((size_t)blockIdx.x * heads + head) * 128 + lane * 8;
    if (row == 0) for (int i = 0; i < 8; i++) out[i] = sum[i];
    asm volatile("griddepcontrol.launch_dependents;");
  }
  PLACEMENT_A(layer, 3, placement_now());
}

__global__ void __launch_bounds__(128) merge_stand_in(const float* partial, __nv_bfloat16* out, int rows, int heads, int group,
                                                      int chunks, uint32_t layer) {
  PLACEMENT_M(layer, 0, placement_sm());
  PLACEMENT_M(layer, 1, placement_now());
  asm volatile("griddepcontrol.wait;");
  PLACEMENT_M(layer, 2, placement_now());
  for (int i = blockIdx.x; i < rows * heads * group; i += gridDim.x) {
    float sum = 0.f;
    for (int c = 0; c < chunks; c++) sum += partial[((size_t)(i / (heads * group) * chunks + c) * heads + i / group % heads) * 128
                                                    + threadIdx.x];
    out[(size_t)i * 128 + threadIdx.x] = __float2bfloat16(sum);
  }
  PLACEMENT_M(layer, 3, placement_now());
  asm volatile("griddepcontrol.launch_dependents;");
}

extern "C" int stand_in_launch(void* q, void* k, void* v, void* partial, void* out, void* table, int columns, int page, int heads,
    int group, int length, int chunk, int chunks, int requests, int padded, int q_stride, int layer, int pdl, int shared, int sms,
    void* stream) {
  cudaLaunchAttribute attribute[1];
  attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(padded, heads);
  config.blockDim = dim3(128);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attribute;
  config.numAttrs = pdl;
  int code = cudaLaunchKernelEx(&config, attention_stand_in, (const __nv_bfloat16*)q, (const uint4*)k, (const uint4*)v,
                                (float*)partial, (const int*)table, columns, page, heads, group, length, chunk, chunks,
                                requests * chunks, q_stride, (uint32_t)layer);
  if (code) return code;
  config.gridDim = dim3(sms * std::max(1, (requests * heads * group + sms - 1) / sms));
  config.dynamicSmemBytes = 0;
  return cudaLaunchKernelEx(&config, merge_stand_in, (const float*)partial, (__nv_bfloat16*)out, requests, heads, group, chunks,
                            (uint32_t)layer);
}
extern "C" int stand_in_allow(int shared) {
  return cudaFuncSetAttribute(attention_stand_in, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
}
""".replace("@RECORDS", _RECORDS)
STAND_IN_SHARED = 27 << 10  # eight programs a multiprocessor, as FlashInfer's registers allow


@functools.cache
def stand_in_library() -> ctypes.CDLL:
    """The stand-in, built by nvcc."""
    folder = Path(tempfile.mkdtemp(prefix="placement-"))
    (folder / "stand_in.cu").write_text(_STAND_IN)
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    target = "-gencode=arch=compute_90a,code=sm_90a"
    command = [nvcc, "-O3", target, "-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "stand_in.cu", "-o", "stand_in.so"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"nvcc: {done.stderr.strip()[-300:]}")
    library = ctypes.CDLL(str(folder / "stand_in.so"))
    library.stand_in_allow(STAND_IN_SHARED)
    return library


# ---- Attention of one cell


@dataclass
class Cell:
    """One batch size and context of a network, with the buffers all its graphs share."""

    network: Network
    case: Case
    meta: Meta
    layers: list[Layer]
    weights: list[Weights]
    index: dict[int, int] = field(default_factory=dict)  # address of a K cache -> its layer

    def __post_init__(self) -> None:
        self.index = {layer.k_cache.data_ptr(): i for i, layer in enumerate(self.layers)}

    @property
    def name(self) -> str:
        return f"{self.network.name} B={self.case.tokens} {int(self.meta.lengths.max())} tokens"


class FlashInferAttention:
    """FlashInfer's decode, planned once a cell. `call` gives a function of (q, k_cache, v_cache) with its own choice of the module
    that runs, of PDL, and of the grid's first size."""

    kind = "flashinfer"

    def __init__(self, cell: Cell) -> None:
        case, model, csr = cell.case, cell.case.model, cell.meta.csr
        self.cell = cell
        self.wrapper = decode_wrapper(case, csr)
        sizes = (model.num_q_heads, model.num_kv_heads, model.head_dim, case.page_size)
        self.wrapper.plan(*csr, *sizes, q_data_type=case.dtype, kv_data_type=case.dtype)
        self.plain, self.plan = self.wrapper._cached_module, [int(n) for n in self.wrapper._plan_info]
        self.padded = self.plan[0]

    def call(self, *, record: bool = False, pdl: bool | None = None, padded: int | None = None) -> Attend:
        module = recording_flashinfer() if record else self.plain
        plan = [self.padded if padded is None else padded, *self.plan[1:]]

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            wrapper = self.wrapper
            wrapper._cached_module, wrapper._plan_info = module, plan
            wrapper._logits_soft_cap = float(self.cell.index[k_cache.data_ptr()])
            try:
                return wrapper.run(q, (k_cache, v_cache), enable_pdl=pdl)
            finally:
                wrapper._cached_module, wrapper._plan_info, wrapper._logits_soft_cap = self.plain, self.plan, 0.0

        return attend

    def library(self) -> ctypes.CDLL:
        return recording_flashinfer().library


class StandInAttention:
    """The stand-in, always recording, with the grid that FlashInfer would have."""

    kind = "stand-in"

    def __init__(self, cell: Cell) -> None:
        self.cell, case = cell, cell.case
        self.sms = torch.cuda.get_device_properties(case.device).multi_processor_count
        heads = case.model.num_kv_heads
        self.length = int(cell.meta.lengths.max())
        pages = -(-self.length // case.page_size)
        self.chunk_pages, used = split([pages] * case.tokens, heads, 8 * self.sms, case.page_size)
        self.chunks = used // case.tokens
        self.padded = 8 * self.sms // heads
        self.partial = torch.empty((PROGRAMS, 128), dtype=torch.float32, device=case.device)

    def call(self, *, record: bool = False, pdl: bool | None = None, padded: int | None = None) -> Attend:
        library, case = stand_in_library(), self.cell.case
        heads = case.model.num_kv_heads

        def attend(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
            out = torch.empty((case.tokens, case.model.num_q_heads, 128), dtype=case.dtype, device=case.device)
            pointers = (q, k_cache, v_cache, self.partial, out, self.cell.meta.block_table)
            numbers = (
                self.cell.meta.block_table.shape[1], case.page_size, heads, case.model.num_q_heads // heads, self.length,
                self.chunk_pages * case.page_size, self.chunks, case.tokens, padded or self.padded, q.stride(0),
                self.cell.index[k_cache.data_ptr()], int(pdl is not False), STAND_IN_SHARED, self.sms,
            )  # fmt: skip
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            code = library.stand_in_launch(*[ctypes.c_void_p(x.data_ptr()) for x in pointers], *map(ctypes.c_int, numbers), stream)
            if code:
                raise RuntimeError(f"stand-in: CUDA error {code}")
            return out

        return attend

    def library(self) -> ctypes.CDLL:
        return stand_in_library()


def make_attention(cell: Cell, stand_in: bool) -> FlashInferAttention | StandInAttention:
    if not stand_in:
        try:
            recording_flashinfer()
            return FlashInferAttention(cell)
        except Exception as error:
            say(f"  flashinfer: {type(error).__name__}: {first_line(error)}; a stand-in takes its place")
    return StandInAttention(cell)


# ---- The copy of our kernel that records


class OurRecords:
    """A memory for records of our programs, and the kernel that writes them.

    The layer comes from q's address: the QKV buffers of every cell are slices of one tensor, a fixed step apart.
    """

    def __init__(self, network: Network, layers: int, most_tokens: int, device: torch.device) -> None:
        width = network.model.heads * network.model.head_dim
        self.rows = torch.zeros((layers, most_tokens * width), dtype=torch.bfloat16, device=device)
        self.records = torch.zeros((layers, OURS, FIELDS), dtype=torch.int64, device=device)
        self._kernel = None

    def qkv(self, layer: int, case: Case) -> Tensor:
        model = case.model
        count = case.tokens * model.heads * model.head_dim
        return self.rows[layer, :count].view(case.tokens, model.heads, model.head_dim)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Launches bound inside are of the kernel that records."""
        kept = prepared.DECODE
        prepared.DECODE = kept._replace(kernel=self.kernel(kept.kernel))
        try:
            yield
        finally:
            prepared.DECODE = kept

    def kernel(self, kernel: Any) -> Any:
        if self._kernel is None:
            step = self.rows.stride(0) * self.rows.element_size()
            self._kernel = recording_kernel(kernel, self.rows.data_ptr(), step, self.records.data_ptr())
        return self._kernel


_BEGIN = """
    placed_begin = placed_now()
    placed_ready = placed_begin
"""
_END = """
    placed_at = PLACED_RECORDS + ((q_ptr.to(tl.int64) - PLACED_ROWS) // PLACED_STEP * PLACED_MOST + tl.program_id(0)) * 32
    placed_to = placed_at.to(tl.pointer_type(tl.int64))
    tl.store(placed_to, placed_sm().to(tl.int64) + 1)
    tl.store(placed_to + 1, placed_begin)
    tl.store(placed_to + 2, placed_ready)
    tl.store(placed_to + 3, placed_now())
"""


def recording_source(text: str, rows: int, step: int, records: int) -> str:
    """Our kernel's module with a kernel `decode_kernel_recorded` that ends by noting where it was and when."""
    text, names = re.subn(
        r"def rope_append_decode_kernel\((.*?)\n\):\n",
        lambda m: f"def decode_kernel_recorded({m[1]}\n):\n{_BEGIN}",
        text,
        flags=re.S,
    )
    head, body = text.split(_BEGIN) if names == 1 else (text, "")
    body, waits = re.subn(r"\n( +)gdc_wait\(\)\n", r"\n\1gdc_wait()\n\1placed_ready = placed_now()\n", body, count=1)
    if names != 1 or waits != 1:
        raise Unavailable("our own kernel's source has another form than this file expects")
    constants = {"PLACED_ROWS": rows, "PLACED_STEP": step, "PLACED_RECORDS": records, "PLACED_MOST": OURS}
    lines = [
        "",
        "from triton.language.extra.cuda import globaltimer as placed_now",
        "from triton.language.extra.cuda import smid as placed_sm",
    ]
    lines += [f"{name} = tl.constexpr({value})" for name, value in constants.items()]
    head = re.sub(r"\n@triton\.jit", lambda m: "\n".join(lines) + "\n\n" + m[0], head, count=1)
    return head + _BEGIN + body.rstrip("\n") + "\n" + _END


def recording_kernel(kernel: Any, rows: int, step: int, records: int) -> Any:
    source = inspect.getsourcefile(kernel.fn)
    path = Path(tempfile.mkdtemp(prefix="placement-")) / "decode_recorded.py"
    path.write_text(recording_source(Path(source).read_text(), rows, step, records))
    package = kernel.fn.__module__.rpartition(".")[0]
    spec = importlib.util.spec_from_file_location(f"{package}._decode_recorded", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module.decode_kernel_recorded


# ---- The model


def split(pages: Sequence[int], kv_heads: int, most_programs: int, page_size: int = PAGE_SIZE) -> tuple[int, int]:
    """(pages a chunk, chunks of all requests): the smallest chunks, of 128 tokens at least, whose programs fit in one wave."""
    chunk = max(128 // page_size, 1)
    while chunk < max(pages) and sum(-(-n // chunk) for n in pages) * kv_heads > most_programs:
        chunk += 1
    return chunk, sum(-(-n // chunk) for n in pages)


def place(programs: int, works: Callable[[int], bool], free: dict[int, int], order: Sequence[int]) -> list[int]:
    """The multiprocessor of every program in turn: the one with the most free slots, the first in `order` among equals. When none
    is left, one opens where a program without work was placed first."""
    rank = {sm: i for i, sm in enumerate(order)}
    heap = [(-slots, rank[sm], sm) for sm, slots in free.items() if slots > 0]
    heapq.heapify(heap)
    leaving, at = deque(), []
    for program in range(programs):
        if heap:
            slots, place_, sm = heapq.heappop(heap)
            if slots < -1:
                heapq.heappush(heap, (slots + 1, place_, sm))
        elif leaving:
            sm = leaving.popleft()
        else:
            sm = order[program % len(order)]
        at.append(sm)
        if not works(program):
            leaving.append(sm)
    return at


def working(at: Sequence[int], padded: int, chunks: int) -> Counter:
    """Programs with work on each multiprocessor."""
    return Counter(sm for program, sm in enumerate(at) if program % padded < chunks)


def predicted(geometry: Geometry | None, case: Case, order: Sequence[int], slots: int, padded: int, chunks: int) -> Counter:
    """Where the model sees attention's programs with work. `geometry` None: attention comes when the kernel before it has gone."""
    model = case.model
    free = dict.fromkeys(order, slots)
    if geometry is not None and geometry.pdl in (1, 2):
        ours = geometry.programs(case.tokens, model.num_q_heads, model.num_kv_heads)
        for i in range(ours):
            sm = order[i % len(order)]
            free[sm] = 0 if geometry.carveout < 0 else free[sm] - 1
        if not any(n > 0 for n in free.values()):
            free = dict.fromkeys(order, slots)
    at = place(padded * model.num_kv_heads, lambda program: program % padded < chunks, free, order)
    return working(at, padded, chunks)


def geometry_of(name: str, case: Case) -> Geometry | None:
    """The geometry of one of our launches; None where attention is scheduled behind its end, or it is not ours."""
    model = case.model
    if name.startswith("ours@"):
        return Geometry(*map(int, name.removeprefix("ours@").split("/")))
    chosen = decode_geometry(case.tokens, model.num_q_heads, model.num_kv_heads, model.head_dim)
    late = {"ours": chosen, "ours-late": chosen._replace(pdl=2)}
    return late.get(name)


# ---- Graphs


def make_cell(network: Network, batch: int, context: int, weights: list[Weights], records: OurRecords, seed: int = 0) -> Cell:
    case = Case(network.model, batch)
    meta = decode_meta(case, context, seed, full=True)
    layers = []
    for i, layer in enumerate(make_layers(case, meta, len(weights), seed, fill=True)):
        qkv = records.qkv(i, case)
        sizes = [network.model.num_q_heads, network.model.num_kv_heads, network.model.num_kv_heads]
        layers.append(Layer(*qkv.split(sizes, dim=1), layer.k_cache, layer.v_cache))
    return Cell(network, case, meta, layers, weights)


def make_step(cell: Cell, provider: Any, attend: Attend, records: OurRecords | None) -> Callable[[], Tensor]:
    """As `bench step` makes it; with `records`, our launches are of the kernel that records."""
    generator = torch.Generator(device=cell.case.device).manual_seed(2)
    start = torch.randn((cell.case.tokens, cell.case.model.hidden), device=cell.case.device, generator=generator).to(
        cell.case.dtype
    )
    with records.recording() if records is not None else contextlib.nullcontext():
        pairs = zip(cell.layers, cell.weights, strict=True)
        launches = [bind_layer(provider, cell.network, cell.case, cell.meta, layer, weight) for layer, weight in pairs]

    def step() -> Tensor:
        x, residual = start, torch.zeros_like(start)
        for weight, layer, launch in zip(cell.weights, cell.layers, launches, strict=True):
            x = decoder_layer(cell.case, weight, layer, x, residual, launch, attend)
        return x + residual

    return step


def graph_of(cell: Cell, name: str, attend: Attend, records: OurRecords | None = None) -> torch.cuda.CUDAGraph | None:
    """None, and a line, where the provider cannot do it."""
    try:
        provider = load(name)
        reason = missing(provider.modules)
        if reason is not None:
            raise Unavailable(reason)
        return timing.capture([make_step(cell, provider, attend, records if name.startswith("ours") else None)])
    except Exception as error:
        say(f"  {name}: {type(error).__name__}: {first_line(error)}")
        return None


def times(graphs: dict[str, torch.cuda.CUDAGraph], layers: int) -> dict[str, dict[str, float]]:
    """Microseconds a layer."""
    replays = {name: graph.replay for name, graph in graphs.items()}
    if not replays:
        return {}
    samples = interleave(replays, timing.EventTimer(), ROUNDS, random.Random(0), target_us=3000.0)
    return {name: summarize([us / layers for us in values]).as_dict() for name, values in samples.items()}


# ---- What the records say


def read(library: ctypes.CDLL, which: int, layers: int) -> Tensor:
    """int64 [layers, programs, FIELDS] of attention (0) or its merge (1)."""
    most = (PROGRAMS, MERGES)[which]
    out = torch.zeros((layers, most, FIELDS), dtype=torch.int64)
    code = library.placement_copy(which, ctypes.c_void_p(out.data_ptr()), ctypes.c_size_t(8 * out.numel()))
    if code:
        raise RuntimeError(f"placement_copy: CUDA error {code}")
    return out


def recorded(
    graph: torch.cuda.CUDAGraph, library: ctypes.CDLL, ours: OurRecords, layers: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(attention, merge, ours) of some replays, each the last of three in a row."""
    found = []
    for _ in range(REPLAYS):
        library.placement_clear()
        ours.records.zero_()
        torch.cuda.synchronize()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        found.append((read(library, 0, layers), read(library, 1, layers), ours.records.cpu()[:layers]))
    return found


def look(attention: Tensor, merge: Tensor, ours: Tensor) -> dict[str, Any] | None:
    """One layer of one replay; times in us, from the moment the first program of attention no longer waits."""
    seen = attention[attention[:, 0] > 0]
    busy = seen[seen[:, 2] > 0]
    if not len(busy):
        return None
    ready = int(busy[:, 2].min())
    last = busy[busy[:, 3].argmax()]
    counts = Counter((busy[:, 0] - 1).tolist())
    a, m, o = busy, merge[merge[:, 0] > 0], ours[ours[:, 0] > 0]
    by_count: dict[int, list[float]] = {}
    for sm, _, waited, end in busy.tolist():
        by_count.setdefault(counts[sm - 1], []).append((end - waited) / 1e3)

    def since(t: Any) -> float:
        return (int(t) - ready) / 1e3

    result = {
        "programs": len(seen),
        "busy": len(busy),
        "sms": len(counts),
        "pairs": len({sm // 2 for sm in counts}),
        "most": max(counts.values()),
        "histogram": dict(sorted(Counter(counts.values()).items())),
        "first_start": since(a[:, 1].min()),
        "last_start": since(a[:, 1].max()),
        "late": int((a[:, 1] > ready).sum()),
        "attention": since(last[3]),
        "first_end": since(a[:, 3].min()),
        "slowest_has": counts[int(last[0]) - 1],
        "us_by_count": {n: round(median(us), 2) for n, us in sorted(by_count.items())},
        "sms_seen": len(set(seen[:, 0].tolist())),
    }
    if len(m):
        result["merge_end"] = since(m[:, 3].max()) - result["attention"]
    if len(o):
        own = {sm - 1 for sm in o[:, 0].tolist()}
        result |= {
            "ours_sms": sorted(own),
            "ours_start": since(o[:, 1].min()),
            "ours_ready": since(o[:, 2].min()),
            "ours_end": since(o[:, 3].max()),
            "on_ours": sum(n for sm, n in counts.items() if sm in own),
        }
    return result


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where one of them does not vary."""
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return float(torch.corrcoef(torch.tensor([list(x), list(y)], dtype=torch.float64))[0, 1])


def ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(range(len(values)), key=lambda i: values[i])
    out = [0.0] * len(values)
    i = 0
    while i < len(ordered):
        j = i
        while j + 1 < len(ordered) and values[ordered[j + 1]] == values[ordered[i]]:
            j += 1
        for k in range(i, j + 1):
            out[ordered[k]] = (i + j) / 2
        i = j + 1
    return out


def middle(rows: list[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return round(median(values), 2) if values else None


def summary(found: list[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """Medians over layers (not the first) and replays, and one layer in full."""
    layers = found[0][0].shape[0]
    rows = [row for a, m, o in found for i in range(min(1, layers - 1), layers) if (row := look(a[i], m[i], o[i])) is not None]
    if not rows:
        return {}
    keys = (
        "programs", "busy", "sms", "pairs", "most", "first_start", "last_start", "late", "attention", "first_end", "slowest_has",
        "merge_end", "sms_seen", "ours_start", "ours_ready", "ours_end", "on_ours",
    )  # fmt: skip
    out: dict[str, Any] = {key: middle(rows, key) for key in keys}
    typical = min(rows, key=lambda row: abs(row["attention"] - out["attention"]))
    out["histogram"], out["us_by_count"], out["ours_sms"] = (typical.get(k) for k in ("histogram", "us_by_count", "ours_sms"))
    out["by_layer"] = [[row["most"], row["sms"], round(row["attention"], 2)] for row in rows]
    out["correlation"] = correlation([row["most"] for row in rows], [row["attention"] for row in rows])
    a, _, o = found[-1]
    at = layers // 2
    zero = int(a[at][a[at][:, 0] > 0][:, 1].min())
    for name, of_one in (("attention", a[at]), ("ours", o[at])):
        seen = of_one[of_one[:, 0] > 0]
        # multiprocessor, start, wait over (0: no wait), end, in ns from attention's first start
        out[f"layer_{name}"] = [[r[0] - 1, r[1] - zero, r[2] - zero if r[2] else 0, r[3] - zero] for r in seen.tolist()]
    return out


def order_of(records: Tensor) -> list[int]:
    """Multiprocessors in the order in which the programs of one layer first came to them."""
    seen = records[records[:, 0] > 0][:, 0] - 1
    return list(dict.fromkeys(seen.tolist()))


# ---- Kernels as the profiler and the graph see them


def profiled(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """Where a layer's time goes, from CUPTI, in us: medians over layers and replays of parts that add up to a layer."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == DeviceType.CUDA and e.duration_ns() > 0]
    kernels = sorted((e.start_ns(), e.start_ns() + e.duration_ns(), e.name()) for e in events)
    norms = [i for i, (_, _, name) in enumerate(kernels) if "_add_rms_norm" in name]
    parts: dict[str, list[float]] = {}
    for first, second, third in zip(norms, norms[1:], norms[2:], strict=False):
        inside = kernels[first:second]
        at = [i for i, (_, _, name) in enumerate(inside) if "BatchDecode" in name or "attention_stand_in" in name]
        if len(at) != 1 or at[0] < 2:
            continue
        norm_end, launch_end, attention_end = inside[0][1], inside[at[0] - 1][1], inside[at[0]][1]
        merges = [end for _, end, name in inside[at[0] + 1 :] if "Merge" in name or "merge_stand_in" in name]
        merge_end = merges[0] if merges else attention_end
        values = {
            "norm": norm_end - inside[0][0],
            "projection to launch's end": launch_end - norm_end,
            "launch itself": launch_end - inside[at[0] - 1][0],
            "attention from launch's end": attention_end - launch_end,
            "attention's start from launch's end": inside[at[0]][0] - launch_end,
            "merge": merge_end - attention_end,
            "output projection": kernels[second][0] - merge_end,
            "mlp": kernels[third][0] - kernels[second][0],
            "layer": kernels[third][0] - inside[0][0],
        }
        for name, ns in values.items():
            parts.setdefault(name, []).append(ns / 1e3)
    return {name: round(median(us), 2) for name, us in parts.items()}


class _KernelNode(ctypes.Structure):
    _fields_ = (
        [("function", ctypes.c_void_p)]
        + [(name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
        + [(name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")]
    )


class _Edge(ctypes.Structure):
    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def nodes(cell: Cell, name: str, attend: Attend) -> list[dict[str, Any]]:
    """Kernels of a graph of one layer in order: grid, threads, registers, programs a multiprocessor, and the edge in front."""
    one = Cell(cell.network, cell.case, cell.meta, cell.layers[:1], cell.weights[:1])
    step = make_step(one, load(name), attend, None)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    raw, cu = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_size_t()

    def check(code: int) -> None:
        if code:
            raise RuntimeError(f"CUDA driver error {code}")

    check(cu.cuGraphGetEdges_v2(raw, None, None, None, ctypes.byref(count)))
    sources, targets, edges = ((kind * count.value)() for kind in (ctypes.c_void_p, ctypes.c_void_p, _Edge))
    check(cu.cuGraphGetEdges_v2(raw, sources, targets, edges, ctypes.byref(count)))
    into = {
        target: ("programmatic" if edge.type == 1 else "full", source)
        for source, target, edge in zip(sources, targets, edges, strict=True)
    }
    first = (set(sources) - set(targets)).pop()
    behind = {source: target for target, (_, source) in into.items()}
    found, node = [], first
    while node is not None:
        kind = ctypes.c_int()
        check(cu.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value == 0:
            p = _KernelNode()
            check(cu.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(p)))
            function = ctypes.c_void_p(p.function)
            if not p.function:
                check(cu.cuKernelGetFunction(ctypes.byref(function), ctypes.c_void_p(p.kernel)))
            label, number = ctypes.c_char_p(), ctypes.c_int()
            check(cu.cuFuncGetName(ctypes.byref(label), function))
            about = {"name": label.value.decode(), "edge": into.get(node, ("none", None))[0], "grid": (p.gx, p.gy, p.gz)}
            about |= {"threads": p.bx * p.by * p.bz, "shared": p.shared}
            for key, attribute in (("registers", 4), ("static", 1), ("carveout", 9)):
                check(cu.cuFuncGetAttribute(ctypes.byref(number), attribute, function))
                about[key] = number.value
            check(
                cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                    ctypes.byref(number), function, ctypes.c_int(about["threads"]), ctypes.c_size_t(p.shared)
                )
            )
            found.append(about | {"slots": number.value})
        node = behind.get(node)
    return found


# ---- Experiments

_started = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - _started:6.1f} {text}" if text else "", flush=True)


def cut(value: Any, width: int = 7) -> str:
    text = "-" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)
    return text.rjust(width)


class Investigation:
    def __init__(self, network: Network, layers: int, most_tokens: int, stand_in: bool, path: str | None) -> None:
        self.network, self.count, self.stand_in, self.path = network, layers, stand_in, path
        self.weights = make_weights(replace(network, layers=layers), torch.bfloat16)
        self.ours = OurRecords(network, layers, most_tokens, torch.device("cuda"))
        self.order: list[int] = []
        self.graphs: dict[tuple[str, str], torch.cuda.CUDAGraph] = {}  # attention as it is, nothing recorded
        self.slots = 8
        self.learnt: list[tuple[float, ...]] = []  # tokens a chunk, chunks, most programs on one, attention's us
        self.result: dict[str, Any] = {"environment": environment(), "network": network.name, "layers": layers, "cells": {}}

    def save(self) -> None:
        if self.path:
            Path(self.path).write_text(json.dumps(self.result))

    def cell(self, batch: int, context: int) -> tuple[Cell, Any]:
        cell = make_cell(self.network, batch, context, self.weights, self.ours)
        return cell, make_attention(cell, self.stand_in)

    def chunks(self, cell: Cell) -> tuple[int, int]:
        """(tokens a chunk, chunks), as attention is planned."""
        pages = [-(-int(n) // cell.case.page_size) for n in cell.meta.lengths.tolist()]
        sms = torch.cuda.get_device_properties(cell.case.device).multi_processor_count
        chunk, count = split(pages, cell.case.model.num_kv_heads, self.slots * sms, cell.case.page_size)
        return chunk * cell.case.page_size, count

    def show_nodes(self, cell: Cell, attention: Any) -> None:
        for name in ("ours", "ours-plain", "flashinfer", "tokenspeed"):
            try:
                found = nodes(cell, name, attention.call())
            except Exception as error:
                say(f"  kernels of {name}: {type(error).__name__}: {first_line(error)}")
                continue
            self.result.setdefault("nodes", {})[name] = found
            say(
                f"  kernels of a layer, {name}: edge in front, grid, threads, registers, shared, carveout, most on a multiprocessor"
            )
            for k in found:
                short = re.sub(r"^_Z\w*?\d+(?=[A-Za-z])", "", k["name"])[:44]
                grid = "x".join(map(str, k["grid"]))
                shared = f"{k['shared']}+{k['static']}"
                sizes = f"{k['threads']:4} {k['registers']:4} {shared:>12} {k['carveout']:3} {k['slots']:3}"
                say(f"    {short:44} {k['edge']:>12} {grid:>12} {sizes}")
                if ("BatchDecode" in k["name"] or "attention_stand_in" in k["name"]) and name == "ours":
                    self.slots = k["slots"]

    def show_order(self, cell: Cell, attention: Any) -> None:
        """How programs are dealt out when nothing else runs: attention without PDL."""
        layer = cell.layers[0]
        plain, noted = (attention.call(record=record)(layer.q, layer.k_cache, layer.v_cache) for record in (False, True))
        say(f"  attention that records gives what it gives without, within {float((plain - noted).abs().max()):.2g}")
        graph = graph_of(cell, "ours-plain", attention.call(record=True, pdl=False), self.ours)
        found = recorded(graph, attention.library(), self.ours, self.count)
        orders = [order_of(a[i]) for a, _, _ in found for i in range(1, self.count)]
        self.order = max(orders, key=orders.count) if len(set(map(tuple, orders))) < len(orders) else orders[0]
        alike = sum(order == self.order for order in orders) / len(orders)
        records = found[-1][0][self.count // 2]
        seen = (records[records[:, 0] > 0][:, 0] - 1).tolist()
        turns = len(self.order)
        again = sum(a == b for a, b in zip(seen, seen[turns:], strict=False)) / max(1, len(seen) - turns)
        starts = records[records[:, 0] > 0][:, 1]
        span = (int(starts.max()) - int(starts.min())) / 1e3
        moments = sorted(set(starts.tolist()))
        tick = min((b - a for a, b in pairwise(moments)), default=0)
        say(
            f"  alone: {len(seen)} programs of attention start within {span:.2f} us on {turns} multiprocessors; a tick is {tick} ns"
        )
        say(f"  the order of first programs is the same in {alike:.0%} of layers; program i + {turns} is where i is in {again:.0%}")
        model = place(
            len(seen), lambda p: p % attention.padded < self.chunks(cell)[1], dict.fromkeys(self.order, self.slots), self.order
        )
        fits = sum(a == b for a, b in zip(model, seen, strict=True)) / len(seen)
        own = [sorted({r - 1 for r in o[i][o[i][:, 0] > 0][:, 0].tolist()}) for _, _, o in found for i in range(1, self.count)]
        first = sum(set(sms) == set(self.order[: len(sms)]) for sms in own) / max(1, len(own))
        say(f"  the model places {fits:.0%} of programs right; ours are on the first of that order in {first:.0%} of layers")
        say(f"  the order begins {self.order[:16]}; ours are on {own[-1][:16]}")
        self.result["order"] = {
            "order": self.order,
            "alike": alike,
            "again": again,
            "fits": fits,
            "span_us": span,
            "ours_first": first,
        }
        self.save()

    def compare(self, cell: Cell, attention: Any, names: Sequence[str], label: str, **options: Any) -> dict[str, float]:
        """Every launch: the step's time, attention's placement and times, and what the model sees."""
        plain, notes = {}, {}
        padded = options.get("padded") or attention.padded
        chunk, chunks = self.chunks(cell)
        grid = f"grid ({padded}, {cell.case.model.num_kv_heads}), {chunks} chunks of {chunk} tokens"
        say(f"{label}: {cell.name}, {attention.kind}, {grid}")
        for name in names:
            graph = graph_of(cell, name, attention.call(**options))
            if graph is None:
                continue
            plain[name] = graph
            if not options:
                self.graphs[cell.name, name] = graph
            recording = graph_of(cell, name, attention.call(record=True, **options), self.ours)
            if recording is not None:
                notes[name] = summary(recorded(recording, attention.library(), self.ours, self.count))
                notes[name]["recorded_us"] = times({name: recording}, self.count)[name]["median"]
        took = times(plain, self.count)
        say("  us a layer; attention from its data to its end; model: multiprocessors used, programs with work on the fullest")
        head = (
            "layer",
            "noted",
            "attn",
            "merge",
            "sms",
            "most",
            "m.sms",
            "m.most",
            "slowest",
            "start",
            "late",
            "own sms",
            "shared",
        )
        say(
            f"    {'launch':24}"
            + "".join(h.rjust(8) for h in head)
            + "  programs: multiprocessors; us a program by programs beside it"
        )
        rows = []
        for name in plain:
            n = notes.get(name, {})
            early = options.get("pdl") is not False
            model = predicted(geometry_of(name, cell.case) if early else None, cell.case, self.order, self.slots, padded, chunks)
            row = {"us": took[name], **n, "model_sms": len(model), "model_most": max(model.values())}
            rows.append((name, row))
            cells = (
                took[name]["median"], n.get("recorded_us"), n.get("attention"), n.get("merge_end"), n.get("sms"), n.get("most"),
                len(model), max(model.values()), n.get("slowest_has"), n.get("first_start"), n.get("late"),
                len(n.get("ours_sms") or ()) or None, n.get("on_ours"),
            )  # fmt: skip
            shown = f"{n.get('histogram')} {n.get('us_by_count')}" if n else ""
            say(f"    {name:24}" + "".join(cut(c, 8) for c in cells) + "  " + shown)
            if n.get("attention") is not None and label != "held out":
                self.learnt.append((chunk, chunks, n["most"], n["attention"]))
        known = [row for _, row in rows if row.get("attention") is not None]
        layer = [row["us"]["median"] for row in known]
        for key in ("attention", "most", "sms", "model_most", "model_sms"):
            r = correlation([row[key] for row in known], layer)
            if r is not None:
                say(f"    correlation of {key} with the layer's time over launches: {r:.2f}")
        inside = [(name, row["correlation"]) for name, row in rows if row.get("correlation") is not None]
        if inside:
            say("    within a launch, layers with more on the fullest take longer: " + ", ".join(f"{n} {r:.2f}" for n, r in inside))
        where = self.result["cells"].setdefault(cell.name, {})
        where[label] = {"padded": padded, "chunk": chunk, "chunks": chunks, "options": options, "rows": dict(rows)}
        self.save()
        return {name: us["median"] for name, us in took.items()}

    def profile(self, cell: Cell, names: Sequence[str]) -> None:
        """Which kernel of a layer the difference is in."""
        say(f"parts of a layer, {cell.name}, from CUPTI (its own overhead included), us")
        shown = False
        for name in names:
            graph = self.graphs.get((cell.name, name))
            if graph is None:
                continue
            try:
                parts = profiled(graph)
            except Exception as error:
                say(f"  {name}: {type(error).__name__}: {first_line(error)}")
                continue
            if parts and not shown:
                say("    " + "launch".ljust(24) + " | ".join(parts))
                shown = True
            say(f"    {name:24}" + " ".join(cut(float(us), 8) for us in parts.values()))
            self.result["cells"].setdefault(cell.name, {}).setdefault("parts", {})[name] = parts
        self.save()

    def addresses(self, batch: int, context: int, names: Sequence[str]) -> None:
        """The same launches on caches that were allocated behind other memory, with other pages."""
        graphs, kept = {}, []
        for i, megabytes in enumerate((0, 3, 34, 258)):
            if megabytes:
                kept.append(torch.empty(megabytes << 20, dtype=torch.uint8, device="cuda"))
            cell = make_cell(self.network, batch, context, self.weights, self.ours, seed=i)
            attention = make_attention(cell, self.stand_in)
            kept.append((cell, attention))
            for name in names:
                graph = graph_of(cell, name, attention.call())
                if graph is not None:
                    graphs[f"{name} +{megabytes} MB"] = graph
        took = times(graphs, self.count)
        say(
            f"caches elsewhere, B={batch} {context} tokens, us a layer: "
            + ", ".join(f"{k} {v['median']:.1f}" for k, v in took.items())
        )
        self.result["addresses"] = took
        self.save()

    def fit(self) -> Expect:
        """attention's us = chunk · (a + b · most + c · chunks + d · most · chunks), by least squares over all recorded so far: what
        a program beside others costs may depend on how many there are in all."""

        def terms(chunk: float, chunks: float, most: float) -> list[float]:
            return [chunk, chunk * most, chunk * chunks, chunk * most * chunks]

        x = torch.tensor([terms(*point[:3]) for point in self.learnt], dtype=torch.float64)
        y = torch.tensor([us for *_, us in self.learnt], dtype=torch.float64)
        factors = torch.linalg.lstsq(x, y[:, None], driver="gelsd").solution[:, 0]
        error = float((x @ factors - y).abs().median())
        shown = ", ".join(f"{128 * n:.3f}" for n in factors.tolist())
        say(f"attention's us for a chunk: ({shown}) · (1, most, chunks, most · chunks); off by {error:.2f} us, median of {len(y)}")
        self.result["fit"] = {"factors": factors.tolist(), "error": error, "points": self.learnt}
        return lambda *point: float(torch.tensor(terms(*point), dtype=torch.float64) @ factors)

    def confirm(self, batch: int, context: int, names: Sequence[str], expect: Expect) -> None:
        """First the prediction for a cell nothing was learnt from, then its times."""
        cell, attention = self.cell(batch, context)
        chunk, chunks = self.chunks(cell)
        foretold = {}
        for name in names:
            model = predicted(geometry_of(name, cell.case), cell.case, self.order, self.slots, attention.padded, chunks)
            foretold[name] = (expect(chunk, chunks, max(model.values())), len(model), max(model.values()))
        best = min(foretold, key=lambda name: (foretold[name][0], -foretold[name][1]))
        say(f"held out: {cell.name}, {chunks} chunks of {chunk}; foretold best: {best}")
        for name, (us, sms, most) in sorted(foretold.items(), key=lambda item: item[1]):
            say(f"    {name:24} {sms} multiprocessors, {most} at most, attention {us:.1f} us")
        took = self.compare(cell, attention, names, "held out")
        both = [name for name in names if name in took]
        r = correlation(ranks([foretold[n][0] for n in both]), ranks([took[n] for n in both]))
        ahead = took.get(best, float("nan")) - min(took.values())
        say(f"    rank correlation {'-' if r is None else f'{r:.2f}'}; the foretold best is {ahead:.2f} us a layer behind the best")
        self.result["cells"].setdefault(cell.name, {})["foretold"] = {"launches": foretold, "us": took, "rank": r, "best": best}
        self.save()


def check_model() -> None:
    """The model on a machine whose order is 0, 1, 2 …: prints what the docstring says."""
    model = NETWORKS["llama-3-8b"].model
    for batch, pages in ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (1, 188), (4, 188)):
        case = Case(model, batch, torch.device("cpu"))
        chunk, chunks = split([pages] * batch, model.num_kv_heads, 8 * 132)
        print(f"B={batch}, {pages * PAGE_SIZE} tokens: {chunks} chunks of {chunk * PAGE_SIZE}")
        for name in ("ours-plain", *(name for name in CANDIDATES if "@" in name or name == "ours")):
            counts = predicted(geometry_of(name, case), case, range(132), 8, 132, chunks)
            print(f"    {name:24} {len(counts):4} multiprocessors, {max(counts.values())} at most")


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="llama-3-8b", choices=list(NETWORKS))
    parser.add_argument("--batch", type=numbers, default=[1, 4])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--launches", default=",".join(CANDIDATES), help="providers, as `step --peers` names them")
    parser.add_argument("--seconds", type=float, default=230.0, help="start nothing new after this")
    parser.add_argument("--stand-in", action="store_true", help="not FlashInfer's attention, but one of its shape")
    parser.add_argument("--model", action="store_true", help="print the model's predictions and stop; needs no GPU")
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    if options.model:
        check_model()
        return
    if not torch.cuda.is_available():
        raise SystemExit("placement: needs a GPU")
    torch.set_grad_enabled(False)
    if not options.stand_in:
        with contextlib.suppress(Exception):  # said where it is needed
            start_build()
    network, names = NETWORKS[options.network], options.launches.split(",")
    held_out = [(b, c) for b, c in HELD_OUT if (b, c) not in {(b, options.context) for b in options.batch}]
    most = max(*options.batch, *(b for b, _ in held_out), 1)
    if network.model.head_dim != 128 and not options.stand_in:
        raise SystemExit("placement: the recording attention is built for heads of 128")
    one = Investigation(network, min(options.layers, MOST_LAYERS), most, options.stand_in, options.json)
    say(f"{network.name}, {one.count} layers, weights made")

    def left() -> bool:
        if time.monotonic() - _started < options.seconds:
            return True
        say("out of time: the rest is not run")
        return False

    def attempt(what: Callable[..., None], *arguments: Any, **keywords: Any) -> None:
        if not left():
            return
        try:
            what(*arguments, **keywords)
        except Exception as error:
            say(f"  {what.__name__}: {type(error).__name__}: {first_line(error)}")
            one.save()
            torch.cuda.synchronize()  # raises, and ends the run, if the context is lost

    cells = {}
    for batch in options.batch:
        cell, attention = cells[batch] = one.cell(batch, options.context)
        say(f"{cell.name}: attention planned, grid {attention.padded} x {network.model.num_kv_heads}")
    first, attention = cells[options.batch[0]]
    attempt(one.show_nodes, first, attention)
    attempt(one.show_order, first, attention)
    if not one.order:
        one.order = list(range(torch.cuda.get_device_properties(0).multi_processor_count))
    for cell, attention in cells.values():
        attempt(one.compare, cell, attention, names, "launches")
        attempt(one.profile, cell, names)
    few = [n for n in ("ours", "ours-plain", "ours@1/16/1/8/4/1/100", "tokenspeed") if n in names]
    for cell, attention in cells.values():
        chunks = one.chunks(cell)[1]
        attempt(one.compare, cell, attention, few, "attention without PDL", pdl=False)
        for padded in dict.fromkeys((chunks, attention.padded - 8, attention.padded - 1)):
            if chunks <= padded < attention.padded:
                attempt(one.compare, cell, attention, few[:3], f"grid {padded}", padded=padded)
    attempt(one.addresses, options.batch[0], options.context, [n for n in ("ours", "ours-plain") if n in names])
    if len(one.learnt) >= 4 and left():
        expect = one.fit()
        for batch, context in held_out:
            attempt(one.confirm, batch, context, names, expect)
    one.save()
    say("done")


if __name__ == "__main__":
    main()
