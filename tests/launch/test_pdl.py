"""Programmatic dependent launch: kernels before and after us overlap with us, and no bit changes; a switch turns it off."""

import pytest
import torch
import triton
import triton.language as tl
from cases import Case, Spec, bits, build, call_arguments, check, prepare, prepared, run_reference
from lanes import ON_GPU
from processes import digest, in_a_new_process
from random_cases import GPU_SIZES, random_spec
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

import decode_rope
from decode_rope.launch import compiled
from decode_rope.launch.decode import decode_geometry

CAPABLE = ON_GPU and not torch.version.hip and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_GPU and not CAPABLE, reason="needs compute capability 9.0")]
STEPS, TOKENS = 20, 6
SPEC = Spec([0, 5, 10, 15, 20, -1], [[r, r + 6, r + 12, r + 18, r + 24, r + 30] for r in range(TOKENS)], num_pages=36, heads=(8, 2))


@triton.jit
def slow_copy(source, target, count, NANOSECONDS: tl.constexpr, BLOCK: tl.constexpr):
    """Lets its dependents start at once, waits for its own inputs, sleeps, and only then writes."""
    gdc_launch_dependents()
    gdc_wait()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + place, mask=place < count)
    first = tl.program_id(0) * BLOCK
    for _ in tl.static_range(NANOSECONDS // 1000):
        first = tl.inline_asm_elementwise(
            "nanosleep.u32 1000; mov.b32 $0, $1;", "=r,r", [first], dtype=tl.int32, is_pure=False, pack=1
        )
    late = first + tl.arange(0, BLOCK)
    tl.store(target + late, x, mask=late < count)


def copy_slowly(source: torch.Tensor, target: torch.Tensor, nanoseconds: int) -> None:
    """`target` becomes `source`, both contiguous, through a kernel that PDL may overlap with its neighbours."""
    words = [x.view(-1).view(torch.int16) for x in (source, target)]
    count = words[0].numel()
    slow_copy[(triton.cdiv(count, 1024),)](*words, count, nanoseconds, 1024, num_warps=4, launch_pdl=True)


def decode(device, **options):
    op = prepare(build(SPEC, device), enable_pdl=True, **options).warmup(TOKENS)
    return lambda case: op(**call_arguments(case))


def prefill(case: Case) -> None:
    decode_rope.rope_append_prefill(**case.arguments(), enable_pdl=True)


def chain(device, launch, nanoseconds: int):
    """(one run of STEPS launches between slow producers and a slow consumer, its buffers to spoil, a check of all results)."""
    source = build(SPEC, device)
    want = run_reference(source.clone())
    cases = [source.clone() for _ in range(STEPS)]
    seen = [torch.empty_like(source["q"]) for _ in cases]
    inputs = ("q", "k", "v")

    def work():
        for case, copy in zip(cases, seen, strict=True):
            for name in inputs:
                copy_slowly(source[name], case[name], nanoseconds)
            launch(case)
            copy_slowly(case["q"], copy, 1000)

    def spoil():
        for case, copy in zip(cases, seen, strict=True):
            for x in (*(case[name] for name in inputs), copy):
                x.fill_(float("nan"))
            for name in ("k_cache", "v_cache"):
                case.storages[name].copy_(source.storages[name])

    def assert_right(turn):
        for step, (case, copy) in enumerate(zip(cases, seen, strict=True)):
            assert torch.equal(bits(copy), bits(want["q"])), (turn, step)
            for name in ("q", "k_cache", "v_cache"):
                assert torch.equal(case.storages[name], want.storages[name]), (turn, step, name)

    return work, spoil, assert_right


CHOSEN = decode_geometry(len(SPEC.positions), *SPEC.heads, SPEC.head_dim)
CHOICES = {
    "default": {},
    "metadata ready": {"metadata_ready": True},
    **{f"pdl of {n}": {"geometry": CHOSEN._replace(pdl=n)} for n in (1, 2, 3)},
    "metadata ready, pdl of 3": {"metadata_ready": True, "geometry": CHOSEN._replace(pdl=3)},
}


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
def test_F7_ten_thousand_steps_behind_a_kernel_that_writes_late(options, device):
    """Each step reads q, k and v that the kernels just before it write after letting it start; a kernel just after it reads q."""
    replay_and_check(*chain(device, decode(device, **options), 2000), 10_000)


def test_F7_prefill_behind_a_kernel_that_writes_late(device):
    replay_and_check(*chain(device, prefill, 2000), 2_000)


def replay_and_check(work, spoil, assert_right, steps: int) -> None:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for turn in range(steps // STEPS):
        spoil()
        graph.replay()
        assert_right(turn)


def test_F7_the_producer_is_late_enough_to_be_noticed(device):
    """The same chain without waiting: what the test above would see if a wait were missing."""
    source = torch.ones(4096, dtype=torch.bfloat16, device=device)
    middle, target = torch.empty_like(source), torch.empty_like(source)

    def work():
        copy_slowly(source, middle, 200_000)
        hasty_copy[(4,)](middle.view(torch.int16), target.view(torch.int16), 1024, num_warps=4, launch_pdl=True)

    work()
    torch.cuda.synchronize()
    wrong = 0
    for _ in range(20):
        middle.zero_()
        target.zero_()
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
        wrong += int(not torch.equal(target, source))
    assert wrong > 0


@triton.jit
def hasty_copy(source, target, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place))


def test_F7_launches_outside_graphs_wait_for_late_writers_too(device):
    work, spoil, assert_right = chain(device, decode(device), 2000)
    for turn in range(50):
        spoil()
        work()
        assert_right(turn)


@pytest.mark.parametrize("seed", range(2000, 2040))
def test_pdl_changes_no_bit(seed, device):
    case = build(random_spec(seed, GPU_SIZES), device)
    for enable_pdl in (True, False, None):
        case.options["enable_pdl"] = enable_pdl
        check(case)
        check(case, decode_rope.rope_append_prefill)
    for metadata_ready in (True, False):
        check(case, prepared(case, enable_pdl=True, metadata_ready=metadata_ready))
    chosen = decode_geometry(len(case.spec.positions), *case.spec.heads, case.spec.head_dim)
    for pdl in (1, 2, 3):
        check(case, prepared(case, geometry=chosen._replace(pdl=pdl)))


@pytest.mark.parametrize("function", [decode_rope.rope_append_decode, decode_rope.rope_append_prefill])
def test_pdl_is_on_where_it_is_asked_for(function, device):
    spec = SPEC.but(head_dim=44, rotary_dim=44)
    before = set(compiled._COMPILED.values())
    for enable_pdl in (True, False):
        function(**build(spec, device).arguments(), enable_pdl=enable_pdl)
    new = set(compiled._COMPILED.values()) - before
    assert sorted(kernel.facts["PDL"] for kernel in new) == [0, 1]
    assert all(kernel.options.get("launch_pdl", False) == bool(kernel.facts["PDL"]) for kernel in new)
    assert not any(kernel.facts.get("PREFETCH") for kernel in new)


def test_the_kill_switch(device):
    """DECODE_ROPE_PDL=0: the same bits, and no kernel with PDL, not even where it is asked for."""
    code = (
        "import torch, decode_rope\n"
        "from cases import build\n"
        "from decode_rope.launch import compiled\n"
        "from processes import digest\n"
        "from ways import TABLE\n"
        "decode_rope.rope_append_decode(**build(TABLE, torch.device('cuda:0')).arguments(), enable_pdl=True)\n"
        "print(digest(range(10)))\n"
        "assert compiled.num_compiled() and not any(kernel.facts['PDL'] for kernel in compiled._COMPILED.values())"
    )
    assert in_a_new_process(code, DECODE_ROPE_PDL="0") == digest(range(10))
    assert any(kernel.facts["PDL"] for kernel in compiled._COMPILED.values())
