"""Time and memory of a step of any program on any cluster, from closed forms (blocks.py): what
published runs are compared with. Of our own program the planner has ledgers instead.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from dolmen.model.count import training_flops_per_token
from dolmen.model.layout import balance
from dolmen.model.spec import ModelSpec, MoESpec, select_prefix
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Simulation, make_schedule
from dolmen.planning.blocks import block_rows, embedding_rows, head_rows, update_rows
from dolmen.planning.capacity import layer_bytes
from dolmen.planning.cost import (
    CONTENTION,
    Machine,
    Overlap,
    Parts,
    Placement,
    action_seconds,
    row_seconds,
    send_seconds,
)
from dolmen.planning.ledger import LedgerRow
from dolmen.planning.operations import Operations, Program, RankShare
from dolmen.planning.ranks import ParameterCount
from dolmen.planning.step import (
    ErrorSpread,
    Estimate,
    Stage,
    combine_parts,
    rows_seconds,
    step_time,
)

BYTES = 2
"""Of an element that is multiplied."""


@dataclass(frozen=True)
class Job:
    """A step of training, as its program does it."""

    spec: ModelSpec
    placement: Placement
    program: Program
    overlap: Overlap
    schedule: str
    virtual_stages: int
    micros: int
    microbatch: int
    length: int
    sequence_parallel: bool = False
    recompute: str = "none"
    """none, selective, op, full: `Operations.recomputed`."""
    zero: int = 1
    dtype: str = "bf16"
    waits: bool = False
    """A rank does nothing else while it sends to another stage."""
    block_alone: bool = False
    """The model is its blocks, forward and backward: neither ends nor update."""
    folded: int = 1
    """Ranks of ep that those of tp are among; 1: the topology says ep."""
    load: float = 1.0
    """Of experts: `RankShare.load`, ..."""
    copies: float | None = None
    """... and `RankShare.copies`."""

    @property
    def topology(self):
        return self.placement.topology

    @property
    def share(self) -> RankShare:
        t = self.topology
        return RankShare(
            self.microbatch,
            self.length,
            t.tp,
            t.cp,
            self.sequence_parallel,
            self.ep,
            self.load,
            self.copies,
            self.folded > 1,
        )

    @property
    def ep(self) -> int:
        return max(self.folded, self.topology.ep)

    @property
    def sequences(self) -> int:
        """Of the global batch."""
        return self.micros * self.microbatch * self.topology.dp

    @cached_property
    def actions(self) -> Schedule:
        t = self.topology
        return make_schedule(self.schedule, t.pp, self.micros, self.virtual_stages)

    @property
    def layers(self) -> list[int]:
        """Of each stage: as many, or where they do not divide, with the ends a layer each."""
        stages = self.topology.pp * self.virtual_stages
        if self.spec.layers % stages:
            return [len(stage) for stage in balance(self.spec.layers, stages)]
        return [self.spec.layers // stages] * stages


@dataclass(frozen=True)
class Forecast:
    estimate: Estimate
    simulation: Simulation
    tensors: int
    """Bytes that the fullest rank holds at once, as an allocator counts them."""
    reserved: int
    """Bytes beside them that no allocator counts."""
    memory: int
    """Of the device."""
    mfu: float
    """FLOPs that the model needs, attention counted whole and recomputation not, over what the
    device's peak does in that time (Korthikanti et al., 2205.05198, section 6.3).
    """
    hfu: float
    """The same of all FLOPs that are done, what is computed again among them."""

    @property
    def holds(self) -> int:
        return self.tensors + self.reserved

    @property
    def fits(self) -> bool:
        return self.holds <= self.memory


def forecast(job: Job, spread: ErrorSpread) -> Forecast:
    """Raises ValueError where the schedule, or a block, is none that can be."""
    roads = {"ep": job.placement.road(range(job.folded))} if job.folded > 1 else {}
    machine = Machine(job.placement, 0, job.dtype, job.overlap, roads)
    stages, rows = _stages(job, machine)
    update = Parts() if job.block_alone else _update(job, machine, stages)
    estimate, simulation = step_time(stages, job.actions, update, spread, job.waits)
    peak = machine.device.rate(job.dtype) * job.topology.size * estimate.seconds
    tokens = job.sequences * job.length
    model = training_flops_per_token(job.spec, job.length, "full") * tokens
    again = sum(row.flops for row in rows.add_recomputation(job.recompute).backward)
    again -= sum(row.flops for row in rows.backward)
    ranks = job.topology.tp * job.topology.cp * job.topology.dp
    hardware = model + again * job.spec.layers * job.micros * ranks
    return Forecast(
        estimate,
        simulation,
        _tensors(job, simulation),
        machine.device.reserved,
        machine.device.memory,
        model / peak,
        hardware / peak,
    )


def _stages(job: Job, machine: Machine) -> tuple[list[Stage], Operations]:
    """What each virtual stage takes, and the rows of a block."""
    spec, share, program = job.spec, job.share, job.program
    rows = block_rows(spec, 0, share, program)
    whole = rows.add_recomputation(job.recompute)
    if job.zero == 3:
        whole = _gathered(whole, job, _block(job).number)
    block = rows_seconds(whole, machine)
    both = [make(spec, share, program) for make in (embedding_rows, head_rows)]
    if job.zero == 3:  # what is gathered first and scattered last has nothing to hide behind
        table = math.prod(spec.params["embed.weight"].local_shape({"tp": job.topology.tp}))
        both = [
            _gathered(both[0], job, table + _block(job).number),
            both[1] if spec.head.tied else _gathered(both[1], job, table),
        ]
    ends = [rows_seconds(one, machine) for one in both]
    parts = [[(n, block)] for n in job.layers]
    if not job.block_alone:
        parts[0].append((1, ends[0]))
        parts[-1].append((1, ends[1]))
    send = _send(job, machine)
    return [combine_parts(some, send) for some in parts], rows


def _gathered(rows: Operations, job: Job, elements: int) -> Operations:
    """With what ZeRO 3 gathers of a part before each direction, and scatters after."""
    gather = LedgerRow("F", "", "collective", "all-gather", axis="fsdp", payload=BYTES * elements)
    scatter = replace(gather, op="reduce-scatter", payload=job.program.gradient * elements)
    copies = LedgerRow("F", "", "memory", "copy", read=BYTES * elements, written=BYTES * elements)
    return Operations(
        (gather, copies, *rows.forward),
        (gather, copies, *rows.backward, scatter, copies, copies),
    )


def _send(job: Job, machine: Machine) -> float:
    """Of hidden vectors to the next stage: each rank of tp sends its part, and Megatron puts them
    together again there (2104.04473, section 4.1).
    """
    topology = job.topology
    if topology.pp * job.virtual_stages == 1:
        return 0.0
    payload = BYTES * job.share.tokens * job.spec.hidden_size
    seconds = send_seconds(payload // topology.tp, machine.hop())
    if topology.tp > 1 and not job.sequence_parallel:
        whole = LedgerRow("F", "", "collective", "all-gather", axis="tp", payload=payload)
        seconds += row_seconds(whole, machine)
    return seconds


def _block(job: Job) -> ParameterCount:
    """Parameters of a block on a rank of tp and ep."""
    leaves, sizes = (
        select_prefix(job.spec.params, "layers.0"),
        {"tp": job.topology.tp, "ep": job.ep},
    )
    found = ParameterCount.count(leaves, sizes)
    return ParameterCount(found.dense, found.experts * (job.topology.tp if job.folded > 1 else 1))


def _elements(job: Job, rank: int) -> ParameterCount:
    """Parameters of a rank of pp, on a rank of tp."""
    pp, block = job.topology.pp, _block(job)
    layers = sum(job.layers[chunk * pp + rank] for chunk in range(job.virtual_stages))
    table = ParameterCount(
        math.prod(job.spec.params["embed.weight"].local_shape({"tp": job.topology.tp}))
    )
    found = ParameterCount(layers * block.dense, layers * block.experts)
    if rank == 0:
        found += table
    if rank == pp - 1 and (pp > 1 or not job.spec.head.tied):
        found += table
    return found


def _owned(job: Job, elements: ParameterCount) -> int:
    """Of these what a rank updates: experts have fewer replicas."""
    ranks = job.topology.dp * job.topology.cp
    replicas = max(1, ranks * (job.topology.tp if job.folded > 1 else 1) // job.ep)
    return -(-elements.dense // ranks) + -(-elements.experts // replicas)


def _update(job: Job, machine: Machine, stages: list[Stage]) -> Parts:
    """What follows the last backward: the rest of the sums over dp that it did not hide, and the
    optimizer.
    """
    found = (_elements(job, rank) for rank in range(job.topology.pp))
    most = max(found, key=lambda held: held.number)
    elements, owned = most.number, _owned(job, most)
    owned = owned if job.zero else elements
    rows = update_rows(owned, elements if job.zero < 3 else owned, job.zero > 0, job.program)
    update = action_seconds(rows, machine)
    return replace(update, dp=_reduced(job, machine, elements, stages) + _tied(job, machine))


def _reduced(job: Job, machine: Machine, elements: int, stages: list[Stage]) -> float:
    """Seconds of the sums of gradients, and of parameters gathered, that nothing hides."""
    if job.zero == 3:
        return 0.0
    grads = LedgerRow("B", "", "collective", "all-reduce", axis="fsdp")
    grads = replace(grads, payload=job.program.gradient * elements)
    if job.zero:
        grads = replace(grads, op="reduce-scatter")
    seconds = row_seconds(grads, machine)
    gathers = 0.0
    if job.zero:
        gather = replace(grads, op="all-gather", payload=BYTES * elements)
        gathers = row_seconds(gather, machine)
    if job.overlap.fsdp == "nothing":
        return seconds + gathers
    # behind the last backward and the first forward; one layer's has nothing to hide behind
    least = 1 / max(1, job.layers[0])
    return sum(
        max(sent - computed, sent * least) + CONTENTION * min(sent, computed)
        for sent, computed in (
            (seconds, stages[0].backward.compute),
            (gathers, stages[0].forward.compute),
        )
    )


def _tied(job: Job, machine: Machine) -> float:
    """The first and the last stage add up the gradients of a table that both have."""
    if job.topology.pp == 1 or not job.spec.head.tied:
        return 0.0
    table = math.prod(job.spec.params["embed.weight"].local_shape({"tp": job.topology.tp}))
    return send_seconds(2 * job.program.gradient * table // 2, machine.hop())


def _tensors(job: Job, simulation: Simulation) -> int:
    """Of the fullest rank: states, what its microbatches keep, and the logits of the last."""
    pp = job.topology.pp
    return max(_states(job, rank) + _kept(job, simulation, rank) for rank in range(pp))


def _states(job: Job, rank: int) -> int:
    """Parameters, gradients and the optimizer's: 12 bytes per parameter of master copy and
    moments, divided as ZeRO says (Rajbhandari et al., 1910.02054, figure 1).
    """
    held = _elements(job, rank)
    elements, owned, g = held.number, _owned(job, held), job.program.gradient
    states = {
        0: (BYTES + g + 12) * elements,
        1: (BYTES + g) * elements + 12 * owned,
        2: BYTES * elements + (g + 12) * owned,
        3: (g + 12) * owned,
    }[job.zero]
    if job.zero == 0 and g == BYTES:
        states += 4 * elements  # the master's gradients
    if job.zero == 3:  # two blocks are whole at once, or an end, and a gradient
        largest = max(2 * _block(job).number, job.spec.vocab_size * job.spec.hidden_size)
        states += (2 * BYTES + g) * largest / 2
    return round(states)


def _kept(job: Job, simulation: Simulation, rank: int) -> int:
    """What backward needs of the microbatches that are under way."""
    t, share, spec = job.topology, job.share, job.spec
    whole = _layer_bytes(job, "none")
    recompute = "none" if job.recompute == "op" else job.recompute
    layer = _layer_bytes(job, recompute)
    if job.recompute == "op":  # every other product's result, and attention's
        layer *= 0.6
    layers = sum(job.layers[chunk * t.pp + rank] for chunk in range(job.virtual_stages))
    kept = simulation.peak[rank] * layers * layer
    if job.recompute == "full":
        kept += whole  # of the one that is computed again
    if rank == t.pp - 1 and not job.block_alone:
        kept += share.tokens * share.part(spec.vocab_size) * (4 + BYTES)
    return round(kept)


def _layer_bytes(job: Job, recompute: str) -> float:
    t = job.topology
    scores = job.program.attention == "scores"
    kept = layer_bytes(
        job.spec,
        job.spec.blocks[0],
        job.microbatch,
        job.length,
        dropout=0.1 if scores or job.program.dropout else 0.0,
        tp=t.tp,
        sequence_parallel=job.sequence_parallel,
        recompute="selective" if recompute == "none" and not scores else recompute,
        cp=t.cp,
        element_bytes=BYTES,
    )
    mlp = job.spec.blocks[0].mlp
    if (
        recompute == "full"
        or isinstance(mlp, MoESpec)
        or not mlp.gated
        or job.program.fused == "no"
    ):
        return kept
    # fused, the activation of the gate is not kept; in fp8 what is multiplied has a byte
    kept -= BYTES * job.share.tokens * job.share.part(mlp.size)
    return kept * (0.65 if job.program.fp8 else 1)
