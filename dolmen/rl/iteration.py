"""Batches of what the model itself has drawn. A phase of `updates` steps begins with answers:

    weights -> rollout's layout -> answers -> rewards -> advantages            (all ranks know all)
            -> log-probabilities as training computes them -> a file -> batches

Prompt, draws and order follow from the seed and the step, never from time, so that a run that goes
on makes the same phases; what a phase has drawn is read from its file where there is one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dolmen.checkpoint.folders import Damaged
from dolmen.core import agree
from dolmen.core.mesh import Mesh
from dolmen.core.rng import seed_of
from dolmen.data.batch import Batch
from dolmen.data.mixture import permute_index
from dolmen.model.decoder import Decoder
from dolmen.objectives import advantage, forward
from dolmen.ops.loss import IGNORED
from dolmen.parallel.actions import Schedule
from dolmen.rl import rollout as files
from dolmen.rl.config import RolloutConfig
from dolmen.rl.environment import Turns
from dolmen.rl.generation import Written, answered, of_rows, with_redraws
from dolmen.rl.offload import Idle
from dolmen.rl.prompts import Prompt, PromptLoader
from dolmen.rl.rewards import Answer
from dolmen.rl.rollout import Drawn, of_answers
from dolmen.rl.scoring import Judging
from dolmen.rl.targets import with_advantages
from dolmen.rl.weights import Drawing
from dolmen.serving.options import Options

PADDED = 16
"""Tokens that rows of a model with experts are multiples of."""

Ask = Callable[[Decoder, Batch, Mesh, Schedule], Tensor]
"""Of each token of a rank's rows a number, or several (objectives/forward.py)."""


class Judged(NamedTuple):
    """An answer with its reward."""

    prompt: Prompt
    written: Written
    answer: Answer
    reward: float
    """NaN where there is none."""

    @property
    def row(self) -> dict[str, Any]:
        """To be read."""
        return {
            "prompt": self.answer.prompt,
            "answer": self.answer.text,
            "reward": None if math.isnan(self.reward) else self.reward,  # JSON has no NaN
            "whole": self.written.whole,
        }


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
    idle: Idle = field(default_factory=Idle)
    """Which models wait, and where."""


