"""What transformers' attention modules hand to attention, and what they were handed themselves."""

import importlib
from typing import NamedTuple

import pytest
import torch
from torch import Tensor


class Prologue(NamedTuple):
    """One layer's way to attention.

    hidden: what the module was given, `[T, hidden]`.
    q, k, v: what attention got, `[T, heads, head_dim]`.
    """

    module: torch.nn.Module
    hidden: Tensor
    q: Tensor
    k: Tensor
    v: Tensor


def config_named(name: str, **values):
    """A config of transformers; skips where this release has none of that name."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**values)


def model_of(config, name: str) -> torch.nn.Module:
    """The model class `name` with random weights; norms have weights that differ from element to element."""
    package = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(package, name)(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.rand_like(parameter) - 0.5)
        else:
            parameter.data.normal_(0, 0.1)
    return model


def prologues(model, **inputs) -> list[Prologue]:
    """What every attention layer of a model does before attention, in the order of the layers."""
    from transformers import AttentionInterface

    given, found = [], []

    def attention(module, q, k, v, mask, **_):
        rows = [x[0].transpose(0, 1).detach().clone() for x in (q, k, v)]
        found.append(Prologue(module, given.pop(), *rows))
        groups = q.shape[1] // k.shape[1]
        return v.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None

    def remember(module, args, kwargs):
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        given.append(hidden[0].detach().clone())

    AttentionInterface.register("decode_rope_prologue", attention)
    modules = [module for name, module in model.named_modules() if name.endswith(("self_attn", ".attention"))]
    hooks = [module.register_forward_pre_hook(remember, with_kwargs=True) for module in modules]
    model.config._attn_implementation = "decode_rope_prologue"
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found
