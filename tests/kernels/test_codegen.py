"""What the compiler makes of the decode kernel, seen without a GPU: widths of accesses, registers, order, index arithmetic."""

import re

import pytest
from compile_only import GFX942, SM80, SM100, accesses, facts, integers, pdl_events, resources, sass, sass_events
from lanes import INTERPRETED
from processes import in_a_new_process
from targets import LLAMA, decode, options_of

from decode_rope.kernels.decode import rope_append_decode_kernel
from decode_rope.kernels.prefill import rope_append_prefill_kernel
from decode_rope.kernels.rope import apply_rope_kernel

if INTERPRETED:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

KERNELS = [rope_append_decode_kernel, rope_append_prefill_kernel, apply_rope_kernel]
INTEGERS = integers(rope_append_decode_kernel)
SHAPES = {
    "Llama": {},
    "slots": dict(PAGED=False),
    "GPT-J pairs": dict(NEOX=False),
    "partial": dict(R=64),
    "outputs": dict(R=64, Q_OUT=True, K_OUT=True, OWN_CACHE_POSITIONS=True, TOKENS_PER_REQUEST=3),
    "many tokens": dict(HQ=4, HKV=1, BTQ=4, BHQ=4, BTK=16, BHK=1),
    "D 96": dict(D=96, DV=96, R=96),
    "D 80, page 544": dict(D=80, DV=80, R=80, PAGE=544),
    "V narrower": dict(D=192, DV=128, R=64),
    "NoPE": dict(R=0),
    "Q only": dict(HKV=0),
    "unaligned": dict(ALIGN=2, ALIGN_CACHE=2, ALIGN_TABLE=4),
}


def test_options_of_a_launch():
    """Fusing a product and a sum would change bits; `launch_pdl`, even as False, is unknown to AMD's compiler."""
    plain = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    assert options_of(rope_append_decode_kernel, LLAMA, 4) == plain
    assert options_of(rope_append_decode_kernel, LLAMA | {"PDL": 1}, 4) == plain | {"launch_pdl": True}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_a_kernel_is_compiled_for_its_facts_and_types_alone(kernel):
    """No run-time argument is specialised: not for its value, and not for the alignment of its address."""
    for parameter in kernel.params:
        if parameter.name in facts(kernel):
            assert parameter.is_constexpr, parameter.name
        else:
            assert parameter.do_not_specialize and not parameter.is_constexpr, parameter.name


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "unaligned"])
def test_aligned_memory_moves_16_bytes_at_a_time(name):
    kernel = decode(**SHAPES[name])
    assert_lean(kernel, shared=not SHAPES[name].get("NEOX", True))
    assert 16 not in accesses(kernel, "ld") and 16 not in accesses(kernel, "st")
    narrow_tile = SHAPES[name].get("R", 128) < 128 and name != "NoPE"
    assert accesses(kernel, "st").count(128) >= (1 if narrow_tile else 2)
    assert 128 in accesses(kernel, "ld")


def assert_lean(kernel, shared: bool) -> None:
    """Nothing is spilled or fused, and nothing goes through shared memory unless it may."""
    used, ptx = resources(kernel, 90), kernel.asm["ptx"]
    assert used["spilled"] == used["stack"] == 0 and used["registers"] <= 80
    assert not re.search(r"\bfma\.", ptx)
    assert shared or (kernel.metadata.shared == 0 and "bar.sync" not in ptx and ".shared" not in ptx)


def test_a_tile_with_less_than_16_bytes_for_each_thread_is_lean_too():
    assert_lean(decode(HQ=8, HKV=1, BTK=1, BHK=2, BHQ=8), shared=False)


def test_the_usual_shape_loads_and_stores_nothing_narrower():
    kernel = decode()
    assert set(accesses(kernel, "st")) == {128}
    assert sorted(set(accesses(kernel, "ld"))) == [32, 64, 128]
    assert accesses(kernel, "ld").count(128) == 14  # q, k, v: 2 each; cos and sin of a Q and of a K tile: 4 each


def test_unaligned_memory_is_read_element_by_element():
    kernel = decode(**SHAPES["unaligned"])
    assert 16 in accesses(kernel, "ld") and set(accesses(kernel, "st")) == {16}
    assert resources(kernel, 90)["spilled"] == 0


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_dtypes(dtype):
    kernel = decode(dtype=dtype)
    assert set(accesses(kernel, "st")) == {128}
    assert not re.search(r"\bfma\.", kernel.asm["ptx"]) and resources(kernel, 90)["spilled"] == 0


