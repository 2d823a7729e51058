"""Rows in bf16 over fp32 masters: what a run leaves, whole, and the dtypes it worked in.

The gradients come back whole, to be compared with one process in bf16, which needs a group of its
own: without one there is no FSDP, and so no mixed precision.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from mechanisms import ADAPTED_CONFIGS
from spawning import Row
from table import FAMILIES, FLOOR, Layout, Run, batches, start, updates

from dolmen.core import state
from dolmen.model.decoder import Decoder
from dolmen.model.layers import Norm
from dolmen.model.layers import RowParallelLinear as RowLinear
from dolmen.model.mlp import Experts, Router

STEPS = 2
ROWS = tuple(
    (family, Layout.of(words))
    for family, words in (
        ("llama", "dp2 zero2 acc4"),
        ("llama", "tp2"),
        ("qwen3", "tp2 sp zero1 acc4"),
        ("gpt2", "pp2 acc4"),
        ("llama", "cp2"),
        ("qwen3-moe", "cp2 gather zero3 acc4"),
        ("qwen3-moe", "dp2 ep2 zero1"),
        ("qwen3-moe", "tp2 sp zero1"),
        ("qwen3, adapters", "tp2 sp zero1"),
        ("gpt2", "dp2 zero3"),
        ("llama", "pp2 acc4 zero-bubble-v v2 zero2"),
        ("llama", "pp2 zero1 zero-bubble"),
    )
)


CONFIGS = {
    **FAMILIES,
    **ADAPTED_CONFIGS,
    # every token to every expert: a choice that rounding turns over would be another function
    "qwen3-moe": replace(FAMILIES["qwen3-moe"], num_experts_per_tok=8),
}


def row(family: str, layout: Layout) -> Row:
    return Row(f"{layout}-{family}", layout.world, partial(bfloat16, family, layout))


def bfloat16(family: str, layout: Layout) -> tuple[Run, set[str]]:
    """STEPS steps on the joined world: a run whose gradients are whole numpy arrays, and what was
    seen on any rank.
    """
    mesh = layout.mesh(torch.device("cpu"))
    train = start(CONFIGS[family], mesh, layout, compute=torch.bfloat16)
    seen = watch(train.model)
    out = updates(train, mesh, batches(mesh)[:STEPS])
    for p in train.model.parameters():
        seen.add(f"master {p.dtype}")
        seen |= {f"moment {m.dtype}" for k, m in train.optimizer.state[p].items() if k != "step"}
    seen |= {f"gradient {g.dtype}" for step in out.gradients for g in step.values()}
    mine = [
        {name: state.gather_full(g).numpy() for name, g in step.items()} for step in out.gradients
    ]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, seen))
    out.gradients = [{} for _ in range(STEPS)]
    for gradients, _ in everyone:
        for whole, part in zip(out.gradients, gradients, strict=True):
            whole.update(part)
    return out, set().union(*(s for _, s in everyone))


def errors(got: Run, want: Run) -> dict[str, tuple[float, str]]:
    """Largest differences over all steps, relative, and where; of a gradient, the norm of the
    difference over that of the true tensor (or FLOOR, as in table.differences).
    """
    gradient = (0.0, "")
    for step, (mine, whole) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        assert mine.keys() == whole.keys()
        for name in whole:
            a, b = (np.asarray(g, np.float64) for g in (mine[name], whole[name]))
            scale = max(np.linalg.norm(b), FLOOR * want.norms[step])
            gradient = max(gradient, (float(np.linalg.norm(a - b) / scale), f"{name}, step {step}"))
    pairs = {"norms": (got.norms, want.norms), "losses": (got.losses, want.losses)}
    return {"gradient": gradient} | {
        kind: max((abs(a / b - 1), f"step {i}") for i, (a, b) in enumerate(zip(*both, strict=True)))
        for kind, both in pairs.items()
    }


def watch(model: Decoder) -> set[str]:
    """What forward passes work in, filled as it is found: weights as the modules see them, and what
    the modules give.
    """
    seen = set()

    def weight(kind, param):
        return lambda module, args: seen.add(f"{kind} {state.local(param.weight).dtype}")

    def result(kind):
        return lambda m, args, y: seen.add(f"{kind} {(y[0] if isinstance(y, tuple) else y).dtype}")

    for m in model.modules():
        for cls, kind in ((Norm, "norm"), (RowLinear, "linear"), (Router, "router")):
            if isinstance(m, cls):  # FSDP makes subclasses
                m.register_forward_pre_hook(weight(kind, m))
        if isinstance(m, Router):
            m.register_forward_hook(result("scores"))
        if isinstance(m, Experts):
            m.register_forward_pre_hook(weight("expert", m.gate))
            m.register_forward_hook(result("experts' result"))
    for block in model.layers.values():
        block.register_forward_hook(result("stream"))
        block.attn.register_forward_hook(result("attention"))
    return seen
