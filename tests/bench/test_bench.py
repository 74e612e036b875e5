"""The benchmark without a GPU: what it counts, and how it judges a provider."""

import json
import random
import re

import pytest
import torch
from bench_on_cpu import CPU, FORTY, Broken
from cases import Spec, build, call_arguments, prepare
from lanes import INTERPRETED

from bench import driver, package, prefill, providers, verify, workloads
from bench.buffers import Case, Layer, context_for, decode_meta, make_layers, num_pages, prefill_meta
from bench.providers import Unavailable
from bench.providers.eager import Eager, rope_append
from bench.providers.flashinfer_fp8 import as_fp8
from bench.report import columns, slug
from bench.stats import Budget, interleave, paired, quantile, summarize

pytest_plugins = ["bench_fixtures"]


def test_models_are_found_by_name_and_by_shape():
    assert [m.shape for m in workloads.find_models(["llama-3-8b", "8/1/128"])] == ["32/8/128", "8/1/128"]
    assert len(workloads.find_models(None)) == len(workloads.MODELS) == 6
    with pytest.raises(workloads.UsageError, match=r"--model: expected one of .*; got 'gpt-9'"):
        workloads.find_models(["gpt-9"])


def test_bytes_moved():
    counted = workloads.traffic(workloads.MODELS["llama-3-8b"], 3)
    assert counted.written == 3 * (32 + 8 + 8) * 128 * 2
    assert counted.read == counted.written + 3 * (128 * 4 + 8 + 4)
    assert counted.total == counted.read + counted.written


def test_prefill_counts_angles_once_a_position():
    model = workloads.MODELS["llama-3-8b"]
    rows = 2 * (32 + 2 * 8) * 128 * 2 + 8 + 4
    assert prefill.least_bytes(model, 10) == 10 * (rows + 128 * 4)
    assert prefill.least_bytes(model, 10_000) == 10_000 * rows + 4096 * 128 * 4


def test_the_copy_beside_a_prefill_moves_as_many_bytes():
    assert prefill.copy_call(2 * 40, CPU)().nbytes == 40


def test_statistics():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert summarize([float(x) for x in range(11)]) == (5.0, 1.0, 9.0, 11)
    assert paired([3.0, 5.0], [1.0, 1.5]) == [2.0, 3.5]
    with pytest.raises(ValueError, match="equal lengths"):
        paired([1.0], [])
    with pytest.raises(ValueError, match="at least one"):
        quantile([], 0.5)


def test_interleaving_pairs_every_round_in_a_random_order_and_keeps_to_the_budget():
    seen = []

    class Timer:
        def round(self, plan):
            seen.append([(name, count) for name, _, count in plan])
            return [(name, 10.0 if name == "slow" else 1.0) for name, _, _ in plan]

    samples = interleave({"slow": print, "fast": print}, Timer(), 40, random.Random(0), target_us=20.0)
    assert samples == {"slow": [10.0] * 40, "fast": [1.0] * 40}
    assert {count for one in seen[1:] for name, count in one if name == "slow"} == {2}
    assert {count for one in seen[1:] for name, count in one if name == "fast"} == {20}
    assert len({one[0][0] for one in seen[1:]}) == 2
    spent = Budget(0)
    assert len(interleave({"a": print}, Timer(), 40, random.Random(0), budget=spent)["a"]) == 5


