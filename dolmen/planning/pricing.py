"""Predicts the seconds of a step of a layout, in two ways. `quick` is a closed form, for a hundred
thousand layouts:

    m (F + B) of the slowest rank + bubble + sends + exposed FSDP communication + the update

and `full` simulates the schedule's own lists with the seconds of each stage (step.py). Both price
the same rows (blocks.py) on the same machine (cost.py).

    bubble, with F, B, I, W of a rank on average over p ranks of v virtual stages
    gpipe, 1f1b     (p - 1) (F + B)
    interleaved     (p - 1) (F + B) / v
    zero-bubble     (p - 1) (F + I - W)
    zero-bubble-v   (p - 1) F / 2
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

from dolmen.core.topology import Topology
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import Simulation, make_schedule
from dolmen.planning.blocks import block_rows, embedding_rows, head_rows, update_rows
from dolmen.planning.capacity import Capacity
from dolmen.planning.cost import (
    CONTENTION,
    Machine,
    Parts,
    Placement,
    Road,
    action_seconds,
    collective_seconds,
    row_seconds,
    send_seconds,
)
from dolmen.planning.hardware import Cluster
from dolmen.planning.ledger import LedgerRow
from dolmen.planning.operations import OURS, Operations, Program, RankShare
from dolmen.planning.plan import Traffic
from dolmen.planning.ranks import stages_of
from dolmen.planning.space import LayoutChoice
from dolmen.planning.step import (
    ErrorSpread,
    Estimate,
    Stage,
    combine_parts,
    rows_seconds,
    step_time,
)

STEADY = 3
"""Times pp: microbatches after which one more takes what the slowest rank computes for it."""


class Timed(NamedTuple):
    """A layout's estimate, and the simulation that it comes from."""

    estimate: Estimate
    simulation: Simulation
    """Simulation of as many microbatches as `schedule` has, which may be fewer than the step's."""
    schedule: Schedule


class StagePart(NamedTuple):
    """A part of a stage: a layer, by the number of its kind, or the embedding or head."""

    kind: int
    again: bool = False
    """Backward recomputes it, if the layout recomputes anything."""


EMBEDDING, HEAD = StagePart(-1), StagePart(-2)


class RankGroup(NamedTuple):
    """Pipeline ranks that consist of the same parts."""

    ranks: int
    """Number of these ranks."""
    parts: tuple[tuple[StagePart, int], ...]
    """(part, how often a rank has it)."""


