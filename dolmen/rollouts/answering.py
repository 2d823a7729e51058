"""Answers to prompts, drawn by copies of a model side by side. The draws of an answer follow from
its own name, so neither the layout nor what else is drawn with it changes what it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.model.decoder import Decoder
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.options import Options
from dolmen.serving.request import Limits, Request


class Written(NamedTuple):
    """An answer."""

    number: int
    """Of its prompt, among those that were given."""
    tokens: list[int]
    logprobs: list[float]
    whole: bool
    """It has come to its end, and not to max_new_tokens."""


def answered(
    model: Decoder,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    options: Options,
    seed: int,
    batch: int,
) -> list[Written]:
    """An answer to each prompt, in their order, on every rank of `mesh`, whose dp are copies that
    draw `batch` answers at once. Draws follow from `seed` and the answer's name.
    """
    share = -(-len(prompts) // mesh.dp.size)
    mine = range(mesh.dp.rank * share, min(len(prompts), (mesh.dp.rank + 1) * share))
    found: list[Written] = []
    with Engine(model, limits=Limits(rows=batch)) as engine:
        numbers = {}
        for i in mine:
            request = Request(prompts[i], options, id=names[i], seed=seed, logprobs="processed")
            numbers[engine.add(request)] = i
        while engine.busy:
            ended = engine.step().ended
            require_finite(ended)
            for one in ended:
                logprobs = [each.logprob for each in one.logprobs]
                whole = one.why == "stop"
                found.append(Written(numbers[one.number], one.tokens, logprobs, whole))
    if mesh.size > 1:
        everyone = agree.gather_objects(found if mesh.tp.rank == 0 else [])
        found = [one for some in everyone for one in some]
    return sorted(found)
