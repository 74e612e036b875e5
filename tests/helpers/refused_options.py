"""Bad norms, scales and outputs of codes: what is given in place of a good one, and how the error begins."""

import torch
from quantised import E4M3, E5M2, INT8, quantised_call

from decode_rope import QKNorm

W = torch.ones(16)
_FNUZ = torch.zeros(12, 4, 2, 16, dtype=torch.float8_e4m3fnuz)


_NATIVE = {name: torch.zeros(12, 4, 2, 16, dtype=torch.bfloat16) for name in ("k_cache", "v_cache")}


def _codes(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(5, 4, 16).to(dtype)


# (error, how its text begins, what is given, and of what dtype the caches are)
BAD = [
    (TypeError, "k_cache: expected the dtype of k", {"k_cache": _FNUZ}, E4M3),
    (TypeError, "k_cache: expected kv_dtype to say", {"k_cache": torch.zeros(12, 4, 2, 16, dtype=torch.uint8)}, E4M3),
    (TypeError, "k_cache: expected kv_dtype torch.int8", {"kv_dtype": INT8}, E4M3),
    (TypeError, "kv_dtype: expected float8_e4m3fn, float8_e5m2 or int8", {"kv_dtype": torch.int16}, E4M3),
    (TypeError, "kv_dtype: expected a torch.dtype or None", {"kv_dtype": "fp8"}, E4M3),
    (TypeError, "v_scale: expected float32", {"v_scale": torch.ones(1, dtype=torch.float64)}, E4M3),
    (ValueError, "v_scale: expected shape", {"v_scale": torch.ones(3)}, E4M3),
    (ValueError, "k_scale: expected positive finite", {"k_scale": torch.tensor([0.0])}, E4M3),
    (ValueError, "k_scale: expected positive finite", {"k_scale": torch.tensor([float("nan")])}, E4M3),
    (TypeError, "k_scale: expected a torch.Tensor", {"k_scale": 0.5}, E4M3),
    (ValueError, "k_scale: expected shape", {"k_scale": torch.ones(12, 4, 3)}, E4M3),
    (TypeError, "k_scale: expected float32", {"k_scale": torch.ones(12, 4, 2, dtype=torch.float16)}, E4M3),
    (ValueError, "k_scale: expected every element at its own", {"k_scale": torch.ones(1, 1, 1).expand(12, 4, 2)}, E4M3),
    (ValueError, "k_scale: expected a scale for an int8", {"k_scale": None}, INT8),
    (ValueError, "k_scale: expected a scale of shape", {"k_scale": torch.ones(12, 4, 2)}, E5M2),
    (ValueError, "k_scale: expected None, because k_cache holds", _NATIVE, E4M3),
    (ValueError, "k_scale: expected None, because no cache", dict.fromkeys(("k", "v", "k_cache", "v_cache", "slot_mapping")), E4M3),
    (ValueError, "q_scale: expected None without", {"q_scale": W[:1]}, E4M3),
    (ValueError, "q_scale: expected None, because q_out holds", {"q_scale": W[:1], "q_out": _codes(torch.bfloat16)}, E4M3),
    (TypeError, "q_out: expected the dtype of q", {"q_out": _codes(E5M2)}, E4M3),
    (ValueError, "q_scale: expected shape", {"q_out": _codes(E4M3), "q_scale": torch.ones(4)}, E4M3),
    (TypeError, "norm.q_weight: expected dtype", {"norm": QKNorm(W.double(), None, 1e-6)}, E4M3),
    (TypeError, "norm.k_weight: expected a torch.Tensor", {"norm": QKNorm(None, 1.0, 1e-6)}, E4M3),
    (ValueError, "norm.q_weight: expected shape [16]", {"norm": QKNorm(torch.ones(64), None, 1e-6)}, E4M3),
    (ValueError, "norm.k_weight: expected stride 1", {"norm": QKNorm(None, torch.ones(32)[::2], 1e-6)}, E4M3),
    (TypeError, "norm: expected a decode_rope.QKNorm", {"norm": 1e-6}, E4M3),
    (TypeError, "norm.eps: expected a number", {"norm": QKNorm(W, W, "1e-6")}, E4M3),
    (ValueError, "norm.eps: expected a finite number of at least", {"norm": QKNorm(W, W, 0.0)}, E4M3),
    (ValueError, "norm.weight_offset: expected a finite number", {"norm": QKNorm(W, W, 1e-6, float("inf"))}, E4M3),
    (ValueError, "norm.order: expected", {"norm": QKNorm(W, W, 1e-6, order="around")}, E4M3),
    (TypeError, "norm.v_norm: expected a bool", {"norm": QKNorm(W, W, 1e-6, v_norm=1)}, E4M3),
    (TypeError, "q_token_scale: expected float32", {"q_token_scale": torch.ones(5, dtype=torch.float16)}, E4M3),
    (TypeError, "q_token_scale: expected a torch.Tensor", {"q_token_scale": 1.0}, E4M3),
    (ValueError, "q_token_scale: expected shape [5]", {"q_token_scale": torch.ones(4)}, E4M3),
    (ValueError, "q_token_scale: expected stride 1", {"q_token_scale": torch.ones(10)[::2]}, E4M3),
]  # fmt: skip


def arguments(changes: dict, kv_dtype: torch.dtype) -> dict:
    call = quantised_call(1, kv_dtype)
    return call.tensors | call.options | changes