class Phases:
    """What `train_steps` reads, of a run that draws it."""

    kept: type[Drawn] = Drawn
    """What the file of a phase holds."""

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        models: Models,
        judging: Judging,
        setup: Setup,
        turns: Turns | None = None,
    ):
        """`turns`: of an environment that answers are drawn in."""
        self.turns = turns
        self.config, self.loader, self.models = config, loader, models
        self.judging, self.setup, self.mesh = judging, setup, setup.mesh
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
            made = files.load(self.setup.out, begins, self.answers, self.kept)
            if made is not None:
                file = files.file_of(self.setup.out, begins)
                files.check_read(file, made, self.models.trained.tree)
            return made

        try:
            # the first rank's folder, where hosts share none
            found = kept() if self.mesh.size == 1 else agree.once(kept)
        except ValueError as error:
            raise Damaged(f"{error}; remove it, and its answers are drawn anew") from None
        if found is None:
            found = self._drawn(begins)
        self.setup.idle.learns()
        self.begun(found)
        return found

    def begun(self, phase: Drawn) -> None:
        """What is told of a phase that begins, or is gone on with."""
        good = phase.rewards[~phase.rewards.isnan()]
        self.told |= phase.apart() | {
            "rollout/reward": float(good.mean()) if len(good) else math.nan,
            "rollout/reward_std": float(good.std()) if len(good) > 1 else 0.0,
        }

    def _drawn(self, begins: int) -> Drawn:
        """Draws, judges and scores the answers of a phase, and keeps them."""
        judged = self._worth_learning(begins)
        written, rewards = [one.written for one in judged], [one.reward for one in judged]
        made = of_answers(
            [one.prompt.tokens for one in judged],
            [one.tokens for one in written],
            [one.logprobs for one in written],
            self.setup.length,
            self._unit(),
            [one.own for one in written],
        )
        whole = torch.tensor([one.whole for one in written])
        if self.config.mask_cut:
            made = replace(made, labels=torch.where(whole[:, None], made.labels, IGNORED))
        made = self.learned(replace(made, rewards=self._shaped(torch.tensor(rewards), written)))
        self.tell(made, written)
        if self.mesh.first:
            files.save(made, self.setup.out, begins, [one.row for one in judged])
            first = min([begins, *self.setup.kept()]) - self.updates + 1
            files.forget(self.setup.out, range(first))
        return made

    def _unit(self) -> int:
        """What the width of rows is a multiple of. Routers count what fills a row up, too, and have
        losses of it: with experts a row is as wide in every layout of 2 cp tp up to PADDED.
        """
        unit = 2 * self.mesh.cp.size * self.mesh.tp.size
        return math.lcm(unit, PADDED) if self.models.trained.tree.experts else unit

    def _worth_learning(self, begins: int) -> list[Judged]:
        """Answers with their rewards; of another prompt in the place of each group from which
        nothing is to be learned, so often as is asked.
        """
        config, prompts = self.config, self.loader.mixture
        number = begins // self.updates * (self.answers // config.samples)

        def drawn(groups: Sequence[int], again: int) -> list[Judged]:
            asked, names = [], []
            for group in groups:
                prompt = prompts.prompts[prompts.index(number + group, again)]
                asked += [prompt] * config.samples
                first = group * config.samples
                of_time = f"/{again}" if again else ""
                names += [f"{begins}/{first + i}{of_time}" for i in range(config.samples)]
            return self._judged(asked, self._answered(self._drawing(again), asked, names))

        groups = self.answers // config.samples
        found, again = with_redraws(drawn, groups, config.samples, config.redraws)
        if config.samples > 1:
            self.told |= {
                "rollout/alike": float(again.alike),
                "rollout/redrawn": float(again.groups),
            }
        return found

    def _drawing(self, again: int) -> Decoder:
        """The model that draws, of the weights as they are: put there as a phase begins, and anew
        each time `again` where it has waited for the judges, as nothing of it is kept meanwhile.
        """
        models, idle = self.models, self.setup.idle
        if again and not idle.parts:
            return models.drawing.model
        idle.reads(models.trained, models.drawing.model)
        return models.drawing.refresh(models.trained)

    def _answered(
        self, model: Decoder, prompts: Sequence[Prompt], names: Sequence[str]
    ) -> list[Written]:
        """An answer to each prompt, in their order, on every rank."""
        config, setup, mesh = self.config, self.setup, self.models.drawing.mesh
        options = Options(temperature=config.temperature, stop=tuple(sorted(setup.stop)))
        setup.idle.reads(model)
        if setup.idle.parts:
            self.told["rollout/idle_gib"] = setup.idle.bytes / 2**30

        def draw(
            texts: Sequence[Sequence[int]], names: Sequence[str], most: Sequence[int]
        ) -> list[Written]:
            return answered(model, mesh, texts, names, most, options, setup.seed, config.batch)

        if self.turns is None:
            most = [config.max_new_tokens] * len(prompts)
            return draw([one.tokens for one in prompts], names, most)
        found, told = self.turns.answered(draw, prompts, names, config.max_new_tokens)
        self.told |= told
        return found

    def _judged(self, prompts: Sequence[Prompt], written: Sequence[Written]) -> list[Judged]:
        self.setup.idle.reads(*self.judging.models)
        decode = self.loader.tokenizer.decode
        answers = [
            Answer(
                p.asked,
                decode(one.tokens, skip_special_tokens=True),
                p.row,
                [*p.tokens, *one.tokens],
            )
            for p, one in zip(prompts, written, strict=True)
        ]
        rewards, told = self.judging(answers)
        self.told |= told
        every = zip(prompts, written, answers, rewards.tolist(), strict=True)
        return [Judged(*one) for one in every]

    def _shaped(self, rewards: Tensor, written: Sequence[Written]) -> Tensor:
        """With what the length of an answer costs."""
        config = self.config
        if not config.overlong:
            return rewards
        cost = config.overlong_weight * advantage.overlong(
            torch.tensor([len(one.tokens) for one in written]),
            max_length=config.max_new_tokens,
            window=config.overlong,
        )
        self.told["rollout/overlong"] = float(cost.mean())
        return rewards + cost

    def learned(self, made: Drawn) -> Drawn:
        """With log-probabilities as training computes them, and advantages."""
        good = ~made.rewards.isnan()
        made = replace(made, labels=torch.where(good[:, None], made.labels, IGNORED))
        made = self.remembered(made)
        if self.models.reference is not None:
            reference = self.log_probabilities(self.models.reference, made)
            made = replace(made, reference=reference)
        return with_advantages(made, self.config)

    def remembered(self, made: Drawn) -> Drawn:
        """With what the model says of its answers before it learns from them, and by which experts,
        where it is to learn through these.
        """
        if not self.config.routing_replay:
            return replace(made, old=self.log_probabilities(self.models.trained, made))

        def ask(model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule) -> Tensor:
            temperature = self.config.temperature
            return forward.routed_log_probabilities(model, batch, mesh, schedule, temperature)

        found = self.asked(ask, self.models.trained, made)
        return replace(made, old=found[..., 0].contiguous(), experts=found[..., 1:].short())

    def log_probabilities(self, model: Decoder, made: Drawn) -> Tensor:
        """Of every answer's tokens, on every rank."""

        def ask(model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule) -> Tensor:
            return forward.log_probabilities(model, batch, mesh, schedule, self.config.temperature)

        return self.asked(ask, model, made)

    def asked(self, ask: Ask, model: Decoder, made: Drawn) -> Tensor:
        """What `ask` says of every answer's tokens, on every rank."""

        def of(batch: Batch) -> Tensor:
            return ask(model, batch, self.mesh, self.setup.schedule)

        self.setup.idle.reads(model)
        return of_rows(made.batch, of, self.answers, self.size, self.mesh)

    def tell(self, made: Drawn, written: Sequence[Written]) -> None:
        lengths = torch.tensor([float(sum(one.own)) for one in written])
        whole = torch.tensor([float(one.whole) for one in written])
        self.told |= {
            "rollout/tokens": float(lengths.mean()),
            "rollout/ended": float(whole.mean()),
        }
        away = (made.old - made.reference)[made.labels != IGNORED]
        if self.models.reference is not None and len(away):
            self.told["rollout/reference_kl"] = float(away.mean())
