"""`rope_append_decode` leaves every byte as the reference does: for any shape, any batch size, any tile, any order of calls."""

import pytest
import torch
from cases import FLOATS, Spec, assert_same_storages, bits, build, call_arguments, check, prepare, prepared, run, run_reference
from lanes import ON_GPU
from random_cases import CPU_SIZES, GPU_SIZES, random_spec

import decode_rope
from decode_rope.launch import compiled
from decode_rope.launch.decode import Geometry, decode_geometry

pytestmark = pytest.mark.kernel
SIZES = GPU_SIZES if ON_GPU else CPU_SIZES

# (query heads, KV heads, head_dim, v_head_dim, rotary_dim, NeoX pairs) of published models; per GPU where heads are split.
MODELS = {
    "Llama-3-8B": (32, 8, 128, 128, 128, True),
    "Llama-3-70B, tp 8": (8, 1, 128, 128, 128, True),
    "Qwen2-0.5B": (14, 2, 64, 64, 64, True),
    "SmolLM2": (9, 3, 64, 64, 64, True),
    "Falcon-7B": (71, 1, 64, 64, 64, True),
    "Gemma-2B": (8, 1, 256, 256, 256, True),
    "GLM-4, GPT-J pairs": (32, 2, 128, 128, 64, False),
    "GPT-J": (16, 16, 256, 256, 64, False),
    "Phi-2": (32, 32, 80, 80, 32, True),
    "Phi-3-mini": (32, 32, 96, 96, 96, True),
    "StableLM, 20 of 80": (8, 8, 80, 80, 20, True),
    "MiMo, V narrower": (16, 1, 192, 128, 64, True),
    "Gemma-4 global": (8, 1, 512, 512, 512, True),
    "odd head_dim": (5, 1, 100, 100, 100, True),
}


def step(num_tokens: int, **changes) -> Spec:
    """A decode step of `num_tokens` requests in different places, each with a page of its own."""
    table = [[r, -1] for r in range(num_tokens)]
    positions = [r % 4 for r in range(num_tokens)]
    return Spec(positions, table, **({"num_pages": num_tokens} | changes))


@pytest.mark.parametrize("seed", range(360 if ON_GPU else 40))
def test_random_calls(seed, device):
    check(build(random_spec(seed, SIZES), device))


