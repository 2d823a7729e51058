"""Where the batches of a run come from: its data, or what its own model draws (rollouts/)."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import Mesh
from dolmen.core.messages import Failed
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.optim.optimizer import DTYPES
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
from dolmen.training import reference
from dolmen.training.config import RunConfig
from dolmen.training.resolve import ResolvedRun
from dolmen.training.state import TrainState

DRAWN_BY = (
    *("critic", "data", "environment", "objective", "optimizer", "ppo", "reward", "rollout"),
    *("train", "pretraining", "tokenizer"),
)
"""What names of options, and of what is read (a loader's fingerprint), begin with where what is
drawn follows from them.
"""
CHOSEN = "train.microbatch_size"
"""The option that is chosen for a layout: rollouts do not follow from it."""


class Batches(Protocol):
    """What `train_steps` reads."""

    def starting_at(
        self, step: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[int, Batch]]: ...


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
    if any(line.startswith(DRAWN_BY) and not line.startswith(CHOSEN) for line in changed):
        delete_rollouts(out, range(step, sys.maxsize))


@contextmanager
def rollout_batches(
    resolved: ResolvedRun,
    loader: PromptLoader,
    state: TrainState,
    mesh: Mesh,
    out: Path,
    checkpoints: Checkpoints,
) -> Iterator[RolloutBatches]:
    """Yield batches of completions that the model of `state` samples. Within, the processes of
    reward functions and of the environment run.
    """
    run = resolved.config
    training = replace(run.training, dropout=0.0, fp8=None)
    drawing = GenerationModel(
        run.tree, training, mesh, run.rollout.tp or run.layout.tp, DTYPES[run.train.dtype]
    )
    before = reference.initial_model(resolved, state, mesh) if run.needs_kl_reference else None
    own_end = loader.tokenizer.eos_token_id
    ends = set() if own_end is None else {int(own_end)}
    if resolved.init is not None:
        ends |= stop_tokens(resolved.init)
    with (
        make_reward(resolved, state, mesh) as judging,
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
        if state.critic is None:
            yield RolloutBatches(run.rollout, loader, models, judging, setup, turns)
            return
        critic = state.critic
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
    learning = [state] if state.critic is None else [state, state.critic.state]
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


def make_reward(resolved: ResolvedRun, state: TrainState, mesh: Mesh) -> CombinedReward:
    """Return what --reward names; reward models in the layout of the one that is trained."""
    run, parts = resolved.config, []
    for weight, name in parse_rewards(run.reward):
        if is_reward_model(name):
            model = reference.load_model(run, resolved.rewards[name], state, mesh)
            judge = RewardModel(model, mesh, state.schedule, run.train.global_batch_size)
        else:
            judge = make_reward_function(name, run.rollout.timeout_seconds)
        parts.append(WeightedReward(name, weight, judge))
    return CombinedReward(parts, run.rollout.on_failure, mesh)
