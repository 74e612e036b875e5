"""What a direct launch is given is right, whatever call it follows. The driver is a stand-in, see `fake_driver.py`."""

import fake_kernels
import pytest
import torch
from cases import assert_same_storages, no_faults
from fake_kernels import Kernel
from lanes import INTERPRETED
from latents import LatentSpec, build, function_of, prepare, run_reference, without_known

from decode_rope import LatentNorm, reference
from decode_rope.api.mla import CALLS
from decode_rope.append.faults import fault_buffer
from decode_rope.launch import compiled
from decode_rope.launch.mla import MLAGeometry

pytestmark = pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")
PLAIN = LatentSpec([5, 0, 17], [[1, 2, 3, 4, 5], [0, 2, 4, 6, 7], [7, 6, 5, 4, 3]])
RAGGED = PLAIN.but(positions=[2, 3, 0, 1, 9], block_table=[[1, 5, 6], [2, 4, 6], [7, 0, 3]], cu_seqlens=[0, 2, 4, 5])
SPECS = {
    "plain": PLAIN,
    "norm": PLAIN.but(norm=torch.float32),
    "NoPE": PLAIN.but(nope=True),
    "NoPE, q_out": PLAIN.but(nope=True, q_out=True),
    "halves out": PLAIN.but(interleaved_out=False),
    "NeoX": PLAIN.but(interleaved_in=False, interleaved_out=False),
    "q_out, own places": PLAIN.but(q_out=True, cache_positions=[1, 2, 19]),
    "pair": PLAIN.but(cache="pair, 4-D and strided"),
    "latents of 12, keys of 20": PLAIN.but(latent_dim=12, rope_dim=20, rows="separate"),
    "slots": PLAIN.but(block_table=None, slots=[3, 9]),
    "two a request": PLAIN.but(positions=[3, 4, 7], tokens_per_request=2),
    "ragged": RAGGED.but(norm=torch.bfloat16),
    "unaligned": PLAIN.but(shift=1, norm=torch.bfloat16),
}


def rows(facts, a):
    tokens, heads, pages = a["num_tokens"], facts["H"], (a["num_pages"], facts["PAGE"])
    found = {
        "q": ((tokens, heads), (a["stride_q_t"], a["stride_q_h"])),
        "q_out": ((tokens, heads), (a["stride_qo_t"], a["stride_qo_h"])),
        "k": ((tokens,), (a["stride_k_t"],)),
        "kv": ((tokens,), (a["stride_kv_t"],)),
        "cache": (pages, (a["stride_c_p"], a["stride_c_t"])),
    }
    if "rope_cache_ptr" not in facts:
        found["rope_cache"] = (pages, (a["stride_rc_p"], a["stride_rc_t"]))
    return found


def programs(facts, a):
    geometry = MLAGeometry(facts["BTQ"], facts["BHQ"], facts["BT"], 1, 0)
    return geometry.programs(a["num_tokens"], facts["H"] if "cos_sin_ptr" not in facts or facts["Q_OUT"] else 0)


