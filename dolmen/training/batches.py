"""Where the batches of a run come from: its data, or what its own model draws (rollouts/)."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dolmen.checkpoint.store import Checkpoints
from dolmen.conversion.source import open_source
from dolmen.core.mesh import Mesh
from dolmen.core.messages import Failed
from dolmen.data import loader as data_loader
from dolmen.data.batch import Batch
from dolmen.data.batches import Loader
from dolmen.model.decoder import Decoder
from dolmen.optim.optimizer import DTYPES
from dolmen.rl import prompts
from dolmen.rl.environment import MultiTurn, UserEnvironment
from dolmen.rl.generation import GenerationModel
from dolmen.rl.iteration import PPORolloutBatches, RolloutBatches, RolloutModels, RolloutSetup
from dolmen.rl.offload import Offloader, offload_parts
from dolmen.rl.prompts import PromptLoader
from dolmen.rl.rewards import (
    CombinedReward,
    RewardError,
    RewardModel,
    WeightedReward,
    is_reward_model,
    make_reward_function,
    parse_rewards,
)
from dolmen.rl.rollout import delete_rollouts
from dolmen.serving.engine import stop_tokens
from dolmen.training import pretraining, reference
from dolmen.training.check_init import own_tokenizer
from dolmen.training.config import RunConfig
from dolmen.training.state import TrainState

DRAWN_BY = (
    *("critic", "data", "environment", "objective", "optimizer", "ppo", "reward", "rollout"),
    *("train", "pretraining", "tokenizer"),
)
"""What names of options, and of what is read (a loader's fingerprint), begin with where what is
drawn follows from them.
"""


class Batches(Protocol):
    """What `train_steps` reads."""

    def starting_at(
        self, step: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[int, Batch]]: ...


def prepare(run: RunConfig, begun: RunConfig, progress: bool, verify: bool) -> Loader:
    """What `run` reads; `begun` says with which model it began. Raises ValueError."""
    own = own_tokenizer(begun.init)
    if run.objective.draws:
        loader = prompts.prepare(
            run.data,
            run.rollout,
            own,
            run.known_model,
            run.sequence_length,
            run.train.global_batch_size,
            run.train.seed,
            [name for _, name in parse_rewards(run.reward)],
            verify,
        )
        if not run.ppo.pretraining_coef:
            return loader
        return loader.beside(pretraining.prepare(run, loader.tokenizer, progress, verify))
    return data_loader.prepare_loader(
        run.data,
        own,
        run.tree.vocab_size,
        run.sequence_length,
        run.train.global_batch_size,
        run.train.seed,
        progress=progress,
        verify=verify,
        steps=run.steps,
        model=run.tree,
    )


@contextmanager
def _ending() -> Iterator[None]:
    """Within, a completion without a reward ends the run: no mistake in its options."""
    try:
        yield
    except RewardError as error:
        raise Failed(str(error), final=True) from None


def forget_other(out: Path, step: int, changed: Iterable[str]) -> None:
    """Take away what a run drew after `step` that goes on from there with other options: answers,
    rewards and what models said of them are of those that it had.
    """
    if any(line.startswith(DRAWN_BY) for line in changed):
        delete_rollouts(out, range(step, sys.maxsize))


@contextmanager
def drawn(
    run: RunConfig,
    begun: RunConfig,
    loader: PromptLoader,
    state: TrainState,
    mesh: Mesh,
    out: Path,
    checkpoints: Checkpoints,
) -> Iterator[RolloutBatches]:
    """Batches of what the model of `state` draws. Within, a process judges its answers where the
    reward is a function. `begun` says which model is the reference.
    """
    training = replace(run.training, dropout=0.0, fp8=None)
    drawing = GenerationModel(
        run.tree, training, mesh, run.rollout.tp or run.layout.tp, DTYPES[run.train.dtype]
    )
    before = reference.start(begun, run, state, mesh) if run.needs_kl_reference else None
    own_end = loader.tokenizer.eos_token_id
    ends = set() if own_end is None else {int(own_end)}
    if begun.init is not None:
        ends |= stop_tokens(open_source(begun.init))
    with (
        make_reward(run, state, mesh) as judging,
        open_environment(run, loader, mesh) as turns,
        _ending(),
    ):
        models = RolloutModels(state.model, drawing, before)
        setup = RolloutSetup(
            mesh,
            state.schedule,
            frozenset(ends),
            run.sequence_length,
            run.train.seed,
            out,
            checkpoints.steps,
            make_offloader(run, state, drawing, before, judging),
        )
        if state.beside is None:
            yield RolloutBatches(run.rollout, loader, models, judging, setup, turns)
            return
        critic = state.beside
        yield PPORolloutBatches(
            run.rollout,
            loader,
            models,
            judging,
            setup,
            run.ppo,
            critic.state.model,
            critic.coefficient,
            turns,
        )


def make_offloader(
    run: RunConfig,
    state: TrainState,
    drawing: GenerationModel,
    reference: Decoder | None,
    judging: CombinedReward,
) -> Offloader:
    """Where the models of a run wait, as it asks."""
    if run.rollout.offload == "none":
        return Offloader()
    learning = [state] if state.beside is None else [state, state.beside.state]
    asked = judging.models if reference is None else [reference, *judging.models]
    trained = [(one.model, one.optimizer) for one in learning]
    return Offloader(offload_parts(drawing.mesh.device, trained, drawing.model, asked))


@contextmanager
def open_environment(
    run: RunConfig, loader: PromptLoader, mesh: Mesh
) -> Iterator[MultiTurn | None]:
    """What --environment names, whose process runs within."""
    if run.environment is None:
        yield None
        return
    with UserEnvironment(run.environment, run.rollout.timeout_seconds) as environment:
        stop = run.rollout.on_failure == "stop"
        yield MultiTurn(environment, loader.tokenizer, run.rollout.max_turns, stop, mesh)


def make_reward(run: RunConfig, state: TrainState, mesh: Mesh) -> CombinedReward:
    """What --reward names; reward models in the layout of the one that is trained."""
    parts = []
    for weight, name in parse_rewards(run.reward):
        if is_reward_model(name):
            model = reference.opened(run, name, state, mesh)
            judge = RewardModel(model, mesh, state.schedule, run.train.global_batch_size)
        else:
            judge = make_reward_function(name, run.rollout.timeout_seconds)
        parts.append(WeightedReward(name, weight, judge))
    return CombinedReward(parts, run.rollout.on_failure, mesh)
