"""What one change of a layout would buy: those that differ from it in one thing."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dolmen.planning.plan import Change
from dolmen.planning.question import Question
from dolmen.planning.space import Choice, Pins, divisors

LESS = 0.99
"""Of the bytes of a layout: what holds more than this holds as much."""


def changes(question: Question, choice: Choice, now: float) -> Iterator[Change]:
    """What one change of a layout would buy that takes `now` seconds, the fastest first; dp is what
    the others leave. Each is simulated, as that is. What takes as long and holds as much buys
    nothing.
    """
    here = question.held(choice)
    tried = []
    for other in dict.fromkeys(neighbours(question, choice)):
        if other == choice:  # of what has no effect, such as ZeRO where dp is 1
            continue
        held = question.held(other)
        seconds = question.pricing.full(other).estimate.seconds
        if seconds >= now and held > LESS * here:
            continue
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
        "recompute": [kind for kind in ("none", "selective", "full") if kind != choice.recompute],
        "virtual_stages": [v for v in (chunks - 1, chunks + 1) if v > 1 and chunks > 1],
    }


def difference(one: Choice, other: Choice) -> str:
    """ "tp 4" of two that differ in tp, and in the dp that it leaves."""
    pairs = zip(one._asdict().items(), other, strict=True)
    told = [f"{n.replace('_', '-')} {b}" for (n, a), b in pairs if a != b and n != "dp"]
    return " ".join(told)
