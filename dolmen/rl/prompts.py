"""Prompts of a run that samples completions: rows with a `prompt` (a text, used as it is) or
`messages` (formatted by the chat template with the generation prompt), or the first line of each
text, in an order that follows from the seed. Other fields of a row are for its reward.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np

from dolmen.core.determinism import seed_of
from dolmen.core.messages import plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.base_loader import Description, Loader
from dolmen.data.batch import Batch
from dolmen.data.chat_loader import refuse_model
from dolmen.data.config import DataConfig
from dolmen.data.inputs import Inputs
from dolmen.data.mixture import Part, TokenStream
from dolmen.data.packing import shuffle_row
from dolmen.data.sources import DataSource
from dolmen.data.template import ASSISTANT, Chat, Template, template_of
from dolmen.data.tokenise import first_lines
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import ModelConfig, special_tokens
from dolmen.files import gate
from dolmen.files.kinds import PROMPT_ROWS
from dolmen.rl.config import RolloutConfig
from dolmen.rl.rewards import NEEDS_ANSWER

SHOWN = 300  # characters of the first prompt, in the header of a run


@dataclass(frozen=True)
class Prompt:
    """A prompt and the row that it is from."""

    tokens: list[int]
    row: dict[str, Any]
    location: str
    """File and row, for messages."""

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """The prompt as the row has it: a text, or the messages of a chat."""
        return next(self.row[name] for name in PROMPT_ROWS if name in self.row)


class Prompts:
    """The prompts of a run, in an order that is a new permutation in each epoch. In the loader's
    count of samples each prompt is read `repeats` times: completions per prompt times epochs per
    iteration.
    """

    def __init__(self, name: str, prompts: Sequence[Prompt], repeats: int, seed: int):
        """`name`: of the data source, for messages. `repeats`: samples that each prompt counts as.
        `seed`: decides the order.
        """
        self.name, self.prompts, self.repeats, self.seed = name, prompts, repeats, seed

    @property
    def parts(self) -> Sequence[Part]:
        """The prompts as one part of a data mixture, for statistics."""
        # all prompts in one array, as the mixture's statistics read documents
        ends = np.cumsum([len(prompt.tokens) for prompt in self.prompts])
        tokens = np.concatenate([np.asarray(prompt.tokens) for prompt in self.prompts])
        starts = np.concatenate([[0], ends[:-1]])
        return [Part(self.name, Fraction(1), TokenStream.from_ranges(tokens, starts, ends))]

    def documents(self, first: int, count: int) -> list[str]:
        """Return file and row of the prompts of samples first ... first + count - 1."""
        # rounded outwards: a batch may begin or end within a prompt's completions
        numbers = range(first // self.repeats, -(-(first + count) // self.repeats))
        return [f"{self.name}: {self.prompts[self.index(number)].location}" for number in numbers]

    def epochs(self, samples: int) -> dict[str, float]:
        """Return {name of the data: how many times (a fraction) all prompts have been read after
        `samples` samples}; each prompt counts as `self.repeats` samples.
        """
        return {self.name: samples / (self.repeats * len(self.prompts))}

    def index(self, number: int, attempt: int = 0) -> int:
        """Return the index in `prompts` of prompt number `number` of the run, counted over all
        epochs: each epoch is a new permutation. A resampling `attempt` above 0 uses other
        permutations.
        """
        seed = seed_of(self.seed, "again", attempt) if attempt else self.seed
        return shuffle_row(number, len(self.prompts), seed)


class NoValidation:
    """The empty validation split."""

    tokens = 0
    bytes = None

    def batches(self, *_: object, **__: object) -> Iterator[Batch]:
        """Yield no batch."""
        yield from ()


class PromptLoader(Loader):
    """The loader of a run that samples completions: prompts, and perhaps pretraining text.
    RolloutBatches makes the batches.
    """

    mixture: Prompts
    text: Loader | None = None
    """The loader of the pretraining text of PPO-ptx."""

    def add_pretraining(self, text: Loader) -> "PromptLoader":
        """Add the loader of the pretraining text, whose position, description and identity follow
        this one's; return this loader.
        """
        self.text = text
        training = f"{self.description.training}; pretraining text: {text.description.training}"
        self.description = replace(
            self.description,
            training=training,
            changes=(*self.description.changes, *text.description.changes),
        )
        identity = {f"pretraining {name}": value for name, value in text.identity.items()}
        self.identity = {**self.identity, **identity}
        return self

    def resume_at(self, step: int, samples: int) -> None:
        """Continue after `step` steps and `samples` samples, in the pretraining text too."""
        super().resume_at(step, samples)
        if self.text is not None:
            self.text.resume_at(step, samples)

    def epochs(self, step: int) -> dict[str, float]:
        """Return the epochs read after `step` steps, by source: those of the prompts, and those of
        the pretraining text as "pretraining NAME", as both may be of one file.
        """
        read = {} if self.text is None else self.text.epochs(step)
        return super().epochs(step) | {f"pretraining {name}": n for name, n in read.items()}

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Raise AssertionError: batches of completions come from RolloutBatches, which samples
        them.
        """
        raise AssertionError(
            "completions are sampled before they are trained on: see RolloutBatches"
        )