@pytest.mark.parametrize("dtype", FLOATS if ON_GPU else FLOATS[:1], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_models(name, dtype, device, on_gpu):
    hq, hkv, d, dv, r, neox = MODELS[name]
    shape = dict(heads=(hq, hkv), head_dim=d, v_head_dim=dv, rotary_dim=r, is_neox=neox, dtype=dtype)
    for num_tokens in (2, 300) if on_gpu else (1,):
        check(build(step(num_tokens, **shape), device))


@pytest.mark.parametrize("is_neox", [True, False])
def test_C3_every_batch_size_gives_a_token_the_same_bits(is_neox, device, on_gpu):
    """The launch changes shape at some batch sizes; a row may not. Sizes are those on both sides of each change, and others."""
    largest = 1030 if on_gpu else 9
    whole = build(step(largest, heads=(5, 2), rotary_dim=40, is_neox=is_neox), device)
    want = run_reference(whole.clone())
    changes = [n for n in range(2, largest) if decode_geometry(n, 5, 2, 64) != decode_geometry(n - 1, 5, 2, 64)]
    assert changes or not on_gpu
    sizes = {*range(1, 18), 64, 257, *(n + i for n in changes for i in (-1, 0, 1)), 1030} if on_gpu else {1, 2, 9}
    for num_tokens in sizes:
        for geometry in (None, Geometry(4, 8, 8, 1, 4, False)):
            got = whole.clone()
            for name in ("q", "k", "v", "positions", "block_table"):
                view = got.views[name]
                got.views[name] = view._replace(shape=(num_tokens, *view.shape[1:]))
            run(got, prepared(got, geometry=geometry))
            assert torch.equal(bits(got["q"]), bits(want["q"][:num_tokens])), num_tokens
            for name in ("k_cache", "v_cache"):
                assert torch.equal(bits(got[name][:num_tokens]), bits(want[name][:num_tokens])), (name, num_tokens)
                assert torch.equal(bits(got[name][num_tokens:]), bits(whole[name][num_tokens:])), (name, num_tokens)


GEOMETRIES = [
    Geometry(1, 2, 1, 2, 1, False),
    Geometry(1, 8, 1, 2, 2, False),
    Geometry(2, 1, 2, 1, 4, False),
    Geometry(2, 4, 4, 2, 4, False),
    Geometry(4, 8, 8, 1, 8, False),
    Geometry(1, 16, 2, 4, 4, False),
    Geometry(16, 1, 1, 2, 4, False),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: "x".join(map(str, g[:5])))
@pytest.mark.parametrize("spec", [
    step(5, heads=(5, 3), rotary_dim=24),
    step(5, heads=(5, 3), rotary_dim=64, is_neox=False, q_out=True, k_out="own", dtype=torch.float16),
    Spec([3, -1, 70, 9, 5], slots=[5, 6, 7, 40, -3], heads=(3, 1), head_dim=80, index_dtype=torch.int64),
    Spec([3, -1, 70, 9, 5], [[1, 0, 99], [2**31 - 1, -5, 1], [0, 3, 5]], tokens_per_request=2, heads=(3, 1), rotary_dim=0),
    Spec([3, -1, 70, 9, 5], heads=(3, 0), q_out=True, rotary_dim=32),
], ids=["table", "outputs", "slots", "NoPE", "Q only"])  # fmt: skip
def test_the_tile_changes_nothing(spec, geometry, device):
    case = build(spec, device)
    check(case, prepared(case, geometry=geometry))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_subnormal_numbers_are_numbers(dtype, device):
    case = build(step(2, dtype=dtype), device)
    tiny = torch.finfo(dtype).smallest_normal
    fraction = torch.linspace(-1, 1, case["q"].numel(), device=device).view_as(case["q"])
    case["q"].copy_(fraction * tiny)
    case["k"].copy_(fraction[:, :2] * tiny)
    assert case["q"].abs().max() <= tiny and (case["q"] != 0).float().mean() > 0.9
    check(case)


def test_F3_alignment_of_one_call_says_nothing_about_the_next(device):
    """Same shapes and strides, other addresses: 16-byte aligned, then not, then aligned again."""
    for shift, table_shift in ((0, 0), (1, 0), (0, 1), (8, 4), (2, 2), (4, 0), (0, 0)):
        check(build(step(3, shift=shift, table_shift=table_shift), device))


@pytest.mark.parametrize("one", ["q", "k", "v", "k_cache", "v_cache", "q_out", "k_out"])
def test_F3_one_unaligned_tensor_is_read_and_written_exactly(one, device):
    spec = step(3, q_out=True, k_out="own", dtype=torch.float16)
    aligned, shifted = build(spec, device), build(spec.but(shift=1), device)
    check(aligned)
    mixed = aligned.clone()
    view = shifted.views[one]
    mixed.views[one] = view._replace(storage="shifted")
    mixed.storages["shifted"] = shifted.storages[view.storage]
    check(mixed)


@pytest.mark.parametrize("one", ["q", "k", "v", "k_cache", "v_cache", "q_out", "k_out", "cos_sin_cache"])
def test_F3_one_unaligned_tensor_takes_another_kernel(one, device):
    """Seen from outside: the kernel that is launched may assume 16 bytes only where every row begins on 16."""
    spec = step(3, q_out=True, k_out="own", dtype=torch.float16)
    shifted = build(spec.but(shift=4 * (one != "cos_sin_cache"), table_shift=one == "cos_sin_cache"), device)
    case = build(spec, device)
    assert alignments_of(case) == (16, 16, 16)
    case.views[one], case.storages["shifted"] = shifted.views[one]._replace(storage="shifted"), shifted.storages[one]
    assert alignments_of(case) == (2, 2, 4)


@pytest.mark.parametrize("changes", [
    dict(head_dim=68), dict(v_head_dim=68), dict(activations="padded"), dict(cache="NHD padded"), dict(cache="HND padded"),
], ids=str)  # fmt: skip
def test_F3_head_sizes_and_strides_bound_the_alignment_a_kernel_assumes(changes, device):
    """68 elements of fp16 are 136 bytes: rows begin on 8. Strides of 69 or 67 elements: rows begin on 2."""
    rows, caches, _ = alignments_of(build(step(3, dtype=torch.float16, rotary_dim=64, **changes), device))
    assert rows == caches == (8 if 68 in changes.values() else 2)


def alignments_of(case) -> tuple[int, int, int]:
    """What the kernel that a bound launch of a case has assumes of rows, of caches and of the table, in bytes."""
    facts = prepare(case).bind(**call_arguments(case)).plan.compiled.facts
    return facts["ALIGN"], facts["ALIGN_CACHE"], facts["ALIGN_TABLE"]


def test_F3_strides_sizes_and_dtypes_of_one_call_say_nothing_about_the_next(device):
    for head_dim in (64, 65, 72, 66):
        for activations in ("separate", "padded", "packed"):
            check(build(step(2, head_dim=head_dim, rotary_dim=32, activations=activations), device))
    for num_tokens in (1, 2, 1, 3, 16, 17):
        check(build(step(num_tokens), device))
    for index in (torch.int32, torch.int64):
        for positions in (torch.int32, torch.int64):
            check(build(step(2, index_dtype=index, positions_dtype=positions), device))


def test_F3_width_and_row_stride_of_the_block_table_are_read_at_each_call(device):
    for width in (1, 2, 16, 17, 5):
        table = [[0] * (width - 1) + [3], [0] * (width - 1) + [1]]
        positions = [4 * width - 1, 4 * width - 4]
        check(build(Spec(positions, table, max_position=128), device))


def test_F3_length_of_the_slot_mapping_is_read_at_each_call(device):
    for length in (3, 2, 3, 0, 1):
        check(build(Spec([1, 2, 3], slots=[9, 4, 2][:length]), device))


def test_F6_the_first_call_of_a_configuration_is_like_the_second(device):
    case = build(step(3, heads=(6, 3), head_dim=72), device)
    before = compiled.num_compiled()
    first, second = case.clone(), case.clone()
    run(first)
    assert compiled.num_compiled() > before
    run(second)
    assert_same_storages(first, second)


@pytest.mark.parametrize("spec", [
    Spec([], [], heads=(4, 2)), Spec([], slots=[]), Spec([], heads=(4, 0)), Spec([], slots=[], q_out=True, k_out="own")
], ids=["table", "slots", "Q only", "outputs"])  # fmt: skip
def test_F11_no_tokens_is_no_launch(spec, device):
    if spec.block_table == []:
        case = build(spec.but(block_table=[[1, 2]]), device)
        case.views["block_table"] = case.views["block_table"]._replace(shape=(0, 2))
    else:
        case = build(spec, device)
    before = compiled.num_compiled()
    got = check(case)
    assert_same_storages(got, case)
    assert got.returned.shape == (0, 4, 64)
    assert compiled.num_compiled() == before


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(80, 80), (128, 128), (96, 48), (64, 64)])
def test_B10_in_place_is_out_of_place_every_time(head_dim, rotary_dim, is_neox, device, on_gpu):
    """A rotation partner read after it was overwritten would show now and then."""
    spec = step(256 if on_gpu else 3, head_dim=head_dim, rotary_dim=rotary_dim, is_neox=is_neox, k_out="k", heads=(8, 2))
    start = build(spec, device)
    outside = build(spec.but(q_out=True, k_out="own"), device)
    for name in ("q", "k"):
        outside[name].copy_(start[name])
    outside["cos_sin_cache"].copy_(start["cos_sin_cache"])
    run(outside)
    for _ in range(100 if on_gpu else 2):
        inside = start.clone()
        run(inside)
        for name in ("q", "k"):
            assert torch.equal(bits(inside[name]), bits(outside[f"{name}_out"])), name
        assert torch.equal(bits(inside["k_cache"][: len(spec.positions)]), bits(outside["k_cache"][: len(spec.positions)]))


@pytest.mark.parametrize("changes", [
    dict(v_is_k=True), dict(v_is_k=True, k_out="own"), dict(k_out="k"), dict(k_out="k", activations="packed"),
    dict(k_out="k", activations="kv side by side"), dict(activations="one head expanded"),
], ids=str)  # fmt: skip
def test_F15_tensors_that_may_share_memory_do(changes, device):
    check(build(step(3, **changes), device))
    check(build(step(3, **changes, shift=1, is_neox=False), device))


def test_F15_q_out_may_be_q(device):
    case = build(step(3, rotary_dim=32), device)
    case.views["q_out"] = case.views["q"]
    check(case)


def test_a_rope_table_brings_its_own_pairing(device):
    class Table:
        is_neox = False

    case = build(step(3), device)
    table = Table()
    table.cos_sin_cache = case["cos_sin_cache"]
    got, want = case.clone(), case.clone()
    table.cos_sin_cache = got["cos_sin_cache"]
    decode_rope.rope_append_decode(**got.arguments() | {"cos_sin_cache": table})
    want.options["is_neox"] = False
    run_reference(want)
    assert_same_storages(got, want)
