"""Searches for the fastest layouts of a model on a cluster.

search_layouts   checks every layout against the memory, and times those that fit in closed form
make_plan        simulates the best of them, dry-runs the first, and returns the plan
changes          what each change of one option of a layout would gain
add_fleets       the same model and batch on other numbers of nodes: days against cost
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dolmen.core.log import gib
from dolmen.core.messages import plural
from dolmen.model import count
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import (
    Candidate,
    Change,
    Fleet,
    Plan,
    Prices,
    Timeline,
    describe_usable,
    words,
)
from dolmen.planning.pricing import Timed, traffic
from dolmen.planning.question import Question
from dolmen.planning.space import LayoutChoice, Pins, divisors
from dolmen.planning.winner import command, confirm

LESS = 0.99
"""Share of the bytes of a layout: one that holds more than this holds as much."""


def changes(question: Question, choice: LayoutChoice, now: float) -> Iterator[Change]:
    """Simulate each layout that differs from `choice` in one option (and the dp that follows); once
    all are simulated, yield what each would change, the fastest first, also those that do not fit
    in memory: seconds per step, peak bytes, whether they fit. Left out are layouts that are neither
    faster than `now`, the seconds of `choice`, nor need at least 1 % less memory.
    """
    here = question.fullest_bytes(choice)
    tried = []
    for other in dict.fromkeys(neighbours(question, choice)):
        size = question.fullest_bytes(other)
        seconds = question.pricing.full(other).estimate.seconds
        if seconds >= now and size > LESS * here:
            continue
        fits = size <= question.memory
        tried.append(Change(difference(choice, other), seconds, size, fits))
    yield from sorted(tried, key=lambda change: change.seconds)


def neighbours(question: Question, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Yield the layouts that differ from `choice` in one option (and the dp that follows), also
    where that option is pinned.
    """
    pins: dict[str, Any] = choice._asdict()
    size = pins.pop("microbatch_size")
    pins.pop("dp")
    if choice.recompute == "none":
        pins["recompute_layers"] = None
    for name, values in _variants(choice).items():
        for value in values:
            changed = {**pins, name: value} if name != "microbatch_size" else pins
            micro = value if name == "microbatch_size" else size
            if name == "recompute" and value == "none":
                changed["recompute_layers"] = None
            try:
                # raises if the options do not go together
                space = replace(question.space(Pins(**changed)), microbatch_size=micro)
            except ValueError:
                continue
            yield from space.choices()


def _variants(choice: LayoutChoice) -> dict[str, list]:
    """Return for each option the values one step away: sizes doubled or at the next smaller
    divisor, other ZeRO stages and so on.
    """
    sizes = {n: [getattr(choice, n) * 2] for n in ("tp", "pp", "cp", "ep", "microbatch_size")}
    for name, values in sizes.items():
        value = getattr(choice, name)
        if value > 1:
            # the next smaller size that divides
            values.append(max(divisors(value)[:-1]))
    chunks = choice.virtual_stages
    return {
        **sizes,
        "zero": [zero for zero in (0, 1, 2, 3) if zero != choice.zero],
        "sequence_parallel": [not choice.sequence_parallel],
        "recompute": [kind for kind in ("none", "selective", "full") if kind != choice.recompute],
        "virtual_stages": [v for v in (chunks - 1, chunks + 1) if v > 1 and chunks > 1],
    }


def difference(first: LayoutChoice, second: LayoutChoice) -> str:
    """Return the options in which layout `second` differs from `first`, with its values and without
    dp, such as "tp 4".
    """
    pairs = zip(first._asdict().items(), second, strict=True)
    text = [f"{n.replace('_', '-')} {b}" for (n, a), b in pairs if a != b and n != "dp"]
    return " ".join(text)


def add_fleets(question: Question, plan: Plan) -> Plan:
    """Return the plan with fleets, the best layout for other numbers of GPUs: half as many nodes,
    twice as many, and so on. These keep the tp, cp and ep of the first layout, so that the search
    takes seconds and not minutes.
    """
    first = plan.ranked[0]
    fleet = Fleet(plan.gpus, first.estimate, first.words)
    return replace(plan, fleets=(fleet, *_other_fleets(question, plan)))


