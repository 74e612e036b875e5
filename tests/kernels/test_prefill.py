"""Prefill: the reference's bytes for ragged batches in every layout, T decode steps' bytes for T tokens, and skipped rows."""

from itertools import pairwise

import pytest
import torch
from cases import ACTIVATIONS, CACHES, FLOATS, Case, Spec, assert_same_storages, bits, build, check, run, run_reference
from fake_driver import with_nothing_loaded
from guarded_memory import signal_of, walled
from lanes import ON_GPU
from ragged import BLOCK_TABLE, CU_SEQLENS, POSITIONS, RAGGED, SLOTS, STILL, live, prefill_in, ragged

from decode_rope import reference, rope_append_decode, rope_append_prefill
from decode_rope.append.faults import fault_buffer
from decode_rope.launch import compiled
from decode_rope.launch.prefill import PrefillGeometry, check_geometry, prefill_geometry
from decode_rope.launch.tiles import Tiles, tiles_of

GEOMETRIES = [
    PrefillGeometry(Tiles(4, 1, 1), Tiles(8, 1, 1)),
    PrefillGeometry(Tiles(2, 4, 2), Tiles(8, 1, 2)),
    PrefillGeometry(Tiles(16, 1, 4), Tiles(4, 2, 1), num_warps=8),
    PrefillGeometry(Tiles(32, 2, 1), Tiles(32, 2, 2), num_warps=2),
]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_ragged_batch_leaves_the_bytes_of_the_reference(dtype, is_neox, device):
    got = check(ragged(device, RAGGED.but(dtype=dtype, is_neox=is_neox)), rope_append_prefill)
    assert got.faults[0] == 0


@pytest.mark.kernel
@pytest.mark.parametrize("cache", CACHES)
def test_every_cache_layout(cache, device):
    # 100 + 5 elements a row in "NHD padded" and the like: not a multiple of 16 bytes.
    check(ragged(device, RAGGED.but(cache=cache, v_head_dim=40, head_dim=48, rotary_dim=32)), rope_append_prefill)


@pytest.mark.kernel
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_every_layout_of_q_k_v(activations, device):
    check(ragged(device, RAGGED.but(activations=activations)), rope_append_prefill)


@pytest.mark.parametrize(
    "changes",
    [
        dict(heads=(9, 3), head_dim=96),
        dict(heads=(7, 1), head_dim=80, rotary_dim=20, is_neox=False),
        dict(heads=(3, 3), head_dim=64, v_head_dim=128, rotary_dim=0),
        dict(heads=(4, 2), rotary_dim=32, q_out=True, k_out="own"),
        dict(heads=(4, 2), rotary_dim=32, k_out="k"),
        dict(heads=(4, 2), k_out="own", v_is_k=True),
        dict(heads=(2, 2), shift=1, table_shift=1),
        dict(heads=(2, 1), positions_dtype=torch.int32, index_dtype=torch.int64, page_size=3, num_pages=11),
    ],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
@pytest.mark.kernel
def test_shapes_outputs_and_alignments(changes, device):
    check(ragged(device, RAGGED.but(**changes)), rope_append_prefill)


@pytest.mark.kernel
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_no_tile_shape_changes_a_bit(geometry, device):
    for changes in (dict(heads=(3, 1)), dict(heads=(4, 2), is_neox=False, rotary_dim=32, k_out="own")):
        check(ragged(device, RAGGED.but(**changes)), prefill_in(geometry))
    check(build(Spec(POSITIONS, slots=SLOTS, heads=(3, 2)), device), prefill_in(geometry))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [dict(), dict(heads=(8, 1), head_dim=128), dict(heads=(3, 2), head_dim=16, is_neox=False), dict(cache="HND", heads=(7, 7))],
    ids=lambda changes: ", ".join(f"{name}={value}" for name, value in changes.items()),
)
def test_rows_in_one_piece(changes, dtype, device, monkeypatch):
    """What only appends takes rows whole: padding, faults and rows at the ends of tiles included; whatever the index."""
    by_slot = Spec(POSITIONS, slots=SLOTS, dtype=dtype, head_dim=64).but(**changes)
    by_request = Spec([*range(10), *range(9), 2**40], [[3, 6, 1], [0, 2, 5]], tokens_per_request=10, dtype=dtype, head_dim=64).but(
        **changes
    )
    with_nothing_loaded(monkeypatch)
    for spec in (by_slot, by_request, by_slot.but(heads=(by_slot.heads[0], 0))):
        check(build(spec, device), rope_append_prefill)
    assert [kernel.facts["WHOLE"] for kernel in compiled._COMPILED.values()] == [True] * 3