@pytest.mark.parametrize("meta", [decode_meta(FORTY, 64, 3), prefill_meta(FORTY, 24, 3)], ids=["decode", "prefill"])
def test_the_forms_of_a_page_table_agree(meta):
    assert len(set(meta.slots.tolist())) == 40
    assert int(meta.slots.max()) < num_pages(meta) * 16
    indptr, indices, last = meta.csr
    assert {x.dtype for x in (indptr, indices, last, meta.positions32, meta.requests)} == {torch.int32}
    for request in range(meta.block_table.shape[0]):
        pages = indices[indptr[request] : indptr[request + 1]]
        length = int(meta.positions[meta.requests == request].max()) + 1
        assert (len(pages) - 1) * 16 + int(last[request]) == length == int(meta.lengths[request])
        for token in (meta.requests == request).nonzero().flatten():
            position = int(meta.positions[token])
            assert int(meta.slots[token]) == int(pages[position // 16]) * 16 + position % 16


def test_packed_layers_are_slices_and_copies_keep_their_strides():
    meta = decode_meta(FORTY, 64, 0)
    packed, apart = (make_layers(FORTY, meta, 2, 0, packed=p, fill=True) for p in (True, False))
    heads = workloads.TINY.heads * workloads.TINY.head_dim
    assert packed[0].k.stride() == (heads, 16, 1) and apart[0].k.is_contiguous()
    assert torch.equal(packed[1].v, apart[1].v) and not torch.equal(packed[0].q, packed[1].q)
    assert packed[0].clone().q.stride() == packed[0].q.stride()
    assert packed[0].k.flatten(1).data_ptr() == packed[0].k.data_ptr()


def test_layers_of_one_case_share_nothing():
    meta = decode_meta(FORTY, 64, 0)
    first, second = make_layers(FORTY, meta, 2, 0)
    assert isinstance(first, Layer) and first.k_cache.data_ptr() != second.k_cache.data_ptr()
    assert first.q.data_ptr() != second.q.data_ptr()


def test_context_fits_the_memory_it_is_given():
    large = Case(workloads.MODELS["llama-3-8b"], 1024, CPU)
    context = context_for(large, 32)
    assert context % 16 == 0 and 64 <= context < 4096
    assert 32 * 1024 * context * 8 * 128 * 2 * 2 <= 16e9
    assert context_for(Case(workloads.TINY, 1, CPU), 32) == 4096


@pytest.mark.parametrize("name", providers.REGISTRY)
def test_every_registered_provider_loads_without_its_package(name):
    provider = providers.load(name)
    assert provider.name == name and provider.group in ("ours", "peer", "other-bytes")
    assert provider.modules and all(isinstance(flag, bool) for flag in (provider.exact, provider.slow, provider.cpu))


def test_choosing_peers_and_missing_packages():
    assert [p.name for p in providers.choose(("ours",), ["none"])] == ["ours"]
    assert [p.name for p in providers.choose(("ours",), None)][1:] == list(providers.PEERS)
    with pytest.raises(workloads.UsageError, match="--peers"):
        providers.choose((), ["nobody"])
    assert providers.missing(("no_such_module_a", "json")) is None
    with pytest.raises(Unavailable, match="import no_such_module_b: ModuleNotFoundError"):
        providers.need(("no_such_module_a", "no_such_module_b"), "x")
    with pytest.raises(Unavailable, match="json has no x"):
        providers.need("json", "x")


def test_a_package_that_lacks_something_says_what(tmp_path, monkeypatch):
    """And not that another release's module is not there."""
    (tmp_path / "half_installed").mkdir()
    (tmp_path / "half_installed" / "__init__.py").touch()
    (tmp_path / "half_installed" / "rope.py").write_text("import what_it_needs")
    monkeypatch.syspath_prepend(tmp_path)
    assert providers.missing(("half_installed.rope", "half_installed.old.rope")).endswith("No module named 'what_it_needs'")
    assert "half_installed.old" in providers.missing(("half_installed.new", "half_installed.old.rope"))


def test_a_provider_of_any_geometry():
    """Of the numbers behind `ours@`, so that every mode can be asked about them."""
    numbers = (1, 2, 1, 4, 1, 1, -1)
    found = providers.load("ours@" + "/".join(map(str, numbers)))
    case = Case(workloads.Model("small", 4, 2, 16, 64), 6, CPU)
    assert found.make_op(case, decode_meta(case, 64, 0))._fixed["geometry"] == package.geometry(numbers)
    assert verify.check(found, case)[:2] == ("ok", "")
    with pytest.raises(workloads.UsageError, match="numbers between slashes after ours@, got '1/x'"):
        providers.load("ours@1/x")


@pytest.mark.parametrize(
    ("name", "prefilling"),
    [
        *((name, False) for name in ("reference", "ours-function", "ours", "ours-meta", "eager")),
        ("reference", True),
        ("eager", True),
    ],
)
def test_right_providers_pass(name, prefilling):
    for packed in (True, False):
        assert verify.check(providers.load(name), FORTY, prefill=prefilling, packed=packed)[:2] == ("ok", "")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("q", "Q is .* times the tolerance"),
        ("nan", "Q is inf times"),
        ("k", "K cache is .* times the tolerance"),
        ("v", "V cache is not what was appended"),
        ("stray", "wrote K cache rows that were not addressed"),
        ("raises", "RuntimeError: no such kernel$"),
    ],
)
def test_wrong_providers_fail_with_a_reason(how, reason):
    verdict = verify.check(Broken(how), FORTY)
    assert verdict.status == "fail" and re.search(reason, verdict.reason), verdict


