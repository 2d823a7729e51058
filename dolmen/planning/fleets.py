"""The same model and batch on other numbers of nodes, for the front of days against cost."""

from collections.abc import Iterator
from dataclasses import replace

from dolmen.planning.plan import Fleet, Plan, words
from dolmen.planning.question import Question
from dolmen.planning.search import look


def with_fleets(question: Question, plan: Plan) -> Plan:
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
            found = look(other, 1)
        except ValueError:  # no layout of so many GPUs
            continue
        if found.best:
            timed = other.pricing.full(found.best[0])
            yield Fleet(placed.gpus, timed.estimate, words(found.best[0].options))


def sizes(nodes: int, most: int) -> list[int]:
    """Numbers of nodes from an eighth to four times as many, as far as a cluster goes."""
    halves = [nodes // 2**n for n in (3, 2, 1) if nodes % 2**n == 0]
    return [*halves, *(nodes * n for n in (2, 4) if nodes * n <= most)]