def _other_fleets(question: Question, plan: Plan) -> Iterator[Fleet]:
    """Yield the best layout, with its step time, on each other number of nodes; those on which none
    fits are left out.
    """
    cluster, layout = question.cluster, plan.ranked[0].layout
    pinned = {axis: int(layout.get(f"layout.{axis}", 1)) for axis in ("tp", "cp", "ep")}
    # pp and dp are free
    pins = replace(question.pins, pp=None, dp=None, **pinned)
    for nodes in sizes(cluster.nodes, cluster.tiers[-1].nodes if cluster.tiers else cluster.nodes):
        placed = replace(cluster, nodes=nodes)
        other = replace(question, cluster=placed, pins=pins)
        try:
            result = search_layouts(other, 1)
        except ValueError:  # no layout of so many GPUs
            continue
        if result.best:
            timed = other.pricing.full(result.best[0])
            yield Fleet(placed.gpus, timed.estimate, words(result.best[0].options))


def sizes(nodes: int, most: int) -> list[int]:
    """Return other numbers of nodes than `nodes`: an eighth, a quarter, half (where whole), twice
    and four times, the larger ones up to `most`.
    """
    halves = [nodes // 2**n for n in (3, 2, 1) if nodes % 2**n == 0]
    return [*halves, *(nodes * n for n in (2, 4) if nodes * n <= most)]


SIMULATED = 20
"""Layouts that are simulated: the best in closed form."""
# what of a step's parts counts as what bounds it
BOUNDS = {"product": "compute", "attention": "compute", "optimizer": "memory", "pp": "bubble"}


@dataclass(frozen=True)
class SearchResult:
    """The layouts that a search has found."""

    considered: int
    """Number of layouts."""
    fitting: int
    """Number of those that fit the device's memory."""
    best: list[LayoutChoice]
    """The fastest in closed form first. Of layouts that differ only in ZeRO or in how cp attends,
    one.
    """
    nearest: tuple[int, LayoutChoice] | None
    """Bytes and layout of the one that needs least memory among those that do not fit."""


def make_plan(question: Question, options: PlanConfig, progress: bool = False) -> Plan:
    """Search the fastest layouts, simulate and dry-run the best, and return the plan. `progress`
    shows a bar of the dry run on stderr. Raises ValueError, in one line, where no layout is
    possible or none fits.
    """
    result = search_layouts(question, max(SIMULATED, options.top))
    if not result.best:
        raise ValueError(refusal(question, result))
    timed = [(question.pricing.full(choice), choice) for choice in result.best]
    timed.sort(key=lambda candidate: candidate[0].estimate.seconds)
    dry = None
    if options.dryrun:
        dry = confirm(question, [choice for _, choice in timed], progress)
        # layouts that the dry run rejected
        timed = timed[len(dry.rejected) :]
    spec = question.run.spec
    first = timed[0][0]
    return Plan(
        question.name,
        count.parameters(spec),
        question.run.sequence_length,
        question.batch,
        question.cluster,
        question.cluster.gpus,
        tuple(
            candidate(question, choice, estimated, options.explain or options.json is not None)
            for estimated, choice in timed[: options.top]
        ),
        Timeline(first.schedule, first.simulation),
        considered=result.considered,
        fitting=result.fitting,
        tokens=options.tokens or 0,
        prices=Prices(options.rent, options.node_price, options.years, options.kilowatt_hour),
        dtype=question.pricing.dtype,
        interval=question.pricing.spread.words,
        dry=dry,
        assumed=tuple(f"train.{name.replace('_', '-')}" for name in question.assumed),
        command=command(question, timed[0][1]),
        headroom=question.headroom,
    )


def search_layouts(question: Question, best: int = SIMULATED) -> SearchResult:
    """Try every layout of the question: those that fit the memory are timed in closed form, and the
    `best` fastest are returned, with counts and the nearest that does not fit. Raises ValueError
    where there is no layout at all.
    """
    considered = fitting = 0
    nearest: tuple[int, LayoutChoice] | None = None
    fastest: dict[tuple, tuple[float, int, bool, LayoutChoice]] = {}
    memory = question.memory
    full: LayoutChoice | None = None
    for choice in question.space().choices():
        considered += 1
        # choices come in the order none, selective, full
        if choice.recompute == "selective" and choice._replace(recompute="none") == full:
            fitting += 1  # as what computes nothing again does, which is faster
            continue
        size = question.fullest_bytes(choice)
        if size > memory:
            if nearest is None or size < nearest[0]:
                nearest = size, choice
            continue
        fitting += 1
        full = choice if choice.recompute == "none" else full
        kind = choice._replace(zero=1, context="ring")
        # the closed forms are a ring's: what is gathered is longer than what they count
        gathers = choice.context == "gather"
        key = round(question.pricing.quick(choice), 6), size, gathers, choice
        if kind not in fastest or key < fastest[kind]:
            fastest[kind] = key
    if not considered:
        question.space().refuse()
    # ties are broken by memory, then the layout itself
    chosen = [choice for *_, choice in heapq.nsmallest(best, fastest.values())]
    return SearchResult(considered, fitting, chosen, nearest)


def refusal(question: Question, result: SearchResult) -> str:
    """Return the error text for a model that fits no layout: the memory that is missing, and what
    would fit (a layout without the pins, or more nodes).
    """
    assert result.nearest is not None
    size, choice = result.nearest
    memory = question.memory
    gpus = plural(question.cluster.gpus, "GPU")
    layouts, lacks = plural(result.considered, "layout"), gib(size - memory)
    text = (
        f"none of {layouts} fits into {gpus} of "
        f"{describe_usable(question.cluster.device.memory, question.headroom)}: the nearest, "
        f"{words(choice.options)}, needs {gib(size)} on its fullest rank, {lacks} too many"
    )
    other = nearest_fitting(question, choice)
    if other is not None:
        fitting = f"{words(other.options)} ({gib(question.fullest_bytes(other))})"
        return f"{text}; the nearest that fits is {fitting}"
    larger = enough_nodes(question)
    if larger is None:
        return f"{text}: use more nodes or a smaller model"
    return f"{text}: use --cluster {question.cluster.name}:{larger} or more"


def nearest_fitting(question: Question, near: LayoutChoice) -> LayoutChoice | None:
    """Return the layout that fits and differs in the fewest options from `near`, when nothing is
    pinned; None if nothing is pinned already, or none fits.
    """
    if not question.pins.specified and question.microbatch_size is None:
        return None
    free = replace(question, pins=Pins(), microbatch_size=None)
    fitting = (choice for choice in free.space().choices() if question.fits(choice))

    def distance(choice: LayoutChoice) -> tuple[int, float]:
        """Return a sort key of a layout: the number of options in which it differs from `near`,
        then its predicted seconds.
        """
        # each option counts the same
        differs = sum(a != b for a, b in zip(choice, near, strict=True))
        return differs, question.pricing.quick(choice)

    return min(fitting, key=distance, default=None)


def enough_nodes(question: Question) -> int | None:
    """Return the first of 2, 4, ... 64 times the present nodes on which a layout fits; None if none
    does, or the cluster has not so many.
    """
    cluster = question.cluster
    most = cluster.tiers[-1].nodes if cluster.tiers else cluster.nodes
    for doubled in (cluster.nodes * 2**n for n in range(1, 7)):
        if doubled > most:
            return None
        larger = replace(question, cluster=replace(cluster, nodes=doubled))
        if any(larger.fits(choice) for choice in larger.space().choices()):
            return doubled
    return None


def candidate(question: Question, choice: LayoutChoice, timed: Timed, explained: bool) -> Candidate:
    """Return a simulated layout as an entry of the plan: time, memory, bottleneck, MFU, HFU and
    traffic. `explained`: also simulate what single changes would gain.
    """
    run, cluster, seconds = question.run, question.cluster, timed.estimate.seconds
    tokens = question.batch * run.sequence_length
    # of the datasheet, so MFU is comparable with publications
    peak = cluster.gpus * cluster.device.rate(question.pricing.dtype)
    flops = count.training_flops_per_token(run.trained, run.sequence_length) * tokens
    # forward, a third of it, is computed once more, in the layers that do
    layers = [len(stage) for stage in question.capacity.ranks.layers_of_stages(choice)]
    some = choice.recompute_layers
    again = sum(n if some is None else min(n, some) for n in layers) / sum(layers)
    # forward is 1/3 of forward and backward
    extra = again / 3 if choice.recompute == "full" else 0.0
    mfu = flops / seconds / peak
    return Candidate(
        choice.options,
        timed.estimate,
        question.capacity.stages(choice, question.batch),
        bound(timed.estimate.parts),
        mfu,
        mfu * (1 + extra),
        traffic=traffic(question.pricing, choice),
        changes=tuple(changes(question, choice, seconds)) if explained else (),
    )


def bound(parts: dict[str, float]) -> str:
    """Return the bottleneck of a step: the part with most seconds besides compute (matrix products
    and attention), if it takes over a tenth of the step; else "compute".
    """
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        name = BOUNDS.get(name, name)
        sums[name] = sums.get(name, 0.0) + seconds
    full, computed = sum(sums.values()), sums.pop("compute", 0.0)
    name, most = max(sums.items(), key=lambda item: item[1], default=("compute", 0.0))
    return name if most > 0.1 * full or computed == 0 else "compute"
