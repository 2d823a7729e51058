"""Rewards of completions: rules, a user's function in a worker process, reward models, and their
weighted sum.

    with CombinedReward([WeightedReward("gsm8k", 1.0, make_reward_function("gsm8k", 10.0))], ...):
        rewards, metrics = reward([RewardInput("What is 6 x 7?", "6 x 7 = 42", {"answer": "42"})])

Rules and functions run on the first rank for all; a reward model runs on all ranks, in the layout
of the run, and scores token ids, not text.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dolmen.conversion.source import ModelSource
from dolmen.core import consensus
from dolmen.core.mesh import Mesh
from dolmen.core.messages import cut
from dolmen.data import tokenizer as tokenizers
from dolmen.data.batch import Batch
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec, ScalarHeadSpec
from dolmen.objectives import forward
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED
from dolmen.parallel.schedule import Schedule
from dolmen.rl import generation
from dolmen.rl.function_worker import LARGEST, FunctionWorker, check_function_name

NUMERIC = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?")
VOWELS = frozenset("aeiouAEIOU")


class RewardInput(NamedTuple):
    """The arguments of a reward function: a prompt and its completion."""

    prompt: str | list[dict[str, Any]]
    """A text, or the messages of a chat."""
    completion: str
    row: dict[str, Any]
    """All fields of the prompt's row."""
    tokens: Sequence[int] = ()
    """Token ids of prompt and completion: what a reward model scores."""


class RewardResult(NamedTuple):
    """A reward, or None and the reason why there is none."""

    reward: float | None
    error: str = ""


class RewardError(ValueError):
    """A reward or environment failed, and the run is to stop for it (--rollout.on-failure stop)."""


class RewardFunction(ABC):
    """Scores one completion at a time; a context manager, within which worker processes run."""

    def start(self) -> None:
        """Start what takes time, such as a worker process, before the first completion. Raises
        ValueError where nothing can be scored; without this call the first completion raises it.
        """
        return None

    @abstractmethod
    def __call__(self, completion: RewardInput) -> RewardResult:
        """Return the reward of a completion, or the reason why it has none."""
        ...

    def __enter__(self) -> "RewardFunction":
        """Return the reward function itself; nothing is started."""
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing; subclasses stop their worker process."""
        return None


class RuleReward(RewardFunction):
    """A reward by a built-in rule; a row without the field that it compares with has no reward."""

    def __init__(self, rule: Callable[[RewardInput], float]):
        """`rule`: returns the reward of a completion; a KeyError of it means that the row lacks a
        field.
        """
        self.rule = rule

    def __call__(self, completion: RewardInput) -> RewardResult:
        """Return the rule's reward, or, if the row lacks a field that the rule reads, the reason
        why there is none.
        """
        try:
            return RewardResult(self.rule(completion))
        except KeyError as error:
            return RewardResult(None, f"the row has no field {error}, which the reward needs")


def exact(completion: RewardInput) -> float:
    """Return 1.0 where the completion equals the row's `answer`, surrounding white space aside,
    else 0.0.
    """
    return float(completion.completion.strip() == str(completion.row["answer"]).strip())


def last_number(text: str) -> float | None:
    """Return the last number of a text, without thousands separators; after ####, where there is
    one, as GSM8K marks answers (2110.14168). None without a number.
    """
    _, _, marked = text.rpartition("####")
    # rpartition without #### leaves the whole text in `marked`
    numbers = NUMBER.findall(marked)
    return float(numbers[-1].replace(",", "")) if numbers else None


def gsm8k(completion: RewardInput) -> float:
    """Return 1.0 where the last number of the completion equals that of the row's `answer`, else
    0.0.
    """
    right, answer = last_number(str(completion.row["answer"])), last_number(completion.completion)
    return float(answer is not None and answer == right)


def stub(completion: RewardInput) -> float:
    """Return the share of characters that are vowels, 0 to 1: a reward for trying out a run."""
    text = completion.completion
    return sum(char in VOWELS for char in text) / max(1, len(text))


class UserReward(RewardFunction):
    """A reward by the user's MODULE:FUNCTION in a worker process, with a time limit per call. A
    call that does not return a finite number fails.
    """

    def __init__(self, name: str, timeout: float):
        """`name`: MODULE:FUNCTION. `timeout`: seconds per call."""
        self.worker = FunctionWorker("reward", name, timeout)

    def __exit__(self, *_: object) -> None:
        """Stop the worker process."""
        self.worker.stop()

    def start(self) -> None:
        """Start the worker process. Raises ValueError where the function cannot be imported."""
        self.worker.start()

    def __call__(self, completion: RewardInput) -> RewardResult:
        """Return the function's reward, or the reason why the call failed."""
        request = {
            "prompt": completion.prompt,
            "completion": completion.completion,
            "row": completion.row,
        }
        reply = self.worker.call(request)
        return RewardResult(reply.get("reward"), reply.get("failed", ""))


