"""What the compiler makes of the latent kernel, seen without a GPU: widths of accesses, registers, order."""

import re
from functools import cache

import pytest
import torch
from compile_only import GFX942, SM80, SM90, SM100, accesses, compile_kernel, facts, integers, pdl_events, pointers, resources
from lanes import INTERPRETED
from targets import options_of

from decode_rope.append.arguments import MLAAppend, kernel_tensors
from decode_rope.kernels.mla import rope_append_mla_kernel
from decode_rope.launch import mla, platform
from decode_rope.launch.mla import MLA, mla_geometry

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

KERNEL = rope_append_mla_kernel
META, NVIDIA = torch.device("meta"), torch.device("cuda:0")
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


def call_of(num_tokens=1, heads=16, latent_dim=512, dtype=torch.bfloat16, norm=None, pair=False, nope=False, ragged=False, **more):
    def make(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device=META)

    widths = (latent_dim, 64) if pair else (latent_dim + 64,)
    caches = (*[make(8, 64, width) for width in widths], None)[:2]
    kv = make(num_tokens, latent_dim + 64)
    return MLAAppend(
        make(num_tokens, heads, 192)[..., 128:], kv[:, latent_dim:], kv[:, :latent_dim], *caches,
        None if nope else make(4096, 64, dtype=torch.float32), make(num_tokens, dtype=torch.int64),
        make(num_tokens, 8, dtype=torch.int32), cu_seqlens_q=make(num_tokens + 1, dtype=torch.int32) if ragged else None,
        kv_weight=None if norm is None else make(latent_dim, dtype=norm), eps=None if norm is None else 1e-6, **more,
    )  # fmt: skip


@cache
def compiled(target=SM90, aligned=True, **shape):
    """The kernel as a plan would compile it for a call on a GPU of `target`."""
    call = call_of(**shape)
    values = MLA.values(call, NVIDIA, aligned)
    static = values.facts | {"FENCE": target[0] == "cuda"}
    if target[1] in (80, "gfx942"):
        static |= {"PDL": 0, "PREFETCH": False}
    types = {name: TYPES[x.dtype] for name, x in kernel_tensors(call).items()} | {"faults_ptr": "*i64"}
    types |= {name: "i32" for name in values.integers}
    return compile_kernel(KERNEL, types, static, target, options_of(KERNEL, static, values.num_warps))


@pytest.fixture(autouse=True)
def pdl(monkeypatch):
    monkeypatch.setattr(platform, "pdl_supported", lambda device: True)


SHAPES = {
    "one token": {},
    "one token of 128 heads": dict(heads=128),
    "a few tokens": dict(num_tokens=100),
    "many tokens": dict(num_tokens=512),
    "many tokens of 128 heads": dict(num_tokens=512, heads=128),
    "NeoX": dict(interleaved_in=False, interleaved_out=False),
    "many tokens, NeoX": dict(num_tokens=512, interleaved_in=False, interleaved_out=False),
    "halves out": dict(interleaved_out=False),
    "many tokens, halves out": dict(num_tokens=512, interleaved_out=False),
    "norm": dict(norm=torch.bfloat16),
    "many tokens, norm": dict(num_tokens=512, norm=torch.bfloat16),
    "norm, fp32 weight": dict(norm=torch.float32),
    "metadata ready": dict(norm=torch.bfloat16, metadata_ready=True),
    "pair": dict(pair=True),
    "NoPE": dict(nope=True),
    "ragged": dict(ragged=True, num_tokens=2048),
    "latents of 256": dict(latent_dim=256, num_tokens=512, norm=torch.bfloat16),
    "fp32": dict(dtype=torch.float32, norm=torch.float32),
    "fp16": dict(dtype=torch.float16),
}


def test_no_argument_is_specialised():
    for parameter in KERNEL.params:
        assert parameter.is_constexpr == (parameter.name in facts(KERNEL))
        assert parameter.is_constexpr or parameter.do_not_specialize, parameter.name


@pytest.mark.parametrize("name", SHAPES)
def test_facts_integers_and_tensors_are_the_parameters(name):
    call = call_of(**SHAPES[name])
    values = MLA.values(call, NVIDIA, True)
    absent = {name for name, fact in values.facts.items() if fact is None and name not in facts(KERNEL)}
    assert set(values.facts) == set(facts(KERNEL)) | absent
    assert set(values.integers) == set(integers(KERNEL)) - absent
    assert set(kernel_tensors(call)) == set(pointers(KERNEL)) - {"faults_ptr"} - absent


