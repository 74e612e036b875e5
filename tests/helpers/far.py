"""Memory that is reserved and hardly touched, and a small call that fits any strides in it."""

import pytest
import torch

from decode_rope import reference

D = 64
WRAP = 2**20  # elements: where 32-bit arithmetic arrives instead, signed or not
FAR = 2**32 + WRAP


def reserve(elements: int, device, dtype=torch.float16) -> torch.Tensor:
    """Memory for `elements`; on a CPU only what is used becomes real."""
    try:
        return torch.empty(elements, dtype=dtype, device=device)
    except RuntimeError as error:  # a CUDA OutOfMemoryError is one too
        pytest.skip(f"no room for {elements} elements of {dtype}: {error}")


def small_call(device, n: int = 2) -> dict[str, torch.Tensor]:
    """`n` tokens, heads, pages and offsets; the last token goes to the last head, page and offset of everything."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, torch.float16)

    call = {"q": randn(n, n, D), "k": randn(n, n, D), "v": randn(n, n, D)}
    call |= {"k_cache": randn(n, n, n, D), "v_cache": randn(n, n, n, D)}
    positions = [n * token + token for token in range(n)]  # offset `token` of column `token`
    call |= {"cos_sin_cache": randn(n * n, D).float(), "positions": torch.tensor(positions, device=device)}
    return call | {"block_table": torch.diag(torch.arange(n, dtype=torch.int32)).to(device)}


def expected(call: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    want = {name: x.clone() for name, x in call.items()}
    reference.rope_append_decode(**want)
    return want
