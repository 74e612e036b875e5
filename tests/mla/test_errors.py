"""Calls that must be refused: the argument is named, and nothing is written."""

import pytest
import torch
from latents import LatentSpec, build, prepare

import decode_rope
from decode_rope import LatentNorm
from decode_rope.launch.mla import MLAGeometry, check_geometry

GOOD = LatentSpec([1, 3, 6], [[1, 2], [3, 4], [5, 6]], norm=torch.bfloat16)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


# (error, how the message begins, what spoils a good call)
BAD = [
    (TypeError, "q_pe: expected a torch.Tensor", lambda c: {"q_pe": 1}),
    (TypeError, "q_pe: expected dtype", lambda c: {"q_pe": c["q_pe"].double()}),
    (ValueError, r"q_pe: expected shape \[tokens, heads, rope_dim\]", lambda c: {"q_pe": c["q_pe"][0]}),
    (ValueError, "q_pe: expected a contiguous last", lambda c: {"q_pe": bf16(3, 16, 3).transpose(1, 2)}),
    (ValueError, "q_pe: expected memory of its own, got memory shared with k_pe", lambda c: {"k_pe": c["q_pe"][:, 0]}),
    (ValueError, "q_pe: expected every element", lambda c: {"q_pe": bf16(3, 1, 16).expand(3, 3, 16)}),
    (TypeError, "k_pe: expected the dtype of q_pe", lambda c: {"k_pe": c["k_pe"].float()}),
    (ValueError, r"k_pe: expected shape \[tokens, 16\]", lambda c: {"k_pe": bf16(3, 8)}),
    (ValueError, r"k_pe: expected shape \[tokens, 16\]", lambda c: {"k_pe": bf16(3, 2, 16)}),
    (ValueError, "k_pe: expected 3 tokens", lambda c: {"k_pe": bf16(2, 16)}),
    (TypeError, "k_pe: expected a torch.Tensor", lambda c: {"k_pe": None}),
    (TypeError, "kv_c: expected a torch.Tensor", lambda c: {"kv_c": None}),
    (ValueError, r"kv_c: expected shape \[tokens, latent_dim\]", lambda c: {"kv_c": bf16(3)}),
    (ValueError, "kv_c: expected a contiguous last", lambda c: {"kv_c": bf16(32, 3).t()}),
    (TypeError, "cache: expected a torch.Tensor", lambda c: {"cache": None}),
    (TypeError, "cache: expected one tensor or a pair", lambda c: {"cache": (c["cache"],) * 3}),
    (TypeError, "cache: expected the dtype of kv_c", lambda c: {"cache": c["cache"].float()}),
    (ValueError, r"cache: expected shape \[pages, page_size, 48\]", lambda c: {"cache": bf16(8, 4, 47)}),
    (ValueError, r"cache: expected shape \[pages, page_size, 48\]", lambda c: {"cache": bf16(8, 48)}),
    (ValueError, r"cache: expected shape \[pages, page_size, 48\]", lambda c: {"cache": bf16(8, 4, 2, 48)}),
    (ValueError, "cache: expected memory of its own, got memory shared with kv_c", lambda c: {"kv_c": c["cache"][0, :3, :32]}),
    (ValueError, r"cache\[0\]: expected shape \[pages, page_size, 32\]", lambda c: {"cache": (bf16(8, 4, 48), bf16(8, 4, 16))}),
    (ValueError, r"cache\[1\]: expected shape \[pages, page_size, 16\]", lambda c: {"cache": (bf16(8, 4, 32), bf16(8, 4, 32))}),
    (ValueError, r"cache\[1\]: expected 8 pages of 4 tokens", lambda c: {"cache": (bf16(8, 4, 32), bf16(7, 4, 16))}),
    (ValueError, r"cache\[0\]: expected memory of its own, got memory shared with cache\[1\]",
     lambda c: {"cache": (c["cache"][..., :32], c["cache"][..., 24:40])}),
    (ValueError, "cos_sin_cache: expected float32", lambda c: {"cos_sin_cache": c["cos_sin_cache"].half()}),
    (ValueError, "cos_sin_cache: expected rotary_dim 16", lambda c: {"cos_sin_cache": torch.zeros(64, 8)}),
    (TypeError, "positions: expected int32 or int64", lambda c: {"positions": c["positions"].float()}),
    (ValueError, r"positions: expected shape \[3\]", lambda c: {"positions": c["positions"][:2]}),
    (ValueError, "block_table, slot_mapping: expected exactly one", lambda c: {"block_table": None}),
    (ValueError, "block_table, slot_mapping: expected exactly one", lambda c: {"slot_mapping": c["positions"]}),
    (ValueError, "block_table: expected", lambda c: {"block_table": c["block_table"][:2]}),
    (ValueError, "cache_positions: expected None with slot_mapping",
     lambda c: {"block_table": None, "slot_mapping": c["positions"], "cache_positions": c["positions"]}),
    (ValueError, "cache_positions: expected shape", lambda c: {"cache_positions": c["positions"][:2]}),
    (ValueError, "tokens_per_request: expected", lambda c: {"tokens_per_request": 0}),
    (TypeError, "kv_norm: expected a decode_rope.LatentNorm", lambda c: {"kv_norm": (c["weight"], 1e-6)}),
    (TypeError, "kv_norm.weight: expected a torch.Tensor", lambda c: {"kv_norm": LatentNorm(None, 1e-6)}),
    (TypeError, "kv_norm.weight: expected dtype", lambda c: {"kv_norm": LatentNorm(c["weight"].double(), 1e-6)}),
    (ValueError, r"kv_norm.weight: expected shape \[32\]", lambda c: {"kv_norm": LatentNorm(c["weight"][:31], 1e-6)}),
    (ValueError, "kv_norm.weight: expected stride 1", lambda c: {"kv_norm": LatentNorm(bf16(64)[::2], 1e-6)}),
    (ValueError, "kv_norm.eps: expected a finite number of at least 1e-25", lambda c: {"kv_norm": LatentNorm(c["weight"], 0.0)}),
    (TypeError, "kv_norm.eps: expected a number", lambda c: {"kv_norm": LatentNorm(c["weight"], "1e-6")}),
    (ValueError, "q_out: expected shape", lambda c: {"q_out": bf16(3, 3, 8)}),
    (ValueError, "q_out: expected memory of its own", lambda c: {"q_out": c["cache"].view(-1)[:144].view(3, 3, 16)}),
    (TypeError, "interleaved_in: expected a bool", lambda c: {"interleaved_in": 1}),
    (TypeError, "interleaved_out: expected a bool", lambda c: {"interleaved_out": 0}),
    (TypeError, "enable_pdl: expected", lambda c: {"enable_pdl": 1}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD)), ids=[words for _, words, _ in BAD])