@dataclass
class Pricing:
    """Predicts the seconds of a step for layouts of one model on one cluster. Results are cached by
    the fields of a layout on which they depend.
    """

    capacity: Capacity
    """Memory of its ranks; has the model's spec, sequence length and dtype."""
    cluster: Cluster
    global_batch_size: int
    dtype: str
    """Dtype of products, as devices have it: "bf16"."""
    spread: ErrorSpread
    _machines: dict[tuple, Machine] = field(default_factory=dict)
    _parts: dict[tuple, Stage] = field(default_factory=dict)
    _rank_groups: dict[tuple, list[RankGroup]] = field(default_factory=dict)
    _quick: dict[tuple, tuple[float, float, float]] = field(default_factory=dict)
    _updates: dict[int, Parts] = field(default_factory=dict)
    _sent: dict[tuple, tuple[float, float, float]] = field(default_factory=dict)

    @cached_property
    def program(self) -> Program:
        """How dolmen computes a step of this run, as the predictor needs it: with dropout attention
        writes its scores to memory.
        """
        capacity = self.capacity
        scores: Literal["scores", "flash"] = "scores" if capacity.dropout else "flash"
        dropped = capacity.dropout > 0
        return replace(OURS, attention=scores, dropout=dropped, element=capacity.element_bytes)

    def machine(self, choice: LayoutChoice) -> Machine:
        """Return the first rank of the layout, placed on the cluster, for which operations are
        priced; cached.
        """
        mesh = choice[:5]
        if mesh not in self._machines:
            world = Topology(choice.dp, choice.tp, choice.pp, choice.cp, choice.ep)
            used = min(self.cluster.gpus_per_node, world.size)
            placement = Placement(self.cluster, world, used)
            self._machines[mesh] = Machine(placement, 0, self.dtype)
        return self._machines[mesh]

    def micros(self, choice: LayoutChoice) -> int:
        """Return the number of microbatches of a step on each data-parallel rank."""
        return self.global_batch_size // choice.dp // choice.microbatch_size

    def quick(self, choice: LayoutChoice) -> float:
        """Return the predicted seconds of a step in closed form, fast enough for a hundred thousand
        layouts.
        """
        span, forward, backward = self._closed_form(choice)
        optimizer, exposed = self._update_seconds(choice, forward, backward)
        return span + optimizer.total + exposed

    def _closed_form(self, choice: LayoutChoice) -> tuple[float, float, float]:
        """Return, in closed form, the seconds of a step until the last action ends, and the longest
        forward and the longest backward seconds of one microbatch on any pipeline rank.
        """
        # without ZeRO, which changes no computation
        key = (*choice[:5], choice.sequence_parallel, *choice[7:])
        if known := self._quick.get(key):
            return known
        p, v, micros = choice.pp, choice.virtual_stages, self.micros(choice)
        ranks = self._groups_of_ranks(choice)
        forward, backward, weights = (self._action_seconds(choice, kind) for kind in "FBW")
        fs = [_rank_total(rank, forward) for rank in ranks]
        bs = [_rank_total(rank, backward) for rank in ranks]
        # it sets the pace of the steady state
        slowest = max(f + b for f, b in zip(fs, bs, strict=True))
        f = sum(n.ranks * seconds for n, seconds in zip(ranks, fs, strict=True)) / p
        b = sum(n.ranks * seconds for n, seconds in zip(ranks, bs, strict=True)) / p
        if choice.schedule in ("gpipe", "1f1b"):
            idle = f + b
        elif choice.schedule == "interleaved":
            idle = (f + b) / v
            # ranks do one chunk at a time, all of them: the slowest of each counts
            slowest *= self._unevenness(choice)
        else:
            w = sum(n.ranks * _rank_total(n, weights) for n in ranks) / p
            idle = f + b - 2 * w if choice.schedule == "zero-bubble" else f / 2
        # the first microbatch's way through all stages, and its gradient's way back
        hops = 2 * (p - 1) * self._send_seconds(choice) * v
        self._quick[key] = micros * slowest + (p - 1) * idle + hops, max(fs), max(bs)
        return self._quick[key]

    def _action_seconds(self, choice: LayoutChoice, kind: str) -> dict[StagePart, float]:
        """Return for each part of the pipeline (layer kind, embedding, head) the seconds of one
        action of this kind (F, B, I or W).
        """
        parts = {part for rank in self._groups_of_ranks(choice) for part, _ in rank.parts}
        return {part: self._part_seconds(part, choice).parts(kind).total for part in parts}

    def _groups_of_ranks(self, choice: LayoutChoice) -> list[RankGroup]:
        """Return the distinct compositions of pipeline ranks (which parts, how often), each with
        the number of ranks that have it; cached.
        """
        key = (choice.pp, choice.schedule, choice.virtual_stages, choice.recompute_layers)
        if key not in self._rank_groups:
            groups: Counter[tuple] = Counter()
            for rank in range(choice.pp):
                parts = Counter(
                    p for s in stages_of(choice, rank) for p in self._parts_of(choice, s)
                )
                groups[tuple(sorted(parts.items()))] += 1
            self._rank_groups[key] = [RankGroup(number, parts) for parts, number in groups.items()]
        return self._rank_groups[key]

    def _parts_of(self, choice: LayoutChoice, stage: int) -> list[StagePart]:
        """Return the parts of a virtual stage: its layers by kind, with the embedding in the first
        and the head in the last.
        """
        layers, limit = self.capacity.ranks.layers_of_stages(choice), choice.recompute_layers
        parts = [
            StagePart(self.capacity.ranks.kinds[layer], limit is None or i < limit)
            for i, layer in enumerate(layers[stage])
        ]
        ends = [EMBEDDING] * (stage == 0) + [HEAD] * (stage == len(layers) - 1)
        return [*parts, *ends]

    def _unevenness(self, choice: LayoutChoice) -> float:
        """Return the factor (1 or more) by which an interleaved schedule is longer because chunks
        have different numbers of layers.
        """
        layers = [len(stage) for stage in self.capacity.ranks.layers_of_stages(choice)]
        p = choice.pp
        chunks = [layers[at : at + p] for at in range(0, len(layers), p)]
        most = max(sum(layers[rank::p]) for rank in range(p))
        return max(1.0, sum(map(max, chunks)) / most)

    def full(self, choice: LayoutChoice) -> Timed:
        """Return the predicted seconds of a step, by simulating the schedule's own lists: at most 3
        * pp microbatches; each further one adds the computation of the slowest rank.
        """
        micros, p = self.micros(choice), choice.pp
        full_step = micros <= STEADY * p
        some = micros if full_step else STEADY * p
        lists = make_schedule(choice.schedule, p, some, choice.virtual_stages)
        stages = self.stages(choice)
        estimate, simulation = step_time(stages, lists, self.update(choice), self.spread)
        if full_step:
            return Timed(estimate, simulation, lists)
        parts = dict(estimate.parts)
        slowest = max(
            (self._rank_seconds(choice, rank, stages) for rank in range(p)),
            key=lambda estimate: estimate.total,
        )
        for name, seconds in slowest.named_seconds().items():
            # in the steady state the slowest rank never idles
            parts[name] += (micros - some) * seconds
        return Timed(self.spread.around(sum(parts.values()), parts), simulation, lists)

    def _rank_seconds(self, choice: LayoutChoice, rank: int, stages: list[Stage]) -> Parts:
        """Return the seconds that a pipeline rank computes for one microbatch, forward and
        backward.
        """
        here = [stages[stage] for stage in stages_of(choice, rank)]
        return sum((stage.forward + stage.backward for stage in here), Parts())

    def stages(self, choice: LayoutChoice) -> list[Stage]:
        """Return the seconds of each virtual stage's actions for one microbatch, in order."""
        stages, send = [], self._send_seconds(choice)
        for stage in range(choice.pp * choice.virtual_stages):
            parts = Counter(self._parts_of(choice, stage))
            stages.append(
                combine_parts([(n, self._part_seconds(p, choice)) for p, n in parts.items()], send)
            )
        return stages

    def update(self, choice: LayoutChoice) -> Parts:
        """Return the seconds after the last action, on the rank with most parameters: the
        optimizer, and FSDP communication that no computation hides.
        """
        _, forward, backward = self._closed_form(choice)
        optimizer, exposed = self._update_seconds(choice, forward, backward)
        return optimizer + Parts(dp=exposed)

    def _update_seconds(
        self, choice: LayoutChoice, forward: float, backward: float
    ) -> tuple[Parts, float]:
        """Return the optimizer's seconds, and those of exposed FSDP communication. `forward`,
        `backward`: seconds of a microbatch, behind which it may hide.
        """
        ranks = self.capacity.ranks
        most = max(ranks.elements(choice, rank) for rank in ranks.extreme_ranks(choice))
        # elements whose optimizer state this rank holds
        local_params = most if choice.zero == 0 else most // (choice.dp * choice.cp)
        if local_params not in self._updates:
            rows = update_rows(
                local_params, local_params, True, self.program, moments=self.capacity.moments
            )
            self._updates[local_params] = action_seconds(rows, self.machine(choice))
        return self._updates[local_params], self._exposed_fsdp(choice, most, forward, backward)

    def _exposed_fsdp(
        self, choice: LayoutChoice, elements: int, forward: float, backward: float
    ) -> float:
        """Return the seconds in a step that gathering `elements` parameters and reducing their
        gradients adds to the computation behind which they are sent (`forward`, `backward`: its
        seconds per microbatch). How often depends on ZeRO and the schedule (docs/concepts/zero.md).
        """
        if choice.dp * choice.cp == 1:
            return 0.0
        every, gather, reduce = self._fsdp_seconds(choice, elements)
        # the first unit that is gathered, and the last that is reduced, have nothing to hide behind
        first = 1 / self._fsdp_units(choice)
        if choice.zero == 0:
            return exposed_seconds(every, backward, first)
        if choice.schedule.startswith("zero-bubble"):  # after the last weight gradients
            return exposed_seconds(gather, forward, first) + reduce
        if choice.zero == 3:
            exposed = exposed_seconds(gather, forward, first) + exposed_seconds(
                gather + reduce, backward, first
            )
            return self.micros(choice) * exposed
        # ZeRO 2 frees what it gathered with each backward
        times = self.micros(choice) if choice.zero == 2 else 1
        return times * (
            exposed_seconds(gather, forward, first) + exposed_seconds(reduce, backward, first)
        )

    def _fsdp_seconds(self, choice: LayoutChoice, elements: int) -> tuple[float, float, float]:
        """Return the seconds of an all-reduce of `elements` gradients in fp32, of an all-gather of
        the parameters in the compute dtype, and of a reduce-scatter of the gradients in fp32.
        """
        key = (choice[:4], elements)
        if key not in self._sent:
            road, size = self.machine(choice).road("fsdp"), self.capacity.element_bytes
            units = self._fsdp_units(choice)
            # bytes per element: gradients are reduced in fp32
            payloads = {"all-reduce": 4, "all-gather": size, "reduce-scatter": 4}
            every, gather, reduce = (
                units * collective_seconds(op, payload * elements // units, road)
                for op, payload in payloads.items()
            )
            self._sent[key] = every, gather, reduce
        return self._sent[key]

    def _fsdp_units(self, choice: LayoutChoice) -> int:
        """Return how many FSDP units a rank has, which are gathered and reduced one at a time:
        layers // pp (rounded down) for its blocks, and one for embedding and head.
        """
        return self.capacity.spec.layers // choice.pp + 1

    def _send_seconds(self, choice: LayoutChoice) -> float:
        """Return the seconds of sending one microbatch's activations to the next stage; 0 without a
        pipeline.
        """
        if choice.pp == 1:
            return 0.0
        return send_seconds(self._sent_bytes(choice), self.machine(choice).hop())

    def _sent_bytes(self, choice: LayoutChoice) -> int:
        """Return the bytes of activations that a stage sends to the next for one microbatch."""
        tokens = choice.microbatch_size * self.capacity.sequence_length // choice.cp
        # sequence parallelism sends this rank's tokens only
        payload = tokens * self.capacity.spec.hidden_size * self.capacity.element_bytes
        return payload // choice.tp if choice.sequence_parallel else payload

    def _part_seconds(self, part: StagePart, choice: LayoutChoice) -> Stage:
        """Return the seconds of a part (a layer, embedding or head) for one microbatch, forward and
        backward; cached.
        """
        # only tp matters for a block otherwise: far fewer entries
        mesh = choice[:5] if choice.ep > 1 or choice.cp > 1 else choice[:1]
        recompute = choice.recompute if part.again else "none"
        key = (part, mesh, choice.sequence_parallel, recompute, choice.microbatch_size)
        if key not in self._parts:
            self._parts[key] = rows_seconds(
                self._part_operations(part, choice), self.machine(choice)
            )
        return self._parts[key]

    def _part_operations(self, part: StagePart, choice: LayoutChoice) -> Operations:
        """Return the operations (ledger rows) of a part for one microbatch, recomputation
        included.
        """
        spec, ranks = self.capacity.spec, self.capacity.ranks
        share = RankShare(
            choice.microbatch_size,
            self.capacity.sequence_length,
            choice.tp,
            choice.cp,
            choice.sequence_parallel,
            choice.ep,
        )
        if part == EMBEDDING:
            return embedding_rows(spec, share, self.program)
        if part == HEAD:
            return head_rows(spec, share, self.program)
        rows = block_rows(spec, ranks.examples[part.kind], share, self.program)
        return rows.add_recomputation(choice.recompute if part.again else "none")

    def communication_rows(self, choice: LayoutChoice, rank: int) -> Iterator[LedgerRow]:
        """Yield ledger rows for the collectives and sends of a pipeline rank in a whole step, each
        with how often (`times`).
        """
        micros = self.micros(choice)
        for stage in stages_of(choice, rank):
            for part, number in Counter(self._parts_of(choice, stage)).items():
                work = self._part_operations(part, choice)
                for row in (*work.forward, *work.backward):
                    if row.kind == "collective":
                        yield replace(row, times=row.times * number * micros)
        hops = micros * self._link_count(choice, rank)
        if hops:
            payload = self._sent_bytes(choice)
            yield LedgerRow("F0", "", "send", "send", axis="pp", payload=payload, times=hops)
        if choice.dp * choice.cp > 1:
            yield from self._fsdp_rows(choice, rank)

    def _link_count(self, choice: LayoutChoice, rank: int) -> int:
        """Return how many links the virtual stages of a pipeline rank have to stages on other
        ranks.
        """
        mine, last = stages_of(choice, rank), choice.pp * choice.virtual_stages - 1
        around = [other for stage in mine for other in (stage - 1, stage + 1)]
        return sum(0 <= other <= last and other not in mine for other in around)

    def _fsdp_rows(self, choice: LayoutChoice, rank: int) -> Iterator[LedgerRow]:
        """Yield ledger rows for the FSDP collectives of a pipeline rank in a step."""
        elements, micros = self.capacity.ranks.elements(choice, rank), self.micros(choice)
        late = choice.zero < 2 or choice.schedule.startswith("zero-bubble")
        reduces = 1 if late else micros
        gathers = reduces * (2 if choice.zero == 3 and not late else 1)
        if choice.zero == 0:
            yield LedgerRow("B0", "", "collective", "all-reduce", axis="fsdp", payload=4 * elements)
            return
        size = self.capacity.element_bytes * elements
        for op, payload, times in (
            ("all-gather", size, gathers),
            ("reduce-scatter", 4 * elements, reduces),
        ):
            yield LedgerRow("B0", "", "collective", op, axis="fsdp", payload=payload, times=times)


def exposed_seconds(seconds: float, computed: float, first: float) -> float:
    """Return the seconds that a collective of `seconds` adds to computation of `computed` seconds
    that runs at the same time. A share `first` of it cannot be hidden; the hidden part still costs
    a quarter of itself, as it takes multiprocessors and memory from the computation.
    """
    hidden = min(seconds * (1 - first), computed)
    return seconds - hidden + CONTENTION * hidden


def _rank_total(rank: RankGroup, seconds: dict[StagePart, float]) -> float:
    """Return the seconds of all parts of a pipeline rank, given the seconds of each part."""
    return sum(number * seconds[part] for part, number in rank.parts)


# Traffic: a ring of n ranks, g of them in each node, goes from one node to the next at one of g
# steps: so of what its ranks send, (n - 1) / n of a payload each (twice that of an all-reduce),
# 1 / g crosses the network, and the rest stays in nodes.
NODE = "node"
AXES = {"fsdp": "dp"}  # what cost.Parts calls them


def traffic(pricing: Pricing, choice: LayoutChoice) -> tuple[Traffic, ...]:
    """Return the traffic of one rank by tier and axis, the nearest tier first: the rank with most
    parameters, among those with stages on both sides if there are any.
    """
    machine = pricing.machine(choice)
    rank = max(
        # ranks with neighbours on both sides send most
        range(choice.pp)[1:-1] or range(choice.pp),
        key=lambda rank: pricing.capacity.ranks.elements(choice, rank),
    )
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for row in pricing.communication_rows(choice, rank):
        for entry in tier_traffic(row, machine):
            sent, seconds = sums.get((entry.tier, entry.axis), (0.0, 0.0))
            sums[entry.tier, entry.axis] = sent + entry.sent, seconds + entry.seconds
    tiers = [NODE, *(tier.name for tier in pricing.cluster.tiers), "network"]
    entries = (Traffic(*key, *values) for key, values in sums.items())
    return tuple(sorted(entries, key=lambda traffic: (tiers.index(traffic.tier), traffic.axis)))


def tier_traffic(row: LedgerRow, machine: Machine) -> Iterator[Traffic]:
    """Yield the bytes that a rank sends for a row (a collective or a send, all its `times`) on each
    tier that it crosses, with the seconds that the link is busy.
    """
    axis = AXES.get(row.axis, row.axis)
    if row.kind == "send":
        tier, size = machine.hop().tier, float(row.payload * row.times)
        yield Traffic(tier, axis, size, row_seconds(row, machine) * row.times)
        return
    road = machine.road(row.axis)
    if road.ranks == 1:
        return
    inside, across = (part * row.payload * row.times for part in shares(row.op, road))
    if inside:
        yield Traffic(NODE, axis, inside, inside / road.near)
    if across:
        yield Traffic(road.tier, axis, across, row_seconds(row, machine) * row.times)


def shares(op: str, road: Road) -> tuple[float, float]:
    """Return two shares of a collective's full payload that a rank sends, on average over the ranks
    of its node: within the node, and out of it. `op`: all-to-all, all-reduce (twice a ring's, so
    the shares may add up to over 1), or any other, a ring in one direction.
    """
    n, g = road.ranks, road.together
    if op == "all-to-all":
        return (g - 1) / n, (n - g) / n
    sent = (n - 1) / n * (2 if op == "all-reduce" else 1)
    # one of g hops of the ring leaves the node
    return (sent, 0.0) if g == n else (sent * (g - 1) / g, sent / g)