@pytest.mark.parametrize("name", SHAPES)
def test_nothing_is_spilled_and_latents_and_q_move_16_bytes_at_a_time(name):
    kernel = compiled(**SHAPES[name])
    used = resources(kernel, 90)
    assert used["spilled"] == used["stack"] == 0 and used["registers"] <= 80
    assert not re.search(r"\bfma\.", kernel.asm["ptx"])
    moved = accesses(kernel, "ld"), accesses(kernel, "st")
    assert moved[0].count(128) >= 2 and moved[1].count(128) >= 2
    assert kernel.metadata.shared <= (4096 if "halves" in name else 512)


@pytest.mark.parametrize("name", ["one token", "many tokens", "NeoX", "NoPE", "pair"])
def test_nothing_goes_through_shared_memory(name):
    kernel = compiled(**SHAPES[name])
    assert kernel.metadata.shared == 0 and "bar.sync" not in kernel.asm["ptx"]


@pytest.mark.parametrize("target", [SM80, SM100, GFX942], ids=["sm_80", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", ["one token", "many tokens, norm", "many tokens, halves out", "ragged", "NoPE"])
def test_other_targets(name, target):
    kernel = compiled(target, **SHAPES[name])
    if target[0] == "cuda":
        assert resources(kernel, target[1])["spilled"] == 0
        assert accesses(kernel, "ld").count(128) >= 2
    else:
        assert "buffer_store_dwordx4" in kernel.asm["amdgcn"] or "global_store_dwordx4" in kernel.asm["amdgcn"]
        assert re.search(r"vgpr_spill_count:\s+0\b", kernel.asm["amdgcn"])


@pytest.mark.parametrize("name", ["one token", "many tokens, norm"])
def test_unaligned_memory_spills_nothing(name):
    kernel = compiled(aligned=False, **SHAPES[name])
    assert resources(kernel, 90)["spilled"] == 0
    assert max(accesses(kernel, "st")) <= 64  # counts of faults


def test_dependents_are_launched_first_and_metadata_is_read_before_the_wait_only_if_it_is_ready():
    early, late = (pdl_events(compiled(metadata_ready=ready, num_tokens=100).asm["ptx"]) for ready in (True, False))
    assert early[0] == late[0] == "launch_dependents"
    assert late[1] == "wait" and late.count("wait") == 1
    assert early[1] == "ld" and early.count("wait") == 2  # of a Q tile, and of the others
    wait = early.index("wait")
    assert "st" not in early[:wait]


def test_loads_of_rows_are_issued_before_those_that_wait():
    """In the PTX of an eager launch: rows and positions, then the fence, then the block table's entry."""
    ptx = compiled(num_tokens=1).asm["ptx"]
    latent = ptx[ptx.rindex("bar.warp.sync") :]
    assert ptx.count("bar.warp.sync") == 2
    assert accesses_of(latent).count(128) == 0, "rows are loaded after the fence"


def test_pairs_that_move_wait_for_all_reads():
    assert "bar.sync" in compiled(interleaved_out=False).asm["ptx"]


def accesses_of(ptx: str) -> list[int]:
    found = re.findall(r"ld\.global(?:\.[\w:]+)*?(?:\.v(\d))?\.[bfu](\d+)", ptx)
    return [int(bits) * int(count or 1) for count, bits in found]


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
@pytest.mark.parametrize("sizes", [(64, 512), (64, 256), (32, 128), (16, 32), (128, 1024)])
def test_a_geometry_covers_every_row_and_is_a_good_one(heads, sizes):
    for num_tokens in (1, 7, 64, 512, 4096):
        geometry = mla_geometry(num_tokens, heads, *sizes)
        mla.check_geometry(geometry)
        programs = geometry.programs(num_tokens, heads)
        tiles = programs - -(-num_tokens // geometry.tokens)
        assert tiles * geometry.tokens_q * geometry.heads_q >= num_tokens * heads
        assert programs <= 2 * num_tokens * heads + num_tokens


def test_few_kernels_serve_all_numbers_of_tokens():
    assert len({mla_geometry(n, 16, 64, 512) for n in range(1, 8192)}) <= 3
    assert len({mla_geometry(n, 128, 64, 512) for n in range(1, 8192)}) <= 3