@pytest.mark.parametrize("target", [SM80, SM100], ids=["sm_80", "sm_100"])
@pytest.mark.parametrize("name", ["Llama", "GPT-J pairs", "many tokens"])
def test_other_nvidia_targets(name, target):
    kernel = decode(target=target, **SHAPES[name])
    assert 128 in accesses(kernel, "ld") and set(accesses(kernel, "st")) == {128}
    few = 4 if name == "GPT-J pairs" and target == SM80 else 0  # one word, for the sake of 40 registers
    assert resources(kernel, target[1])["spilled"] <= few
    assert "griddepcontrol" not in kernel.asm["ptx"]


@pytest.mark.parametrize("name", ["Llama", "slots", "unaligned"])
def test_amd_target(name):
    kernel = decode(target=GFX942, **SHAPES[name])
    assembly = kernel.asm["amdgcn"]
    if name != "unaligned":
        assert re.search(r"(global|buffer)_load_dwordx4", assembly) and re.search(r"(global|buffer)_store_dwordx4", assembly)
    assert re.search(r"\.vgpr_spill_count:\s+0", assembly) and re.search(r"\.sgpr_spill_count:\s+0", assembly)


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["Llama", "NoPE", "Q only", "outputs", "many tokens"])
def test_F7_pdl_triggers_first_and_waits_before_anything_is_read(name, arch):
    events = pdl_events(decode(target=("cuda", arch, 32), **SHAPES[name], PDL=True).asm["ptx"])
    assert events[:2] == ["launch_dependents", "wait"]
    assert not {"launch_dependents", "wait"} & set(events[2:])
    assert events.count("ld") > 2 or name in ("NoPE", "Q only")


def test_kernels_compile_where_another_package_has_replaced_tritons_functions():
    """As SGLang 0.5.23 does when it is imported, and before or after us."""
    code = (
        "import triton\n"
        "replace = lambda: setattr(triton, 'next_power_of_2', lambda n: 1 << (n - 1).bit_length())\n"
        "{}import targets\n{}"
        "targets.decode(D=96, DV=96, R=96)\n"
        "targets.prefill()\n"
        "targets.rope()\n"
        "print('compiled')"
    )
    for before, after in (("replace()\n", ""), ("", "replace()\n")):
        assert in_a_new_process(code.format(before, after), TRITON_ALWAYS_COMPILE="1") == "compiled"


@pytest.mark.parametrize("arch", [90, 100])
def test_F7_pdl_may_trigger_after_the_wait_or_never_and_before_anything_is_read(arch):
    events = pdl_events(decode(target=("cuda", arch, 32), PDL=2).asm["ptx"])
    assert events[:2] == ["wait", "launch_dependents"] and not {"launch_dependents", "wait"} & set(events[2:])
    last = pdl_events(decode(target=("cuda", arch, 32), PDL=3).asm["ptx"])
    assert last[0] == "wait" and not {"launch_dependents", "wait"} & set(last[1:])
    early = decode(target=("cuda", arch, 32), PDL=2, PREFETCH=True)
    assert pdl_events(early.asm["ptx"]) == pdl_events(decode(target=("cuda", arch, 32), PDL=1, PREFETCH=True).asm["ptx"])


@pytest.mark.parametrize("arch", [90, 100])
@pytest.mark.parametrize("name", ["Llama", "NoPE", "Q only", "outputs", "many tokens", "slots"])
def test_F7_prefetch_reads_metadata_and_the_table_before_the_wait_and_nothing_else(name, arch):
    """Every tile waits once, before it reads or writes anything of the activations' dtype and before it counts a fault."""
    kernel = decode(target=("cuda", arch, 32), **SHAPES[name], PDL=True, PREFETCH=True)
    tiles = kernel.asm["ttir"].split("} else {")
    assert len(tiles) == (1 if name == "Q only" else 3)
    for tile in tiles:
        places = {
            "wait": [m.start() for m in re.finditer(r"griddepcontrol\.wait|grid_dependency_wait", tile)],
            "touched": [m.start() for m in re.finditer(r"tt\.load .*ptr<bf16>|tt\.store |tt\.atomic_rmw ", tile)],
            "early": [m.start() for m in re.finditer(r"tt\.load .*ptr<(?:f32|i64|i32)>", tile)],
        }
        assert len(places["wait"]) == 1
        assert all(place > places["wait"][0] for place in places["touched"])
        assert all(place < places["wait"][0] for place in places["early"])
    events = pdl_events(kernel.asm["ptx"])
    assert events[0] == "launch_dependents" and events.count("wait") == len(tiles)
    first_wait = events.index("wait")
    assert not {"st", "atom", "red"} & set(events[:first_wait])


