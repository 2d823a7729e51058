"""What the stages ask of dolmen: the only file here that says how its training step is made."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dolmen.core import mesh as meshes
from dolmen.core import state
from dolmen.core.mesh import Axis, Mesh
from dolmen.data.batch import Batch
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.model.training import Training
from dolmen.ops import kernels, moe
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.attention_support import AttentionName
from dolmen.optim.config import OptimizerConfig
from dolmen.optim.optimizer import adamw, master_dtype
from dolmen.parallel import context
from dolmen.training.state import TrainState

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float64: "float64"}
OPTIMIZER = OptimizerConfig(lr=1e-4, schedule="constant")


@contextmanager
def alone(device: torch.device) -> Iterator[Mesh]:
    """The mesh of one process that has joined a group of its own: NCCL's on a GPU."""
    with meshes.process_group_context(None, device):
        yield meshes.build_mesh(1, 1, device)


def single(device: torch.device) -> Mesh:
    """The mesh of a process that has joined nothing: inference."""
    return replace(meshes.SINGLE, device=device)


def fill(model: Decoder) -> None:
    """Random values, drawn on the device in fp32 from a parameter's name alone: what `initialize`
    draws on the CPU, so that no split changes it, would take a minute of a large model.
    """
    with torch.no_grad():
        for name, p in model.named_parameters():
            values = state.local_view(p)
            if values.ndim == 1:
                values.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            generator = torch.Generator(values.device).manual_seed(zlib.crc32(name.encode()))
            drawn = values if values.dtype == torch.float32 else torch.empty_like(values).float()
            values.copy_(drawn.normal_(0.0, 0.02, generator=generator))


def training(
    spec: ModelSpec,
    mesh: Mesh,
    sequences: int,
    compute: torch.dtype = torch.bfloat16,
    *,
    knobs: Training = Training(),
    layout: Layout | None = None,
    micro: int | None = None,
    compile: bool = False,
    rest: torch.dtype | None = None,
    initial: Callable[[Decoder], None] = fill,
) -> TrainState:
    """A model with `initial` values and its optimizer, as `dolmen train` makes them; of the
    `sequences` of a batch a rank computes `micro` at once (default: all).
    """
    layout = replace(layout or Layout(), dp=mesh.dp.size)
    schedule = layout.make_schedule(sequences, micro or sequences // mesh.dp.size)
    model = build.build(
        spec,
        mesh,
        layout,
        schedule,
        training=knobs,
        dtype=rest or master_dtype(DTYPES[compute]),
        compute=compute,
        compile=compile,
    )
    initial(model)
    return TrainState(model, adamw(model, OPTIMIZER), OPTIMIZER, 1000, layout.zero, schedule)


def batch(spec: ModelSpec, sequences: int, length: int, documents: int = 1) -> Batch:
    """Random tokens, the same every time; each sequence of so many documents of one length."""
    chance = torch.Generator().manual_seed(1)
    text = torch.randint(spec.vocab_size, (sequences, length + 1), generator=chance)
    begun = None
    if documents > 1:
        size = -(-length // documents)
        starts = (torch.arange(length) // size * size).expand(sequences, -1).contiguous()
        begun = Documents.from_starts(starts)
    return Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous(), begun)


def attention_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attend: Attend = Attend(),
    starts: Tensor | None = None,
    backend: AttentionName | None = None,
) -> Callable[[], Tensor]:
    """Attention by `backend`, or by the kernels that a model of this device and dtype is built
    with, to be called again and again: what a step knows once per batch is done here. starts
    [batch, length] lie on the host.
    """
    here = context.ContextParallel(Axis("cp"), kernel=backend or chosen_attention(q))
    documents = (
        None
        if starts is None
        else here.documents(Documents.from_starts(starts).to_device(q.device))
    )
    return lambda: here.attention(q, k, v, attend.with_documents(documents))


def chosen_attention(q: Tensor) -> AttentionName:
    """The backend that the rule chooses for a model of this device, dtype and head size."""
    return kernels.choose(kernels.Hardware.from_device(q.device), q.dtype, q.shape[3]).attention


def norms(device: torch.device, dtype: torch.dtype) -> list[Literal["passes", "fused"]]:
    """The ways that the device has to compute an RMSNorm: torch's kernel has a backward on a GPU
    alone.
    """
    chosen = kernels.choose(kernels.Hardware.from_device(device), dtype, 64).norm
    return ["passes"] if chosen == "passes" else ["passes", chosen]


def grouped(x: Tensor, weight: Tensor, counts: list[int]) -> dict[str, Tensor]:
    """The products of experts, counts[i] rows with weight[i], by each road that the device has."""
    hardware = kernels.Hardware.from_device(x.device)
    chosen = kernels.choose(hardware, x.dtype, 64, weight.shape[1:]).grouped
    out = {"loop": moe.grouped_linear(x, weight, counts)}
    if chosen == "grouped_mm":
        ends = torch.tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        out[chosen] = moe.grouped_linear(x, weight, ends)
    return out