def test_a_bad_argument_is_named_and_nothing_is_written(number):
    error, words, change = BAD[number]
    case = build(GOOD.but(rows="separate"), "cpu")
    arguments = case.arguments()
    changed = change(case)
    before = {name: storage.clone() for name, storage in case.storages.items()}
    for function in (decode_rope.rope_append_mla_decode, decode_rope.rope_append_mla_prefill):
        with pytest.raises(error, match=f"^{words}"):
            function(**(arguments | changed))
    assert all(torch.equal(before[name], storage) for name, storage in case.storages.items())


def test_a_call_refused_after_a_good_one():
    case = build(GOOD, "cpu")
    decode_rope.rope_append_mla_decode(**case.arguments())
    with pytest.raises(TypeError, match=r"^interleaved_in"):
        decode_rope.rope_append_mla_decode(**(case.arguments() | {"interleaved_in": 1}))
    with pytest.raises(ValueError, match=r"^q_pe: expected memory of its own"):
        decode_rope.rope_append_mla_decode(**(case.arguments() | {"k_pe": case["q_pe"][:, 0]}))


@pytest.mark.parametrize("bounds", [torch.zeros(4), torch.zeros(2, 2).long(), torch.zeros(0).long()], ids=["float", "2-D", "empty"])
def test_bad_bounds_of_sequences(bounds):
    with pytest.raises((TypeError, ValueError), match=r"^cu_seqlens_q"):
        decode_rope.rope_append_mla_prefill(**build(GOOD, "cpu").arguments(), cu_seqlens_q=bounds)