def test_F7_prefetch_keeps_its_order_in_ptx():
    """The usual shape: each tile's two 16-byte loads of q, k or v lie between its wait and its first store."""
    events = pdl_events(decode(PDL=True, PREFETCH=True).asm["ptx"])
    waits = [i for i, event in enumerate(events) if event == "wait"]
    for wait in waits:
        assert events[wait + 1 : wait + 4] == ["ld", "ld", "st"]


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("name", ["Llama", "slots", "GPT-J pairs", "partial", "many tokens"])
def test_loads_that_need_nothing_are_made_in_one_round_trip(name, prefetch):
    """In SASS, no tile waits for its last page or angles before it reads its rows, unless all of that is read before the PDL wait;
    and it reads all rows before it stores any, or leaves."""
    tiles = sass_events(decode(**SHAPES[name], PDL=1, PREFETCH=prefetch))
    assert len(tiles) == 3
    for tile in tiles:
        stored = tile.index("store")
        before, after = tile[tile.index("load") : stored], tile[stored:]
        assert "load" not in after and "leave" not in before, tile
        assert before[-1] == ("load" if prefetch else "load to keep"), tile


def test_one_instruction_widens_an_element_and_one_narrows_two():
    """Two tiles, of Q and of K, with 16 elements a thread."""
    listing = sass(decode(BTQ=1, BHQ=16, BTK=1, BHK=16, HKV=16))
    assert "PRMT" not in listing and listing.count("F2FP") == 16 and "F2F." not in listing


def test_metadata_stays_in_the_l2_cache():
    """What all layers read is loaded to be evicted last: positions, pages, slots and angles, and nothing else."""
    for name in ("Llama", "slots", "outputs"):
        loads = re.findall(r"tt\.load (.*)", decode(**SHAPES[name]).asm["ttir"])
        rows = [load for load in loads if "ptr<bf16>" in load]
        kept = [load for load in loads if re.search("evict_last|evictionPolicy = 3", load)]  # Triton 3.9, 3.6
        assert len(rows) > 3 and len(kept) > 3 and len(rows) + len(kept) == len(loads), name


def test_without_pdl_there_is_no_trace_of_it():
    kernel = decode()
    assert "griddepcontrol" not in kernel.asm["ptx"] and not kernel.metadata.launch_pdl
    assert decode(PDL=True).metadata.launch_pdl


# Operations whose result stays inside a tile if their operands do, and those that pass a number on as it is.
LOCAL = {f"arith.{name}" for name in ("addi", "subi", "muli", "divsi", "remsi", "andi", "select")}
PASSING = {"tt.expand_dims", "tt.broadcast", "tt.splat", "tt.reshape", "tt.bitcast"}
WIDENING = {"arith.extsi", "arith.extui"}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("wide", [[], INTEGERS, INTEGERS[::2]], ids=["none", "all", "some"])
def test_B1_index_arithmetic_is_64_bit(name, index, wide):
    """Whatever is added to a pointer is 64 bits wide, or a place inside the tile; and what was widened to that was a place inside
    the tile, a number as it was loaded or given, or the number of a token or tile, made of program numbers and `num_tokens`."""
    text = decode(positions=index, index=index, wide=frozenset(wide), **SHAPES[name]).asm["ttir"]
    kind, offsets = {"%num_tokens": "program"}, 0  # of each value: "local", "program", "loaded", "given" or other
    for line in text.splitlines():
        made = re.match(r"\s*(%[\w#]+)(?::\d+)? = (\S+) (.*)", line)
        if made is None:
            continue
        value, operation, rest = made.groups()
        operands = re.findall(r"%[\w#]+", rest.split(" : ")[0])
        kinds = {kind.get(x, "given") for x in operands[operation == "arith.select" :]}
        if operation in ("arith.constant", "tt.make_range") or (operation in LOCAL | PASSING and kinds == {"local"}):
            kind[value] = "local"
        elif operation == "tt.get_program_id" or (operation in LOCAL | PASSING and kinds <= {"local", "program"}):
            kind[value] = "program"
        elif operation == "tt.load" or (operation in PASSING and kinds == {"loaded"}):
            kind[value] = "loaded"
        else:
            kind[value] = "given" if operation in PASSING and kinds == {"given"} else "other"
        if operation == "tt.addptr":
            offsets += 1
            offset_type = rest.rsplit(" : ", 1)[1].split(" loc(")[0].split(", ")[-1]
            assert "i64" in offset_type or kind[operands[1]] == "local", line
        if operation in WIDENING and not re.search("i1>? to ", rest):
            assert kinds <= {"local", "program", "loaded", "given"}, line
    assert offsets > 5
