"""`DecodeRope`: calls and bound launches leave the bits of the plain function; what it was not built for is refused."""

import ast
import gc
import inspect
import re
from collections.abc import Callable

import pytest
import torch
from bad import GOOD, ONLY_Q, Bad, give
from cases import (
    Spec,
    assert_same_storages,
    bits,
    build,
    call_arguments,
    check,
    prepare,
    prepared,
    run,
    run_reference,
    without_known,
)
from lanes import ON_GPU
from random_cases import CPU_SIZES, GPU_SIZES, random_spec

import decode_rope
from decode_rope.api import bound
from decode_rope.launch import compiled
from decode_rope.launch import decode as geometry
from decode_rope.launch.decode import Geometry

anywhere = pytest.mark.anywhere
kernel = pytest.mark.kernel
SIZES = GPU_SIZES if ON_GPU else CPU_SIZES
SLOTS = GOOD.but(block_table=None, slots=[3, 5, 7], index_dtype=torch.int64)
OUTPUTS = GOOD.but(q_out=True, k_out="own", cache_positions=[1, 3, 6])


@anywhere
@pytest.mark.parametrize("seed", range(1000, 1150 if ON_GPU else 1015))
def test_calls_and_bound_launches_of_random_cases(seed, device):
    case = build(random_spec(seed, SIZES), device)
    check(case, prepared(case))
    check(case, lambda **arguments: without_known(prepare(case).bind)(**arguments)())


@anywhere
def test_a_bound_launch_reads_its_buffers_each_time(device):
    case = build(GOOD, device)
    case["cos_sin_cache"].uniform_(-1, 1)
    launch = prepare(case).bind(**call_arguments(case))
    before = case.clone()
    for positions, pages in (([1, 3, 6], [1, 2]), ([-1, 0, 7], [7, 0]), ([64, 2, 5], [3, 9])):
        changed = before.clone()
        for target in (case, changed):
            target["q"].copy_(before["q"])
            target["positions"].copy_(torch.tensor(positions))
            target["block_table"][1].copy_(torch.tensor(pages))
        for name in ("k_cache", "v_cache"):
            case[name].copy_(before[name])
        assert launch() is case["q"]
        assert_same_storages(case, run_reference(changed))


@anywhere
def test_a_bound_launch_returns_q_out_and_keeps_its_buffers_alive(device):
    case = build(OUTPUTS, device)
    want = run_reference(case.clone())
    launch = prepare(case).bind(**call_arguments(case))
    del case
    gc.collect()
    assert torch.equal(bits(launch()), bits(want["q_out"]))


@anywhere
def test_binding_launches_nothing(device):
    case = build(GOOD, device)
    before = case.clone()
    prepare(case).bind(**call_arguments(case))
    prepare(case).warmup(4)
    assert_same_storages(case, before)


@anywhere
def test_no_tokens(device):
    case = build(SLOTS.but(positions=[], slots=[]), device)
    op = prepare(case)
    assert op(**call_arguments(case)) is case["q"]
    assert op.bind(**call_arguments(case))() is case["q"]