def test_gradients_are_refused():
    case = build(GOOD.but(rows="separate"), "cpu")
    with pytest.raises(ValueError, match=r"^kv_c: expected a tensor that needs no gradient"):
        decode_rope.rope_append_mla_decode(**(case.arguments() | {"kv_c": case["kv_c"].clone().requires_grad_()}))


def test_q_out_may_be_q():
    case, other = build(GOOD, "cpu"), build(GOOD, "cpu")
    decode_rope.rope_append_mla_decode(**case.arguments())
    decode_rope.rope_append_mla_decode(**other.arguments(), q_out=other["q_pe"])
    assert all(torch.equal(case.storages[name], other.storages[name]) for name in case.storages)


OPS = [
    (TypeError, "dtype: expected a torch.dtype", {"dtype": "bf16"}),
    (ValueError, "addressing: expected", {"addressing": "pages"}),
    (ValueError, "num_heads: expected at least 1", {"num_heads": 0}),
    (TypeError, "two_caches: expected a bool", {"two_caches": 1}),
    (TypeError, "geometry: expected a decode_rope.launch.mla.MLAGeometry", {"geometry": (1, 8, 1, 1, 0)}),
    (ValueError, "cos_sin_cache: expected", {"cos_sin_cache": torch.zeros(64, 8)}),
]


@pytest.mark.parametrize("number", range(len(OPS)), ids=[words for _, words, _ in OPS])
def test_an_op_of_bad_facts(number):
    error, words, facts = OPS[number]
    facts = dict(cos_sin_cache=torch.zeros(64, 16), num_heads=3, rope_dim=16, latent_dim=32, page_size=4, device="cpu") | facts
    with pytest.raises(error, match=f"^{words}"):
        decode_rope.DecodeMLA(**facts)


CALLS = [
    ("block_table: expected it, and no slot_mapping", lambda c: {"block_table": None, "slot_mapping": c["positions"]}),
    ("q_out: expected left out", lambda c: {"q_out": torch.zeros_like(c["q_pe"])}),
    ("cache_positions: expected left out", lambda c: {"cache_positions": c["positions"]}),
    ("cache: expected one tensor", lambda c: {"cache": (bf16(8, 4, 32), bf16(8, 4, 16))}),
    ("cache: expected pages of 4", lambda c: {"cache": bf16(8, 2, 48)}),
    ("positions: expected torch.int64", lambda c: {"positions": c["positions"].int()}),
    ("q_pe: expected torch.bfloat16 of shape", lambda c: {"q_pe": bf16(3, 2, 16)}),
    ("block_table: expected torch.int32", lambda c: {"block_table": c["block_table"].long()}),
]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[words for words, _ in CALLS])
def test_a_call_that_an_op_was_not_built_for(number):
    words, change = CALLS[number]
    case = build(GOOD, "cpu")
    op = prepare(case)
    names = ("q_pe", "k_pe", "kv_c", "cache", "positions", "block_table")
    arguments = {name: case[name] for name in names} | change(case)
    for function in (op, op.bind):
        with pytest.raises((TypeError, ValueError), match=f"^{words}"):
            function(**arguments)


def test_bad_geometries():
    good = MLAGeometry(1, 8, 1, 1, 0)
    check_geometry(good)
    for bad in (good._replace(heads_q=3), good._replace(heads_q=1), good._replace(pdl=4), good._replace(carveout=101)):
        with pytest.raises(ValueError, match=r"^geometry"):
            check_geometry(bad)
    with pytest.raises(TypeError, match=r"^geometry"):
        check_geometry(good._replace(tokens=1.0))
