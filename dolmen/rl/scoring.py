"""Rewards of completions: reward models, and the weighted sum of several scorers.

A reward model as a scorer: one that `dolmen train reward` has made, or any other of transformers
that ends in one number, in the layout of the run, which scores the tokens themselves.

The rewards of answers: the sum of what several judges say, each times its weight. Rules and
functions are asked by the first rank for all, reward models by all together.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.conversion.source import Source, open_source
from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.data import tokenizer as tokenizers
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.model.tree import Scalar
from dolmen.objectives import forward
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED
from dolmen.parallel.actions import Schedule
from dolmen.rl import generation
from dolmen.rl.rewards import Answer, Judge, Judgement, NoReward


@dataclass(frozen=True, eq=False)
class Scorer:
    """Scores of texts, each the number of its last token."""

    model: Decoder
    """Ends in a scalar head."""
    mesh: Mesh
    schedule: Schedule
    """Of training, which splits `size` rows over dp."""
    size: int
    """Rows that are asked at once, over all of dp."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, " texts"]:
        """Of texts of a token or more, on every rank. Every rank calls it. Raises ValueError for a
        text that is longer than the model reads.
        """
        longest, most = max(map(len, texts)), self.model.tree.max_position_embeddings
        if longest > most:
            raise ValueError(
                f"a text has {longest} tokens, and the reward model reads {most} "
                "(max_position_embeddings): draw shorter answers"
            )
        unit = 2 * self.mesh.cp.size * self.mesh.tp.size
        width = -(-longest // unit) * unit
        tokens = torch.zeros(-(-len(texts) // self.size) * self.size, width, dtype=torch.int64)
        lengths = torch.ones(len(tokens), dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], lengths[row] = torch.tensor(text), len(text)
        index = torch.arange(width)
        # what fills a row up is a text of its own, which nobody reads
        starts = torch.where(index >= lengths[:, None], lengths[:, None], 0)

        def batch(rows: slice) -> Batch:
            nothing = torch.full_like(tokens[rows], IGNORED)
            documents = Documents.of(starts[rows].contiguous())
            return Batch(tokens[rows], nothing, documents).with_positions(1)

        def ask(rows: Batch) -> Tensor:
            return forward.values(self.model, rows, self.mesh, self.schedule)

        found = generation.of_rows(batch, ask, len(tokens), self.size, self.mesh)
        return found[torch.arange(len(texts)), lengths[: len(texts)] - 1]


def check(name: str, vocab_size: int, tokenizer: str | None) -> Source:
    """The source of the reward model `name`. Raises ValueError where it does not end in one number,
    or reads other tokens than a model of `vocab_size` with this `tokenizer`.
    """
    source = open_source(name)
    tree = source.tree
    if not isinstance(tree.head, Scalar):
        raise ValueError(
            f"reward {name} foretells tokens: give a model that ends in one number, as dolmen "
            "train reward makes one"
        )
    if tree.vocab_size != vocab_size:
        raise ValueError(
            f"reward {name} has a vocab_size of {tree.vocab_size:,}, the model {vocab_size:,}: "
            "give a reward model of the same tokens"
        )
    if source.tokenizer is None or tokenizer is None:
        return source
    ours, theirs = (
        tokenizers.load_tokenizer(folder, "--reward", probe=False).get_vocab()
        for folder in (tokenizer, str(source.tokenizer))
    )
    other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if other:
        raise ValueError(
            f"reward {name} has a tokenizer of its own: {len(other):,} of {len(ours):,} tokens, as "
            f"{other[0]!r}, have other ids; give a reward model of the same tokens"
        )
    return source


class Part(NamedTuple):
    """Of a reward."""

    name: str
    """As --reward has it."""
    weight: float
    judge: Judge | Scorer


class Rewards(NamedTuple):
    """Of answers, in their order."""

    each: Float[Tensor, " answers"]
    """NaN where there is none."""
    told: dict[str, float]


@dataclass(frozen=True, eq=False)
class Judging:
    """Judges answers; functions within `with` alone, where their processes run."""

    parts: Sequence[Part]
    on_failure: Literal["stop", "zero", "leave-out"]
    mesh: Mesh
    say: Callable[[str], None] = print

    @property
    def models(self) -> list[Decoder]:
        """Reward models among the judges."""
        return [one.judge.model for one in self.parts if isinstance(one.judge, Scorer)]

    def __enter__(self) -> "Judging":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:
            for part in self.parts:
                if isinstance(part.judge, Judge):
                    ending.push(part.judge.__exit__)

    def __call__(self, answers: Sequence[Answer]) -> Rewards:
        """Every rank calls it with the same. Raises NoReward, on every rank, for an answer whose
        reward fails where a run is to stop then.
        """
        total, failed, told = torch.zeros(len(answers)), 0, {}
        for place, part in enumerate(self.parts):
            found = self._by(part, answers)
            try:
                each = [self._settled(one) for one in found]
            except ValueError as error:  # the same on every rank
                raise NoReward(str(error)) from None
            rewards = torch.tensor(each)
            total += part.weight * rewards
            failed += sum(one.reward is None for one in found)
            if len(self.parts) > 1:
                good = rewards[~rewards.isnan()]
                told[f"rollout/reward_{place + 1}"] = float(good.mean()) if len(good) else math.nan
        return Rewards(total, {**told, "rollout/failed_rewards": float(failed)})

    def _by(self, part: Part, answers: Sequence[Answer]) -> list[Judgement]:
        """What one of the judges says, on every rank."""
        judge = part.judge
        if isinstance(judge, Scorer):
            scores = judge([one.tokens for one in answers]).tolist()
            return [
                Judgement(one) if math.isfinite(one) else Judgement(None, f"{part.name} gave {one}")
                for one in scores
            ]

        def by_the_first() -> list[Judgement]:
            found = []
            for answer in answers:
                found.append(judge(answer))
                if found[-1].reward is None and self.on_failure == "stop":
                    break  # nobody asks what the others are
            return found

        return by_the_first() if self.mesh.size == 1 else agree.once(by_the_first)

    def _settled(self, found: Judgement) -> float:
        """The reward that counts. Raises ValueError where a run is to stop."""
        if found.reward is not None:
            return found.reward
        if self.on_failure == "stop":
            raise ValueError(f"{found.why} (--rollout.on-failure zero or leave-out goes on)")
        if self.mesh.first:
            self.say(f"WARNING: {found.why}")
        return 0.0 if self.on_failure == "zero" else math.nan
