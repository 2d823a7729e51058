"""The data of one rollout iteration: what its updates learn from, the same on every rank, and its
files, which a resumed run reads instead of sampling again.

    rollouts/00000040.safetensors      the tensors of the iteration that begins at step 40
    rollouts/00000040.jsonl            its text: prompt, completion, reward
    rollouts/completions.jsonl         a few completions of every iteration, which are kept
"""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import safetensors.torch
import torch
from jaxtyping import Bool, Float, Float64, Int16, Int64
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.files import gate, write
from dolmen.files import safetensors as files
from dolmen.model.routing_replay import choice_slices
from dolmen.model.spec import ModelSpec
from dolmen.objectives.on_policy import ADVANTAGE, OLD, REFERENCE, RETURN, VALUE
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED

FOLDER = "rollouts"
COMPLETIONS = "completions.jsonl"
EXPERTS = "experts"  # the one tensor that a file may lack
DTYPES = {"tokens": torch.int64, "labels": torch.int64, EXPERTS: torch.int16}
"""The dtypes of tensors that are not floating point."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """The completions of an iteration in rows [completions, length]: prompt, completion, padding.
    Values that belong to a label stand at the position of the token before it, as logits do.
    """

    other_shapes: ClassVar[dict[str, tuple[int, ...]]] = {}
    """Shapes of tensors that are neither per token nor per completion."""

    tokens: Int64[Tensor, "completions length"]
    labels: Int64[Tensor, "completions length"]
    """The next token where it was sampled from the model and is trained on, else IGNORED."""
    sampled_logprobs: Float[Tensor, "completions length"]
    """Log-probability of each label when it was sampled, by the generation model."""
    rewards: Float[Tensor, " completions"]
    """NaN where the reward function failed."""
    old_logprobs: Float[Tensor, "completions length"]
    """Log-probability of each label in the policy before the first update, by the trainer."""
    reference_logprobs: Float[Tensor, "completions length"]
    """Log-probability of each label in the reference model; 0 without one."""
    advantages: Float[Tensor, "completions length"]
    experts: Int16[Tensor, "completions length choices"]
    """Experts that each token was routed to, for routing replay; 0 choices without it."""

    def batch(self, rows: slice | Int64[Tensor, " rows"]) -> Batch:
        """Return the completions `rows` as a training batch: tokens and labels, padding as a
        document of its own, per-token numbers for the losses (log-probabilities, advantages), and
        recorded experts.
        """
        tokens, labels = self.tokens[rows], self.labels[rows]
        batch = Batch(
            tokens, labels, Documents.from_starts(_document_starts(labels))
        ).add_positions(1)
        experts = self.experts[rows].long() if self.experts.numel() else None
        numbers = {name: values[rows] for name, values in self.numbers.items()}
        return replace(batch, numbers=numbers, experts=experts)

    @property
    def numbers(self) -> dict[str, Float[Tensor, "completions length"]]:
        """Old log-probabilities, advantages and reference log-probabilities [completions, length],
        by the names under which the policy's objective reads them.
        """
        return {
            OLD: self.old_logprobs,
            ADVANTAGE: self.advantages,
            REFERENCE: self.reference_logprobs,
        }

    @property
    def trained(self) -> Bool[Tensor, "completions length"]:
        """True where a position has a label, so that it is trained on [completions, length]."""
        return self.labels != IGNORED

    def logprob_difference(self) -> dict[str, float]:
        """Return metrics of the difference between the log-probabilities of trainer and generator:
        its mean, and its maximum relative to a tolerance of 1e-4 max(1, |log p| / 10). Empty
        without labels.
        """
        old = self.old_logprobs[self.trained]
        difference = (self.old_logprobs - self.sampled_logprobs)[self.trained].abs()
        if not len(difference):
            return {}
        # relative for large |log p|, whose rounding grows with them
        tolerance = 1e-4 * (old.abs() / 10).clamp(min=1)
        return {
            "rollout/logprob_difference": float(difference.mean()),
            "rollout/logprob_difference_over_tolerance": float((difference / tolerance).max()),
        }


@dataclass(frozen=True, eq=False)
class PPORollout(Rollout):
    """A rollout with a critic's values and returns."""

    values: Float[Tensor, "completions length"]
    """The critic's value before the first update."""
    returns: Float[Tensor, "completions length"]
    """Targets of the critic."""
    kl_coef: Float64[Tensor, " one"]
    """The KL coefficient in the rewards of tokens."""

    other_shapes: ClassVar[dict[str, tuple[int, ...]]] = {"kl_coef": (1,)}

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Old log-probabilities, advantages, reference log-probabilities, values and returns
        [completions, length], by the names under which the objectives of policy and critic read
        them.
        """
        return {**super().numbers, VALUE: self.values, RETURN: self.returns}

    def explained_variance(self) -> float:
        """Return 1 - var(returns - values) / var(returns) over labels: 1 is a perfect critic, below
        0 is worse than the returns' mean. 0 for constant returns.
        """
        returns, error = self.returns[self.trained], (self.returns - self.values)[self.trained]
        variance = returns.var(unbiased=False)
        return float(1 - error.var(unbiased=False) / variance) if variance > 0 else 0.0

    def entropy(self) -> float:
        """Return a sampling estimate of the policy's entropy per token, in nats: the mean of -log p
        of the sampled tokens; 0 without labels.
        """
        return float(-self.old_logprobs[self.trained].mean()) if self.trained.any() else 0.0


RolloutType = TypeVar("RolloutType", bound=Rollout)


def make_rollout(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    max_length: int,
    length_multiple: int,
    sampled: Sequence[Sequence[bool]] | None = None,
) -> Rollout:
    """Return a rollout with a row per completion: inputs and shifted labels, padded to the longest,
    rounded up to a multiple of `length_multiple`, and at most `max_length`. Prompt and completion
    have at most `max_length` + 1 tokens. Tokens that were not `sampled` from the model have no
    label. Rewards, log-probabilities of trainer and reference, and advantages are 0.
    """
    # inputs are one token shorter than the text: the last token predicts nothing
    longest = max(len(p) + len(c) - 1 for p, c in zip(prompts, completions, strict=True))
    length = min(max_length, -(-longest // length_multiple) * length_multiple)
    tokens = torch.zeros(len(prompts), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    sampled_logprobs = torch.zeros(tokens.shape)
    sampled = sampled or [[True] * len(completion) for completion in completions]
    rows = zip(prompts, completions, logprobs, sampled, strict=True)
    for row, (prompt, completion, numbers, mask) in enumerate(rows):
        text, first = torch.tensor([*prompt, *completion]), len(prompt) - 1
        end, mask = len(text) - 1, torch.tensor(mask)
        # inputs are all tokens but the last; labels are moved by one, as the last prompt token
        # predicts the first of the completion
        tokens[row, :end] = text[:-1]
        labels[row, first:end] = torch.where(mask, text[first + 1 :], IGNORED)
        sampled_logprobs[row, first:end] = torch.tensor(numbers) * mask
    rewards, zeros = torch.zeros(len(prompts)), torch.zeros(tokens.shape)
    experts = _no_experts(tokens.shape)
    return Rollout(tokens, labels, sampled_logprobs, rewards, zeros, zeros, zeros, experts)


def _no_experts(shape: torch.Size) -> Int16[Tensor, "completions length 0"]:
    """Return the tensor of expert choices of a rollout without routing replay: 0 choices per
    token.
    """
    return torch.zeros(*shape, 0, dtype=torch.int16)


def _document_starts(labels: Int64[Tensor, "rows length"]) -> Int64[Tensor, "rows length"]:
    """Return for each token the position at which its document starts: 0 in prompt and completion,
    and the first padding position in the padding, which is a document of its own.
    """
    index = torch.arange(labels.shape[1])
    # padding starts behind the last label: tokens there have none
    end = torch.where(labels != IGNORED, index + 1, 0).amax(1, keepdim=True)
    return torch.where(index >= end, end, 0).expand_as(labels).contiguous()


def rollout_file(out: Path, step: int) -> Path:
    """Return the path of the tensors of the iteration that begins at `step`, in the run's folder
    `out`: rollouts/STEP.safetensors, 8 digits.
    """
    return out / FOLDER / f"{step:08d}.safetensors"


def save(rollout: Rollout, out: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write the tensors of a rollout, and its text `rows` as JSON lines, each file atomically. The
    text comes first: where the tensors exist, the iteration is complete.
    """
    write.folder(out, FOLDER)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    text_file = rollout_file(out, step).with_suffix(".jsonl")
    write.replace(text_file, lines.encode(errors="replace"))
    tensors = {field.name: vars(rollout)[field.name].clone() for field in fields(rollout)}
    if not rollout.experts.numel():
        del tensors[EXPERTS]
    # last: a resumed run takes the iteration as complete where this file exists
    write.replace(rollout_file(out, step), safetensors.torch.save(tensors))


