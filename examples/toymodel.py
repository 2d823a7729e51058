"""A module of one's own over several processes: ToyModel of PyTorch's tutorials, 10 -> 32 -> 5, its
first layer by columns and its second by rows. Every layout prints the same losses, and goes on from
what any other has saved.

    python examples/toymodel.py
    torchrun --nproc-per-node 4 examples/toymodel.py --tp 2 --folder runs/toy
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn

import dolmen
from dolmen.core.mesh import SINGLE, Mesh, build_mesh

PLAN = {"net1": "columns", "net2": "rows"}
BATCH = 16


class ToyModel(nn.Module):
    def __init__(self, inputs: int = 10, hidden: int = 32, outputs: int = 5):
        super().__init__()
        self.net1, self.net2 = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.net1(x).relu())


def train(mesh: Mesh, zero: int = 0, steps: int = 10, folder: str | None = None) -> list[float]:
    """The losses of the steps, of 20 at most, that the checkpoint in `folder` has not made."""
    torch.manual_seed(0)
    model = dolmen.parallelize(ToyModel(), PLAN, mesh, zero=zero)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # or any other, after parallelize
    made = dolmen.restore(folder, model, optimizer, mesh) if folder else 0
    data = torch.randn(20, BATCH, 10, generator=torch.Generator().manual_seed(1))
    rows = slice(mesh.dp.rank * BATCH // mesh.dp.size, (mesh.dp.rank + 1) * BATCH // mesh.dp.size)
    losses = []
    for x in data[made:steps, rows]:
        loss = (model(x) - x[:, :5]).square().sum() / BATCH  # of the whole batch
        losses.append(dolmen.step(model, optimizer, loss, mesh).loss)
    if folder:
        dolmen.save(folder, model, optimizer, mesh, step=steps, keep=1)
    return losses


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--tp", type=int, default=1)
    words.add_argument("--folder")
    asked, mesh = words.parse_args(), SINGLE
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        mesh = build_mesh(dist.get_world_size() // asked.tp, asked.tp, torch.device("cpu"))
    losses = train(mesh, folder=asked.folder)
    if mesh.first:
        print("losses:", *(f"{one:.6f}" for one in losses))
