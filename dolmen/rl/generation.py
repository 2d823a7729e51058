"""Generates completions on data-parallel copies of a model, with DAPO's dynamic sampling.

What a model makes of rows that every rank has: each copy of it asks its share.

Answers to prompts, drawn by copies of a model side by side. The draws of an answer follow from
its own name, so neither the layout nor what else is drawn with it changes what it is.

DAPO's dynamic sampling (2503.14476, section 3.2): nothing is learned from a group whose rewards
are all equal, so others are drawn in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dolmen.core import agree, collectives
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.options import Options
from dolmen.serving.request import Limits, Request


def of_rows(
    batch: Callable[[slice], Batch],
    ask: Callable[[Batch], Tensor],
    rows: int,
    size: int,
    mesh: Mesh,
) -> Float[Tensor, "rows length *numbers"]:
    """`ask(batch(...))` of so many rows, `size` (which divides them) at once over all of dp: on
    every rank, on the CPU, in fp32. Every rank of `mesh` calls it.
    """
    mine, found = size // mesh.dp.size, []
    for first in range(0, rows, size):
        own = slice(first + mesh.dp.rank * mine, first + (mesh.dp.rank + 1) * mine)
        here = ask(batch(own))
        whole = torch.zeros((size, *here.shape[1:]), dtype=here.dtype, device=here.device)
        whole[own.start - first : own.stop - first] = here
        # of each row one rank of dp has the numbers, and the others 0
        found.append(collectives.reduce_scalar(whole, mesh.dp).float().cpu())
    return torch.cat(found)


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


class Rewarded(Protocol):
    @property
    def reward(self) -> float: ...


One = TypeVar("One", bound=Rewarded)


class Redrawn(NamedTuple):
    """What has come of it."""

    groups: int
    """That were drawn again, each time counted."""
    alike: int
    """That are so still."""


def with_redraws(
    draw: Callable[[Sequence[int], int], list[One]], groups: int, samples: int, most: int
) -> tuple[list[One], Redrawn]:
    """Of so many `groups` their `samples` answers, group by group. `draw(numbers, time)` draws
    those of the groups of these numbers; it is called for all with time 0, and for those that are
    alike with time 1, 2, ... `most`.
    """
    found, redrawn = draw(range(groups), 0), 0
    for again in range(1, most + 1):
        equal = _alike(found, samples)
        if not equal:
            break
        redrawn += len(equal)
        for place, one in enumerate(draw(equal, again)):
            group, sample = divmod(place, samples)
            found[equal[group] * samples + sample] = one
    return found, Redrawn(redrawn, len(_alike(found, samples)))


def _alike(found: Sequence[Rewarded], samples: int) -> list[int]:
    return alike(torch.tensor([one.reward for one in found]), samples).nonzero()[:, 0].tolist()


def alike(rewards: Float[Tensor, " answers"], samples: int) -> Bool[Tensor, " groups"]:
    """Whether the rewards of a group of so many consecutive answers are all equal, those that
    failed aside.
    """
    grouped = rewards.view(-1, samples)
    most = grouped.nan_to_num(-torch.inf).amax(1)
    least = grouped.nan_to_num(torch.inf).amin(1)
    return most <= least