def log_completions(out: Path, step: int, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append `rows` of the iteration that begins at `step` to rollouts/completions.jsonl, and
    return the appended rows: with `step`, prompts as text, and without the reward where it failed.
    """
    logged = []
    for row in rows:
        prompt = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"])
        known = {name: value for name, value in row.items() if value is not None}
        logged.append({"step": step, **known, "prompt": prompt})
    if logged:
        with write.append(out / FOLDER / COMPLETIONS) as file:
            file.writelines(json.dumps(row) + "\n" for row in logged)
    return logged


def load(
    out: Path, step: int, completions: int, kind: type[RolloutType] = Rollout
) -> RolloutType | None:
    """Return the rollout of the iteration that begins at `step`, as class `kind`; missing expert
    choices are filled in. None without a file, or with another number of completions, from a run
    with other options. Raises Refused for wrong tensors, whatever their number.
    """
    file = rollout_file(out, step)
    if not file.exists():
        return None
    stored = files.read_header(file)
    names = [field.name for field in fields(kind)]
    if EXPERTS not in stored:
        names.remove(EXPERTS)
    if sorted(stored) != sorted(names):
        raise gate.refuse(
            file, f"has tensors {', '.join(sorted(stored)[:8])}, not {', '.join(names)}"
        )
    tensors = {name: stored[name].read() for name in names}
    shape = tensors["tokens"].shape
    experts = tensors.setdefault(EXPERTS, _no_experts(shape))
    # files may be damaged or forged: every shape and dtype is checked before use
    if len(shape) != 2 or not all(shape):
        raise gate.refuse(file, f"tokens have shape {tuple(shape)}, not [completions, length]")
    for name, tensor in tensors.items():
        dtype = DTYPES.get(name)
        right = tensor.dtype == dtype if dtype else tensor.is_floating_point()
        if not right:
            raise gate.refuse(file, f"{name} are {tensor.dtype}, not {dtype or torch.float32}")
    if experts.ndim != 3 or bool((experts < 0).any()):
        raise gate.refuse(file, f"{EXPERTS} must be expert indices [completions, length, choices]")
    shapes = {"rewards": shape[:1], EXPERTS: (*shape, *experts.shape[2:]), **kind.other_shapes}
    for name, tensor in tensors.items():
        if tensor.shape != shapes.get(name, shape):
            problem = f"{name} has shape {tuple(tensor.shape)}, but tokens {tuple(shape)}"
            raise gate.refuse(file, problem)
    return kind(**tensors) if shape[0] == completions else None


def check_ids(file: Path, rollout: Rollout, spec: ModelSpec) -> None:
    """Raise Refused where `file` has token ids outside of the vocabulary, or expert indices that a
    model of `spec` does not have.
    """
    for name, ids in (("tokens", rollout.tokens), ("labels", rollout.labels[rollout.trained])):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < spec.vocab_size:
            span = f"{name} are from {int(ids.min())} to {int(ids.max())}"
            raise gate.refuse(file, f"{span}, but vocab_size is {spec.vocab_size:,}")
    if rollout.experts.numel():
        check_experts(file, rollout.experts, spec)


def check_experts(
    file: Path, experts: Int16[Tensor, "completions length choices"], spec: ModelSpec
) -> None:
    """Raise Refused where the file's expert indices do not fit a model of `spec`: another number of
    choices per token, or an index that is not below the number of experts.
    """
    choices = max((place.stop for place in choice_slices(spec).values()), default=0)
    if experts.shape[2] != choices:
        raise gate.refuse(
            file, f"{EXPERTS} are {experts.shape[2]} choices per token, but the model has {choices}"
        )
    if int(experts.max()) >= spec.experts:
        raise gate.refuse(
            file,
            (
                f"{EXPERTS} have index {int(experts.max())}, but the model has {spec.experts} "
                "experts"
            ),
        )


def delete_rollouts(out: Path, steps: Container[int]) -> None:
    """Delete the files of the iterations that begin at a step in `steps`, text included; the log of
    completions stays.
    """
    for file in (out / FOLDER).glob("*"):
        number, _, kind = file.name.partition(".")
        # nothing but what `save` has written
        if number.isdigit() and len(number) == 8 and kind in ("safetensors", "jsonl"):
            if int(number) in steps:
                file.unlink()
