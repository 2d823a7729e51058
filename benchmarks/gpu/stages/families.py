"""Each family's tiny model, from a folder of transformers: two updates on the device, their losses
and gradient norms beside those of the CPU in float64.
"""

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import compare, house, tables
from benchmarks.gpu.case import Case, Context, Record
from dolmen.conversion.source import ModelSource, load_weights, open_source
from dolmen.core import mesh as meshes
from dolmen.core.mesh import Mesh
from dolmen.model import build
from dolmen.training.step import optimizer_step

family_cases = tables.load("families", "family_cases")


LENGTH, SEQUENCES, UPDATES = 40, 4, 2
# Of losses and of norms, relative. float64 and float32: the order of sums is another, over some
# thousand terms (what the oracle's rows are held to, times 10, as weights here are larger). bf16:
# no less than the oracle's rows, and four times what the CPU's bf16 is off by itself.
BOUNDS = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (2**-9, 2**-6),
}
FEW = ("llama", "mixtral", "gpt2")


def cases(context: Context) -> Iterator[Case]:
    seen: set[str] = set()
    for name, case in family_cases.CASES.items():
        first = case.model_type not in seen  # one of each family
        seen.add(case.model_type)
        if (context.full and first) or name in FEW:
            yield Case(name, 1.2, partial(family, context, name))


def family(context: Context, name: str, record: Record) -> None:
    torch.set_num_threads(1)  # models so small wait for a second thread
    device = torch.device(context.place)
    with tempfile.TemporaryDirectory() as to, house.alone(device) as mesh:
        source = open_source(family_cases.save(family_cases.build(name), Path(to)))
        cpu = meshes.build_mesh(1, 1, torch.device("cpu"))
        true = updates(source, cpu, torch.float64)
        record.tell(loss=true[0][0], norm=true[1][0])
        for dtype, bounds in BOUNDS.items():
            own = updates(source, cpu, dtype) if dtype is torch.bfloat16 else true
            found = updates(source, mesh, dtype)
            for kind, got, ref, off, bound in zip(
                ("losses", "norms"), found, true, own, bounds, strict=True
            ):
                most = max(bound, 4 * compare.apart(off, ref))
                record.check(
                    f"{kind} in {dtype}", compare.apart(got, ref), most, "another order of sums"
                )


def updates(source: ModelSource, mesh: Mesh, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of UPDATES steps computed in `dtype`."""
    state = house.training(source.spec, mesh, SEQUENCES, dtype, micro=2)
    build.load(state.model, lambda write: load_weights(source, write))
    batch = house.batch(source.spec, SEQUENCES, LENGTH).read_by(source.spec)
    told = [optimizer_step(state, batch, mesh) for _ in range(UPDATES)]
    return [m.loss for m in told], [m.grad_norm for m in told]
