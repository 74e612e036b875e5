"""The benchmark without a GPU: stand-ins for graphs, timers and attention, and providers with one fault."""

import time

import torch

from bench import workloads
from bench.buffers import Case
from bench.providers.eager import Eager

CPU = torch.device("cpu")
FORTY = Case(workloads.TINY, 40, CPU)


class CpuGraph:
    """Stands in for a CUDA graph: replaying runs the calls again."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


class CpuTimer:
    def __init__(self, flush=0):
        self.flush = flush

    def round(self, plan):
        out = []
        for name, replay, count in plan:
            begin = time.perf_counter_ns()
            for _ in range(count):
                replay()
            out.append((name, (time.perf_counter_ns() - begin) / count / 1e3))
        return out


def sdpa(case, meta):
    """Attention in PyTorch, over the pages."""

    def attend(q, k_cache, v_cache):
        rows = (-1, case.model.num_kv_heads, case.model.head_dim)
        out = []
        for t in range(case.tokens):
            past = torch.arange(int(meta.lengths[t]))
            slots = meta.block_table[t, past // case.page_size].long() * case.page_size + past % case.page_size
            k, v = (c.view(rows)[slots].transpose(0, 1)[None] for c in (k_cache, v_cache))
            heads = q[t][None, :, None]
            out.append(torch.nn.functional.scaled_dot_product_attention(heads, k, v, enable_gqa=True)[0, :, 0])
        return torch.stack(out)

    return attend


class Broken(Eager):
    """Eager PyTorch, then one thing wrong."""

    def __init__(self, how):
        super().__init__(f"broken-{how}")
        self.how = how

    def bind(self, case, meta, layer):
        if self.how == "raises":
            raise RuntimeError("no such kernel\nand more")
        right = super().bind(case, meta, layer)

        def call():
            q = right()
            if self.how == "q":
                q[0, 0, 0] += 1
            elif self.how == "nan":
                q[-1, -1, -1] = float("nan")
            elif self.how == "k":
                layer.k_cache.view(-1, *layer.k.shape[1:])[meta.slots[-1]] *= 1.5
            elif self.how == "v":
                layer.v_cache.view(-1, *layer.v.shape[1:])[meta.slots[0]] = 0
            elif self.how == "stray":
                free = sorted(set(range(layer.k_cache.shape[0] * case.page_size)) - set(meta.slots.tolist()))
                layer.k_cache.view(torch.int16).view(-1, *layer.k.shape[1:])[free[0], 0, 0] ^= 1
            return q

        return call


class Missing(Eager):
    modules = ("no_such_module_c",)