def prepare(
    data: DataConfig,
    inputs: Inputs,
    rollout: RolloutConfig,
    model: ModelConfig,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    rewards: Sequence[str],
) -> PromptLoader:
    """Return the loader of the prompts in the opened data, those that are too long left out. Raises
    ValueError for rows that are no prompts, and where none is short enough to leave max_new_tokens
    within `sequence_length`.
    """
    refuse_model(data, model.spec)
    (source,) = inputs.sources
    # one more than the row: inputs leave out the last token of a text
    room = sequence_length + 1 - rollout.max_new_tokens
    if room < 1:
        raise ValueError(
            f"rollout.max-new-tokens ({rollout.max_new_tokens}) leaves no room for a prompt in "
            f"train.sequence-length ({sequence_length}): set it to {sequence_length} or less"
        )
    read = list(_prompts(source, data, inputs.tokenizer, model, rewards))
    fitting = [prompt for prompt in read if len(prompt.tokens) <= room]
    if not fitting:
        longest = min((len(prompt.tokens) for prompt in read), default=0)
        raise ValueError(
            f"--data.path {source.name}: of {plural(len(read), 'prompt')} none is left"
            + (
                f": the shortest has {longest} tokens, but train.sequence-length "
                f"({sequence_length}) minus rollout.max-new-tokens ({rollout.max_new_tokens}) "
                f"leaves {room}"
                if read
                else ""
            )
        )
    mixture = Prompts(source.name, fitting, rollout.num_generations * rollout.epochs, seed)
    left_out = (
        f"skipped: {plural(len(read) - len(fitting), 'prompt')} of over {room} tokens "
        "(--train.sequence-length, --rollout.max-new-tokens)"
    )
    updates = rollout.updates(global_batch_size)
    stale = plural(updates - 1, "update")
    off_policy = f", the last one {stale} off-policy" if updates > 1 else " (on-policy)"
    decoded = inputs.tokenizer.decode(fitting[0].tokens)
    description = Description(
        f"{source.name}: {plural(len(fitting), 'prompt')} of {_lengths(fitting)} tokens; each "
        f"iteration samples {rollout.completions(global_batch_size):,} completions for "
        f"{plural(updates, 'update')}{off_policy}",
        changes=(left_out,) if len(fitting) < len(read) else (),
        details=(f"prompt of {fitting[0].location}: {decoded[:SHOWN]!r}",),
    )
    # the fingerprint shows on resume whether the prompts have changed
    content = hashlib.blake2b(digest_size=8)
    for prompt in fitting:
        # -1, which is no token id, between prompts
        content.update(np.array(prompt.tokens, "<i8").tobytes() + b"\xff" * 8)
    identity = {
        "data 1": f"{len(fitting):,} prompts, hash {content.hexdigest()}",
        "tokenizer": tokenizers.fingerprint(inputs.tokenizer),
        "sequence_length": str(sequence_length),
        "global_batch_size": str(global_batch_size),
        "seed": str(seed),
    }
    return PromptLoader(
        mixture, NoValidation(), global_batch_size, inputs.tokenizer, description, identity
    )


def _lengths(prompts: Sequence[Prompt]) -> str:
    """Return "SHORTEST to LONGEST" in tokens."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    return f"{min(lengths)} to {max(lengths)}"


def _prompts(
    source: DataSource,
    data: DataConfig,
    tokenizer: PreTrainedTokenizer,
    model: ModelConfig,
    rewards: Sequence[str],
) -> Iterator[Prompt]:
    """Yield the prompt of each row of `source`, tokenized: a chat by its template with the
    generation prompt, a text with the model's special tokens. Raises Refused for a row without
    exactly one prompt, without the `answer` that a reward needs, or with an empty prompt.
    """
    template: Template | None = None
    for row, where in first_lines(source, data.text_field, data.max_row_bytes):
        row = {name: value for name, value in row.items() if value is not None}
        form = gate.check_form(row, where, PROMPT_ROWS)
        comparing = [name for name in rewards if name in NEEDS_ANSWER]
        if comparing and "answer" not in row:
            problem = f"it has no `answer`, which --reward {comparing[0]} needs"
            raise gate.refuse(where, problem)
        if form == "messages":
            if row["messages"][-1]["role"] == ASSISTANT:
                raise gate.refuse(where, "its last message is the assistant's")
            template = template or template_of(tokenizer, data.template)
            tokens = template.prompt(Chat(row["messages"], 1.0, where))
        else:
            tokens = special_tokens.frame_prompt(model, tokenizer(row[form])["input_ids"])
        if not tokens:
            raise gate.refuse(where, "its prompt has no tokens")
        yield Prompt(tokens, row, where)
