"""A module of one's own over several processes: ToyModel of PyTorch's tutorials, 10 -> 32 -> 5, its
first layer by columns and its second by rows. Every layout prints the same losses.

    python examples/toymodel.py
    torchrun --nproc-per-node 4 examples/toymodel.py --tp 2
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import dolmen
from dolmen.core.mesh import SINGLE, Mesh, grid
from dolmen.optim.config import OptimizerConfig
from dolmen.training import modules

PLAN = {"net1": "columns", "net2": "rows"}
BATCH = 16


class ToyModel(nn.Module):
    def __init__(self, inputs: int = 10, hidden: int = 32, outputs: int = 5):
        super().__init__()
        self.net1, self.net2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.net1(x).relu())


def train(mesh: Mesh, zero: int = 0, steps: int = 10) -> list[float]:
    """The losses of steps on random data."""
    torch.manual_seed(0)
    model = dolmen.parallelize(ToyModel(), PLAN, mesh, zero=zero)
    optimizer = modules.adamw(model, OptimizerConfig(lr=1e-2))
    data = torch.randn(steps, BATCH, 15)  # of the whole batch; a rank of dp takes its rows
    rows = slice(mesh.dp.rank * BATCH // mesh.dp.size, (mesh.dp.rank + 1) * BATCH // mesh.dp.size)
    losses = []
    for batch in data[:, rows]:
        loss = (model(batch[:, :10]) - batch[:, 10:]).square().sum() / BATCH
        whole = loss.detach().clone()
        modules.step(model, optimizer, loss, mesh)
        if mesh.dp.size > 1:
            dist.all_reduce(whole, group=mesh.dp.group)
        losses.append(float(whole))
    return losses


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--tp", type=int, default=1)
    tp, mesh = words.parse_args().tp, SINGLE
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = grid(dist.get_world_size() // tp, tp, torch.device("cpu"))
    losses = train(mesh)
    if mesh.first:
        print("losses:", *(f"{one:.6f}" for one in losses))