RULES = {"exact": exact, "gsm8k": gsm8k, "stub": stub}
NEEDS_ANSWER = ("exact", "gsm8k")
"""Rules that compare with the row's `answer`."""


def parse_rewards(rewards: Sequence[str]) -> list[tuple[float, str]]:
    """Return (weight, name) of each --reward: WEIGHT:NAME, or NAME with weight 1. Raises ValueError
    for a weight of 0 or over LARGEST (1e15).
    """
    weighted = []
    for text in rewards:
        weight, _, name = text.partition(":")
        if NUMERIC.fullmatch(weight) is None:
            weighted.append((1.0, text))
        elif 0 < float(weight) <= LARGEST and name:
            weighted.append((float(weight), name))
        else:
            raise ValueError(
                f"reward is {cut(text)}: the weight in WEIGHT:REWARD must be over 0 and at most "
                f"{LARGEST:g}, and a reward"
            )
    return weighted


def is_reward_model(name: str) -> bool:
    """Return whether a --reward is a reward model (an existing folder, or a name with a slash, as
    of the hub), and not a rule or function.
    """
    if name in RULES or name.startswith("regex:"):
        return False
    return "/" in name or Path(name).expanduser().is_dir()


def make_reward_function(name: str, timeout: float) -> RewardFunction:
    """Return the reward function of a --reward that is no reward model: a rule, regex:PATTERN (1
    where it matches somewhere, else 0) or MODULE:FUNCTION with `timeout` seconds per call, not
    started. Raises ValueError where there is no such reward.
    """
    if name in RULES:
        return RuleReward(RULES[name])
    kind, _, pattern = name.partition(":")
    if kind == "regex":
        try:
            expression = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"reward {name}: not a regular expression: {error}") from None
        return RuleReward(lambda scored: float(expression.search(scored.completion) is not None))
    check_function_name(
        name, "reward", f"{', '.join(RULES)}, regex:PATTERN, the folder of a reward model or "
    )
    return UserReward(name, timeout)


