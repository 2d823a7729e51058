"""The batches of a run: its data, or rollouts of its own model, with the reference and reward
models, environment and offloading that they need (rl/).
"""

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
from dolmen.rl.config import RolloutConfig
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
from dolmen.serving.engine import build_proposer, load_draft, stop_tokens
from dolmen.training import reference
from dolmen.training.resolve import ResolvedRun
from dolmen.training.state import TrainState

ROLLOUT_OPTIONS = (
    *("critic", "data", "environment", "objective", "optimizer", "ppo", "reward", "rollout"),
    *("train", "pretraining", "tokenizer"),
)
"""Prefixes of options, and of entries of a loader's fingerprint, that rollouts depend on."""
CHOSEN = "train.microbatch_size"
"""An option under `train` that depends on the layout, and that rollouts do not depend on."""


class Batches(Protocol):
    """The batches that `train_steps` reads: yields (step, this rank's batch) from a step on."""

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """Yield (step, rows of the global batch for `rank` of `ranks`), from `step` on, without
        end.
        """
        ...


@contextmanager
def _ending() -> Iterator[None]:
    """Context manager: raise a RewardError as Failed with `final`, which ends the run without a
    traceback and without a restart.
    """
    try:
        yield
    except RewardError as error:
        raise Failed(str(error), final=True) from None


def forget_other(out: Path, step: int, changed: Iterable[str]) -> None:
    """Delete the stored rollouts in the run's folder of iterations from `step` on if an option that
    they depend on is among the `changed` lines ("option: old -> new"): completions, rewards and
    log-probabilities were made with the old options.
    """
    if any(line.startswith(ROLLOUT_OPTIONS) and not line.startswith(CHOSEN) for line in changed):
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
    """Context manager: yield the source of batches that consist of completions sampled by the model
    of `state`, with rewards and advantages (PPO's if it has a critic). Builds the generation,
    reference and reward models; worker processes of reward functions and environment run within.
    Raises Failed if a reward fails and --rollout.on-failure is stop.
    """
    run = resolved.config
    # sampling without dropout, and in the run's dtype: fp8 would make the generator another policy
    training = replace(run.training, dropout=0.0, fp8=None)
    generator = GenerationModel(
        run.spec, training, mesh, run.rollout.tp or run.layout.tp, DTYPES[run.train.dtype]
    )
    reference_model = None
    if run.needs_kl_reference:
        reference_model = reference.initial_model(resolved, state, mesh)
    eos_token_id = loader.tokenizer.eos_token_id
    # a chat model may end its turn with another token (generation_config.json) than the tokenizer's
    stop_ids = set() if eos_token_id is None else {int(eos_token_id)}
    if resolved.init is not None:
        stop_ids |= stop_tokens(resolved.init)
    with (
        make_reward(resolved, state, mesh) as reward,
        open_environment(run.environment, run.rollout, loader, mesh) as turns,
        _ending(),
    ):
        draft = load_draft(resolved.draft, run.spec, generator.mesh, DTYPES[run.train.dtype])
        proposer = build_proposer(run.rollout.speculative, draft, generator.mesh)
        models = RolloutModels(state.model, generator, reference_model, proposer)
        setup = RolloutSetup(
            mesh,
            state.schedule,
            frozenset(stop_ids),
            run.sequence_length,
            run.train.seed,
            out,
            checkpoints.steps,
            Offloader()
            if run.rollout.offload == "none"
            else make_offloader(state, generator, reference_model, reward),
        )
        if state.critic is None:
            yield RolloutBatches(run.rollout, loader, models, reward, setup, turns)
            return
        critic = state.critic
        yield PPORolloutBatches(
            run.rollout,
            loader,
            models,
            reward,
            setup,
            run.ppo,
            critic.state.model,
            critic.coefficient,
            turns,
        )


def make_offloader(
    state: TrainState,
    generator: GenerationModel,
    reference: Decoder | None,
    reward: CombinedReward,
) -> Offloader:
    """Return the offloader that moves models and optimizer states between device and host while
    they are not needed: trained models, generation model, reference and reward models.
    """
    learning = [state] if state.critic is None else [state, state.critic.state]
    # the generator is no part of these: its values are dropped, as each iteration copies them anew
    frozen = reward.models if reference is None else [reference, *reward.models]
    trained = [(learner.model, learner.optimizer) for learner in learning]
    return Offloader(offload_parts(generator.mesh.device, trained, generator.model, frozen))


@contextmanager
def open_environment(
    name: str | None, config: RolloutConfig, loader: PromptLoader, mesh: Mesh
) -> Iterator[MultiTurn | None]:
    """Context manager: yield the object that turns completions into multi-turn ones by the user's
    function `name` (--environment), whose worker process runs within; None for None.
    """
    if name is None:
        yield None
        return
    with UserEnvironment(name, config.timeout_seconds) as environment:
        stop = config.on_failure == "stop"
        yield MultiTurn(environment, loader.tokenizer, config.max_turns, stop, mesh)


def make_reward(resolved: ResolvedRun, state: TrainState, mesh: Mesh) -> CombinedReward:
    """Return an object that scores completions by the weighted sum of the rewards in --reward.
    Reward models are loaded, in the layout of the trained model; reward functions run in worker
    processes.
    """
    run, parts = resolved.config, []
    for weight, name in parse_rewards(run.reward):
        if is_reward_model(name):
            model = reference.load_model(run, resolved.rewards[name], state, mesh)
            scorer = RewardModel(model, mesh, state.schedule, run.train.global_batch_size)
        else:
            scorer = make_reward_function(name, run.rollout.timeout_seconds)
        parts.append(WeightedReward(name, weight, scorer))
    return CombinedReward(parts, run.rollout.on_failure, mesh)
