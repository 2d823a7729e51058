"""What a phase has drawn, and all that its updates learn it from: on every rank the same, and in a
file before the first of them, so that a run that is killed goes on with the same answers and
rewards.

    rollouts/00000040.safetensors      what is drawn before step 40
    rollouts/00000040.jsonl            the same to be read: prompt, answer, reward
"""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import safetensors.torch
import torch
from jaxtyping import Float, Int16, Int64
from torch import Tensor

from dolmen.data.batch import Batch
from dolmen.files import gate, write
from dolmen.files import safetensors as files
from dolmen.model.replay import places
from dolmen.model.tree import Tree
from dolmen.objectives.grpo import ADVANTAGE, OLD, REFERENCE
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED

FOLDER = "rollouts"
EXPERTS = "experts"  # the name of a tensor that a file need not have
DTYPES = {"tokens": torch.int64, "labels": torch.int64, EXPERTS: torch.int16}
"""All else are numbers with a fraction."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """Answers, each behind its prompt in a row, in the order of their numbers."""

    others: ClassVar[dict[str, tuple[int, ...]]] = {}
    """Shapes of what is kept of no token and no answer."""

    tokens: Int64[Tensor, "answers length"]
    labels: Int64[Tensor, "answers length"]
    """IGNORED but where an answer's token follows."""
    sampled: Float[Tensor, "answers length"]
    """Of each label, the log-probability with which it was drawn."""
    rewards: Float[Tensor, " answers"]
    """NaN where there is none."""
    old: Float[Tensor, "answers length"]
    """Of each label, the log-probability in the model as it was trained when the phase began."""
    reference: Float[Tensor, "answers length"]
    """The same of the model that the run began with; 0 where nobody asks."""
    advantages: Float[Tensor, "answers length"]
    experts: Int16[Tensor, "answers length choices"]
    """Those that each token went to when the phase began; of no choice where nobody asks."""

    def batch(self, rows: slice | Int64[Tensor, " rows"]) -> Batch:
        """These answers to learn from."""
        tokens, labels = self.tokens[rows], self.labels[rows]
        made = Batch(tokens, labels, Documents.of(_starts(labels))).with_positions(1)
        experts = self.experts[rows].long() if self.experts.numel() else None
        numbers = {name: each[rows] for name, each in self.numbers.items()}
        return replace(made, numbers=numbers, experts=experts)

    @property
    def numbers(self) -> dict[str, Float[Tensor, "answers length"]]:
        """What an objective must know of each token."""
        return {OLD: self.old, ADVANTAGE: self.advantages, REFERENCE: self.reference}

    def apart(self) -> dict[str, float]:
        """By how much trainer and generator differ over all that was drawn: of log-probabilities
        the mean difference, and the largest, beside what is allowed of it:
        1e-4 max(1, |log p| / 10).
        """
        here = self.labels != IGNORED
        old, off = self.old[here], (self.old - self.sampled)[here].abs()
        if not len(off):
            return {}
        allowed = 1e-4 * (old.abs() / 10).clamp(min=1)
        return {
            "rollout/logprob_difference": float(off.mean()),
            "rollout/logprob_difference_of_allowed": float((off / allowed).max()),
        }


Kept = TypeVar("Kept", bound=Drawn)


