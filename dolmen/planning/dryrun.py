"""The dry run: the real step of any rank of any world, in one process, without its memory.

Build, forward, backward and update run on tensors that have no values, in a process group in which
nothing is sent, with the kernels that are chosen for some hardware. What they do is a ledger. Of
many microbatches few are run (steady_state.py). It runs eagerly, whatever `train.compile` is.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import MofNCompleteColumn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dolmen.core.device import replace_read_back
from dolmen.core.log import bar, gib, say
from dolmen.core.mesh import Axis, Mesh
from dolmen.core.messages import plural
from dolmen.core.state import local_view
from dolmen.core.torch_private import dispatch, sharding
from dolmen.data.batch import FOLLOWS, Batch
from dolmen.model.build import allocate, place
from dolmen.model.decoder import Decoder
from dolmen.ops.attention import Documents
from dolmen.ops.kernels import CPU, KNOWN, Hardware
from dolmen.optim.optimizer import DTYPES, master_dtype
from dolmen.parallel import data
from dolmen.parallel.schedule import Action, Schedule
from dolmen.planning.config import DryrunRequest, ranks_of
from dolmen.planning.counting import Counting, Memory
from dolmen.planning.dry_report import DryRunReport
from dolmen.planning.ledger import Ledger
from dolmen.planning.steady_state import DryRunSteps, shorten_step
from dolmen.training import loop
from dolmen.training.checks.run import validate_computation
from dolmen.training.config import RunConfig
from dolmen.training.initialize import initial_state
from dolmen.training.resolve import resolve
from dolmen.training.state import TrainState
from dolmen.training.step import optimizer_step


def report(request: DryrunRequest, progress: bool = False) -> DryRunReport:
    """Dry-run the requested ranks one after the other and return their ledgers. `progress` shows a
    bar on stderr, and the peak of each rank when it is done. Raises ValueError for a run that
    training would refuse, or that would crash.
    """
    options = request.options
    resolved = resolve(request.run, None, reads_init=False)
    validate_computation(resolved)
    run = resolved.config
    if run.train.numerics == "exact":
        # AdamW's foreach form reads its step counts, and tensors of a dry run have no values
        raise ValueError(
            "a dry run does not cover train.numerics exact, whose ranks hold whole gradients until "
            "the last backward: set --train.numerics fast"
        )
    ranks, hardware = ranks_of(options.ranks, run.layout.world), KNOWN[options.device]
    pp = run.layout.world // run.layout.pp
    steps = [shorten_step(run, rank, options.exact).schedule for rank in ranks]
    # for the bar
    actions = [
        len(schedule.actions[rank // pp]) for schedule, rank in zip(steps, ranks, strict=True)
    ]
    done, counts = count(1), []
    title = f"dry run of {plural(len(ranks), 'rank')} of {run.layout.world:,}"
    with bar(title, sum(actions), progress, MofNCompleteColumn()) as reach:
        for rank in ranks:
            counts.append(
                dryrun(
                    run,
                    rank,
                    hardware=hardware,
                    exact=options.exact,
                    max_load=options.max_load,
                    observe=lambda: reach(next(done)),
                )
            )
            peak = counts[-1].peak
            say(f"rank {rank:,}: {gib(peak)} at the peak", progress)
            gc.collect()  # the model is in cycles
    return DryRunReport(run, hardware, tuple(counts))


def dryrun(
    run: RunConfig,
    rank: int,
    *,
    hardware: Hardware = CPU,
    exact: bool = False,
    max_load: float = 1.0,
    observe: Callable[[], None] = lambda: None,
) -> Ledger:
    """Run a step of `run` as `rank` of the world of `run.layout`, with the kernels of `hardware`,
    and return its ledger.

    The run has been checked. `exact`: run all microbatches, not one period of the steady state.
    Routers send equally many rows to every expert; `max_load` multiplies those of this rank's
    experts. `observe` is called after each action. Raises ValueError where a process group has been
    joined, and whatever the step would raise.
    """
    if dist.is_initialized():
        raise ValueError(
            "dolmen dryrun runs in one process, but this process belongs to a group: run it "
            "without torchrun or srun"
        )
    # a process group of any size, in which nothing is sent
    dispatch.join_fake(run.layout.world, rank)
    try:
        mesh = match_hardware(hardware, run.layout.mesh(torch.device("cpu")))
        # fewer microbatches, whose period stands for the rest
        steps = shorten_step(run, rank, exact)
        return _count_step(run, rank, mesh, steps, hardware, max_load, observe)
    finally:
        dist.destroy_process_group()


def _count_step(
    run: RunConfig,
    rank: int,
    mesh: Mesh,
    steps: DryRunSteps,
    hardware: Hardware,
    max_load: float,
    observe: Callable[[], None],
) -> Ledger:
    """Build the model, run one training step of `steps.schedule` on `mesh` with fake tensors, and
    return the ledger of operators, collectives and memory. `observe` is called after each action.
    What the step raises is raised as `crash_error`.
    """
    schedule = steps.schedule
    model = place(
        run.spec,
        mesh,
        run.layout,
        schedule,
        training=run.training,
        dtype=master_dtype(run.train.dtype),
        compute=DTYPES[run.train.dtype],
        hardware=hardware,
    )
    counting = Counting(groups(mesh), instant=hardware.kind == "cuda")

    def answer(x: Tensor, rows: int | None) -> Any:
        """Return made-up values for what the host reads from a tensor without values (see
        `balanced_values`), and record the read.
        """
        counting.read(x)
        return balanced_values(x, rows, max_load)

    def end_action(action: Action) -> None:
        """Assign the ledger rows since the last schedule action to `action`, set the memory kind of
        its gradients, and call `observe`: called by the step after each action.
        """
        counting.end_action(str(action), steps.times.get(action, 1))
        mark_gradients(model, counting.memory)
        observe()

    # outside of the fake mode, so its tokens have values
    batch = batch_of(run, schedule)
    with (
        dispatch.Fake(allow_non_fake_inputs=True),
        replace_read_back(answer),
        counting.count_memory(),
    ):
        state = allocate_state(run, model, schedule, mesh, counting)
        rest = counting.memory.live
        # what training leaves to no collector is no matter of chance here
        with loop.manual_gc(), counting.step(model), follow_fsdp(model, counting.memory):
            try:
                optimizer_step(state, batch, mesh, observe=end_action)
            except Exception as error:  # whatever the code of the run raises, which runs here
                raise crash_error(rank, counting, error) from error
        # clipping and update, after the last action
        counting.end_action("optimizer")
    return Ledger(rank, rest, tuple(counting.rows), counting.memory.at_most)


def crash_error(rank: int, counting: Counting, error: Exception) -> ValueError:
    """Return a ValueError which explains that the step of this rank would raise `error`, after
    which action and in which module.
    """
    last = counting.rows[-1].action if counting.rows else ""
    where = f"after {last}" if last else "at the start"
    module = counting.places.here if counting.places is not None else None
    inside = f" in {module}" if module else ""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ValueError(f"the step of rank {rank} would fail {where}{inside}: {reason}")


def allocate_state(
    run: RunConfig, model: Decoder, schedule: Schedule, mesh: Mesh, counting: Counting
) -> TrainState:
    """Allocate a placed model and its optimizer, counted as parameters and optimizer state, and
    return the training state.
    """
    with counting.memory.makes("parameter"):
        allocate(model, mesh.device)
    with counting.memory.makes("optimizer"):
        return initial_state(run, model, schedule, mesh, steps=run.steps or 1)


def match_hardware(hardware: Hardware, mesh: Mesh) -> Mesh:
    """Return the mesh with groups that use the collectives that `hardware` would: those of gloo for
    a CPU, else of NCCL.
    """
    # over gloo other operators are issued than over NCCL
    gloo = hardware.kind == "cpu"
    axes = {name: axis for name, axis in axes_of(mesh).items() if axis.group is not None}
    changed = {name: replace(axis, gloo=gloo) for name, axis in axes.items() if name not in ALL}
    return replace(mesh, **changed)


ALL = ("ends", "world")
"""Axes over which nothing is scattered."""


def axes_of(mesh: Mesh) -> dict[str, Axis]:
    """Return field name -> axis for the axes of a mesh."""
    return {name: axis for name, axis in vars(mesh).items() if isinstance(axis, Axis)}


def groups(mesh: Mesh) -> dict[str, list[str]]:
    """Return process group name -> names of the mesh axes that it serves; the axes of pipeline
    sends are "pp".
    """
    members: dict[str, list[str]] = {}
    for name, axis in axes_of(mesh).items():
        if axis.group is not None:
            known = "pp" if name in ("up", "down") else name
            members.setdefault(axis.group.group_name, []).append(known)
    return members


@dataclass(frozen=True, eq=False)
class RealTokenBatch(Batch):
    """A batch whose tokens have values, cut into microbatches beforehand: the host reads tokens,
    and within the dry run slices and comparisons would have no values.
    """

    parts: tuple["RealTokenBatch", ...] = ()

    @property
    def real_tokens(self) -> int:
        """Number of tokens in the batch; none of them is padding."""
        return self.tokens.numel()

    def microbatches(self, size: int) -> list[Batch]:
        """Return the microbatches that were cut beforehand; `size` has no effect."""
        return list(self.parts)

    def to(self, device: torch.device) -> Batch:
        """Return the batch itself, whatever the device: a dry run has only one."""
        return self


def batch_of(run: RunConfig, schedule: Schedule) -> RealTokenBatch:
    """Return the batch of zero tokens that one rank trains on in a dry run, with as many
    microbatches as the schedule has. With a document mask each sequence is one document.
    """
    rows = schedule.micros * run.microbatch_size
    tokens = torch.zeros(rows, run.sequence_length, dtype=torch.int64)
    documents = Documents.from_starts(torch.zeros_like(tokens)) if run.data.document_mask else None
    numbers = {FOLLOWS: torch.zeros_like(tokens, dtype=torch.float32)} if run.spec.both_ways else {}
    full = Batch(tokens, tokens, documents, numbers=numbers).read_by(run.spec)
    parts = tuple(RealTokenBatch(**vars(part)) for part in full.microbatches(run.microbatch_size))
    return RealTokenBatch(**vars(full), parts=parts)


def balanced_values(x: Tensor, rows: int | None, max_load: float) -> Any:
    """Return what the host reads from a tensor without values. For counts of `rows` tokens by
    expert these are equal shares; for sent and received counts [2, ranks, experts per rank] the
    received are `max_load` times as many. For any other tensor (`rows` None) ones.
    """
    if rows is None:
        return np.ones(x.shape).tolist()
    experts = x.numel() if x.ndim == 1 else x.numel() // 2
    going = np.full(experts, rows // experts)
    # the counts must add up to the rows
    going[: rows % experts] += 1
    if x.ndim == 1:
        return going.tolist()
    coming = np.full(x.shape[1:], round(max_load * rows / experts))
    return [going.reshape(x.shape[1:]).tolist(), coming.tolist()]


@contextmanager
def follow_fsdp(model: Decoder, memory: Memory) -> Iterator[None]:
    """Context manager that keeps the memory kinds of FSDP's tensors right: gathered parameters are
    compute copies, accumulated gradients unsharded until they are reduced.
    """
    watched: set[nn.Parameter] = set()

    def mark_gradient(p: Tensor) -> None:
        """Count a gradient that autograd has just accumulated as unsharded: a parameter hook."""
        assert p.grad is not None
        memory.set_kind("unsharded", p.grad)

    def mark_gathered(unit: nn.Module, args: object) -> None:
        """Count what FSDP has gathered for a unit as compute copies: a forward pre-hook."""
        assert isinstance(unit, FSDPModule)
        for record in sharding.records(unit):
            # before its first forward, a shard that is uneven is copied to one that is padded
            memory.set_kind("parameter", local_view(record.sharded_param))
            for tensor in record.all_gather_outputs:
                memory.set_kind("compute", tensor)
            p = record.unsharded_param
            if p.requires_grad and p not in watched:
                watched.add(p)
                p.register_post_accumulate_grad_hook(mark_gradient)

    # FSDP's own comes first
    handles = [
        unit.register_forward_pre_hook(mark_gathered)
        for unit in model.modules()
        if isinstance(unit, FSDPModule)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def mark_gradients(model: Decoder, memory: Memory) -> None:
    """Set the memory kind under which a model's gradients are counted, after an action: unsharded
    ones, and the reduced shards.
    """
    for unit in data.units(model):
        for record in sharding.records(unit):
            # ZeRO 0 and 1 keep these until the last microbatch
            if record.unsharded_accumulated_grad is not None:
                memory.set_kind("unsharded", record.unsharded_accumulated_grad)
            if record.sharded_param.grad is not None:
                memory.set_kind("gradient", local_view(record.sharded_param.grad))
