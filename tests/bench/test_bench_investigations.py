"""The benchmark's investigations without a GPU; gaps also with one."""

import pytest

from bench import in_model, package, prefill, providers, workloads
from bench.buffers import Case
from bench.investigations import gaps, ncu

pytest_plugins = ["bench_fixtures"]


def test_gaps_between_kernels():
    """Of every pair in a row its median, an overlap as a negative gap; pairs seen rarely are left out."""
    kernel = gaps.Kernel
    a_layer = [("gemm", 0, 100), ("rope", 130, 150), ("attention", 140, 240)]
    kernels = [kernel(name, 1000 * i + start, 1000 * i + end) for i in range(3) for name, start, end in a_layer]
    kernels[1] = kernel("rope", 104, 150)
    found = gaps.edges(reversed(kernels), least=3)
    assert found == [gaps.Edge("gemm", "rope", 30, 20, 3), gaps.Edge("rope", "attention", -10, 100, 3)]
    assert gaps.edges(kernels, least=2)[2] == gaps.Edge("attention", "gemm", 760, 100, 2)


@pytest.mark.gpu
def test_gaps_of_a_layer(runner, device):
    ours = [providers.load("ours")]
    row = gaps.measure(Case(workloads.find_models(["8/1/128"])[0], 1), ours, runner, False)
    launch = [edge for edge in row["edges"]["ours"] if edge["second"] == package.DECODE_KERNEL]
    assert len(launch) == 1 and launch[0]["count"] == gaps.LAYERS * gaps.REPLAYS and 0 < launch[0]["duration"] < 100_000
    assert not any(package.DECODE_KERNEL in edge["second"] for edge in row["edges"][in_model.BASE])


def test_ncu_output_is_read_between_markers():
    text = f"""==PROF== Connected
{ncu._PREFIX} llama-3-8b 128 ours
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","byte","byte","ns"
"0","bench_marker_kernel","32","0","900"
"1","decode_kernel","1,600","200","1,500"
"2","bench_marker_kernel","32","0","900"
"3","rope","10","20","30"
"4","append","1","2","3"
"""
    ours, two = ncu.split(ncu.parse(text))
    assert ours == [ncu.Kernel("decode_kernel", 1600.0, 200.0, 1500.0)] and len(two) == 2
    assert ncu.labels(text) == [("llama-3-8b", 128, "ours")]
    row = ncu.row_of("llama-3-8b", 128, "flashinfer", two)
    assert row["dram"] == {"read": 11.0, "written": 22.0} and row["us"] == pytest.approx(0.033)
    assert ncu.parse("==ERROR== no permission") == []


def test_long_workloads_of_the_profiler_are_prefills(runner):
    for tokens, name in ((40, "ours"), (ncu.MOST_DECODE + 1, "ours-prefill")):
        (provider,), meta = ncu.workload(Case(workloads.TINY, tokens), ["ours"], runner)
        assert provider.name == name and meta.positions.numel() == tokens
    row = ncu.row_of("llama-3-8b", 10_000, "ours-prefill", [])
    assert sum(row["counted"].values()) == prefill.least_bytes(workloads.MODELS["llama-3-8b"], 10_000)
