"""Every rope type gives the frequencies its paper states, worked out here pair by pair in double precision."""

import math

import pytest
import torch

from decode_rope.tables import scaling

R, THETA = 64, 5e5
PAIRS = range(R // 2)


def f(j, theta=THETA, dim=R):
    return theta ** (-2 * j / dim)


def yarn_ramp(j, fast, slow, original, truncate=True):
    """How much of pair j is interpolated: 0 when it turns `fast` times within the trained length, 1 below `slow` turns."""

    def pair_with(turns):
        return R * math.log(original / (2 * math.pi * turns)) / (2 * math.log(THETA))

    low, high = pair_with(fast), pair_with(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return min(max((j - max(low, 0)) / (min(high, R - 1) - max(low, 0)), 0), 1)


def yarn(j, factor, original, fast=32, slow=1, truncate=True):
    ramp = yarn_ramp(j, fast, slow, original, truncate)
    return f(j) / factor * ramp + f(j) * (1 - ramp)


def llama3(j, factor, low, high, original):
    wavelength = 2 * math.pi / f(j)
    if wavelength < original / high:
        return f(j)
    if wavelength > original / low:
        return f(j) / factor
    smooth = (original / wavelength - low) / (high - low)
    return (1 - smooth) * f(j) / factor + smooth * f(j)


YARN_SCALE, LONGROPE_SCALE = 0.1 * math.log(4) + 1, math.sqrt(1 + math.log(32) / math.log(4096))
SHORT, LONG = [1.0 + 0.01 * j for j in PAIRS], [1.0 + 2 * j for j in PAIRS]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096, "factor": 32.0}
MSCALES = {"long_mscale": 1.5, "short_mscale": 1.25}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
CASES = {
    "default": ({}, [f(j) for j in PAIRS], 1.0),
    "linear": ({"factor": 8.0}, [f(j) / 8 for j in PAIRS], 1.0),
    "proportional": ({"partial_rotary_factor": 0.25}, [f(j) if j < 8 else 0.0 for j in PAIRS], 1.0),
    "proportional whole": ({"factor": 2.0}, [f(j) / 2 for j in PAIRS], 1.0),
    "dynamic at the trained length": ({"factor": 2.0, "max_position_embeddings": 4096}, [f(j) for j in PAIRS], 1.0),
    "dynamic": (
        {"factor": 2.0, "max_position_embeddings": 4096, "seq_len": 8192},
        [f(j, THETA * (2 * 8192 / 4096 - 1) ** (R / (R - 2))) for j in PAIRS],
        1.0,
    ),
    "ntk_alpha": ({"alpha": 1000.0}, [f(j, THETA * 1000 ** (R / (R - 2))) for j in PAIRS], 1.0),
    "yarn": (YARN, [yarn(j, 4, 32768) for j in PAIRS], YARN_SCALE),
    "yarn no truncate": ({**YARN, "truncate": False}, [yarn(j, 4, 32768, truncate=False) for j in PAIRS], YARN_SCALE),
    "yarn betas": (
        {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 0.5},
        [yarn(j, 4, 32768, fast=16, slow=2) for j in PAIRS],
        0.5,
    ),
    "yarn zero betas": ({**YARN, "beta_fast": 0, "beta_slow": 0}, [yarn(j, 4, 32768) for j in PAIRS], YARN_SCALE),
    "longrope short": ({**LONGROPE, "long": False}, [f(j) / SHORT[j] for j in PAIRS], LONGROPE_SCALE),
    "longrope long": ({**LONGROPE, "long": True, "attention_factor": 1.19}, [f(j) / LONG[j] for j in PAIRS], 1.19),
    "llama3": (LLAMA3, [llama3(j, 8, 1, 4, 8192) for j in PAIRS], 1.0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_formula(case):
    parameters, expected, attention_scaling = CASES[case]
    parameters = {"rope_type": case.split()[0], **parameters}
    expected = torch.tensor(expected, dtype=torch.float64)
    exact, _ = scaling.inverse_frequencies(parameters, R, THETA, dtype=torch.float64)
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=0)
    inv_freq, scale = scaling.inverse_frequencies(parameters, R, THETA)
    assert (inv_freq.dtype, inv_freq.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(inv_freq.double(), expected, rtol=5e-7, atol=0)
    assert scale == pytest.approx(attention_scaling, rel=1e-15)


@pytest.mark.parametrize(
    ("model", "parameters", "expected"),
    [
        ("gpt-oss", {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}, 1.3465735902799727),
        ("OLMo-3", {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}, 1.2079441541679836),
        (
            "DeepSeek-V3",
            {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 1},
            1.0,
        ),
        (
            "a zero is no mscale",
            {"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1, "mscale_all_dim": 0},
            0.1 * math.log(40) + 1,
        ),
        ("shrinking", {"rope_type": "yarn", "factor": 0.5, "original_max_position_embeddings": 4096}, 1.0),
        ("Phi-3.5", {"rope_type": "longrope", **LONGROPE, "long": True}, 1.1902380714238083),
        ("no stretch", {"rope_type": "longrope", **LONGROPE, "factor": 1.0, "long": True}, 1.0),
        ("Phi-3.5-MoE", {"rope_type": "longrope", **LONGROPE, "long": True, "long_mscale": 1.5, "short_mscale": 1.25}, 1.5),
        (
            "its short side",
            {"rope_type": "longrope", **LONGROPE, "long": False, "long_mscale": 1.5, "short_mscale": 1.25},
            1.25,
        ),
    ],
)
def test_attention_scaling(model, parameters, expected):
    assert scaling.inverse_frequencies(parameters, R, THETA)[1] == expected


def test_yarn_with_one_beta_is_a_step():
    """Kimi-K2 has beta_fast == beta_slow: every pair is either kept or interpolated, none is blended or NaN."""
    kept, _ = scaling.default(R, THETA)
    parameters = {"factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1, "beta_slow": 1}
    inv_freq, _ = scaling.yarn(R, THETA, **parameters, truncate=True)
    stretched = kept / 32
    is_kept = torch.isclose(inv_freq, kept, rtol=1e-6, atol=0)
    assert (is_kept | torch.isclose(inv_freq, stretched, rtol=1e-6, atol=0)).sum() >= R // 2 - 1
    assert is_kept.tolist() == sorted(is_kept.tolist(), reverse=True)


@pytest.mark.parametrize("rope_type", ["linear", "yarn", "llama3"])
def test_factor_one_changes_no_frequency(rope_type):
    parameters = {"rope_type": rope_type, **LLAMA3, "factor": 1.0}
    torch.testing.assert_close(
        scaling.inverse_frequencies(parameters, R, THETA)[0], scaling.default(R, THETA)[0], rtol=2e-7, atol=0
    )


@pytest.mark.parametrize("rotary_dim", [2, 7, 20, 80, 96, 512])
def test_any_rotary_dim(rotary_dim):
    inv_freq, _ = scaling.default(rotary_dim, 1e4)
    assert inv_freq.shape == ((rotary_dim + 1) // 2,)
    assert inv_freq[0] == 1.0


@pytest.mark.parametrize(
    ("parameters", "theta", "message"),
    [
        ({"rope_type": "fancy"}, 1e4, "rope_type: expected one of default, .*, got 'fancy'; compute its"),
        ({"rope_type": "yarn", "factor": 4.0}, 1e4, "'yarn': missing original_max_position_embeddings; got"),
        ({"rope_type": "llama3"}, 1e4, "missing factor, low_freq_factor, high_freq_factor, original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": None}, 1e4, "missing factor"),
        ({"rope_type": "linear", "factor": 0}, 1e4, "factor: expected a number above 0, got 0"),
        ({"rope_type": "linear", "factor": "8"}, 1e4, "factor: expected a number above 0, got '8'"),
        ({"rope_type": "ntk_alpha", "alpha": -1.0}, 1e4, "alpha: expected a number above 0, got -1.0"),
        ({}, 0, "theta: expected a number above 0, got 0"),
        ({}, float("nan"), "theta: expected a number above 0, got nan"),
        (
            {"rope_type": "longrope", **LONGROPE, "long": True, "long_factor": [1.0] * 3},
            1e4,
            "long_factor: expected 32 numbers",
        ),
    ],
)
def test_bad_parameters(parameters, theta, message):
    with pytest.raises(ValueError, match=message):
        scaling.inverse_frequencies(parameters, R, theta)


def test_ntk_needs_more_than_one_pair():
    with pytest.raises(ValueError, match="rotary_dim: NTK scaling needs more than 2, got 2"):
        scaling.ntk_alpha(2, 1e4, alpha=8.0)
