"""Searches for the fastest layouts of a model on a cluster, and compares their neighbours.

What one change of a layout would buy: those that differ from it in one thing.

The same model and batch on other numbers of nodes, for the front of days against cost.

The fastest layouts of a model on a cluster. Every layout is held against the device's memory,
those that fit are timed in closed form, and the best of them simulated.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dolmen.core.log import gib
from dolmen.core.messages import plural
from dolmen.model import count
from dolmen.planning.config import PlanConfig
from dolmen.planning.plan import Candidate, Change, Fleet, Plan, Prices, Timeline, words
from dolmen.planning.pricing import Timed, traffic
from dolmen.planning.question import Question
from dolmen.planning.space import LayoutChoice, Pins, divisors
from dolmen.planning.winner import command, confirm

LESS = 0.99
"""Share of the bytes of a layout: one that holds more than this holds as much."""


def changes(question: Question, choice: LayoutChoice, now: float) -> Iterator[Change]:
    """Yield what each change of one thing would gain over a layout that takes `now` seconds, the
    fastest first; dp is what the others leave. Each is simulated, as that is. A change that takes
    as long and holds as much gains nothing.
    """
    here = question.fullest_bytes(choice)
    tried = []
    for other in dict.fromkeys(neighbours(question, choice)):
        if other == choice:  # of what has no effect, such as ZeRO where dp is 1
            continue
        held = question.fullest_bytes(other)
        seconds = question.pricing.full(other).estimate.seconds
        if seconds >= now and held > LESS * here:
            continue
        fits = held <= question.cluster.device.memory
        tried.append(Change(difference(choice, other), seconds, held, fits))
    yield from sorted(tried, key=lambda change: change.seconds)


def neighbours(question: Question, choice: LayoutChoice) -> Iterator[LayoutChoice]:
    """Layouts that differ in one thing, whatever is pinned."""
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
                space = replace(question.space(Pins(**changed)), microbatch_size=micro)
            except ValueError:
                continue
            yield from space.choices()


def _variants(choice: LayoutChoice) -> dict[str, list]:
    """One step each way."""
    sizes = {n: [getattr(choice, n) * 2] for n in ("tp", "pp", "cp", "ep", "microbatch_size")}
    for name, found in sizes.items():
        value = getattr(choice, name)
        if value > 1:
            found.append(max(divisors(value)[:-1]))
    chunks = choice.virtual_stages
    return {
        **sizes,
        "zero": [zero for zero in (0, 1, 2, 3) if zero != choice.zero],
        "sequence_parallel": [not choice.sequence_parallel],
        "recompute": [kind for kind in ("none", "selective", "full") if kind != choice.recompute],
        "virtual_stages": [v for v in (chunks - 1, chunks + 1) if v > 1 and chunks > 1],
    }


def difference(one: LayoutChoice, other: LayoutChoice) -> str:
    """ "tp 4" of two that differ in tp, and in the dp that it leaves."""
    pairs = zip(one._asdict().items(), other, strict=True)
    text = [f"{n.replace('_', '-')} {b}" for (n, a), b in pairs if a != b and n != "dp"]
    return " ".join(text)


def add_fleets(question: Question, plan: Plan) -> Plan:
    """The plan, with the best layouts of half as many nodes, twice as many, and so on. These keep
    the tensor, context and expert parallelism of its first layout, which is seconds in place of
    minutes.
    """
    first = plan.ranked[0]
    own = Fleet(plan.gpus, first.estimate, first.words)
    return replace(plan, fleets=(own, *_others(question, plan)))


def _others(question: Question, plan: Plan) -> Iterator[Fleet]:
    cluster, said = question.cluster, plan.ranked[0].layout
    kept = {axis: int(said.get(f"layout.{axis}", 1)) for axis in ("tp", "cp", "ep")}
    pins = replace(question.pins, pp=None, dp=None, **kept)
    for nodes in sizes(cluster.nodes, cluster.tiers[-1].nodes if cluster.tiers else cluster.nodes):
        placed = replace(cluster, nodes=nodes)
        other = replace(question, cluster=placed, pins=pins)
        try:
            found = search_layouts(other, 1)
        except ValueError:  # no layout of so many GPUs
            continue
        if found.best:
            timed = other.pricing.full(found.best[0])
            yield Fleet(placed.gpus, timed.estimate, words(found.best[0].options))


def sizes(nodes: int, most: int) -> list[int]:
    """Numbers of nodes from an eighth to four times as many, as far as a cluster goes."""
    halves = [nodes // 2**n for n in (3, 2, 1) if nodes % 2**n == 0]
    return [*halves, *(nodes * n for n in (2, 4) if nodes * n <= most)]


SIMULATED = 20
"""Layouts that are simulated: the best in closed form."""
# what of a step's parts counts as what bounds it
BOUNDS = {"product": "compute", "attention": "compute", "optimizer": "memory", "pp": "bubble"}


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    considered: int
    fitting: int
    best: list[LayoutChoice]
    """The fastest in closed form first, of layouts that differ in ZeRO or in how cp attends alone
    one."""
    nearest: tuple[int, LayoutChoice] | None
    """The bytes and the layout that needs least memory, if none fits."""


def make_plan(question: Question, options: PlanConfig, progress: bool = False) -> Plan:
    """The fastest layouts; `progress` shows that of a dry run on stderr. Raises ValueError, in one
    line, where no layout can be or none fits.
    """
    found = search_layouts(question, max(SIMULATED, options.top))
    if not found.best:
        raise ValueError(refusal(question, found))
    timed = [(question.pricing.full(choice), choice) for choice in found.best]
    timed.sort(key=lambda one: one[0].estimate.seconds)
    dry = None
    if options.dryrun:
        dry = confirm(question, [choice for _, choice in timed], progress)
        timed = timed[len(dry.struck) :]
    tree = question.run.tree
    first = timed[0][0]
    return Plan(
        question.name,
        count.parameters(tree),
        question.run.sequence_length,
        question.batch,
        question.cluster,
        question.cluster.gpus,
        tuple(
            candidate(question, choice, one, options.explain or options.json is not None)
            for one, choice in timed[: options.top]
        ),
        Timeline(first.schedule, first.simulation),
        considered=found.considered,
        fitting=found.fitting,
        tokens=options.tokens or 0,
        prices=Prices(options.rent, options.node_price, options.years, options.kilowatt_hour),
        dtype=question.pricing.dtype,
        interval=question.pricing.spread.words,
        dry=dry,
        assumed=tuple(f"train.{name.replace('_', '-')}" for name in question.assumed),
        command=command(question, timed[0][1]),
    )


def search_layouts(question: Question, best: int = SIMULATED) -> SearchResult:
    """Every layout, held against memory. Raises ValueError where there is none."""
    considered = fitting = 0
    nearest: tuple[int, LayoutChoice] | None = None
    fastest: dict[tuple, tuple[float, int, bool, LayoutChoice]] = {}
    memory = question.cluster.device.memory
    whole: LayoutChoice | None = None
    for choice in question.space().choices():
        considered += 1
        if choice.recompute == "selective" and choice._replace(recompute="none") == whole:
            fitting += 1  # as what computes nothing again does, which is faster
            continue
        held = question.fullest_bytes(choice)
        if held > memory:
            if nearest is None or held < nearest[0]:
                nearest = held, choice
            continue
        fitting += 1
        whole = choice if choice.recompute == "none" else whole
        kind = choice._replace(zero=1, context="ring")
        # the closed forms are a ring's: what is gathered is longer than what they count
        gathers = choice.context == "gather"
        key = round(question.pricing.quick(choice), 6), held, gathers, choice
        if kind not in fastest or key < fastest[kind]:
            fastest[kind] = key
    if not considered:
        question.space().refuse()
    chosen = [choice for *_, choice in heapq.nsmallest(best, fastest.values())]
    return SearchResult(considered, fitting, chosen, nearest)


def refusal(question: Question, found: SearchResult) -> str:
    """Explain that no layout fits: what is missing, and the nearest that does."""
    assert found.nearest is not None
    held, choice = found.nearest
    memory = question.cluster.device.memory
    gpus = plural(question.cluster.gpus, "GPU")
    layouts, lacks = plural(found.considered, "layout"), gib(held - memory)
    text = (
        f"none of {layouts} fits {gpus} of {gib(memory)}: the nearest, {words(choice.options)}, "
        f"needs {gib(held)} on its fullest rank, {lacks} too many"
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
    """Return the layout that fits and differs in least, of those without what is pinned."""
    if not question.pins.said and question.microbatch_size is None:
        return None
    free = replace(question, pins=Pins(), microbatch_size=None)
    fitting = (choice for choice in free.space().choices() if question.fits(choice))

    def distance(choice: LayoutChoice) -> tuple[int, float]:
        differs = sum(a != b for a, b in zip(choice, near, strict=True))
        return differs, question.pricing.quick(choice)

    return min(fitting, key=distance, default=None)


def enough_nodes(question: Question) -> int | None:
    """The fewest nodes, by doubling, on which a layout fits; None: more than the cluster has."""
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
    """A layout with all that is said of it; `explained`: and of its neighbours, which are simulated
    too.
    """
    run, cluster, seconds = question.run, question.cluster, timed.estimate.seconds
    tokens = question.batch * run.sequence_length
    peak = cluster.gpus * cluster.device.rate(question.pricing.dtype)
    flops = count.training_flops_per_token(run.trained, run.sequence_length) * tokens
    # forward, a third of it, is computed once more, in the layers that do
    layers = [len(stage) for stage in question.capacity.ranks.layers_of_stages(choice)]
    some = choice.recompute_layers
    again = sum(n if some is None else min(n, some) for n in layers) / sum(layers)
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
    """Return the part of a step that takes longest other than the products; compute, where nothing
    else takes a tenth.
    """
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        name = BOUNDS.get(name, name)
        sums[name] = sums.get(name, 0.0) + seconds
    whole, computed = sum(sums.values()), sums.pop("compute", 0.0)
    name, most = max(sums.items(), key=lambda one: one[1], default=("compute", 0.0))
    return name if most > 0.1 * whole or computed == 0 else "compute"