@kernel
@pytest.mark.parametrize(
    "spec", [GOOD, SLOTS, OUTPUTS, ONLY_Q, GOOD.but(rotary_dim=0)], ids=["table", "slots", "outputs", "Q only", "NoPE"]
)
def test_after_warmup_nothing_is_compiled(spec, device, on_gpu):
    """Over all numbers of tokens, alignments, strides, widths and row strides of the table."""
    most = 2000 if on_gpu else 9
    heads = (3, spec.heads[1] // 2)
    start = build(spec.but(is_neox=False, heads=heads, head_dim=24, rotary_dim=spec.rotated and 24), device)
    op = prepare(start).warmup(most)
    loaded = compiled.num_compiled()
    for num_tokens in (*range(1, 100, 7), *range(100, most, 211)) if on_gpu else (1, 2, 9):
        for shift, activations in ((0, "separate"), (1, "separate"), (0, "padded")):
            case = build(resized(start.spec, num_tokens).but(shift=shift, activations=activations), device)
            expected = run_reference(case.clone())
            op.cos_sin = case["cos_sin_cache"] if case.spec.rotated else None
            op(**call_arguments(case))
            assert_same_storages(case, expected)
    assert compiled.num_compiled() == loaded


def resized(spec: Spec, num_tokens: int) -> Spec:
    """The same call for another number of tokens, every second one on page 0."""
    changes = {"positions": [i % 4 for i in range(num_tokens)], "num_pages": num_tokens + 1}
    if spec.block_table:
        changes["block_table"] = [[i + 1, 0] for i in range(num_tokens)]
    if spec.slots:
        changes["slots"] = [4 * i + 1 for i in range(num_tokens)]
    if spec.cache_positions:
        changes["cache_positions"] = changes["positions"]
    return spec.but(**changes)


@kernel
def test_the_number_of_kernels_does_not_grow_with_batches_or_strides(device, on_gpu):
    """One aligned and one unaligned kernel for each tile shape there is, and no more."""
    spec = GOOD.but(heads=(4, 1), head_dim=20)
    tiles = {geometry.decode_geometry(n, 4, 1, 20) for n in range(1, 2000)}
    before = compiled.num_compiled()
    for num_tokens in (*range(1, 100, 9), *range(100, 2000, 211)) if on_gpu else (1, 2, 9):
        for changes in (dict(), dict(activations="padded"), dict(shift=1), dict(cache="NHD padded"), dict(table_shift=1)):
            run(build(resized(spec, num_tokens).but(**changes), device))
    assert compiled.num_compiled() - before <= 2 * len(tiles)


BUILD = {
    "addressing": Bad(ValueError, 'addressing: expected "block_table" or "slot_mapping", got', give(addressing="pages")),
    "q heads": Bad(ValueError, "num_q_heads: expected at least 1 and less than 2^63, got 0", give(num_q_heads=0)),
    "kv heads": Bad(ValueError, "num_kv_heads: expected at least 0 and less than 2^63, got -1", give(num_kv_heads=-1)),
    "half a head": Bad(TypeError, "num_kv_heads: expected an int, got float", give(num_kv_heads=1.5)),
    "head_dim": Bad(ValueError, "head_dim: expected at least 1 and less than 2^63, got -4", give(head_dim=-4)),
    "v_head_dim": Bad(ValueError, "v_head_dim: expected at least 1 and less than 2^63, got 0", give(v_head_dim=0)),
    "page_size": Bad(TypeError, "page_size: expected an int, got bool", give(page_size=True)),
    "dtype": Bad(TypeError, "dtype: expected a torch.dtype, got 'bf16'", give(dtype="bf16")),
    "dtype, int8": Bad(TypeError, "q: expected dtype bfloat16, float16 or float32", give(dtype=torch.int8)),
    "index_dtype": Bad(TypeError, "block_table: expected int32 or int64, got torch.int16", give(index_dtype=torch.int16)),
    "positions_dtype": Bad(TypeError, "positions: expected int32 or int64", give(positions_dtype=torch.float32)),
    "layout": Bad(ValueError, 'kv_layout: expected "NHD" or "HND"', give(kv_layout="NDH")),
    "pairing": Bad(TypeError, "is_neox: expected a bool", give(is_neox=1)),
    "per request": Bad(ValueError, "tokens_per_request: expected at least 1", give(tokens_per_request=0)),
    "pdl": Bad(TypeError, "enable_pdl: expected None, True or False", give(enable_pdl="no")),
    "no k_out": Bad(ValueError, "k_out, cache_positions: expected False with num_kv_heads=0", give(num_kv_heads=0, k_out=True)),
    "no place": Bad(ValueError, "k_out, cache_positions: expected False", give(num_kv_heads=0, cache_positions=True)),
    "geometry": Bad(TypeError, "geometry: expected a decode_rope.launch.decode.Geometry, got", give(geometry=(1, 2, 1, 2, 4))),
    "three heads": Bad(ValueError, "geometry: expected powers of two", give(geometry=Geometry(1, 3, 1, 4, 4, False))),
    "no tokens": Bad(ValueError, "geometry: expected powers of two", give(geometry=Geometry(0, 2, 1, 4, 4, False))),
    "pdl of 4": Bad(ValueError, "geometry: expected pdl of 0 to 3", give(geometry=Geometry(1, 2, 1, 4, 4, 4))),
    "a carveout of 1.0": Bad(TypeError, "geometry: expected integers", give(geometry=Geometry(1, 2, 1, 4, 4, 1, 1.0))),
    "a carveout of 101": Bad(ValueError, "geometry: expected a carveout", give(geometry=Geometry(1, 2, 1, 4, 4, 1, 101))),
    "one row": Bad(ValueError, "geometry: expected tiles of at least two rows", give(geometry=Geometry(1, 2, 1, 1, 4, False))),
}  # fmt: skip
TABLES = {
    "list": Bad(TypeError, "cos_sin_cache: expected one tensor, got a list", lambda c: [1]),
    "half": Bad(ValueError, "cos_sin_cache: expected float32", lambda c: c["cos_sin_cache"].half()),
    "elsewhere": Bad(ValueError, "cos_sin_cache: expected device", lambda c: c["cos_sin_cache"].to("meta")),
}
CALL = {
    "slots": Bad(ValueError, "block_table: expected it, and no slot_mapping", lambda c: {"slot_mapping": c["positions"]}),
    "no table": Bad(ValueError, "block_table: expected it, and no slot_mapping", give(block_table=None)),
    "no slots": Bad(ValueError, "slot_mapping: expected it, and no block_table", give(slot_mapping=None), SLOTS),
    "table": Bad(ValueError, "slot_mapping: expected it, and no block_table",
                 lambda c: {"slot_mapping": None, "block_table": c["slot_mapping"][:, None]}, SLOTS),
    "q list": Bad(TypeError, "q: expected a torch.Tensor, got list", give(q=[])),
    "fewer heads": Bad(ValueError, "q: expected torch.bfloat16 of shape (3, 3, 16), as this op was built, "
                       "got torch.bfloat16 of (3, 2, 16)", lambda c: {"q": c["q"][:, :2]}),
    "positions": Bad(ValueError, "positions: expected torch.int64 of shape (3,), as this op was built, got torch.int32",
                     lambda c: {"positions": c["positions"].int()}),
    "other dtype": Bad(ValueError, "q: expected torch.bfloat16 of shape (3, 3, 16), as this op was built, got torch.float16",
                       lambda c: {n: c[n].half() for n in ("q", "k", "v", "k_cache", "v_cache")}),
    "no k": Bad(ValueError, "k: expected it given, as this op was built",
                give(k=None, v=None, block_table=None, k_cache=None, v_cache=None)),
    "some k": Bad(ValueError, "block_table: expected it, and no slot_mapping",
                  lambda c: {"k": c["q"].clone(), "v": c["q"].clone()}, ONLY_Q),
    "no q_out": Bad(ValueError, "q_out: expected it given, as this op was built", give(q_out=None), OUTPUTS),
    "no k_out": Bad(ValueError, "k_out: expected it given", give(k_out=None), OUTPUTS),
    "no places": Bad(ValueError, "cache_positions: expected it given", give(cache_positions=None), OUTPUTS),
    "q_out": Bad(ValueError, "q_out: expected it left out", lambda c: {"q_out": torch.empty_like(c["q"])}),
    "index dtype": Bad(TypeError, "block_table: expected torch.int32, as this op was built, got torch.int64",
                       lambda c: {"block_table": c["block_table"].long()}),
    "page size": Bad(ValueError, "k_cache: expected pages of 4 tokens, as this op was built, got shape (8, 3, 2, 16)",
                     lambda c: {n: c[n][:, 1:] for n in ("k_cache", "v_cache")}),
    "one cache": Bad(ValueError, "k_cache: expected memory of its own", lambda c: {"v_cache": c["k_cache"][..., :8]}),
    "axes": Bad(ValueError, "positions: expected one row, got shape (2, 3)", lambda c: {"positions": c["positions"].expand(2, 3)}),
    "grad": Bad(ValueError, "q: expected a tensor that needs no gradient", lambda c: {"q": c["q"].clone().requires_grad_()}),
}  # fmt: skip


def refuse(bad: Bad, act: Callable[[], object]) -> int:
    """The line of the package that raised, after a look at the words."""
    with pytest.raises(bad.error, match="^" + re.escape(bad.words)) as info:
        act()
    assert type(info.value) is bad.error
    return info.traceback[-1].lineno + 1


@anywhere
@pytest.mark.parametrize("name", BUILD)
def test_an_op_that_cannot_be_built(name, device):
    case = build(GOOD, device)
    refuse(BUILD[name], lambda: prepare(case, **BUILD[name].change(case)))


@anywhere
@pytest.mark.parametrize("name", TABLES)
def test_an_op_that_cannot_be_built_on_its_table(name, device):
    facts = dict(num_q_heads=3, num_kv_heads=2, head_dim=16, page_size=4, device=device)
    case = build(GOOD, device)
    refuse(TABLES[name], lambda: decode_rope.DecodeRope(TABLES[name].change(case), **facts))


@anywhere
@pytest.mark.parametrize("max_tokens", [0, -1, 1.0, None])
def test_warmup_for_no_tokens(max_tokens, device):
    with pytest.raises(ValueError, match="max_tokens: expected an int of at least 1"):
        prepare(build(GOOD, device)).warmup(max_tokens)


def test_warmup_covers_tuned_and_untuned_numbers_of_tokens(monkeypatch):
    op = prepare(build(GOOD, "cpu"))
    op.tuned[1] = Geometry(1, 2, 1, 2, 8, 0)
    assert op._geometry_of(2) == geometry.decode_geometry(1, *op.heads[:3])  # untuned, 1 and 2 would share a kernel
    planned = []
    monkeypatch.setattr(bound.platform, "runs_reference", lambda device: False)
    monkeypatch.setattr(bound, "Plan", lambda spec, call, device, aligned=True: planned.append((call.geometry, aligned)))
    op.warmup(2)
    assert planned == [(op.tuned[1], True), (op.tuned[1], False), (None, True), (None, False)]


@anywhere
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", CALL)
def test_a_call_the_op_was_not_built_for(name, warm, device):
    bad = CALL[name]
    case = build(bad.spec, device)
    op = prepare(case)
    if warm:
        for _ in range(2):
            op(**call_arguments(case.clone()))
    before = case.clone()
    arguments = call_arguments(case) | bad.change(case)
    refuse(bad, lambda: op(**arguments))
    refuse(bad, lambda: op.bind(**arguments))
    assert_same_storages(case, before)


@pytest.mark.parametrize("spec", [GOOD, GOOD.but(rotary_dim=0)], ids=["table", "NoPE"])
def test_a_call_on_another_device(spec):
    case = build(spec, "cpu")
    op = prepare(case)
    moved = {name: x.to("meta") for name, x in call_arguments(case).items() if x is not None}
    with pytest.raises(ValueError, match=r"^(cos_sin_cache|q): expected device"):
        op(**moved)


def test_every_raise_of_the_geometry_is_tried():
    lines = {n.lineno for n in ast.walk(ast.parse(inspect.getsource(geometry))) if isinstance(n, ast.Raise)}
    case = build(GOOD, "cpu")
    tried = {refuse(bad, lambda bad=bad: prepare(case, **bad.change(case))) for bad in BUILD.values()}
    assert lines <= tried


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 255, 256, 257, 4096])
def test_the_measured_tiles_are_valid(num_tokens):
    for q_heads, kv_heads in ((1, 0), (1, 1), (5, 1), (14, 2), (32, 8), (71, 1), (128, 128)):
        for head_dim in (1, 2, 64, 80, 100, 128, 256, 512, 576, 4096):
            tile = geometry.decode_geometry(num_tokens, q_heads, kv_heads, head_dim)
            geometry.check_geometry(tile)
            rows = -(-num_tokens // tile.tokens_q) * -(-q_heads // tile.heads_q)
            assert tile.programs(num_tokens, q_heads, 0) == rows
            both = -(-num_tokens // tile.tokens_kv) * -(-kv_heads // tile.heads_kv)
            assert tile.programs(num_tokens, q_heads, kv_heads) == rows + 2 * both


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a current CUDA device")
def test_without_a_gpu_there_is_no_device_to_choose():
    with pytest.raises(ValueError, match=r'^device: expected "cpu" or a CUDA device'):
        prepare(build(GOOD, "cpu"), device=None)
