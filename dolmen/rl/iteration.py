"""Rollout iterations: training batches of GRPO and PPO from completions of the current weights.

One iteration makes the batches of `updates` consecutive training steps:

    policy weights    copied into the generation model                        generation.py
    prompts           sampled into completions, in turns with an environment  environment.py
    completions       scored; groups with equal rewards are resampled         rewards.py
    policy            forward: log-probabilities before the first update      objectives/forward.py
    reference, critic forward: log-probabilities for the KL, values           objectives/forward.py
    rewards           turned into advantages (and returns for a critic)       targets.py
    all of it         written to rollouts/STEP.safetensors of the run         rollout.py
    updates           each reads --train.global-batch-size completions, in a new order per epoch

The result is a `Rollout`: tensors [completions, length] that every rank holds completely, so that
means and variances over a group or an iteration need no communication and no layout changes them.

Invariants:
- Prompts, samples and order follow from the seed, the step and the number of a completion, never
  from time or layout. A resumed run repeats the iteration that it was in.
- An iteration is written before its first update and read back where its file exists, so rewards,
  which may be slow, paid for or random, are computed once per completion.
- The weights that generate are those of the last update: an iteration of one update is on-policy,
  and update i of an iteration is i updates off-policy. The ratios of the policy loss correct that.
- All ranks call everything here in the same order: generation, rewards and forwards are collective.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

from dolmen.checkpoint.folders import Damaged
from dolmen.core import consensus
from dolmen.core.determinism import seed_of
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.data.mixture import permute_index
from dolmen.model.decoder import Decoder
from dolmen.objectives import advantage, forward
from dolmen.ops.loss import IGNORED
from dolmen.parallel.schedule import Schedule
from dolmen.rl import rollout as rollouts
from dolmen.rl.config import PPOConfig, RolloutConfig
from dolmen.rl.environment import MultiTurn
from dolmen.rl.generation import (
    Completion,
    GenerationModel,
    compute_over_rows,
    generate_completions,
    resample_degenerate_groups,
)
from dolmen.rl.offload import Offloader
from dolmen.rl.prompts import Prompt, PromptLoader
from dolmen.rl.rewards import CombinedReward, RewardInput
from dolmen.rl.rollout import PPORollout, Rollout, make_rollout
from dolmen.rl.targets import KLController, compute_advantages, compute_ppo_targets
from dolmen.serving.request import SamplingParams
from dolmen.serving.speculation import Acceptance, Proposer

PADDING_MULTIPLE = 16
"""Row lengths of a model with experts are multiples of this many tokens."""
ComputePerToken = Callable[[Decoder, Batch, Mesh, Schedule], Tensor]
"""A forward that returns one number, or several, per token of a rank's rows."""


class ScoredCompletion(NamedTuple):
    """A completion with its reward."""

    prompt: Prompt
    completion: Completion
    text: RewardInput
    reward: float
    """NaN where the reward function failed."""

    @property
    def row(self) -> dict[str, Any]:
        """The fields of its line in rollouts/STEP.jsonl; reward None where it failed."""
        return {
            "prompt": self.text.prompt,
            "completion": self.text.completion,
            "reward": None if math.isnan(self.reward) else self.reward,  # JSON has no NaN
            "tokens": len(self.completion.tokens),
            "finished": self.completion.finished,
        }


@dataclass(frozen=True, eq=False)
class RolloutModels:
    """The models that an iteration uses."""

    policy: Decoder
    generator: GenerationModel
    reference: Decoder | None = None
    """The model of the KL penalty, or the teacher; None where there is neither."""
    proposer: Proposer | None = None
    """Drafts tokens for verification (speculative decoding); None: no drafts."""


@dataclass(frozen=True, eq=False)
class RolloutSetup:
    """The context of an iteration: mesh, schedule, limits, seed, folder, offloader."""

    mesh: Mesh
    schedule: Schedule
    stop_tokens: frozenset[int]
    """Token ids that end a completion."""
    max_length: int
    """Maximum tokens of a row, prompt and completion."""
    seed: int
    out: Path
    checkpoint_steps: Callable[[], list[int]] = list
    """Returns the steps of the checkpoints that exist."""
    offloader: Offloader = field(default_factory=Offloader)


