"""Batches of what the model itself has drawn. A phase of `updates` steps begins with answers:

    weights -> rollout's layout -> answers -> rewards -> advantages            (all ranks know all)
            -> log-probabilities as training computes them -> a file -> batches

Prompt, draws and order follow from the seed and the step, never from time, so that a run that goes
on makes the same phases; what a phase has drawn is read from its file where there is one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dolmen.core import agree, collectives
from dolmen.core.mesh import Mesh
from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.data.mixture import permute_index
from dolmen.model.decoder import Decoder
from dolmen.objectives import advantage, score
from dolmen.ops.loss import IGNORED
from dolmen.parallel.actions import Schedule
from dolmen.rollouts import drawn as files
from dolmen.rollouts.config import RolloutConfig
from dolmen.rollouts.drawn import Drawn, of_answers
from dolmen.rollouts.prompts import PromptLoader
from dolmen.rollouts.rewards import Answer, Judge, NoReward
from dolmen.rollouts.weights import Drawing
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.options import Options
from dolmen.serving.request import Limits, Request

EPS = 1e-4  # of group normalisation, as TRL's


class Written(NamedTuple):
    """An answer."""

    number: int
    """Of the phase."""
    tokens: list[int]
    logprobs: list[float]
    whole: bool
    """It has come to its end, and not to max_new_tokens."""


@dataclass(frozen=True, eq=False)
class Models:
    """Those that a phase asks."""

    trained: Decoder
    drawing: Drawing
    reference: Decoder | None = None
    """What the run began with, where a KL from it counts."""


@dataclass(frozen=True, eq=False)
class Setup:
    """What a run says of its phases, whatever is learned from them."""

    mesh: Mesh
    schedule: Schedule
    stop: frozenset[int]
    """Tokens that end an answer."""
    length: int
    """Of a row, at most."""
    seed: int
    out: Path
    kept: Callable[[], list[int]] = list
    """Steps of the checkpoints that there are."""
    say: Callable[[str], None] = print


class Phases:
    """What `train_steps` reads, of a run that draws it."""

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        models: Models,
        judge: Judge,
        setup: Setup,
    ):
        self.config, self.loader, self.models = config, loader, models
        self.judge, self.setup, self.mesh = judge, setup, setup.mesh
        self.size = loader.global_batch_size
        self.answers, self.updates = config.answers(self.size), config.updates(self.size)
        self.told = loader.told

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for ever; what is drawn is drawn with the weights as they are then."""
        mine, phase = self.size // ranks, None
        for now in count(step):
            begins = now - now % self.updates
            if phase is None or now == begins:
                phase = self._phase(begins)
            rows = self._rows(now - begins, begins)
            own = rows[rank * mine : (rank + 1) * mine]
            yield now, phase.batch(own)

    def _rows(self, update: int, begins: int) -> Tensor:
        """Which answers an update learns from: in each epoch all, in another order."""
        epoch, first = divmod(update * self.size, self.answers)
        key = seed_of(self.setup.seed, "answers", begins, epoch)
        places = torch.arange(first, first + self.size).numpy()
        return torch.from_numpy(permute_index(places, self.answers, key))

    def _phase(self, begins: int) -> Drawn:
        def kept() -> Drawn | None:
            return files.load(self.setup.out, begins, self.answers)

        # the first rank's folder, where hosts share none
        found = kept() if self.mesh.size == 1 else agree.once(kept)
        if found is None:
            found = self._drawn(begins)
        self.told |= found.apart()
        return found

    def _drawn(self, begins: int) -> Drawn:
        """Draws, judges and scores the answers of a phase, and keeps them."""
        number = begins // self.updates * (self.answers // self.config.samples)
        prompts = self.loader.mixture
        asked = [
            prompts.prompts[prompts.index(number + i // self.config.samples)]
            for i in range(self.answers)
        ]
        written = self._answered([one.tokens for one in asked], begins)
        texts = [
            self.loader.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in written
        ]
        answers = [Answer(p.asked, text, p.row) for p, text in zip(asked, texts, strict=True)]
        rewards = self._judged(answers)
        made = of_answers(
            [one.tokens for one in asked],
            [one.tokens for one in written],
            [one.logprobs for one in written],
            self.setup.length,
            2 * self.mesh.cp.size * self.mesh.tp.size,
        )
        made = self._learned(replace(made, rewards=rewards))
        self._tell(made, written)
        if self.mesh.first:
            rows = [
                {
                    "prompt": one.prompt,
                    "answer": one.text,
                    "reward": _json(reward),
                    "whole": w.whole,
                }
                for one, reward, w in zip(answers, rewards.tolist(), written, strict=True)
            ]
            files.save(made, self.setup.out, begins, rows)
            files.forget(self.setup.out, min([begins, *self.setup.kept()]) - self.updates + 1)
        return made

    def _answered(self, prompts: Sequence[Sequence[int]], begins: int) -> list[Written]:
        """An answer to each prompt, in their order, on every rank."""
        model, mesh, config = (
            self.models.drawing.refresh(self.models.trained),
            self.models.drawing.mesh,
            self.config,
        )
        options = Options(
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            stop=tuple(sorted(self.setup.stop)),
        )
        copies, share = mesh.dp.size, -(-len(prompts) // mesh.dp.size)
        mine = range(mesh.dp.rank * share, min(len(prompts), (mesh.dp.rank + 1) * share))
        found: list[Written] = []
        with Engine(model, limits=Limits(rows=config.batch)) as engine:
            numbers = {}
            for i in mine:
                # draws follow from the answer's own number, whichever copy draws it
                request = Request(
                    prompts[i],
                    options,
                    id=f"{begins}/{i}",
                    seed=self.setup.seed,
                    logprobs="processed",
                )
                numbers[engine.add(request)] = i
            while engine.busy:
                ended = engine.step().ended
                require_finite(ended)
                for one in ended:
                    logprobs = [each.logprob for each in one.logprobs]
                    whole = one.why == "stop"
                    found.append(Written(numbers[one.number], one.tokens, logprobs, whole))
        if copies * mesh.tp.size > 1:
            everyone = agree.gather_objects(found if mesh.tp.rank == 0 else [])
            found = [one for some in everyone for one in some]
        return sorted(found)

    def _judged(self, answers: Sequence[Answer]) -> Tensor:
        """Rewards, which the first rank finds for all. Raises NoReward, on every rank, for an
        answer whose reward fails where a run is to stop then.
        """

        def all_of() -> list[float]:
            failed, found = 0, []
            for answer in answers:
                reward, why = self.judge(answer)
                if reward is None:
                    failed += 1
                    if self.config.on_failure == "stop":
                        raise ValueError(f"{why} (--rollout.on-failure zero or leave-out goes on)")
                    self.setup.say(f"WARNING: {why}")
                    reward = 0.0 if self.config.on_failure == "zero" else math.nan
                found.append(reward)
            return [*found, float(failed)]

        try:
            *rewards, failed = all_of() if self.mesh.size == 1 else agree.once(all_of)
        except ValueError as error:  # of any rank's kind, once it has come from another
            raise NoReward(str(error)) from None
        self.told["rollout/failed_rewards"] = failed
        return torch.tensor(rewards)

    def _learned(self, made: Drawn) -> Drawn:
        """With advantages, and log-probabilities as training computes them."""
        good = ~made.rewards.isnan()
        groups = torch.arange(len(good)) // self.config.samples
        advantages = torch.zeros(len(good))
        advantages[good] = advantage.group_normalised(
            made.rewards[good], groups[good], eps=EPS, scale=self.config.scale
        )
        labels = torch.where(good[:, None], made.labels, IGNORED)
        made = replace(made, labels=labels, advantages=advantages[:, None] * (labels != IGNORED))
        made = replace(made, old=self._log_probabilities(self.models.trained, made))
        if self.models.reference is None:
            return made
        return replace(made, reference=self._log_probabilities(self.models.reference, made))

    def _log_probabilities(self, model: Decoder, made: Drawn) -> Tensor:
        """Of every answer's tokens, on every rank."""
        mesh, mine = self.mesh, self.size // self.mesh.dp.size
        found = []
        for first in range(0, self.answers, self.size):
            own = slice(first + mesh.dp.rank * mine, first + (mesh.dp.rank + 1) * mine)
            here = score.log_probabilities(
                model, made.batch(own), mesh, self.setup.schedule, self.config.temperature
            )
            whole = torch.zeros((self.size, *here.shape[1:]), dtype=here.dtype, device=here.device)
            whole[own.start - first : own.stop - first] = here
            # of each row one rank of dp has the numbers, and the others 0
            found.append(collectives.reduce_scalar(whole, mesh.dp).float().cpu())
        return torch.cat(found)

    def _tell(self, made: Drawn, written: Sequence[Written]) -> None:
        good = made.rewards[~made.rewards.isnan()]
        lengths = torch.tensor([float(len(one.tokens)) for one in written])
        whole = torch.tensor([float(one.whole) for one in written])
        self.told |= {
            "rollout/reward": float(good.mean()) if len(good) else math.nan,
            "rollout/reward_std": float(good.std()) if len(good) > 1 else 0.0,
            "rollout/tokens": float(lengths.mean()),
            "rollout/ended": float(whole.mean()),
        }
        away = (made.old - made.reference)[made.labels != IGNORED]
        if self.models.reference is not None and len(away):
            self.told["rollout/reference_kl"] = float(away.mean())


def _json(reward: float) -> Any:
    """JSON has no NaN."""
    return None if math.isnan(reward) else reward
