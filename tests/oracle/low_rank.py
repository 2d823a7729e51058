"""The oracle of adapters: low-rank updates of frozen weights as their paper defines them (Hu et
al., 2106.09685, section 4.1), one process, float64, on the modules of `transformers`.

    W = W0 + (alpha / r) B A        dA = (alpha / r) B^T dW        dB = (alpha / r) dW A^T

The module computes with the sum W and gives its gradient; A and B get theirs by hand. So it never
multiplies by A or B, as dolmen does.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import trainer
from torch import Tensor
from trainer import Batch, Job, Result


@dataclass(frozen=True)
class Adapters:
    """`targets`: last parts of the names of layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def of(self, names: Collection[str]) -> list[str]:
        """The stored weights that have one."""
        return [name for name in names if name.split(".")[-2] in self.targets]


def train(
    job: Job,
    adapters: Adapters,
    weights: dict[str, Tensor],
    begin: dict[str, Tensor],
    batches: Sequence[Batch],
) -> Result:
    """`job.steps` updates. `begin`: A by the stored name of its weight; B begins at 0. `weights` of
    the result are the sums, `first` and `second` the moments of `NAME.A` and `NAME.B`.
    """
    model, scale, out = trainer.build(job), adapters.alpha / adapters.rank, Result()
    names = trainer.stored(model, job.kind)
    parts = {name: p.data[part] for name, (p, part) in names.items()}
    for name, part in parts.items():
        part.copy_(weights[name])
    chosen, moved = adapters.of(parts), dict[str, Tensor]()
    for name in chosen:
        moved[f"{name}.A"] = begin[name].double().clone()
        moved[f"{name}.B"] = torch.zeros(len(parts[name]), adapters.rank, dtype=torch.float64)
    optimizer, routers = trainer.optimizer_of(job, moved), trainer.Routers(model, job)
    places = {name: place for name, place in names.items() if name in chosen}
    for step, batch in enumerate(batches[: job.steps]):
        loss, _, whole, count, _ = trainer._gradients(model, job, batch, places, routers, out)
        gradients = {}
        for name in chosen:
            a, b = moved[f"{name}.A"], moved[f"{name}.B"]
            gradients[f"{name}.A"] = scale * b.T @ whole[name]
            gradients[f"{name}.B"] = scale * whole[name] @ a.T
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        shrink = min(1.0, job.clip / (norm + 1e-6))
        optimizer.update({n: g * shrink for n, g in gradients.items()}, trainer.rate(job, step))
        for name in chosen:
            a, b = moved[f"{name}.A"], moved[f"{name}.B"]
            parts[name].copy_(weights[name].double() + scale * b @ a)
        out.losses.append(loss)
        out.norms.append(norm)
        out.tokens.append(count + (out.tokens[-1] if out.tokens else 0))
    out.weights, out.first, out.second = parts, optimizer.first, optimizer.second
    return out
