"""The attention backend of a run on a GPU, chosen by time: each backend that computes what the
model needs runs the attention of a microbatch, forward and backward, on random numbers of the run's
own shape (the heads of a tp rank, the tokens of a cp rank), before the model is built.

Which is the fastest depends on the shape and on whether documents are masked, so a rule that was
measured at one shape is wrong at others. The first rank measures and all take its choice: ranks
with different kernels would round differently. Times are remembered by GPU, version of torch and
shape in `attention.json` of --data.cache, so that a resumed run has the same kernel and does not
measure again.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dolmen.core.mesh import Mesh
from dolmen.files import gate, kinds, write
from dolmen.model.block import attention_kinds
from dolmen.model.build import longest_head
from dolmen.model.spec import AttentionSpec, ModelSpec
from dolmen.ops.attention import Attend, Documents
from dolmen.ops.attention.operators import activate_attention, attention_activated, is_installed
from dolmen.ops.attention_support import (
    TIMED,
    AttentionChoice,
    AttentionName,
    AttentionNeeds,
    choose_attention,
    find_lack,
)
from dolmen.ops.kernels import Hardware, attention_needs
from dolmen.optim.optimizer import DTYPES
from dolmen.parallel.context import ContextParallel
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.start import on_first_rank

FILE = "attention.json"
DOCUMENTS = 4
"""Documents of a sequence, of equal length, that are timed where --data.document-mask is set."""
WARM, TIMES = 2, 5  # calls that do not count, and calls of whose times the median does

Measure = Callable[[AttentionName, RunConfig, Mesh], float]


class LayerShape(NamedTuple):
    """Heads and window of a layer, on which the time of its attention depends."""

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    window: int | None


def measure_attention(backend: AttentionName, run: RunConfig, mesh: Mesh) -> float:
    """Return the milliseconds that a backend takes for the attention of a microbatch in all layers,
    forward and backward, on this device, without communication. Raises ValueError for a backend
    that cannot be activated.
    """
    context = _LocalContext(replace(mesh.cp, rank=0, group=None), run.layout.context, backend)
    layers = layer_shapes(run.spec, mesh.tp.size)
    with attention_activated(backend):
        return sum(
            count * time_call(attention_step(shape, run, context, mesh.device), mesh.device)
            for shape, count in layers.items()
        )


def check_attention(run: RunConfig, hardware: Hardware) -> None:
    """Raise ValueError if --train.attention does not compute what the run needs on `hardware`."""
    choose_attention(_needs(run, hardware), run.train.attention)


def choose_run_attention(
    run: RunConfig, mesh: Mesh, hardware: Hardware, measure: Measure = measure_attention
) -> AttentionChoice:
    """Return the attention backend of a run, the same on every rank: --train.attention; for auto
    the fastest of `find_candidates`, if they are several, from remembered times or those that
    `measure` returns on the first rank. It stays auto, which the rule decides, on a CPU, with
    --train.deterministic, and with dropout, which no backend computes. Collective. Raises Unusable
    for a backend that does not compute what the run needs, or is not installed.
    """
    try:
        check_attention(run, hardware)
        activate_attention(run.train.attention)
    except ValueError as error:
        raise Unusable(str(error)) from None
    by_rule = run.train.deterministic or run.train.dropout or hardware.kind == "cpu"
    if run.train.attention != "auto" or by_rule:
        return AttentionChoice(run.train.attention)
    times = on_first_rank(mesh, lambda: _times(run, mesh, hardware, measure))
    if len(times) < 2:
        return AttentionChoice()
    return AttentionChoice(min(times, key=lambda name: times[name]), tuple(times.items()))


def _times(
    run: RunConfig, mesh: Mesh, hardware: Hardware, measure: Measure
) -> dict[AttentionName, float]:
    """Return the milliseconds of each candidate, remembered or measured (and then remembered);
    empty for fewer than two candidates.
    """
    candidates = find_candidates(run, hardware)
    if len(candidates) < 2:
        return {}
    file, key = run.data.cache_folder / FILE, shape_key(run, mesh, hardware)
    known = read_times(file)
    times = known.setdefault(key, {})
    remembered = len(times)
    for name in candidates:
        if name not in times:
            with suppress(ValueError):  # an installed FlashAttention-3 that does not load
                times[name] = measure(name, run, mesh)
    if len(times) > remembered:
        with suppress(OSError):  # a folder that cannot be written: measured again next time
            file.parent.mkdir(parents=True, exist_ok=True)
            write.replace(file, json.dumps(known, indent=1))
    return {name: times[name] for name in candidates if name in times}


def find_candidates(run: RunConfig, hardware: Hardware) -> list[AttentionName]:
    """Return the backends that are timed for a run: those of TIMED that compute its attention and
    are installed.
    """
    needs = _needs(run, hardware)
    return [name for name in TIMED if not find_lack(name, needs) and is_installed(name)]


def _needs(run: RunConfig, hardware: Hardware) -> AttentionNeeds:
    """Return what a run asks of an attention backend on `hardware`."""
    return attention_needs(
        hardware,
        DTYPES[run.train.dtype],
        longest_head(run.spec),
        attention_kinds(run.spec),
        run.train.deterministic,
    )


def shape_key(run: RunConfig, mesh: Mesh, hardware: Hardware) -> str:
    """Return the text under which times are remembered: GPU, versions, and all that `Measure`
    depends on.
    """
    layers = " + ".join(
        f"{count} x {s.heads}/{s.kv_heads} heads of {s.key_size}/{s.value_size}, window {s.window}"
        for s, count in layer_shapes(run.spec, mesh.tp.size).items()
    )
    documents = f", {DOCUMENTS} documents" if run.data.document_mask else ""
    return (
        f"{hardware.name}, torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}: "
        f"{run.train.dtype} {run.microbatch_size} x {run.sequence_length} tokens{documents}, "
        f"cp {mesh.cp.size} {run.layout.context}, {layers}"
    )


def read_times(file: Path) -> dict[str, dict[str, float]]:
    """Return the remembered milliseconds by shape and backend; empty where there is no such file,
    or a damaged one, which the next choice replaces.
    """
    try:
        return gate.read_json(file, kinds.ATTENTION_TIMES)
    except gate.Refused:
        return {}


def layer_shapes(spec: ModelSpec, tp: int) -> Counter[LayerShape]:
    """Return the number of layers of each shape of attention that a tp rank computes."""
    shapes: Counter[LayerShape] = Counter()
    for layer, attend in zip(spec.blocks, attention_kinds(spec), strict=True):
        mixer = layer.mixer
        # latent attention has a key and a value per query head
        kv_heads = mixer.kv_heads if isinstance(mixer, AttentionSpec) else mixer.heads
        key_size, value_size = mixer.head_sizes
        heads = mixer.heads // tp
        # fewer than ranks: each has a whole one
        kv_heads = max(1, kv_heads // tp)
        # unequal groups are expanded to one per query head (model/attention.py)
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
        shapes[LayerShape(heads, kv_heads, key_size, value_size, attend.window)] += 1
    return shapes


class _LocalContext(ContextParallel):
    """Context parallelism that sends nothing: a rank's own keys stand for those of all."""

    def gather_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values repeated to the length of the whole sequence."""
        return k.repeat(1, self.axis.size, 1, 1), v.repeat(1, self.axis.size, 1, 1)


def attention_step(
    shape: LayerShape, run: RunConfig, context: ContextParallel, device: torch.device
) -> Callable[[], object]:
    """Return a function that computes one layer's attention of a microbatch, forward and backward,
    for random queries, keys, values and gradient of the output.
    """
    batch, length = run.microbatch_size, run.sequence_length
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, g = (
        torch.randn(
            (batch, length // context.axis.size, heads, size),
            generator=generator,
            device=device,
            dtype=DTYPES[run.train.dtype],
        )
        for heads, size in (
            (shape.heads, shape.key_size),
            (shape.kv_heads, shape.key_size),
            (shape.kv_heads, shape.value_size),
            (shape.heads, shape.value_size),
        )
    )
    attend = Attend(shape.window)
    if run.data.document_mask:
        each = -(-length // DOCUMENTS)
        starts = (torch.arange(length) // each * each).expand(batch, -1).contiguous()
        documents = context.documents(Documents.from_starts(starts).to_device(device))
        attend = attend.with_documents(documents)
    if context.axis.size > 1 and context.kind == "ring":
        return lambda: _ring_pieces(q, k, v, g, context, attend)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    return lambda: torch.autograd.grad(context.attention(q, k, v, attend), (q, k, v), g)


def _ring_pieces(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, context: ContextParallel, attend: Attend
) -> None:
    """Compute the pieces of ring attention of a rank, forward and backward, a rank's own keys
    standing for those of all; merging and sending, which no backend changes, are left out.
    """
    for source in range(context.axis.size):
        for mine, theirs, at in context.visible(source, q.shape[1] // 2, attend):
            piece = q[:, mine], k[:, theirs], v[:, theirs]
            full = context.backend.partial(*piece, at)
            context.backend.partial_backward(g[:, mine], *piece, full, at)


def time_call(
    work: Callable[[], object],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the milliseconds of a call on the device, by `clock` in seconds: the median of TIMES
    calls after WARM that do not count.
    """
    times = []
    for _ in range(WARM + TIMES):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (clock() - start))
    return statistics.median(times[WARM:])