def of_answers(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[float]],
    length: int,
    unit: int,
    own: Sequence[Sequence[bool]] | None = None,
) -> Drawn:
    """Rows of `prompts` with their `answers`, none longer than `length` + 1: as wide as the longest
    needs, in multiples of `unit`. Tokens of an answer that are not the model's `own` have no label.
    Rewards, log-probabilities and advantages are still to come.
    """
    longest = max(len(p) + len(a) - 1 for p, a in zip(prompts, answers, strict=True))
    width = min(length, -(-longest // unit) * unit)
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED)
    sampled = torch.zeros(tokens.shape)
    own = own or [[True] * len(answer) for answer in answers]
    every = zip(prompts, answers, logprobs, own, strict=True)
    for row, (prompt, answer, numbers, drawn) in enumerate(every):
        whole, first = torch.tensor([*prompt, *answer]), len(prompt) - 1
        here = torch.tensor(drawn)
        tokens[row, : len(whole) - 1] = whole[:-1]
        labels[row, first : len(whole) - 1] = torch.where(here, whole[first + 1 :], IGNORED)
        sampled[row, first : len(whole) - 1] = torch.tensor(numbers) * here
    nothing = torch.zeros(len(prompts))
    unknown, unasked = torch.zeros(tokens.shape), _unasked(tokens.shape)
    return Drawn(tokens, labels, sampled, nothing, unknown, unknown, unknown, unasked)


def _unasked(shape: torch.Size) -> Int16[Tensor, "answers length 0"]:
    """Experts of which nothing is known."""
    return torch.zeros(*shape, 0, dtype=torch.int16)


def _starts(labels: Int64[Tensor, "rows length"]) -> Int64[Tensor, "rows length"]:
    """Of documents: the row, and what fills it up behind the answer, which nobody reads."""
    index = torch.arange(labels.shape[1])
    end = torch.where(labels != IGNORED, index + 1, 0).amax(1, keepdim=True)
    return torch.where(index >= end, end, 0).expand_as(labels).contiguous()


def file_of(out: Path, step: int) -> Path:
    return out / FOLDER / f"{step:08d}.safetensors"


def save(drawn: Drawn, out: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Whole, or not at all; `rows` are those to be read."""
    write.folder(out, FOLDER)
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write.replace(file_of(out, step).with_suffix(".jsonl"), lines.encode(errors="replace"))
    tensors = {one.name: vars(drawn)[one.name].clone() for one in fields(drawn)}
    if not drawn.experts.numel():
        del tensors[EXPERTS]
    write.replace(file_of(out, step), safetensors.torch.save(tensors))


def load(out: Path, step: int, answers: int, kind: type[Kept] = Drawn) -> Kept | None:
    """What was drawn before `step`; None where there is no file, or one of another number of
    answers: of phases of another length, whose begin may be this one's too. Raises Refused for one
    that is not what `save` has written of this `kind`.
    """
    file = file_of(out, step)
    if not file.exists():
        return None
    stored = files.read_header(file)
    names = [one.name for one in fields(kind)]
    if EXPERTS not in stored:
        names.remove(EXPERTS)
    if sorted(stored) != sorted(names):
        raise gate.refuse(
            file, f"has tensors {', '.join(sorted(stored)[:8])}, not {', '.join(names)}"
        )
    tensors = {name: stored[name].read() for name in names}
    shape = tensors["tokens"].shape
    experts = tensors.setdefault(EXPERTS, _unasked(shape))
    if len(shape) != 2 or not all(shape):
        raise gate.refuse(file, f"tokens are {tuple(shape)}, no rows of answers")
    for name, tensor in tensors.items():
        wanted = DTYPES.get(name)
        right = tensor.dtype == wanted if wanted else tensor.is_floating_point()
        if not right:
            raise gate.refuse(file, f"{name} are {tensor.dtype}, not {wanted or torch.float32}")
    if experts.ndim != 3 or bool((experts < 0).any()):
        raise gate.refuse(file, f"{EXPERTS} are no numbers of experts of each token")
    for name, tensor in tensors.items():
        wanted = {"rewards": shape[:1], EXPERTS: (*shape, *experts.shape[2:]), **kind.others}.get(
            name, shape
        )
        if tensor.shape != wanted:
            said = f"{name} is {tuple(tensor.shape)}, and tokens are {tuple(shape)}"
            raise gate.refuse(file, said)
    return kind(**tensors) if shape[0] == answers else None


def check_read(file: Path, made: Drawn, tree: Tree) -> None:
    """Raises Refused where what `file` has is not of a model of this `tree`."""
    labels = made.labels[made.labels != IGNORED]
    for name, ids in (("tokens", made.tokens), ("labels", labels)):
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < tree.vocab_size:
            said = f"{name} are from {int(ids.min())} to {int(ids.max())}"
            raise gate.refuse(file, f"{said}, and the model has {tree.vocab_size:,} of them")
    if made.experts.numel():
        check_experts(file, made.experts, tree)


def check_experts(file: Path, experts: Int16[Tensor, "answers length choices"], tree: Tree) -> None:
    """Raises Refused for those of `file` that are not of a model of this `tree`."""
    choices = max((place.stop for place in places(tree).values()), default=0)
    if experts.shape[2] != choices:
        said = f"{EXPERTS} are {experts.shape[2]} choices of each token, of the model {choices}"
        raise gate.refuse(file, said)
    if int(experts.max()) >= tree.experts:
        said = f"{EXPERTS} have number {int(experts.max())}, and the model {tree.experts} of them"
        raise gate.refuse(file, said)


def forget(out: Path, begun: Container[int]) -> None:
    """Take away the files of phases that began at one of these steps."""
    for file in sorted((out / FOLDER).glob("*")):
        number, _, kind = file.name.partition(".")
        if number.isdigit() and len(number) == 8 and kind in ("safetensors", "jsonl"):
            if int(number) in begun:
                file.unlink()
