"""How far tables are from exact angles, kept as bounds."""

import pytest
import torch

from decode_rope.tables import accuracy, scaling
from decode_rope.tables import table as tables

# (angle, relative) errors of a window of 1024 positions that ends there; theta 1e6, rotary_dim 128.
ERRORS = {
    2**10: {"hf": (7.3e-5, 7.3e-5), "fp64": (4.5e-5, 4.5e-5)},
    2**15: {"hf": (2.5e-3, 2.1e-3), "fp64": (1.5e-3, 4.5e-5)},
    2**17: {"hf": (9.6e-3, 7.9e-3), "fp64": (5.7e-3, 4.5e-5)},
    2**20: {"hf": (7.7e-2, 6.3e-2), "fp64": (4.6e-2, 4.5e-5)},
}


@pytest.mark.parametrize("exactness", ["hf", "fp64"])
@pytest.mark.parametrize("end", ERRORS)
def test_error_against_float64(end, exactness):
    inv_freq, _ = scaling.default(128, 1e6)
    exact, _ = scaling.default(128, 1e6, dtype=torch.float64)
    absolute, relative = accuracy.error_at(inv_freq, exact, end - 1, exactness)
    largest_absolute, largest_relative = ERRORS[end][exactness]
    assert 0.8 * largest_absolute < absolute < largest_absolute
    assert 0.8 * largest_relative < relative < largest_relative


def test_error_bound_of_every_angle():
    """Half an ulp of the product and one of `pow`: `1.5 * 2^-23 * angle`, plus the rounding of cos and sin."""
    exact = scaling.default(128, 1e6, dtype=torch.float64)[0]
    got = tables.rows(scaling.default(128, 1e6)[0], 1.0, 2**17 - 512, 2**17).double()
    angle = torch.arange(2**17 - 512, 2**17)[:, None].double() * exact
    bound = 1.5 * 2**-23 * angle + 2**-22
    assert ((got[:, :64] - angle.cos()).abs() <= bound).all()
    assert ((got[:, 64:] - angle.sin()).abs() <= bound).all()
