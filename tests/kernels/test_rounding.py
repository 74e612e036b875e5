"""Results that lie half way between two numbers of the output dtype go to the even one, in q, in k_out and in the cache."""

import pytest
import torch
from cases import Spec, bits, build, check

pytestmark = pytest.mark.anywhere
STEPS = (0, 1, 2, 3, 4, 5)  # of eps above 1, before half a step is added; then 0, 2, 2, 4, 4, 6


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_way_cases_go_to_even(dtype, is_neox, device):
    """x1 = 1 + n · eps and x2 = −eps / 2, turned by cos = sin = 1: y1 = x1 + eps / 2 in fp32, exactly."""
    eps = torch.finfo(dtype).eps
    case = build(Spec([3, 3], slots=[4, 9], dtype=dtype, is_neox=is_neox, head_dim=12, q_out=True, k_out="own"), device)
    case["cos_sin_cache"].fill_(1.0)
    first, second = (slice(0, 6), slice(6, 12)) if is_neox else (slice(0, 12, 2), slice(1, 12, 2))
    for x in (case["q"], case["k"]):
        x[..., first] = (1 + torch.tensor(STEPS, device=device) * eps).to(dtype)
        x[..., second] = -eps / 2
    got = check(case)
    want = (1 + torch.tensor([0, 2, 2, 4, 4, 6], device=device) * eps).to(dtype)
    for result in (got["q_out"], got["k_out"], got["k_cache"].flatten(0, 1)[[4, 9]]):
        assert bool((result[..., first] == want).all())
        assert not (bits(result[..., first]) & 1).any()
