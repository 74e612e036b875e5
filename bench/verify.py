"""Nothing is timed before it is right: Q and the whole of both caches against decode_rope.reference."""

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from bench.buffers import Case, Layer, Meta, context_for, decode_meta, make_layers, prefill_meta
from bench.providers import Provider, Unavailable, first_line, need
from bench.providers.flashinfer_fp8 import as_fp8

# One unit in the last place is at most this much of the value; the absolute part covers cancellation.
_ULP = {
    torch.bfloat16: (2.0**-7, 2.0**-16),
    torch.float16: (2.0**-10, 2.0**-16),
    torch.float32: (2.0**-22, 2.0**-20),
    torch.float8_e4m3fn: (2.0**-3, 2.0**-9),
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class Verdict(NamedTuple):
    """status: `ok`, `skip` (cannot run here) or `fail` (wrong result); reason is empty when ok."""

    status: str
    reason: str
    max_error: float | None = None


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.element_size()])


def equal(x: Tensor, y: Tensor) -> bool:
    return bool(torch.equal(bits(x), bits(y)))


def worst(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Largest absolute error, and the largest ratio of an error to what one ulp of `got`'s dtype allows."""
    relative, absolute = _ULP[got.dtype]
    wanted = want.float()
    error = (got.float() - wanted).abs()
    ratio = error / (wanted.abs() * relative + absolute)
    # NaN never passes: it compares false with every bound.
    return float(error.max()), float("inf") if bool(ratio.isnan().any()) else float(ratio.max())


def reference(meta: Meta, layer: Layer) -> Layer:
    """A copy of `layer` after decode_rope.reference has rotated Q and appended K and V."""
    out = layer.clone()
    need("decode_rope.reference", "rope_append_decode")(
        out.q,
        out.k,
        out.v,
        out.k_cache,
        out.v_cache,
        meta.cos_sin,
        meta.positions,
        slot_mapping=meta.slots,
    )
    return out


def verification_case(case: Case, *, prefill: bool, packed: bool, seed: int) -> tuple[Meta, Layer]:
    """Fresh random inputs of the case's shape; the caches hold random values so that any stray write shows."""
    if prefill:
        meta = prefill_meta(case, 512, seed)
    else:
        meta = decode_meta(case, context_for(case, 1, limit_bytes=2e8), seed)
    return meta, make_layers(case, meta, 1, seed, packed=packed, fill=True)[0]


def check(provider: Provider, case: Case, *, prefill: bool = False, packed: bool = True, seed: int | None = None) -> Verdict:
    """Runs `provider` once on fresh inputs and compares everything it may have touched.

    The inputs differ from provider to provider and from case to case, and not from run to run, unless a seed is given.
    """
    if case.device.type == "cpu" and not provider.cpu:
        return Verdict("skip", "needs a GPU")
    if seed is None:
        seed = zlib.crc32(f"{provider.name} {case}".encode())
    try:
        meta, layer = verification_case(case, prefill=prefill, packed=packed, seed=seed)
        if provider.group == "other-bytes":
            return _check_fp8(provider, case, meta, layer)
        want = reference(meta, layer)
        before = layer.clone()
        q = provider.bind(case, meta, layer)()
        return _compare(provider, meta, before, layer, q.view(layer.q.shape), want)
    except Unavailable as error:
        return Verdict("skip", str(error))
    except Exception as error:  # a provider that raises never stops the run
        return Verdict("fail", f"{type(error).__name__}: {first_line(error)}")


def _compare(provider: Provider, meta: Meta, before: Layer, got: Layer, q: Tensor, want: Layer) -> Verdict:
    if provider.exact:
        same = {
            "Q": equal(q, want.q),
            "K cache": equal(got.k_cache, want.k_cache),
            "V cache": equal(got.v_cache, want.v_cache),
            "K input": equal(got.k, before.k),
            "V input": equal(got.v, before.v),
        }
        wrong = [name for name, ok in same.items() if not ok]
        return Verdict("fail", f"not bit-identical: {', '.join(wrong)}") if wrong else Verdict("ok", "", 0.0)
    return _compare_close(meta, before, got, q, want)


def _compare_close(meta: Meta, before: Layer, got: Layer, q: Tensor, want: Layer) -> Verdict:
    q_error, q_ratio = worst(q, want.q)
    k_error, k_ratio = worst(got.k_cache, want.k_cache)
    if max(q_ratio, k_ratio) > 1:
        which = "Q" if q_ratio >= k_ratio else "K cache"
        return Verdict("fail", f"{which} is {max(q_ratio, k_ratio):.3g} times the tolerance of one ulp off")
    if not equal(got.v_cache, want.v_cache):
        return Verdict("fail", "V cache is not what was appended")
    if not equal(_untouched(got.k_cache, meta), _untouched(before.k_cache, meta)):
        return Verdict("fail", "wrote K cache rows that were not addressed")
    return Verdict("ok", "", max(q_error, k_error))


def _untouched(cache: Tensor, meta: Meta) -> Tensor:
    rows = cache.view(-1, *cache.shape[2:])
    keep = torch.ones(rows.shape[0], dtype=torch.bool, device=cache.device)
    keep[meta.slots] = False
    return rows[keep]


def _check_fp8(provider: Provider, case: Case, meta: Meta, layer: Layer) -> Verdict:
    """Against the reference in fp32, within one ulp of e4m3; bytes of rows not addressed stay the same."""
    exact = Layer(*(x.float() for x in (layer.q, layer.k, layer.v, layer.k_cache, layer.v_cache)))
    want = reference(meta, exact)
    before = layer.clone()
    q = provider.bind(case, meta, layer)().view(layer.q.shape)
    errors = {"Q": worst(q, want.q)}
    for name, cache, old, wanted in (
        ("K cache", layer.k_cache, before.k_cache, want.k_cache),
        ("V cache", layer.v_cache, before.v_cache, want.v_cache),
    ):
        codes, old_codes = as_fp8(cache), as_fp8(old)
        rows = (-1, *codes.shape[2:])
        errors[name] = worst(codes.view(rows)[meta.slots], wanted.view(rows)[meta.slots])
        if not equal(_untouched(codes, meta), _untouched(old_codes, meta)):
            return Verdict("fail", f"wrote {name} rows that were not addressed")
    name, (_, ratio) = max(errors.items(), key=lambda item: item[1][1])
    if ratio > 1:
        return Verdict("fail", f"{name} is {ratio:.3g} times the tolerance of one fp8 ulp off")
    return Verdict("ok", "", max(error for error, _ in errors.values()))
