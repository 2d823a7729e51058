"""Generation of completions by data-parallel copies of the policy, and DAPO's dynamic sampling.

    policy             any tp, pp, cp, ep, and any stage of ZeRO
    GenerationModel    tp, and pp with one stage per rank; the other ranks are further copies

Weights go from rank to rank, through no file. The random numbers of a completion follow from its
name and the seed, so neither the layout nor the batch that it is generated in changes it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from dolmen.core import collectives, consensus, state
from dolmen.core.mesh import Mesh
from dolmen.data.batch import Batch
from dolmen.model import build
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.spec import ModelSpec
from dolmen.model.training import Training
from dolmen.parallel import pipeline
from dolmen.parallel.inference_linear import Weights
from dolmen.parallel.schedule import Schedule
from dolmen.parallel.simulation import make_schedule
from dolmen.serving.engine import Engine, require_finite
from dolmen.serving.request import Limits, Request, SamplingParams
from dolmen.serving.speculation import Proposer


class GenerationModel:
    """A copy of the trained model in a layout that can generate (tp, pp, data-parallel copies), in
    inference mode; `load_weights` fills it.
    """

    def __init__(
        self,
        model_spec: ModelSpec,
        training: Training,
        mesh: Mesh,
        tp: int,
        dtype: torch.dtype,
        pp: int = 1,
        released: bool = False,
    ):
        """Build the model in the layout tp x pp x copies. `mesh` is training's; `pp` is training's,
        or 1. A `released` model has no memory until weights are loaded. Raises ValueError where
        `tp` does not divide the number of processes.
        """
        # all ranks that tp and pp leave are data-parallel copies: cp and ep of training become dp
        layout = Layout(tp=tp, pp=pp, dp=mesh.size // (tp * pp))
        self.training_mesh = mesh
        self.mesh = mesh if mesh.size == 1 else layout.mesh(mesh.device)
        self.schedule: Schedule | None = None if pp == 1 else make_schedule("1f1b", pp, pp)
        if self.schedule is not None:
            pipeline.connect(self.schedule, self.mesh)
        make = build.place if released else build.build
        self.model = make(
            model_spec, self.mesh, schedule=self.schedule, dtype=dtype, training=training
        ).eval()

    def load_weights(self, policy: Decoder) -> Decoder:
        """Copy the current weights of `policy` into this model, from rank to rank, and return it;
        released memory is allocated first. A collective of all ranks.
        """
        if self.model.device.type == "meta":
            build.allocate(self.model, self.mesh.device)
        # every rank takes part in each gather, and keeps what its stage needs
        local_names = {name for name, _ in self.model.named_parameters()}

        def stream(write: Callable[[str, Tensor], None]) -> None:
            """Call `write(name, full tensor)` for each parameter of this rank's stage."""
            for name, value in full_parameters(policy, self.training_mesh):
                if name in local_names:  # of this rank's stage
                    write(name, value)

        build.load(self.model, stream)
        return self.model

    def release(self) -> None:
        """Free the model's memory, including prepacked weights; `load_weights` allocates it
        again.
        """
        self.model.disable_prepack(keep=False)
        self.model.to_empty(device="meta")