@dataclass(frozen=True, eq=False)
class RewardModel:
    """Scores sequences of token ids by a model with a scalar head: the score is that of the last
    token.
    """

    model: Decoder
    mesh: Mesh
    schedule: Schedule
    """The schedule of training, which splits `batch_size` rows over dp."""
    batch_size: int
    """Rows of a forward, over all of dp."""

    def __call__(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, " texts"]:
        """Return the score of each sequence of at least one token [texts], on every rank; every
        rank calls it. Raises ValueError for a sequence over max_position_embeddings.
        """
        longest, limit = max(map(len, texts)), self.model.spec.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"a prompt with its completion has {longest} tokens, but the reward model reads "
                f"only {limit} (max_position_embeddings): set a smaller --rollout.max-new-tokens"
            )
        # the length that every layout can split: 2 cp chunks, for the zigzag of causal attention,
        # times tp
        multiple = 2 * self.mesh.cp.size * self.mesh.tp.size
        width = -(-longest // multiple) * multiple
        # filled up with rows of one token, whose scores are dropped below
        rows = -(-len(texts) // self.batch_size) * self.batch_size
        tokens = torch.zeros(rows, width, dtype=torch.int64)
        lengths = torch.ones(rows, dtype=torch.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)], lengths[row] = torch.tensor(text), len(text)
        index = torch.arange(width)
        # padding is a document of its own, which no token of the text attends to
        starts = torch.where(index >= lengths[:, None], lengths[:, None], 0)

        def batch(rows: slice) -> Batch:
            """Return these rows as a batch without labels, whose padding is a document of its
            own.
            """
            labels = torch.full_like(tokens[rows], IGNORED)
            documents = Documents.from_starts(starts[rows].contiguous())
            return Batch(tokens[rows], labels, documents).add_positions(1)

        def compute(rows: Batch) -> Tensor:
            """Return the scalar of each token."""
            return forward.values(self.model, rows, self.mesh, self.schedule)

        values = generation.compute_over_rows(
            batch, compute, len(tokens), self.batch_size, self.mesh
        )
        # the score is that of the last token, which has seen the whole text
        return values[torch.arange(len(texts)), lengths[: len(texts)] - 1]


def check_reward_model(
    name: str, source: ModelSource, policy: ModelSpec, tokenizer: str | None
) -> None:
    """Raise ValueError where the reward model `name`, opened as `source`, has no scalar head,
    another vocab_size than the policy, or a tokenizer that gives a token of `tokenizer` (the
    policy's folder) another id.
    """
    if not isinstance(source.spec.head, ScalarHeadSpec):
        raise ValueError(
            f"reward {name} has an LM head: give a model with a scalar head (dolmen train reward)"
        )
    policy.check_same_vocabulary(f"reward {name}", source.spec)
    # nothing to compare: equal vocab_size has to do
    if source.tokenizer is None or tokenizer is None:
        return
    ours, theirs = (
        tokenizers.load_tokenizer(folder, "--reward", probe=False).get_vocab()
        for folder in (tokenizer, str(source.tokenizer))
    )
    other = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if other:
        raise ValueError(
            f"reward {name} has another tokenizer than the model: {len(other):,} of {len(ours):,} "
            f"tokens, as {other[0]!r}, have other ids; give a reward model with the same tokenizer"
        )


class WeightedReward(NamedTuple):
    """One --reward: its name, its weight and what computes it."""

    name: str
    weight: float
    scorer: RewardFunction | RewardModel


class ScoredRewards(NamedTuple):
    """Rewards of completions, in order."""

    rewards: Float[Tensor, " completions"]
    """NaN where the reward failed."""
    metrics: dict[str, float]


@dataclass(frozen=True, eq=False)
class CombinedReward:
    """The weighted sum of several rewards; a context manager, at whose end worker processes
    stop.
    """

    parts: Sequence[WeightedReward]
    on_failure: Literal["stop", "zero", "leave-out"]
    mesh: Mesh
    say: Callable[[str], None] = print

    @property
    def models(self) -> list[Decoder]:
        """The models of those parts that are reward models."""
        return [part.scorer.model for part in self.parts if isinstance(part.scorer, RewardModel)]

    def __enter__(self) -> "CombinedReward":
        """Return this reward; worker processes start with the first call."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop all worker processes, even if stopping one of them fails."""
        with ExitStack() as stack:
            for part in self.parts:
                if isinstance(part.scorer, RewardFunction):
                    stack.push(part.scorer.__exit__)

    def __call__(self, completions: Sequence[RewardInput]) -> ScoredRewards:
        """Return the weighted rewards [completions] and metrics: mean of each part, number of
        failures. Every rank calls it with the same completions. Raises RewardError, on every rank,
        for a failure with --rollout.on-failure stop.
        """
        total, failed, metrics = torch.zeros(len(completions)), 0, {}
        # one part after the other: a reward model is a collective, which all ranks enter together
        for place, part in enumerate(self.parts):
            results = self._score(part, completions)
            try:
                resolved = [self._resolve_failure(result) for result in results]
            except ValueError as error:  # the same on every rank
                raise RewardError(str(error)) from None
            rewards = torch.tensor(resolved)
            # a NaN of one part makes the completion's reward NaN: it is left out of training
            total += part.weight * rewards
            failed += sum(result.reward is None for result in results)
            if len(self.parts) > 1:
                scored = rewards[~rewards.isnan()]
                mean = float(scored.mean()) if len(scored) else math.nan
                metrics[f"rollout/reward_{place + 1}"] = mean
        return ScoredRewards(total, {**metrics, "rollout/failed_rewards": float(failed)})

    def _score(
        self, part: WeightedReward, completions: Sequence[RewardInput]
    ) -> list[RewardResult]:
        """Return the results of one part, in order, on every rank. Functions run on the first rank,
        and stop at the first failure if that ends the run.
        """
        scorer = part.scorer
        if isinstance(scorer, RewardModel):
            scores = scorer([completion.tokens for completion in completions]).tolist()
            return [
                RewardResult(score)
                if math.isfinite(score)
                else RewardResult(None, f"{part.name} gave {score}")
                for score in scores
            ]

        def score_on_first_rank() -> list[RewardResult]:
            """Return a reward function's result for each completion, in order; with
            --rollout.on-failure stop only up to the first failure, for which the run stops.
            """
            results = []
            for completion in completions:
                results.append(scorer(completion))
                if results[-1].reward is None and self.on_failure == "stop":
                    break  # the run stops for it: the others are not needed
            return results

        return (
            score_on_first_rank()
            if self.mesh.size == 1
            else consensus.run_on_rank_zero(score_on_first_rank)
        )

    def _resolve_failure(self, result: RewardResult) -> float:
        """Return the reward of a result, or for a failure 0 or NaN, as set by --rollout.on-failure,
        with a warning. Raises ValueError where a failure stops the run.
        """
        if result.reward is not None:
            return result.reward
        if self.on_failure == "stop":
            raise ValueError(f"{result.error} (--rollout.on-failure zero or leave-out continues)")
        if self.mesh.first:
            self.say(f"WARNING: {result.error}")
        return 0.0 if self.on_failure == "zero" else math.nan