def test_an_exact_provider_may_not_be_one_ulp_off():
    class AlmostOurs(Broken):
        exact = True

    assert verify.check(AlmostOurs("none"), FORTY).status == "ok"
    assert "not bit-identical: K cache" in verify.check(AlmostOurs("stray"), FORTY).reason


@pytest.mark.parametrize(("factor", "status"), [(1.0, "ok"), (1.3, "fail")])
def test_fp8_providers_are_judged_by_one_fp8_ulp(factor, status):
    class Fp8(Eager):
        group = "other-bytes"

        def bind(self, case, meta, layer):
            rows = (-1, *layer.k.shape[1:])
            k_rows, v_rows = torch.zeros(2, num_pages(meta) * case.page_size, *layer.k.shape[1:])

            def call():
                x = (layer.q.float(), layer.k.float(), layer.v.float() * factor)
                q = rope_append(*x, k_rows, v_rows, meta.cos_sin, meta.positions, meta.slots)
                for cache, new in ((layer.k_cache, k_rows), (layer.v_cache, v_rows)):
                    codes = as_fp8(cache).view(rows).view(torch.uint8)
                    codes[meta.slots] = new[meta.slots].to(torch.float8_e4m3fn).view(torch.uint8)
                return q.to(torch.float8_e4m3fn)

            return call

    assert verify.check(Fp8("fp8"), FORTY).status == status


def test_providers_for_a_gpu_are_skipped_without_one():
    assert verify.check(providers.load("sglang"), FORTY) == ("skip", "needs a GPU", None)


def test_report_writes_json_after_every_row_and_prints_a_reason_once(report, capsys):
    report.skip("peer", "not installed", "a")
    report.skip("peer", "not installed", "b")
    report.add({"x": float("inf"), "y": [1.5, float("nan")]}, "a line")
    written = json.loads(report.path.read_text())
    assert written["rows"] == [{"x": None, "y": [1.5, None]}]
    assert written["skipped"] == {"peer: not installed": ["a", "b"]}
    assert {"gpu", "versions", "revision", "time"} <= written["environment"].keys()
    assert capsys.readouterr().out.splitlines() == ["  skip peer: not installed", "a line"]
    assert columns(["a", "bc", "d"], [3, 4, 1]) == "a     bc d"
    assert slug("NVIDIA H200") == "nvidia-h200" and slug(None) == "cpu"


def test_driver_structures_have_the_layout_of_the_c_headers():
    import ctypes

    assert ctypes.sizeof(driver.LaunchConfig) == 56 and driver.LaunchConfig.stream.offset == 32
    assert ctypes.sizeof(driver.LaunchAttribute) == 72 and driver.LaunchAttribute.value.offset == 8
    facts = driver.Facts(1 << 41, 7, 4, 96, True, [("p", 1 << 40), ("q", -3), ("p", 0)])
    config, _ = driver.launch_config(facts, 123)
    assert (*config.grid, *config.block, config.shared, config.stream) == (7, 1, 1, 128, 1, 1, 96, 123)
    assert config.num_attributes == 1 and config.attributes[0].id == 6 and config.attributes[0].value.number == 1
    assert driver.launch_config(facts._replace(pdl=False), 123)[0].num_attributes == 0
    config, _ = driver.launch_config(facts._replace(carveout=100), 123)
    assert [(a.id, a.value.number) for a in config.attributes[: config.num_attributes]] == [(6, 1), (14, 100)]
    pointers, values = driver.kernel_parameters(facts.arguments)
    assert len(pointers) == 3 and [v.value for v in values] == [1 << 40, -3, None]
    assert ctypes.c_int64.from_address(pointers[1]).value == -3


@pytest.mark.skipif(INTERPRETED, reason="launches do not go to the driver")
def test_the_benchmark_s_bare_launch_has_the_parameters_of_ours(fake_driver):
    """In the kernel's own order, which is not that of the call's tensors; Triton's scratch pointers last."""
    case = build(Spec([5, 0, 6], [[1, 2], [0, 5], [3, 4]]), "cpu")
    launch = prepare(case).bind(**call_arguments(case))
    launch()
    ours = fake_driver.arguments[-1]
    kinds = ["p" if name.endswith("_ptr") else "q" for name in ours]
    assert package.facts_of(launch).arguments == [*zip(kinds, ours.values(), strict=True), ("p", 0), ("p", 0)]