@pytest.mark.kernel
@pytest.mark.parametrize("changes", STILL, ids=str)
def test_no_rotation(changes, device):
    """K and V are appended; Q, which stays as it is, is copied to an output of its own and else takes no programs."""
    check(build(Spec(POSITIONS, slots=SLOTS, rotary_dim=0).but(**changes), device), rope_append_prefill)


@pytest.mark.kernel
def test_cu_seqlens_of_either_dtype_and_any_place_for_empty_sequences(device):
    for dtype in (torch.int32, torch.int64):
        check(ragged(device, dtype=dtype), rope_append_prefill)
    spec = RAGGED.but(block_table=[[-1, -1, -1], *BLOCK_TABLE, [7, 7, 7], [7, 7, 7]])
    check(ragged(device, spec, [0, 0, 7, 12, 12, 19, 19, 19]), rope_append_prefill)


@pytest.mark.kernel
@pytest.mark.parametrize("chunks", [[8], [1] * 8, [3, 5], [2, 1, 4, 1]], ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
def test_a_prefill_is_its_decode_steps_however_it_is_cut(chunks, is_neox, device):
    """One sequence of 8 tokens from position 4 on, whole, in chunks, and in 8 decode steps: one storage."""
    spec = Spec(list(range(4, 12)), [[3, 6, 1]], heads=(5, 2), is_neox=is_neox, rotary_dim=48)
    steps, pieces = build(spec, device), build(spec, device)
    for token in range(8):
        _decode_one(steps, token)
    start = 0
    for size in chunks:
        rows = slice(start, start + size)
        q, k, v, positions = (pieces[name][rows] for name in ("q", "k", "v", "positions"))
        rope_append_prefill(
            q, k, v, pieces["k_cache"], pieces["v_cache"], pieces["cos_sin_cache"], positions, is_neox=is_neox,
            block_table=pieces["block_table"], cu_seqlens_q=torch.tensor([0, size], device=device),
        )  # fmt: skip
        start += size
    assert_same_storages(pieces, steps)


def _decode_one(case: Case, token: int) -> None:
    rows = slice(token, token + 1)
    q, k, v, positions = (case[name][rows] for name in ("q", "k", "v", "positions"))
    rope_append_decode(
        q, k, v, case["k_cache"], case["v_cache"], case["cos_sin_cache"], positions, is_neox=case.spec.is_neox,
        block_table=case["block_table"],
    )  # fmt: skip


@pytest.mark.kernel
def test_tokens_per_request_and_slot_mapping_as_in_decode(device):
    spec = Spec(list(range(8)), [[5, 2, 0], [0, 6, 3]], tokens_per_request=4)
    one_request = spec.but(tokens_per_request=2**32 + 1)
    slots = Spec(POSITIONS, slots=SLOTS)
    for case in (build(x, device) for x in (spec, one_request, slots, Spec([3, 1], slots=[]))):
        got, want = check(case, rope_append_prefill), case.clone()
        rope_append_decode(**want.arguments())
        assert_same_storages(got, want)


@pytest.mark.kernel
def test_no_tokens(device):
    case = build(Spec([], slots=[], q_out=True), device)
    assert_same_storages(check(case, rope_append_prefill), case)
    check(ragged(device, Spec([], [[1, 2]]), [0, 0]), rope_append_prefill)


@pytest.mark.kernel
class TestRows:
    """Rows that must not be written."""

    def test_padding_rows_and_skipped_slots(self, device):
        got = check(ragged(device, RAGGED.but(positions=[-1, *POSITIONS[1:11], -7, *POSITIONS[12:]])), rope_append_prefill)
        assert got.faults[0] == 0
        check(build(Spec(POSITIONS, slots=[-1, 3, -(2**40), 5, 6, -4, 11], index_dtype=torch.int64), device), rope_append_prefill)

    def test_tokens_outside_every_sequence_pass_through(self, device):
        case = ragged(device, RAGGED.but(q_out=True, k_out="own"), [2, 7, 12, 12, 17])
        got = check(case, rope_append_prefill)
        for row in (0, 1, 17, 18, 19):
            for name in ("q", "k"):
                assert torch.equal(bits(got[f"{name}_out"][row]), bits(case[name][row]))
        assert not torch.equal(bits(got["q_out"][16]), bits(case["q"][16]))

    def test_no_sequences_at_all(self, device):
        case = ragged(device, RAGGED.but(block_table=[[0, 1, 2]]), [0])
        assert_same_storages(check(case, rope_append_prefill), case)

    def test_only_q_and_only_live_k_know_padding_too(self, device):
        for cu_seqlens in ([3, 9], [0, 4, 20]):
            check(ragged(device, Spec(POSITIONS, heads=(4, 0)), cu_seqlens), rope_append_prefill)
            check(live(device, cu_seqlens, q_out=True, k_out="own"), rope_append_prefill)

    def test_cu_seqlens_beside_a_slot_mapping_says_what_is_padding(self, device):
        check(ragged(device, Spec(POSITIONS, slots=SLOTS), [1, 4, 18]), rope_append_prefill)

    def test_faults_are_counted_once_a_token(self, device):
        """Rows 1 and 4: past the table. 8, 10, 11: page past the cache. 17, 18: column past the width."""
        positions = [0, 64, 2, 3, 2**40, 5, 6, 5, 8, 7, 8, 9, 0, 1, 2, 3, 4, 12, 13, 0]
        spec = RAGGED.but(positions=positions, block_table=[[5, 2, -1], [0, 6, 99], [-1, -1, -1], [4, 1, -1]])
        got = check(ragged(device, spec, [0, 7, 12, 12, 19]), rope_append_prefill)
        assert got.faults[0] == 2 + 3 + 2
        assert got.faults[1] >> 35 == 1
        got = check(build(Spec([3, 4, 5], slots=[1, 32, 2**40], index_dtype=torch.int64), device), rope_append_prefill)
        assert got.faults[0] == 2
        for changes in (dict(heads=(4, 0)), dict(slots=[1, 2, 3])):
            got = check(build(Spec([3, 64, 70], **changes), device), rope_append_prefill)
            assert got.faults[0] == 2

    def test_cache_positions_place_tokens_elsewhere(self, device):
        places = [*range(3, 10), *range(4, 9), *range(1, 8), 0]
        check(ragged(device, RAGGED.but(cache_positions=places, positions=[p // 2 for p in POSITIONS])), rope_append_prefill)
        check(ragged(device, RAGGED.but(cache_positions=[-1, 2, 2**40, *places[3:]])), rope_append_prefill)


GARBAGE = [
    [9, 3, 14, 2, 17],
    [0, -5, 2**31 - 1, -(2**31), 8],
    [2**31 - 1] * 5,
    [-1] * 5,
    [19, 12, 12, 7, 0],
    [0, 100, 5, 101, 12],
    [13],
]


@pytest.mark.kernel
@pytest.mark.parametrize("cu_seqlens", GARBAGE, ids=str)
def test_garbage_in_cu_seqlens_stays_within_the_tensors_and_the_named_slots(cu_seqlens, device):
    """Whatever it holds: no access outside the tensors, and no slot but those of the token's position in some row."""
    case = ragged(device, cu_seqlens=cu_seqlens)

    def work():
        got = case.clone() if ON_GPU else walled(case, end=True)
        run(got, rope_append_prefill)
        named = {row[p // 4] * 4 + p % 4 for row in BLOCK_TABLE for p in POSITIONS if p // 4 < 3 and row[p // 4] >= 0}
        for name in ("k_cache", "v_cache"):
            new, old = (bits(x[name]).flatten(0, 1).flatten(1) for x in (got, case))
            assert set((new != old).any(1).nonzero().flatten().tolist()) <= named

    if ON_GPU:
        work()
    else:
        assert signal_of(work) == 0


@pytest.mark.skipif(ON_GPU, reason="a GPU has no pages to protect from here")
@pytest.mark.parametrize("end", [False, True], ids=["start", "end"])
@pytest.mark.parametrize(
    "spec", [RAGGED.but(heads=(3, 1), k_out="own", q_out=True), Spec(POSITIONS, slots=SLOTS[:11])], ids=["table", "slots"]
)
@pytest.mark.kernel
def test_no_byte_outside_the_tensors_is_touched(spec, end, device):
    case = ragged(device, spec) if spec.slots is None else build(spec, device)
    want = run_reference(case.clone())

    def work():
        got = run(walled(case, end), rope_append_prefill)
        for name in ("q", "k_cache", "v_cache"):
            assert torch.equal(bits(got[name]), bits(want[name])), name

    assert signal_of(work) == 0


@pytest.mark.anywhere
@pytest.mark.parametrize("changes", [dict(), dict(q_out=True, rotary_dim=16), dict(activations="packed"), dict(shift=1)], ids=str)
@pytest.mark.parametrize("k_out", ["k", "own"])
def test_live_k_without_a_cache(k_out, changes, device):
    check(live(device, k_out=k_out, **changes), rope_append_prefill)


@pytest.mark.anywhere
def test_q_alone_may_name_a_cache(device):
    case = build(Spec(POSITIONS, heads=(4, 0)), device)
    cache = torch.full((2, 4, 2, 64), 7.0, dtype=torch.bfloat16, device=device)
    want = run_reference(case.clone())
    rope_append_prefill(**(case.arguments() | {"k_cache": cache, "v_cache": cache}))
    assert_same_storages(case, want)
    assert (cache == 7).all()


FAR = 2**32 + 2**20  # elements; 32-bit arithmetic arrives 2^20 from the start instead
STEPS = [(name, dim) for name in ("q", "k", "v", "q_out", "k_out") for dim in (0, 1)]
STEPS += [(name, dim) for name in ("k_cache", "v_cache") for dim in (0, 1, 2)] + [("block_table", 0), ("positions", 0)]


@pytest.mark.kernel
@pytest.mark.parametrize(("name", "dim"), STEPS)
def test_steps_past_32_bits(name, dim, device):
    """Two sequences of a token each, the second at the last page, offset and head of everything; one dimension steps far."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": 2, "k": 2, "v": 2} | {out: 2 for out in ("q_out", "k_out") if out == name}
    call = {x: torch.randn(2, n, 32, generator=generator).to(device, torch.float16) for x, n in heads.items()}
    call |= {x: torch.randn(2, 2, 2, 32, generator=generator).to(device, torch.float16) for x in ("k_cache", "v_cache")}
    call |= {"cos_sin_cache": torch.randn(4, 32, generator=generator).to(device)}
    call |= {
        "positions": torch.tensor([[1, 3], [2, 0]], dtype=torch.int32, device=device),
        "block_table": torch.tensor([[0, 0], [0, 1]], dtype=torch.int32, device=device),
    }
    call |= {"axis_map": torch.tensor([0, 1] * 8, dtype=torch.int8, device=device)}
    call |= {"cu_seqlens_q": torch.tensor([0, 1, 2], device=device)}
    want = {x: tensor.clone() for x, tensor in call.items()}
    reference.rope_append_prefill(**want)
    strides = list(call[name].stride())
    strides[dim] = FAR
    try:
        memory = torch.empty(FAR + 2**20, dtype=call[name].dtype, device=device)
    except RuntimeError as error:
        pytest.skip(f"no room to reserve {FAR} elements: {error}")
    near = memory[: 2**21].zero_()
    far = memory.as_strided(call[name].shape, strides)
    far.copy_(call[name])
    call[name] = far
    untouched = near[2**19 :].clone()
    rope_append_prefill(**call)
    for x, expected in want.items():
        assert torch.equal(call[x], expected), x
    assert torch.equal(near[2**19 :], untouched)


@pytest.mark.kernel
def test_a_plan_serves_other_memory(device):
    """The second call of a configuration takes the short way: other buffers, then unaligned ones, then another chunk of them."""
    spec = RAGGED.but(activations="packed", k_out="k")
    for seed, shift in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 0)):
        check(ragged(device, spec.but(seed=seed, shift=shift)), rope_append_prefill)


@pytest.mark.kernel
def test_one_kernel_for_any_number_of_tokens_and_sequences(device):
    check(build(Spec(POSITIONS, slots=SLOTS, heads=(6, 2)), device), rope_append_prefill)
    loaded = compiled.num_compiled()
    for tokens in (1, 2, 16, 17):
        check(build(Spec(POSITIONS[:tokens], slots=SLOTS[:tokens], heads=(6, 2)), device), rope_append_prefill)
    assert compiled.num_compiled() == loaded


@pytest.mark.kernel
def test_aliasing_is_noticed_in_a_call_that_has_a_plan(device):
    case = ragged(device, RAGGED.but(k_out="own"))
    a = case.arguments()
    rope_append_prefill(**a)
    before = case.clone()
    wrong = [
        {"k_out": a["v"]},  # same shape and strides as k
        {"v": a["k_out"]},
        {"v_cache": a["k_cache"]},
        {"k": a["k_out"], "v": a["k_out"]},
    ]
    for change in wrong:
        with pytest.raises(ValueError, match="expected memory of its own"):
            rope_append_prefill(**(a | {name: x.view(a[name].shape) for name, x in change.items()}))
    assert_same_storages(case, before)


@pytest.mark.anywhere
def test_what_is_refused_once_is_refused_after_a_good_call(device):
    a = build(Spec([3, 1], heads=(4, 0)), device).arguments()
    rope_append_prefill(**a)
    for change in ({"is_neox": 1}, {"tokens_per_request": True}, {"k_cache": ()}, {"q": a["q"].clone().requires_grad_()}):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError)):
                rope_append_prefill(**(a | change))


@pytest.mark.parametrize("bad", [PrefillGeometry(Tiles(3, 1, 1), Tiles(2, 1, 1)), PrefillGeometry(Tiles(2, 1, 1), Tiles(1, 4, 1))])
def test_impossible_geometries(bad):
    with pytest.raises(ValueError, match="geometry: expected"):
        check_geometry(bad)
    with pytest.raises(ValueError, match="geometry: expected"):
        prefill_in(bad)(**ragged("cpu").arguments())
    with pytest.raises(TypeError, match=r"geometry: expected a decode_rope\.launch\.prefill\.PrefillGeometry, got tuple"):
        check_geometry((4, 4, 4))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("rotary", [0, 0.25, 1])
def test_every_shape_of_heads_has_tiles(itemsize, rotary):
    for heads in (*range(1, 41), 48, 64, 71, 96, 128):
        for head_dim in (2, 16, 64, 80, 96, 100, 128, 192, 256, 512):
            for whole in (False, True):
                geometry = prefill_geometry(heads, heads, head_dim, 2 * int(rotary * head_dim / 2), itemsize, True, whole)
                check_geometry(geometry)
            tiles = tiles_of(heads, head_dim, head_dim, itemsize)
            assert tiles.groups(heads) * tiles.heads * tiles.loop >= heads
            assert tiles.tokens * tiles.heads * tiles.loop * head_dim * itemsize <= 2 * 128 * 64


def test_the_driver_gets_every_parameter_in_its_place(fake_driver):
    """A direct launch without a GPU: what is packed is what the kernel's parameters are called."""
    spec = RAGGED.but(cache="HND padded", activations="padded", q_out=True, k_out="own", cache_positions=[1] * 20)
    case = ragged("cpu", spec)
    a = case.arguments() | {
        "positions": torch.zeros(3, 25, dtype=torch.int64)[:, :20],
        "axis_map": torch.zeros(32, dtype=torch.int8),
    }
    for _ in range(2):
        rope_append_prefill(**a)
    want = {f"{name}_ptr": a[name].data_ptr() for name in ("q", "k", "v", "q_out", "k_out", "k_cache", "v_cache", "positions")}
    want |= {f"{name}_ptr": a[name].data_ptr() for name in ("cache_positions", "axis_map")}
    want |= {"cos_sin_ptr": a["cos_sin_cache"].data_ptr(), "index_ptr": a["block_table"].data_ptr()}
    want |= {"cu_seqlens_ptr": a["cu_seqlens_q"].data_ptr(), "faults_ptr": fault_buffer(torch.device("cpu")).data_ptr()}
    want |= {"index_len": 3, "stride_index": a["block_table"].stride(0), "num_tokens": 20, "max_position": 64}
    want |= {"num_pages": 8, "tokens_per_request": 1, "num_requests": 4, "stride_axis": 25}
    for short, name in (("q", "q"), ("k", "k"), ("v", "v"), ("qo", "q_out"), ("ko", "k_out")):
        want |= {f"stride_{short}_t": a[name].stride(0), f"stride_{short}_h": a[name].stride(1)}
    for short, name in (("kc", "k_cache"), ("vc", "v_cache")):
        page, head, offset, _ = a[name].stride()
        want |= {f"stride_{short}_p": page, f"stride_{short}_t": offset, f"stride_{short}_h": head}
    assert fake_driver.arguments == [want] * 2


@pytest.mark.gpu
class TestOnAGpu:
    def test_seventy_thousand_tokens(self, device):
        """Offsets past 2^31 bytes in q, and a sequence for every length from 1 to about 370."""
        tokens, (hq, hkv, d), page = 70_001, (128, 8, 128), 16
        lengths = torch.arange(1, 374)
        cu = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
        cu = torch.cat([cu[cu < tokens], torch.tensor([tokens])])
        positions = torch.cat([torch.arange(n) + n for n in cu.diff().tolist()])
        rows, width = len(cu) - 1, 48
        table = torch.randperm(rows * width).view(rows, width).int()
        angle = torch.rand(1000, d // 2) * 6.3
        cos_sin = torch.cat([angle.cos(), angle.sin()], 1).to(device)
        g = torch.Generator(device=device).manual_seed(0)
        rand = lambda *shape: torch.randn(shape, device=device, dtype=torch.bfloat16, generator=g)  # noqa: E731
        call = [rand(tokens, hq, d), rand(tokens, hkv, d), rand(tokens, hkv, d)]
        call += [torch.zeros(rows * width, page, hkv, d, dtype=torch.bfloat16, device=device) for _ in range(2)]
        index = dict(block_table=table.to(device), cu_seqlens_q=cu.to(device))
        want = [x.clone() for x in call]
        reference.rope_append_prefill(*want, cos_sin, positions.to(device), **index)
        rope_append_prefill(*call, cos_sin, positions.to(device), **index)
        for got, expected in zip(call, want, strict=True):
            assert torch.equal(bits(got), bits(expected))

    def test_a_graph_reads_its_metadata_at_every_replay(self, device):
        case = ragged(device)
        run(case.clone(), rope_append_prefill)
        static = case.clone()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                rope_append_prefill(**static.arguments())
        replays = [(CU_SEQLENS, BLOCK_TABLE, 1), ([0, 1, 4, 18, 18], BLOCK_TABLE[::-1], 2), ([3, 3, 3, 9, 20], BLOCK_TABLE, 3)]
        for cu_seqlens, block_table, seed in replays:
            lengths = [b - a for a, b in pairwise(cu_seqlens)]
            positions = [33] * cu_seqlens[0] + [seed + step for length in lengths for step in range(length)]
            positions += [33] * (len(POSITIONS) - len(positions))
            fresh = ragged(device, RAGGED.but(positions=positions, block_table=block_table, seed=seed), cu_seqlens)
            for name, storage in fresh.storages.items():
                static.storages[name].copy_(storage)
            static.options["cu_seqlens_q"].copy_(fresh.options["cu_seqlens_q"])
            graph.replay()
            torch.cuda.synchronize()
            assert_same_storages(static, run_reference(fresh))

    def test_a_first_use_inside_a_capture_says_so(self, device):
        case = ragged(device, RAGGED.but(heads=(11, 1), head_dim=24))
        with pytest.raises(RuntimeError, match="first time inside a CUDA graph capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            rope_append_prefill(**case.arguments())

    def test_nothing_waits_for_the_device(self, device):
        case = ragged(device)
        rope_append_prefill(**case.arguments())
        torch.cuda.set_sync_debug_mode("error")
        try:
            rope_append_prefill(**case.arguments())
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.anywhere
def test_reference_finds_the_sequence_of_each_token(device):
    cu = torch.tensor([1, 3, 3, 6], device=device)
    assert reference.sequence_of(cu, 8).tolist() == [-1, 0, 0, 2, 2, 2, -1, -1]
    assert reference.sequence_of(cu[:1], 2).tolist() == [-1, -1]
