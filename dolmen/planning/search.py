"""The fastest layouts of a model on a cluster. Every layout is held against the device's memory,
those that fit are timed in closed form, and the best of them simulated.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dolmen.core.config import from_dict, to_dict
from dolmen.core.words import counted
from dolmen.files import gate, write
from dolmen.model import count
from dolmen.model.layout import Layout
from dolmen.planning.calibrate import shipped
from dolmen.planning.capacity import Capacity
from dolmen.planning.config import PlanConfig, PlanRequest
from dolmen.planning.hardware import Cluster, read_cluster
from dolmen.planning.outline import Outline
from dolmen.planning.plan import Candidate, Change, Plan, Prices, Timeline, words
from dolmen.planning.pricing import Pricing, Timed
from dolmen.planning.space import Choice, Pins, Space, divisors
from dolmen.planning.traffic import traffic
from dolmen.training.config import RunConfig

SIMULATED = 20
"""Layouts that are simulated: the best in closed form."""
PRODUCTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# what of a step's parts counts as what bounds it
BOUNDS = {"product": "compute", "attention": "compute", "optimizer": "memory", "pp": "bubble"}


@dataclass(frozen=True)
class Question:
    """A run on all GPUs of a cluster, and what is given of its layout."""

    name: str
    run: RunConfig
    cluster: Cluster
    pins: Pins
    microbatch_size: int | None

    @staticmethod
    def of(request: PlanRequest) -> "Question":
        """Of what is asked. Raises ValueError."""
        asked = request.asked
        if asked.cluster is None:
            raise ValueError("missing --cluster (such as dgx-a100:384, or a YAML file)")
        cluster = read_cluster(asked.cluster)
        step = {n: v for n, v in asked.train.said.items() if n != "microbatch_size"}
        if "dtype" not in step and request.run.train.dtype not in ("bfloat16", "float16"):
            step["dtype"] = "bfloat16"
        if "dtype" not in asked.train.said and "bf16" not in cluster.device.peak:
            step["dtype"] = "float16" if "fp16" in cluster.device.peak else "float32"
        split = (asked.layout.schedule or "").startswith("zero-bubble")
        if split and "compile" not in step:
            step["compile"] = False
        run = replace(request.run, train=replace(request.run.train, **step))
        run.check_length()
        if split:
            replace(run, layout=Layout(**asked.layout.said)).refuse_compiled()
        cluster.device.rate(PRODUCTS[run.train.dtype])
        return Question(request.name, run, cluster, asked.layout, asked.train.microbatch_size)

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.run.train.global_batch_size

    def space(self, pins: Pins | None = None) -> Space:
        """Its layouts, or those with other pins."""
        return Space(
            self.run.trained,
            self.cluster.gpus,
            self.batch,
            self.run.sequence_length,
            self.microbatch_size,
            self.run.train.dropout,
            self.run.train.compile,
            self.pins if pins is None else pins,
        )

    @cached_property
    def capacity(self) -> Capacity:
        """What ranks hold."""
        return Capacity(
            self.run.trained,
            self.run.sequence_length,
            self.run.train.dropout,
            4 if self.run.train.dtype == "float32" else 2,
            other=self.cluster.device.reserved,
        )

    @cached_property
    def pricing(self) -> Pricing:
        """What layouts take."""
        outline = Outline(self.run.trained, self.run.sequence_length, self.capacity.element_bytes)
        dtype = PRODUCTS[self.run.train.dtype]
        spread = shipped().spread(self.cluster.device.name)
        return Pricing(outline, self.capacity, self.cluster, self.batch, dtype, spread)

    def held(self, choice: Choice) -> int:
        """Bytes of the fullest rank."""
        return self.capacity.fullest(choice, self.batch)

    def fits(self, choice: Choice) -> bool:
        """Whether every rank has memory enough."""
        return self.held(choice) <= self.cluster.device.memory

    def as_run(self, found: Plan) -> RunConfig:
        """The first layout of a plan of it, as `dolmen train` takes it."""
        said: dict[str, dict[str, Any]] = {"layout": {}, "train": {}}
        for name, value in found.ranked[0].layout.items():
            section, _, option = name.partition(".")
            said[section][option] = value
        return from_dict(RunConfig, said, replace(self.run, layout=Layout()))


@dataclass(frozen=True)
class Found:
    """What a search has seen."""

    considered: int
    fitting: int
    best: list[Choice]
    """The fastest in closed form first, of layouts that differ in ZeRO or in how cp attends alone
    one."""
    nearest: tuple[int, Choice] | None
    """Where none fits, that which holds least, and its bytes."""


def plan(request: PlanRequest) -> Plan:
    """The fastest layouts. Raises ValueError, in one line, where no layout can be or none fits."""
    return answer(Question.of(request), request.asked)


def answer(question: Question, asked: PlanConfig) -> Plan:
    """The same."""
    found = look(question, max(SIMULATED, asked.top))
    if not found.best:
        raise ValueError(refusal(question, found))
    timed = [(question.pricing.full(choice), choice) for choice in found.best]
    timed.sort(key=lambda one: one[0].estimate.seconds)
    tree = question.run.tree
    first = timed[0][0]
    return Plan(
        question.name,
        count.parameters(tree),
        question.run.sequence_length,
        question.batch,
        question.cluster,
        question.cluster.gpus,
        tuple(candidate(question, choice, one) for one, choice in timed[: asked.top]),
        Timeline(first.schedule, first.simulation),
        considered=found.considered,
        fitting=found.fitting,
        tokens=asked.tokens or 0,
        prices=Prices(asked.rent, asked.node_price, asked.years, asked.kilowatt_hour),
        dtype=question.pricing.dtype,
        interval=question.pricing.spread.words,
    )


def write_recipe(question: Question, found: Plan, file: Path) -> None:
    """The first layout as a run that `dolmen train` takes. Raises ValueError where it cannot be
    written.
    """
    if file.suffix not in (".yaml", ".yml"):
        raise ValueError(f"--as-recipe {file}: give a .yaml file")
    text = gate.whole_yaml(yaml.safe_dump(to_dict(question.as_run(found)), sort_keys=False))
    try:
        write.replace(file, text)
    except OSError as error:
        raise ValueError(f"--as-recipe {file}: {error.strerror}") from None


def look(question: Question, best: int = SIMULATED) -> Found:
    """Every layout, held against memory. Raises ValueError where there is none."""
    considered = fitting = 0
    nearest: tuple[int, Choice] | None = None
    fastest: dict[tuple, tuple[float, int, bool, Choice]] = {}
    memory = question.cluster.device.memory
    for choice in question.space().choices():
        considered += 1
        held = question.held(choice)
        if held > memory:
            if nearest is None or held < nearest[0]:
                nearest = held, choice
            continue
        fitting += 1
        alike = choice._replace(zero=1, context="ring")
        # the closed forms are a ring's: what is gathered is longer than what they count
        gathers = choice.context == "gather"
        key = round(question.pricing.quick(choice), 6), held, gathers, choice
        if alike not in fastest or key < fastest[alike]:
            fastest[alike] = key
    if not considered:
        question.space().refuse()
    chosen = [choice for *_, choice in heapq.nsmallest(best, fastest.values())]
    return Found(considered, fitting, chosen, nearest)


def refusal(question: Question, found: Found) -> str:
    """Of layouts of which none fits: what is missing, and the nearest that does."""
    assert found.nearest is not None
    held, choice = found.nearest
    memory = question.cluster.device.memory
    gpus = counted(question.cluster.gpus, "GPU")
    layouts, lacks = counted(found.considered, "layout"), gib(held - memory)
    told = (
        f"none of {layouts} fits {gpus} of {gib(memory)}: the nearest, {words(choice.options)}, "
        f"needs {gib(held)} on its fullest rank, {lacks} too many"
    )
    other = nearest_fitting(question, choice)
    if other is not None:
        fitting = f"{words(other.options)} ({gib(question.held(other))})"
        return f"{told}; the nearest that fits is {fitting}"
    larger = enough(question)
    if larger is None:
        return f"{told}: use more nodes or a smaller model"
    return f"{told}: use --cluster {question.cluster.name}:{larger} or more"


def nearest_fitting(question: Question, near: Choice) -> Choice | None:
    """Of layouts without what is pinned the one that fits and differs in least."""
    if not question.pins.said and question.microbatch_size is None:
        return None
    free = replace(question, pins=Pins(), microbatch_size=None)
    fitting = (choice for choice in free.space().choices() if question.fits(choice))

    def distance(choice: Choice) -> tuple[int, float]:
        differs = sum(a != b for a, b in zip(choice, near, strict=True))
        return differs, question.pricing.quick(choice)

    return min(fitting, key=distance, default=None)


def enough(question: Question) -> int | None:
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


def candidate(question: Question, choice: Choice, timed: Timed) -> Candidate:
    """A layout with all that is said of it."""
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
        changes=tuple(changes(question, choice)),
    )


def bound(parts: dict[str, float]) -> str:
    """What of a step takes longest beside the products that it is for; these, where nothing else
    takes a tenth.
    """
    sums: dict[str, float] = {}
    for name, seconds in parts.items():
        name = BOUNDS.get(name, name)
        sums[name] = sums.get(name, 0.0) + seconds
    whole, computed = sum(sums.values()), sums.pop("compute", 0.0)
    name, most = max(sums.items(), key=lambda one: one[1], default=("compute", 0.0))
    return name if most > 0.1 * whole or computed == 0 else "compute"


def changes(question: Question, choice: Choice) -> Iterator[Change]:
    """What one change of a layout would buy, the fastest first; dp is what the others leave."""
    tried = []
    for other in dict.fromkeys(neighbours(question, choice)):
        if other == choice:  # of what has no effect, such as ZeRO where dp is 1
            continue
        held = question.held(other)
        seconds = question.pricing.quick(other)
        fits = held <= question.cluster.device.memory
        tried.append(Change(difference(choice, other), seconds, held, fits))
    yield from sorted(tried, key=lambda change: change.seconds)


def neighbours(question: Question, choice: Choice) -> Iterator[Choice]:
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


def _variants(choice: Choice) -> dict[str, list]:
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
        "recompute": [kind for kind in ("none", "full") if kind != choice.recompute],
        "virtual_stages": [v for v in (chunks - 1, chunks + 1) if v > 1 and chunks > 1],
    }


def difference(one: Choice, other: Choice) -> str:
    """ "tp 4" of two that differ in tp, and in the dp that it leaves."""
    pairs = zip(one._asdict().items(), other, strict=True)
    told = [f"{n.replace('_', '-')} {b}" for (n, a), b in pairs if a != b and n != "dp"]
    return " ".join(told)


def gib(size: int) -> str:
    """Bytes, to a tenth of a GiB."""
    return f"{size / 2**30:,.1f} GiB"