class RolloutBatches:
    """Training batches of a run that samples its own completions: implements the `Batches` of
    training by rollout iterations.
    """

    rollout_type: type[Rollout] = Rollout
    """The class that an iteration's file is read as."""

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        models: RolloutModels,
        reward: CombinedReward,
        setup: RolloutSetup,
        multi_turn: MultiTurn | None = None,
    ):
        """`loader`: the prompts. `models`, `reward`: what samples and scores. `setup`: where and
        how. `multi_turn`: the environment of multi-turn completions; None: single turns. Raises
        ValueError if the completions of an iteration are no whole number of global batches.
        """
        self.config, self.loader, self.models = config, loader, models
        self.reward, self.setup, self.mesh = reward, setup, setup.mesh
        self.multi_turn = multi_turn
        self.batch_size = loader.global_batch_size
        self.completions = config.completions(self.batch_size)
        self.updates = config.updates(self.batch_size)
        self.metrics = loader.extra_metrics

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """Yield (step, rows of the global batch for `rank` of `ranks`) from `step` on, without end.
        The first batch of an iteration samples its completions, with the policy's weights at that
        moment, or reads them from its file.
        """
        rows, rollout = self.batch_size // ranks, None
        for now in count(step):
            # a run that resumes in the middle of an iteration reads its file and continues in it
            first_step = now - now % self.updates
            if rollout is None or now == first_step:
                rollout = self._load_or_make(first_step)
            order = self._order(now - first_step, first_step)
            yield now, self._make_batch(rollout, order[rank * rows : (rank + 1) * rows])

    def _make_batch(self, rollout: Rollout, rows: slice | Int64[Tensor, " rows"]) -> Batch:
        """Return rows of the rollout as a training batch. With exact numerics it has no documents:
        the generator has none, and the padding is last, so that no label sees it.
        """
        batch = rollout.batch(rows)
        return replace(batch, documents=None) if self._exact else batch

    @property
    def _exact(self) -> bool:
        """True with exact numerics."""
        return self.models.policy.split.kernels.exact is not None

    def _order(self, update: int, first_step: int) -> Tensor:
        """Return the indices of the completions that update number `update` of an iteration reads
        [global batch size]; each epoch is a new permutation of all completions.
        """
        # completions are a whole number of batches, so no update spans two epochs
        epoch, first = divmod(update * self.batch_size, self.completions)
        key = seed_of(self.setup.seed, "answers", first_step, epoch)
        places = torch.arange(first, first + self.batch_size).numpy()
        return torch.from_numpy(permute_index(places, self.completions, key))

    def _load_or_make(self, first_step: int) -> Rollout:
        """Return the rollout of the iteration that begins at `first_step`, read from its file or
        else sampled; add its metrics, and load the trained models back onto the device. Raises
        Damaged for a file that cannot be used.
        """
        out = self.setup.out

        def load() -> Rollout | None:
            """Return the stored rollout, or None. Raises ValueError (Refused) for a damaged file or
            wrong ids.
            """
            rollout = rollouts.load(out, first_step, self.completions, self.rollout_type)
            if rollout is not None:
                file = rollouts.rollout_file(out, first_step)
                rollouts.check_ids(file, rollout, self.models.policy.spec)
            return rollout

        try:
            # the first rank's folder, where hosts share none
            rollout = load() if self.mesh.size == 1 else consensus.run_on_rank_zero(load)
        except ValueError as error:
            raise Damaged(f"{error}; remove it to sample its completions again") from None
        if rollout is None:
            rollout = self._make(first_step)
        self.setup.offloader.use_for_updates()
        self.report(rollout)
        return rollout

    def _make(self, first_step: int) -> Rollout:
        """Sample, score and write the completions of an iteration; return the rollout with all that
        its updates read. Every rank calls it.
        """
        scored = self._sample_and_score(first_step)
        completions = [scored_completion.completion for scored_completion in scored]
        rollout = make_rollout(
            [scored_completion.prompt.tokens for scored_completion in scored],
            [completion.tokens for completion in completions],
            [completion.logprobs for completion in completions],
            self.setup.max_length,
            self._length_multiple(),
            [completion.sampled for completion in completions],
        )
        finished = torch.tensor([completion.finished for completion in completions])
        if self.config.mask_truncated_completions:
            # a truncated completion has no right reward: it might have gone on to the answer
            labels = torch.where(finished[:, None], rollout.labels, IGNORED)
            rollout = replace(rollout, labels=labels)
        # after resampling: the penalty would make groups of equal rewards look different
        rewards = self._with_overlong_penalty(
            torch.tensor([scored_completion.reward for scored_completion in scored]), completions
        )
        rollout = self.add_targets(replace(rollout, rewards=rewards))
        self._report_sampling(rollout, completions)
        if self.mesh.first:
            self._write(
                rollout, first_step, [scored_completion.row for scored_completion in scored]
            )
        return rollout

    def _write(self, rollout: Rollout, first_step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rollout and its text, append config.log_completions of the completions to the
        log, and delete rollouts before the oldest checkpoint, from which no run can resume.
        """
        out = self.setup.out
        rollouts.save(rollout, out, first_step, rows)
        sample = rows[: self.config.log_completions]
        self.loader.completions += rollouts.log_completions(out, first_step, sample)
        # a run that resumes at step s reads the iteration that begins at s - s % updates
        oldest = min([first_step, *self.setup.checkpoint_steps()]) - self.updates + 1
        rollouts.delete_rollouts(out, range(oldest))

    def _length_multiple(self) -> int:
        """Return the number that row lengths are a multiple of: 2 cp tp, so that every layout can
        split them. Routers count padding too, so with experts the padding must not depend on the
        layout: then it is the same for every 2 cp tp that divides PADDING_MULTIPLE (16). With exact
        numerics all rows have the length of a sequence, which is a leaf.
        """
        if self._exact:
            return self.setup.max_length
        multiple = 2 * self.mesh.cp.size * self.mesh.tp.size
        has_experts = self.models.policy.spec.experts
        return math.lcm(multiple, PADDING_MULTIPLE) if has_experts else multiple

    def _sample_and_score(self, first_step: int) -> list[ScoredCompletion]:
        """Return the scored completions of the iteration that begins at `first_step`, group by
        group. A group whose rewards are all equal is replaced by completions of another prompt, up
        to config.max_resamples times.
        """
        config, prompts = self.config, self.loader.mixture
        groups = self.completions // config.num_generations
        # prompts are counted over the whole run, so a resumed run continues where it was
        first_prompt = first_step // self.updates * groups

        def sample(numbers: Sequence[int], attempt: int) -> list[ScoredCompletion]:
            """Return scored completions of new prompts for the groups with these numbers."""
            of_groups, names = [], []
            for group in numbers:
                prompt = prompts.prompts[prompts.index(first_prompt + group, attempt)]
                # a resampled group reads the prompt that its number has in the permutation of that
                # attempt
                of_groups += [prompt] * config.num_generations
                first = group * config.num_generations
                suffix = f"/{attempt}" if attempt else ""
                each = range(first, first + config.num_generations)
                names += [f"{first_step}/{i}{suffix}" for i in each]  # seeds of the samples
            return self._score(of_groups, self._generate(attempt, of_groups, names))

        scored, resampling = resample_degenerate_groups(
            sample, groups, config.num_generations, config.max_resamples
        )
        if config.num_generations > 1:
            self.metrics |= {
                "rollout/degenerate_groups": float(resampling.degenerate),
                "rollout/resampled_groups": float(resampling.resampled),
            }
        return scored

    def _load_generator(self, attempt: int) -> Decoder:
        """Return the generation model with the policy's current weights. They are copied in attempt
        0, and again in each later attempt (resampling) if models are offloaded, as the generator's
        weights are dropped then.
        """
        # without offloading the generator keeps its weights for resampling
        models, offloader = self.models, self.setup.offloader
        if attempt and not offloader.parts:
            return models.generator.model
        offloader.use_weights(models.policy, models.generator.model)
        return models.generator.load_weights(models.policy)

    def _generate(
        self, attempt: int, prompts: Sequence[Prompt], names: Sequence[str]
    ) -> list[Completion]:
        """Return a completion of each prompt, in order, on every rank; with an environment, of
        several turns. `names` seed the random numbers of each completion; attempts above 0 are
        resampling.
        """
        model = self._load_generator(attempt)
        config, setup, mesh = self.config, self.setup, self.models.generator.mesh
        stop = tuple(sorted(setup.stop_tokens))
        # no top-k or top-p: the policy's own distribution is what the loss takes the ratio of
        options = SamplingParams(temperature=config.temperature, stop=stop)
        setup.offloader.use_weights(model)
        if setup.offloader.parts:
            self.metrics["rollout/offloaded_gib"] = setup.offloader.bytes / 2**30

        def generate(
            texts: Sequence[Sequence[int]], names: Sequence[str], max_new_tokens: Sequence[int]
        ) -> list[Completion]:
            """Return one turn of each sequence in `texts` (token ids), of at most
            `max_new_tokens`.
            """
            return generate_completions(
                *(model, mesh, texts, names, max_new_tokens, options, setup.seed),
                *(config.max_num_seqs, config.weights, self.models.proposer, config.compile),
            )

        if self.multi_turn is None:
            max_new_tokens = [config.max_new_tokens] * len(prompts)
            return generate([prompt.tokens for prompt in prompts], names, max_new_tokens)
        completions, metrics = self.multi_turn.generate(
            generate, prompts, names, config.max_new_tokens
        )
        self.metrics |= metrics
        return completions

    def _score(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion]
    ) -> list[ScoredCompletion]:
        """Return the completions with their decoded text and rewards, on every rank. Reward models
        are loaded onto the device before.
        """
        self.setup.offloader.use_weights(*self.reward.models)
        decode = self.loader.tokenizer.decode
        texts = [
            RewardInput(
                prompt.content,
                decode(completion.tokens, skip_special_tokens=True),
                prompt.row,
                # a reward model reads the tokens themselves: decoding and encoding again may change
                # them
                [*prompt.tokens, *completion.tokens],
            )
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rewards, metrics = self.reward(texts)
        self.metrics |= metrics
        rows = zip(prompts, completions, texts, rewards.tolist(), strict=True)
        return [ScoredCompletion(*row) for row in rows]

    def _with_overlong_penalty(self, rewards: Tensor, completions: Sequence[Completion]) -> Tensor:
        """Return the rewards [completions] plus DAPO's penalty (negative) of completions near the
        maximum length; unchanged without --rollout.overlong-buffer.
        """
        config = self.config
        if not config.overlong_buffer:
            return rewards
        penalty = config.overlong_penalty_factor * advantage.overlong_penalty(
            torch.tensor([len(completion.tokens) for completion in completions]),
            max_length=config.max_new_tokens,
            buffer=config.overlong_buffer,
        )
        self.metrics["rollout/overlong_penalty"] = float(penalty.mean())
        return rewards + penalty

    def add_targets(self, rollout: Rollout) -> Rollout:
        """Return the rollout with log-probabilities of the policy and of the reference model, if
        there is one, and with advantages. Runs forwards; every rank calls it.
        """
        rollout = self.add_old_logprobs(rollout)
        if self.models.reference is not None:
            reference = self.log_probabilities(self.models.reference, rollout)
            rollout = replace(rollout, reference_logprobs=reference)
        return compute_advantages(rollout, self.config)

    def add_old_logprobs(self, rollout: Rollout) -> Rollout:
        """Return the rollout with the policy's log-probabilities before the first update and, for
        routing replay, the experts of each token. Completions whose reward failed lose their
        labels, so that nothing is learned from them.
        """
        scored = ~rollout.rewards.isnan()
        # a failure with --rollout.on-failure leave-out
        labels = torch.where(scored[:, None], rollout.labels, IGNORED)
        rollout = replace(rollout, labels=labels)
        if not self.config.routing_replay:
            old = self.log_probabilities(self.models.policy, rollout)
            return replace(rollout, old_logprobs=old)

        def compute(model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule) -> Tensor:
            """Return, per token of a batch, the log-probability of its label, followed by its
            expert indices.
            """
            temperature = self.config.temperature
            return forward.routed_log_probabilities(model, batch, mesh, schedule, temperature)

        log_probabilities = self.compute_per_token(compute, self.models.policy, rollout)
        # expert indices are below 2^15, and exact in the float that they came in
        old, experts = log_probabilities[..., 0].contiguous(), log_probabilities[..., 1:].short()
        return replace(rollout, old_logprobs=old, experts=experts)

    def log_probabilities(self, model: Decoder, rollout: Rollout) -> Tensor:
        """Return the log-probability of each label in `model` at the sampling temperature
        [completions, length], 0 without a label; on every rank, on the CPU.
        """

        def compute(model: Decoder, batch: Batch, mesh: Mesh, schedule: Schedule) -> Tensor:
            """Return the log-probabilities of a batch."""
            return forward.log_probabilities(model, batch, mesh, schedule, self.config.temperature)

        return self.compute_per_token(compute, model, rollout)

    def compute_per_token(
        self, compute: ComputePerToken, model: Decoder, rollout: Rollout
    ) -> Tensor:
        """Return `compute` over all rows of the rollout [completions, length, ...], on every rank,
        on the CPU in fp32. The weights of `model` are loaded onto the device, all other models
        offloaded.
        """

        def compute_batch(batch: Batch) -> Tensor:
            """Return `compute` of this rank's rows."""
            return compute(model, batch, self.mesh, self.setup.schedule)

        self.setup.offloader.use_weights(model)
        return compute_over_rows(
            partial(self._make_batch, rollout),
            compute_batch,
            self.completions,
            self.batch_size,
            self.mesh,
        )

    def report(self, rollout: Rollout) -> None:
        """Add to `metrics`, for a rollout that was sampled or read from its file: mean and standard
        deviation of rewards, and the difference of log-probabilities between trainer and generator.
        """
        rewards = rollout.rewards[~rollout.rewards.isnan()]
        self.metrics |= rollout.logprob_difference() | {
            # NaN: every reward of the iteration failed
            "rollout/reward": float(rewards.mean()) if len(rewards) else math.nan,
            "rollout/reward_std": float(rewards.std()) if len(rewards) > 1 else 0.0,
        }

    def _report_sampling(self, rollout: Rollout, completions: Sequence[Completion]) -> None:
        """Add to `metrics` what is known only of completions that were just sampled: mean length,
        share that is finished, accepted share of drafts, KL from the reference.
        """
        lengths = torch.tensor([float(sum(completion.sampled)) for completion in completions])
        finished = torch.tensor([float(completion.finished) for completion in completions])
        self.metrics |= {
            "rollout/completion_length": float(lengths.mean()),
            "rollout/finished": float(finished.mean()),
        }
        if self.models.proposer is not None:
            drafted = sum(each.num_draft_tokens for each in completions)
            accepted = sum(each.num_accepted_tokens for each in completions)
            self.metrics["rollout/draft_acceptance_rate"] = Acceptance(drafted, accepted).rate
        trained = rollout.labels != IGNORED
        # k1, the unbiased estimate, in nats per token
        kl = (rollout.old_logprobs - rollout.reference_logprobs)[trained]
        if self.models.reference is not None and len(kl):
            self.metrics["rollout/reference_kl"] = float(kl.mean())


class PPORolloutBatches(RolloutBatches):
    """Rollout batches of PPO, with a critic: values and returns of each token, generalised
    advantages, and a KL coefficient that may adapt to a target.
    """

    rollout_type = PPORollout

    def __init__(
        self,
        config: RolloutConfig,
        loader: PromptLoader,
        models: RolloutModels,
        reward: CombinedReward,
        setup: RolloutSetup,
        ppo: PPOConfig,
        critic: Decoder,
        kl_controller: KLController,
        multi_turn: MultiTurn | None = None,
    ):
        """Make the batches. `kl_controller` is updated when an iteration begins, so that its value
        at any checkpoint is that of the next iteration.
        """
        super().__init__(config, loader, models, reward, setup, multi_turn)
        self.ppo, self.critic, self.kl_controller = ppo, critic, kl_controller

    def add_targets(self, rollout: Rollout) -> PPORollout:
        """Return the rollout with log-probabilities of policy and reference, the critic's values,
        and the advantages and returns from GAE. Without a reference model the KL is 0.
        """
        rollout = self.add_old_logprobs(rollout)
        reference = rollout.old_logprobs
        if self.models.reference is not None:
            reference = self.log_probabilities(self.models.reference, rollout)
            rollout = replace(rollout, reference_logprobs=reference)
        values = self.compute_per_token(forward.values, self.critic, rollout)
        return compute_ppo_targets(rollout, reference, values, self.ppo, self.kl_controller.value)

    def report(self, rollout: Rollout) -> None:
        """Add the metrics of a rollout to `metrics`, explained variance and entropy among them, and
        adapt the KL coefficient for the next iteration to this one's KL.
        """
        super().report(rollout)
        assert isinstance(rollout, PPORollout)
        # kl_coef from the file: after a resume the step of the coefficient is made again, from its
        # old value
        kl_coef, kl = float(rollout.kl_coef), self.kl_per_completion(rollout)
        self.kl_controller.value = self.kl_controller.next_value(kl_coef, kl, self.completions)
        self.metrics |= {
            "rollout/explained_variance": rollout.explained_variance(),
            "rollout/entropy": rollout.entropy(),
        }
        if self.models.reference is not None:
            self.metrics |= {"rollout/kl_coef": kl_coef, "rollout/kl_per_completion": kl}

    def kl_per_completion(self, rollout: PPORollout) -> float:
        """Return the mean over completions of the estimated KL from the reference, summed over
        tokens; 0 without a reference model.
        """
        trained = rollout.trained
        if self.models.reference is None or not trained.any():
            return 0.0
        difference = rollout.old_logprobs - rollout.reference_logprobs
        difference = torch.where(trained, difference, 0.0)
        kl = advantage.kl_of_difference(difference, self.ppo.kl_estimator).sum(1)
        return float(kl[trained.any(1)].mean())