def full_parameters(model: Decoder, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full tensor) of each parameter of `model` on every rank, whatever its sharding,
    in fp32 or wider (int8 stays int8). A collective of all ranks, one parameter at a time.
    """
    # one parameter at a time: the peak memory is that of the largest, not of the model
    local = dict(model.named_parameters())
    wide = torch.promote_types(state.dtype_of(model), torch.float32)
    # tied embedding and head are both on the boundary stages: the first stage sends the weight
    sent_by_first = None if model.split.first else model.tied_across_ranks
    for name, spec in model.spec.params.items():
        parameter, dtype = local.get(name), torch.int8 if spec.int8 else wide
        if mesh.pp.size == 1:
            yield name, state.gather_full(local[name]).to(dtype)
            continue
        value = torch.zeros(spec.shape, dtype=dtype, device=mesh.device)
        if parameter is not None:
            full = state.gather_full(parameter)  # a collective of this stage's ranks
            if parameter is not sent_by_first:
                value.copy_(full)
        # one stage has the values, the others add 0
        yield name, collectives.reduce_scalar(value, mesh.pp)


def compute_over_rows(
    batch: Callable[[slice], Batch],
    compute: Callable[[Batch], Tensor],
    rows: int,
    batch_size: int,
    mesh: Mesh,
) -> Float[Tensor, "rows length *numbers"]:
    """Return `compute(batch(rows))` over `rows` rows that every rank has: split over dp,
    `batch_size` at a time (which divides `rows`), results on every rank, on the CPU, in fp32. Every
    rank of `mesh` calls it.
    """
    share, results = batch_size // mesh.dp.size, []
    for first in range(0, rows, batch_size):
        # as many rows per rank as in a training step: the schedule's microbatches divide them
        local = slice(first + mesh.dp.rank * share, first + (mesh.dp.rank + 1) * share)
        result = compute(batch(local))
        full = torch.zeros(
            (batch_size, *result.shape[1:]), dtype=result.dtype, device=result.device
        )
        full[local.start - first : local.stop - first] = result
        # each row is computed by one rank of dp, and 0 on the others
        results.append(collectives.reduce_scalar(full, mesh.dp).float().cpu())
    return torch.cat(results)


class Completion(NamedTuple):
    """The tokens generated after a prompt, in one or several turns."""

    prompt_index: int
    """Index of the prompt in the list that was given."""
    tokens: list[int]
    logprobs: list[float]
    """Log-probability of each token when it was sampled; 0 for tokens of an environment."""
    sampled: list[bool]
    """True for tokens sampled from the model, False for tokens of an environment."""
    finished: bool
    """True if it ended with a stop token, and not at the maximum length."""
    num_draft_tokens: int = 0
    """Tokens that were drafted and verified (speculative decoding)."""
    num_accepted_tokens: int = 0
    """Drafts that are among its tokens."""

    def add_environment_tokens(self, tokens: list[int], max_tokens: int) -> "Completion":
        """Return the completion with an environment's turn appended, log-probability 0 and not
        sampled. Where `max_tokens` would leave no token for the model, return it without the turn,
        marked as truncated.
        """
        if len(self.tokens) + len(tokens) >= max_tokens:
            return self._replace(finished=False)
        return self._replace(
            tokens=self.tokens + tokens,
            logprobs=self.logprobs + [0.0] * len(tokens),
            sampled=self.sampled + [False] * len(tokens),
        )

    def add_turn(self, turn: "Completion") -> "Completion":
        """Return the completion with the model's next turn appended; it is finished if that turn
        is.
        """
        return self._replace(
            tokens=self.tokens + turn.tokens,
            logprobs=self.logprobs + turn.logprobs,
            sampled=self.sampled + turn.sampled,
            finished=turn.finished,
            num_draft_tokens=self.num_draft_tokens + turn.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens + turn.num_accepted_tokens,
        )


def generate_completions(
    model: Decoder,
    mesh: Mesh,
    prompts: Sequence[Sequence[int]],
    names: Sequence[str],
    max_new_tokens: Sequence[int],
    options: SamplingParams,
    seed: int,
    max_num_seqs: int,
    weights: Weights = "stated",
    proposer: Proposer | None = None,
    compile: bool = False,
) -> list[Completion]:
    """Return a completion of each prompt, in order, on every rank of `mesh`. Each data-parallel
    copy of the model generates its share of the prompts, at most `max_num_seqs` at the same time.
    `names` and `seed` determine the random numbers. `weights`: int8 multiplies integers.
    `proposer`: drafts tokens (speculative decoding). `compile`: compile decode steps. Raises
    ValueError for logits that are not finite.
    """
    # rounded up: the last copies may have fewer prompts, or none
    share = -(-len(prompts) // mesh.dp.size)
    local = range(mesh.dp.rank * share, min(len(prompts), (mesh.dp.rank + 1) * share))
    completions: list[Completion] = []
    limits = Limits(rows=max_num_seqs)
    with Engine(
        model, limits=limits, weights=weights, proposer=proposer, compile=compile
    ) as engine:
        index_of = {}
        for i in local:
            limited = replace(options, max_new_tokens=max_new_tokens[i])
            # "processed": log-probabilities of the distribution that was sampled, with the
            # temperature
            request = Request(prompts[i], limited, id=names[i], seed=seed, logprobs="processed")
            index_of[engine.add(request)] = i
        while engine.busy:
            ended = engine.step().finished
            require_finite(ended)
            for sequence in ended:
                logprobs = [logprob.logprob for logprob in sequence.logprobs]
                sampled, finished = [True] * len(logprobs), sequence.finish_reason == "stop"
                index = index_of[sequence.number]
                counts = sequence.num_draft_tokens, sequence.num_accepted_tokens
                completions.append(
                    Completion(index, sequence.tokens, logprobs, sampled, finished, *counts)
                )
    if mesh.size > 1:
        # all ranks of tp generate the same: one of them sends
        per_rank = consensus.gather_objects(completions if mesh.tp.rank == 0 else [])
        completions = [completion for rank in per_rank for completion in rank]
    # by prompt_index, the first field
    return sorted(completions)


class HasReward(Protocol):
    """Anything with a reward."""

    @property
    def reward(self) -> float:
        """The reward; NaN where it failed."""
        ...


Sample = TypeVar("Sample", bound=HasReward)


class Resampling(NamedTuple):
    """Counts of dynamic sampling."""

    resampled: int
    """Groups that were sampled again, counted each time."""
    degenerate: int
    """Groups whose rewards are all equal after the last attempt."""


def resample_degenerate_groups(
    sample: Callable[[Sequence[int], int], list[Sample]],
    groups: int,
    group_size: int,
    max_resamples: int,
) -> tuple[list[Sample], Resampling]:
    """Return `group_size` samples for each group, in order, and the counts of resampling. A group
    whose rewards are all equal has no advantage, so it is sampled again up to `max_resamples` times
    (DAPO's dynamic sampling, 2503.14476, section 3.2). `sample(group numbers, attempt)` is called
    for all groups with attempt 0, and for degenerate ones with attempts 1, 2, ...
    """
    samples, resampled = sample(range(groups), 0), 0
    for attempt in range(1, max_resamples + 1):
        degenerate = _degenerate_numbers(samples, group_size)
        if not degenerate:
            break
        resampled += len(degenerate)
        for place, new in enumerate(sample(degenerate, attempt)):
            # `place` counts the samples of the degenerate groups alone
            group, i = divmod(place, group_size)
            samples[degenerate[group] * group_size + i] = new
    return samples, Resampling(resampled, len(_degenerate_numbers(samples, group_size)))


def _degenerate_numbers(samples: Sequence[HasReward], group_size: int) -> list[int]:
    """Return the indices of the groups of `group_size` consecutive samples whose rewards are all
    equal; failed rewards (NaN) are ignored.
    """
    rewards = torch.tensor([sample.reward for sample in samples])
    return degenerate_groups(rewards, group_size).nonzero()[:, 0].tolist()


def degenerate_groups(
    rewards: Float[Tensor, " completions"], group_size: int
) -> Bool[Tensor, " groups"]:
    """Return whether all rewards of each group of `group_size` consecutive completions are equal; a
    reward that failed (NaN) is ignored.
    """
    grouped = rewards.view(-1, group_size)
    # NaN becomes the neutral element of each reduction; a group of failures only is degenerate too
    highest = grouped.nan_to_num(-torch.inf).amax(1)
    lowest = grouped.nan_to_num(torch.inf).amin(1)
    return highest <= lowest
