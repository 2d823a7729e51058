"""Answers to prompts, drawn by copies of a model side by side. The draws of an answer follow from
its own name, so neither the layout nor what else is drawn with it changes what it is.
"""

from collections.abc import Sequence
from dataclasses import replace
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
    """0 where the model has not drawn."""
    own: list[bool]
    """Whether the model has drawn each of them."""
    whole: bool
    """It has come to its end, and not to max_new_tokens."""

    def followed(self, tokens: list[int], room: int) -> "Written":
        """The same, and behind it tokens of others; cut where these leave no room for more."""
        if len(self.tokens) + len(tokens) >= room:
            return self._replace(whole=False)
        return self._replace(
            tokens=self.tokens + tokens,
            logprobs=self.logprobs + [0.0] * len(tokens),
            own=self.own + [False] * len(tokens),
        )

    def joined(self, more: "Written") -> "Written":
        """The same, and what the model has drawn behind it."""
        return self._replace(
            tokens=self.tokens + more.tokens,
            logprobs=self.logprobs + more.logprobs,
            own=self.own + more.own,
            whole=more.whole,
        )


def answered(
    model: Decoder,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    most: Sequence[int],
    options: Options,
    seed: int,
    batch: int,
) -> list[Written]:
    """An answer to each prompt, in their order, on every rank of `mesh`, whose dp are copies that
    draw `batch` answers at once, each of so many tokens at most. Draws follow from `seed` and the
    answer's name.
    """
    share = -(-len(prompts) // mesh.dp.size)
    mine = range(mesh.dp.rank * share, min(len(prompts), (mesh.dp.rank + 1) * share))
    found: list[Written] = []
    with Engine(model, limits=Limits(rows=batch)) as engine:
        numbers = {}
        for i in mine:
            own = replace(options, max_new_tokens=most[i])
            request = Request(prompts[i], own, id=names[i], seed=seed, logprobs="processed")
            numbers[engine.add(request)] = i
        while engine.busy:
            ended = engine.step().ended
            require_finite(ended)
            for one in ended:
                logprobs = [each.logprob for each in one.logprobs]
                whole = one.why == "stop"
                own = [True] * len(logprobs)
                found.append(Written(numbers[one.number], one.tokens, logprobs, own, whole))
    if mesh.size > 1:
        everyone = agree.gather_objects(found if mesh.tp.rank == 0 else [])
        found = [one for some in everyone for one in some]
    return sorted(found)
