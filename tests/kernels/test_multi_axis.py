"""Positions of several axes (M-RoPE): the formulas of the models that use them, and which rows are bad."""

import pytest
import torch
from cases import bits

from decode_rope import apply_rope, reference, rope_append_prefill
from decode_rope.append.faults import fault_buffer
from decode_rope.tables import axes

pytestmark = pytest.mark.anywhere
ROWS, TOKENS = 40, 11


def table(rotary_dim: int, device) -> torch.Tensor:
    angle = torch.rand(ROWS, rotary_dim // 2, generator=torch.Generator().manual_seed(0)) * 6.3
    return torch.cat([angle.cos(), angle.sin()], dim=1).to(device)


def positions_of(num_axes: int, device, low: int = 0) -> torch.Tensor:
    """`[axes, TOKENS]` with a row stride of TOKENS + 1, as servers slice them."""
    generator = torch.Generator().manual_seed(num_axes)
    return torch.randint(low, ROWS, (num_axes, TOKENS + 1), generator=generator).to(device)[:, :TOKENS]


def randn(*shape, device, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def rotate_by_hand(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """`x` `[T, H, D]`, cos and sin `[T, R/2]`: x·cos + rotate_half(x)·sin over the first R elements."""
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    if is_neox:
        cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        other = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    else:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    return torch.cat([turned * cos[:, None] + other * sin[:, None], rest], -1)


def chunked_sections(per_axis: torch.Tensor, sections) -> torch.Tensor:
    """Qwen2-VL: split the pairs into sections, section i from axis i. `per_axis` `[axes, T, R/2]`."""
    return torch.cat([part[axis] for axis, part in enumerate(per_axis.split(sections, dim=-1))], -1)


def interleaved_sections(per_axis: torch.Tensor, sections) -> torch.Tensor:
    """Qwen3-VL: time everywhere, then height on pairs 1, 4, 7 … and width on 2, 5, 8 … up to three times their sections."""
    found = per_axis[0].clone()
    for axis, offset in ((1, 1), (2, 2)):
        picked = slice(offset, sections[axis] * 3, 3)
        found[..., picked] = per_axis[axis, ..., picked]
    return found


def ernie_sections(per_axis: torch.Tensor, sections) -> torch.Tensor:
    """Ernie-4.5-VL: sections are height, width, time; height on even pairs and width on odd ones, then time. Rows are t, h, w."""
    height, width, time = sections
    space = height + width
    even, odd = per_axis[1, ..., 0:space:2], per_axis[2, ..., 1:space:2]
    return torch.cat([torch.stack([even, odd], -1).flatten(-2), per_axis[0, ..., -time:]], -1)


MODELS = {
    "Qwen2-VL": (3, 128, 128, True, axes.chunked((16, 24, 24)), lambda c: chunked_sections(c, [16, 24, 24])),
    "GLM-4.1V": (3, 128, 64, False, axes.chunked((8, 12, 12)), lambda c: chunked_sections(c, [8, 12, 12])),
    "Qwen3-VL": (3, 128, 128, True, axes.interleaved((24, 20, 20), 64), lambda c: interleaved_sections(c, (24, 20, 20))),
    "Qwen3.5": (3, 256, 64, True, axes.interleaved((11, 11, 10), 32), lambda c: interleaved_sections(c, (11, 11, 10))),
    "Ernie-4.5-VL": (3, 128, 128, False, axes.ernie((22, 22, 20)), lambda c: ernie_sections(c, (22, 22, 20))),
    "HunYuan-VL": (4, 128, 128, True, axes.chunked((16, 16, 16, 16)), lambda c: chunked_sections(c, [16] * 4)),
}


@pytest.mark.parametrize("model", MODELS)
def test_formulas_of_the_models(model, device):
    num_axes, head_dim, rotary_dim, is_neox, mapping, combine = MODELS[model]
    cos_sin, positions = table(rotary_dim, device), positions_of(num_axes, device)
    axis_map = torch.tensor(mapping, dtype=torch.int8, device=device)
    cos, sin = cos_sin[positions].chunk(2, -1)
    x = randn(TOKENS, 3, head_dim, device=device)
    want = rotate_by_hand(x, combine(cos), combine(sin), is_neox)
    got = apply_rope(x, cos_sin, positions, axis_map=axis_map, is_neox=is_neox)
    assert torch.equal(got, want)
    q, k = x.clone(), randn(TOKENS, 1, head_dim, device=device, seed=2)
    want_k = rotate_by_hand(k, combine(cos), combine(sin), is_neox)
    k_cache, v_cache = (torch.zeros(20, 1, head_dim, device=device) for _ in range(2))
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(3))[:TOKENS].to(device)
    rope_append_prefill(
        q, k, k.clone(), k_cache, v_cache, cos_sin, positions, slot_mapping=slots, axis_map=axis_map, is_neox=is_neox
    )
    assert torch.equal(q, want)
    assert torch.equal(k_cache[slots], want_k)
    assert torch.equal(v_cache[slots], k)


@pytest.mark.parametrize(
    ("model", "name", "rotary", "mapping"),
    [
        ("qwen2_vl", "Qwen2VL", "Qwen2VLRotaryEmbedding", axes.chunked((16, 24, 24))),
        ("qwen3_vl", "Qwen3VL", "Qwen3VLTextRotaryEmbedding", axes.interleaved((24, 20, 20), 64)),
    ],
)
def test_as_hugging_face_rotates(model, name, rotary, mapping, device):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    config = getattr(transformers, f"{name}TextConfig")(hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128)
    embedding, positions = getattr(modeling, rotary)(config).to(device), positions_of(3, device)
    angle = torch.arange(ROWS, device=device)[:, None].float() * embedding.inv_freq
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    q, k = randn(1, 4, TOKENS, 128, device=device), randn(1, 2, TOKENS, 128, device=device)
    want = modeling.apply_rotary_pos_emb(q, k, *embedding(q, positions[:, None]))
    axis_map = torch.tensor(mapping, dtype=torch.int8, device=device)
    for x, expected in zip((q, k), want, strict=True):
        assert torch.equal(apply_rope(x, cos_sin, positions[:, None], axis_map=axis_map, layout="HND"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64], ids=str)
def test_bits_of_the_reference_for_any_map(dtype, positions_dtype, device):
    """Maps with entries outside the axes too, which count as the nearest axis."""
    for num_axes, rotary_dim, is_neox, seed in ((1, 64, True, 0), (2, 48, False, 1), (4, 20, True, 2), (8, 64, False, 3)):
        axis_map = torch.randint(-2, num_axes + 2, (rotary_dim // 2,), generator=torch.Generator().manual_seed(seed))
        positions = positions_of(num_axes, device, low=-3).to(positions_dtype)
        options = dict(axis_map=axis_map.to(device, torch.int8), is_neox=is_neox)
        x = randn(TOKENS, 3, 64, device=device, dtype=dtype)
        want = reference.apply_rope(x, table(rotary_dim, device), positions, **options)
        assert torch.equal(bits(apply_rope(x, table(rotary_dim, device), positions, **options)), bits(want))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_batched_axes(layout, device):
    """`[axes, B, S]`, and one `[axes, S]` shared by the batch through an expanded view."""
    axis_map = torch.tensor(axes.interleaved((6, 5, 5), 16), dtype=torch.int8, device=device)
    positions = torch.randint(0, ROWS, (3, 2, 5), generator=torch.Generator().manual_seed(4)).to(device)
    shared = positions[:, :1].expand(3, 2, 5)
    x = randn(2, 5, 5, 32, device=device, dtype=torch.bfloat16)
    for given in (positions, shared, positions[:, :1]):
        whole = apply_rope(x, table(32, device), given, axis_map=axis_map, layout=layout)
        for b in range(2):
            own = given[:, min(b, given.shape[1] - 1)]
            rows = x[b].transpose(0, 1) if layout == "HND" else x[b]
            alone = apply_rope(rows, table(32, device), own, axis_map=axis_map)
            assert torch.equal(bits(alone), bits(whole[b].transpose(0, 1) if layout == "HND" else whole[b]))


def test_equal_axes_are_one_axis(device):
    """Text: all rows equal, and no map can matter; nor is one looked at with a single row of positions."""
    cos_sin, x = table(32, device), randn(TOKENS, 2, 32, device=device, dtype=torch.bfloat16)
    one = positions_of(1, device)[0]
    axis_map = torch.tensor(axes.chunked((4, 6, 6)), dtype=torch.int8, device=device)
    want = apply_rope(x, cos_sin, one)
    assert torch.equal(apply_rope(x, cos_sin, one.expand(3, TOKENS), axis_map=axis_map), want)
    assert torch.equal(apply_rope(x, cos_sin, one, axis_map=axis_map), want)


def test_a_table_object_brings_its_map(device):
    class Table:
        cos_sin_cache, is_neox = table(32, device), True
        axis_map = torch.tensor(axes.chunked((4, 6, 6)), dtype=torch.int8, device=device)

    x, positions = randn(TOKENS, 2, 32, device=device), positions_of(3, device)
    want = apply_rope(x, Table.cos_sin_cache, positions, axis_map=Table.axis_map)
    assert torch.equal(apply_rope(x, Table(), positions), want)
    q = x.clone()
    rope_append_prefill(q, None, None, None, None, Table(), positions)
    assert torch.equal(q, want)
    batch = x[None].repeat(2, 1, 1, 1)
    text = positions[:2].contiguous()
    assert torch.equal(apply_rope(batch, Table(), text), apply_rope(batch, Table.cos_sin_cache, text))


def appended(positions, axis_map, device, **index):
    """Q, the caches and the faults of an append of TOKENS tokens in pages of 4, as the kernel and the reference leave them."""
    cos_sin, results = table(16, device), []
    for function in (rope_append_prefill, reference.rope_append_prefill):
        q, k, v = (randn(TOKENS, h, 16, device=device, dtype=torch.bfloat16, seed=h) for h in (3, 2, 2))
        caches = [torch.full((8, 4, 2, 16), -1.0, dtype=torch.bfloat16, device=device) for _ in range(2)]
        faults = fault_buffer(q.device) if function is rope_append_prefill else torch.zeros(2, dtype=torch.int64, device=device)
        faults.copy_(torch.tensor([0, 2**63 - 1]))
        options = index | (dict(faults=faults) if function is not rope_append_prefill else {})
        function(q, k, v, *caches, cos_sin, positions, axis_map=axis_map, **options)
        results.append([q, *caches, faults.clone()])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got if got.dtype == torch.int64 else bits(got), want if want.dtype == torch.int64 else bits(want))
    return results[0]


class TestRows:
    def test_a_bad_position_of_any_axis_in_use_makes_a_bad_row(self, device):
        positions = positions_of(3, device).clone()
        positions[1, 2], positions[2, 5], positions[0, 7], positions[2, 9] = ROWS, ROWS + 3, ROWS + 9, -1
        positions[2, 2] = ROWS + 1  # of two bad axes the first is named
        axis_map = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0], dtype=torch.int8, device=device)
        slots = torch.arange(TOKENS, device=device)
        q, k_cache, v_cache, faults = appended(positions, axis_map, device, slot_mapping=slots)
        before = randn(TOKENS, 3, 16, device=device, dtype=torch.bfloat16, seed=3)
        untouched = [(cache.flatten(0, 1)[row] == -1).all().item() for cache in (k_cache, v_cache) for row in range(TOKENS)]
        assert [row % TOKENS for row, same in enumerate(untouched) if same] == [2, 5, 7, 9] * 2
        assert all(torch.equal(bits(q[row]), bits(before[row])) for row in (2, 5, 7, 9))
        assert not torch.equal(bits(q[3]), bits(before[3]))
        assert faults.tolist() == [4, (2 << 35) + (1 << 32) + ROWS]

    def test_an_axis_in_no_use_may_hold_anything(self, device):
        positions = positions_of(4, device).clone()
        positions[1], positions[3] = -5, 2**40
        axis_map = torch.tensor([0, 2] * 4, dtype=torch.int8, device=device)
        *_, faults = appended(positions, axis_map, device, slot_mapping=torch.arange(TOKENS, device=device))
        assert faults[0] == 0

    def test_row_0_says_what_is_padding(self, device):
        positions = positions_of(3, device).clone()
        positions[0, 4], positions[1, 4] = -1, ROWS
        axis_map = torch.tensor(axes.chunked((2, 3, 3)), dtype=torch.int8, device=device)
        _, k_cache, _, faults = appended(positions, axis_map, device, slot_mapping=torch.arange(TOKENS, device=device))
        assert faults[0] == 0
        assert (k_cache.flatten(0, 1)[4] == -1).all()

    @pytest.mark.parametrize("own", [False, True], ids=["row 0", "cache_positions"])
    def test_where_tokens_go_through_a_block_table(self, own, device):
        positions = positions_of(3, device).clone()
        positions[0] = torch.arange(TOKENS, device=device) % 8
        axis_map = torch.tensor(axes.interleaved((3, 3, 2), 8), dtype=torch.int8, device=device)
        block_table = torch.tensor([[5, 2, 7], [1, 0, 3]], dtype=torch.int32, device=device)
        cu_seqlens = torch.tensor([0, 8, 11], device=device)
        places = torch.tensor([*range(4, 12), *range(3)], device=device)
        index = dict(block_table=block_table, cu_seqlens_q=cu_seqlens) | (dict(cache_positions=places) if own else {})
        _, _, v_cache, _ = appended(positions, axis_map, device, **index)
        v = randn(TOKENS, 2, 16, device=device, dtype=torch.bfloat16, seed=2)
        assert torch.equal(bits(v_cache[2, 1]), bits(v[1 if own else 5]))
        assert torch.equal(bits(v_cache[1, 2]), bits(v[10]))

    def test_nope_takes_row_0(self, device):
        positions, q = positions_of(3, device), randn(TOKENS, 2, 16, device=device)
        k_cache, v_cache = (torch.zeros(ROWS, 2, 16, device=device) for _ in range(2))
        table_of_one = torch.arange(ROWS, device=device)[None]
        first = positions[0].clone()
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:TOKENS].to(device)
        positions[0] = order
        rope_append_prefill(
            q, q.clone(), q.clone(), k_cache, v_cache, None, positions, block_table=table_of_one, tokens_per_request=TOKENS,
            axis_map=torch.zeros(8, dtype=torch.int8, device=device),
        )  # fmt: skip
        assert torch.equal(k_cache[order], q) and not torch.equal(first, order)