def latent_append(facts, a, at):
    """The kernel, made of the reference, on the memory that a launch names."""
    n, r, pair = facts["L"], facts["R"], "rope_cache_ptr" not in facts
    sizes = {"q": r, "q_out": r, "k": r, "kv": n, "cache": n if pair else n + r, "rope_cache": r}
    x = {name: at(name, (*shape, sizes[name]), (*strides, 1)) for name, (shape, strides) in rows(facts, a).items()}
    options, requests = {}, -(-a["num_tokens"] // facts["TOKENS_PER_REQUEST"])
    if "cu_seqlens_ptr" not in facts:
        requests = a["num_requests"]
        options["cu_seqlens_q"] = at("cu_seqlens", (requests + 1,), (1,))
    if facts["PAGED"]:
        options["block_table"] = at("index", (requests, a["index_len"]), (a["stride_index"], 1))
    else:
        options["slot_mapping"] = at("index", (a["index_len"],), (1,))
    if "cache_positions_ptr" not in facts:
        options["cache_positions"] = at("cache_positions", (a["num_tokens"],), (1,))
    if "kv_weight_ptr" not in facts:
        options["kv_norm"] = LatentNorm(at("kv_weight", (n,), (1,)), facts["EPS"])
    table = None if "cos_sin_ptr" in facts else at("cos_sin", (a["max_position"], r), (r, 1))
    reference.rope_append_mla_prefill(
        x["q"], x["k"], x["kv"], (x["cache"], x["rope_cache"]) if pair else x["cache"], table,
        at("positions", (a["num_tokens"],), (1,)), tokens_per_request=facts["TOKENS_PER_REQUEST"],
        q_out=x["q_out"] if facts["Q_OUT"] else None, interleaved_in=not facts["NEOX_IN"], interleaved_out=not facts["NEOX_OUT"],
        faults=at("faults", (2,), (1,)), **options,
    )  # fmt: skip


@pytest.fixture
def driver(monkeypatch, fake_driver):
    def is_aligned(found, a):
        """Rows, latents and keys, and the table, as aligned as the kernel was compiled for."""
        for name, (shape, strides) in rows(found.facts, a).items():
            cache = name.endswith("cache")
            align, size = found.facts["ALIGN_CACHE" if cache else "ALIGN"], found.dtypes[f"{name}_ptr"].itemsize
            steps = [step * size for count, step in zip(shape, strides, strict=True) if count > 1]
            steps += [found.facts["L"] * size] if cache else []
            if any(step % align for step in (a[f"{name}_ptr"], *steps)):
                return False
        return "cos_sin_ptr" in found.facts or not a["cos_sin_ptr"] % found.facts["ALIGN_TABLE"]

    monkeypatch.setitem(fake_kernels.KERNELS, "rope_append_mla_kernel", Kernel(programs, rows, latent_append))
    monkeypatch.setattr("fake_driver.is_aligned", is_aligned)
    CALLS.clear()
    yield fake_driver
    CALLS.clear()


def works(function, start, times=3):
    """`function` on one memory again and again: each time it leaves what the reference leaves."""
    case = start.clone()
    for _ in range(times):
        want = run_reference(case.clone())
        buffer = fault_buffer(case.device)
        buffer.copy_(no_faults("cpu"))
        assert function(**case.arguments()) is case.returned
        assert_same_storages(case, want)
        assert buffer.tolist() == want.faults


@pytest.mark.parametrize("name", SPECS)
def test_repeated_launches(name, driver):
    start = build(SPECS[name], "cpu")
    works(function_of(start), start)
    assert len(driver.launches) == 3


@pytest.mark.parametrize("name", [name for name in SPECS if name != "ragged"])
def test_repeated_launches_of_an_op_and_bound_ones(name, driver):
    start = build(SPECS[name], "cpu")
    op = prepare(start)
    works(without_known(op), start)
    bound = {}

    def launch(**arguments):
        bound.setdefault("launch", op.bind(**arguments))
        return bound["launch"]()

    works(without_known(launch), start)
    assert len(driver.launches) == 6


def test_unaligned_memory_after_aligned_one(driver):
    for shift in (0, 1, 0, 8):
        start = build(PLAIN.but(shift=shift, rows="separate"), "cpu")
        works(function_of(start), start)
    assert compiled.num_compiled() == 2


def test_big_steps_are_given_in_64_bits(driver):
    call = build(PLAIN, "cpu")
    far = torch.empty(3, 2**32, dtype=torch.bfloat16, device="meta")
    from decode_rope.launch.mla import MLA

    record = MLA.record(*[call[name] for name in ("q_pe", "k_pe")], far[:, :32], call["cache"], None, None, call["positions"],
                        call["block_table"])  # fmt: skip
    assert MLA.values(record, torch.device("cpu"), True).integers["stride_kv_t"] == 2**32


def test_warmup_compiles_all_that_calls_launch(driver):
    spec = PLAIN.but(heads=64, norm=torch.bfloat16)
    op = prepare(build(spec, "cpu"))
    op.warmup(120)
    count = compiled.num_compiled()
    for num_tokens in (1, 3, 95, 120):
        for shift in (0, 1):
            positions = [token % 4 for token in range(num_tokens)]
            slots = [[token // 2] for token in range(num_tokens)]
            start = build(spec.but(positions=positions, block_table=slots, num_pages=64, shift=shift), "cpu")
            op(**{name: start[name] for name in ("q_pe", "k_pe", "kv_c", "cache", "positions", "block_table")})
    assert compiled.num_compiled() == count >= 4
