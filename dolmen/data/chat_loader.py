"""Chats in packed rows, as batches.

    row        a a a a|b b b|. .          two examples, of five tokens and of four, and padding
    labels     - a a a|- b b|- -          of the tokens that are trained; `-` is IGNORED
    starts     0 0 0 0 4 4 4 7 7          of documents: no example sees another
    positions  0 1 2 3 0 1 2 0 1

Rows are packed once. An epoch is a permutation of them, keyed by (seed, epoch); so sample i is
known at once, for any i, and each example is read once per epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import torch

from dolmen.core.rng import seed_of
from dolmen.core.words import counted, printable
from dolmen.data.batch import Batch
from dolmen.data.batches import Loader
from dolmen.data.config import DataConfig
from dolmen.data.examples import Examples, open_examples
from dolmen.data.inputs import Inputs
from dolmen.data.mixture import Part, permute_index
from dolmen.data.packing import pack
from dolmen.data.stream import TokenStream
from dolmen.data.template import template_of
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.model.tree import Tree
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED

SHOWN = 600  # characters of the example that is shown, about the first trained token


class Packed:
    """Rows of `sequence_length` places, each of some of the examples `chosen`."""

    bytes = None

    def __init__(
        self,
        examples: Examples,
        chosen: np.ndarray,
        sequence_length: int,
        packing: bool,
        weighted: bool,
        seed: int = 0,
    ):
        self.examples, self.chosen = examples, chosen
        self.sequence_length, self.seed = sequence_length, seed
        self.weighted = weighted
        # one each, where they are not packed
        room = examples.places()[chosen].tolist() if packing else [sequence_length] * len(chosen)
        self.rows = [chosen[row].tolist() for row in pack(room, sequence_length)]

    @property
    def parts(self) -> Sequence[Part]:
        spans = [self.examples.span(index) for index in sorted(self.chosen.tolist())]
        starts, stops = (
            np.array([one(span) for span in spans], np.int64)
            for one in (lambda s: s.start, lambda s: s.stop)
        )
        stream = TokenStream.of(self.examples.tokens, starts, stops)
        return [Part(self.examples.name, Fraction(1), stream)]

    @property
    def tokens(self) -> int:
        """Those that are trained, or predicted."""
        return int(self.examples.predictions()[self.chosen].sum())

    def epochs(self, samples: int) -> dict[str, float]:
        return {self.examples.name: samples / len(self.rows)}

    def documents(self, first: int, count: int) -> list[str]:
        name = self.examples.name
        return [f"{name}: examples {', '.join(map(str, row))}" for row in self.read(first, count)]

    def read(self, first: int, count: int) -> list[list[int]]:
        """The examples of samples first .. first + count - 1."""
        found, size = [], len(self.rows)
        for sample in range(first, first + count):
            epoch, within = divmod(sample, size)
            key = seed_of(self.seed, "row", epoch)
            found.append(self.rows[int(permute_index(np.array([within]), size, key)[0])])
        return found

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """As HeldOutRows.batches; the last one is filled up with rows of nothing."""
        size, rows = len(self.rows), rows or batch_size
        chosen = min(size, max_sequences or size)
        picked = [self.rows[index * size // chosen] for index in range(chosen)]
        for first in range(first_row, -(-chosen // batch_size) * batch_size, batch_size):
            made = picked[first : first + rows]
            yield self.batch(made + [[]] * (rows - len(made)))

    def batch(self, rows: list[list[int]]) -> Batch:
        """These rows of examples."""
        shape = len(rows), self.sequence_length
        tokens, labels = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        weights, starts = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
        examples = self.examples
        for row, indices in enumerate(rows):
            place = 0
            for index in indices:
                span = examples.span(index)
                ids = examples.tokens[span].astype(np.int64)
                trained = examples.trained[span][1:] * examples.weights[index]
                here = slice(place, place + len(ids) - 1)
                tokens[row, here] = ids[:-1]
                labels[row, here] = np.where(trained > 0, ids[1:], IGNORED)
                weights[row, here], starts[row, here] = trained, place
                place = here.stop
            starts[row, place:] = place
        made = Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            Documents.of(torch.from_numpy(starts)),
        ).with_positions(1)
        return replace(made, weights=torch.from_numpy(weights)) if self.weighted else made


class ChatLoader(Loader):
    """Packed chats."""

    mixture: Packed

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        rows = self.rows(ranks)
        return self.mixture.batch(self.mixture.read(self.first(step) + rank * rows, rows))


def prepare(
    config: DataConfig,
    inputs: Inputs,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    progress: bool,
    verify: bool,
    model: Tree | None,
) -> ChatLoader:
    """From chats to batches. Raises ValueError for chats that cannot be trained on, and for a model
    that is not taught by them.
    """
    if model is not None and (model.both_ways or model.blanks is not None):
        why = "fills in masked tokens" if model.both_ways else "has blanks and prefixes of its own"
        raise ValueError(
            f"data.rows chats is for models that foretell the next token, and this one {why}: use "
            "--data.rows text"
        )
    template = template_of(inputs.tokenizer, config.template)
    if config.template is not None:
        inputs.tokenizer.chat_template = template.text  # that of the model that is saved

    def opened(source, option: str) -> Examples:
        return open_examples(
            source,
            template,
            config.train_on,
            sequence_length + 1,
            config.cache_folder,
            progress,
            option,
            verify,
        )

    (source,) = inputs.sources
    examples = opened(source, "--data.path")
    judge = None
    if inputs.validation is not None:
        judge = opened(inputs.validation, "--data.validation")
    training, held = divide(examples, judge, config.validation_fraction)
    validated = examples if judge is None else judge
    weighted = examples.weighted
    mixture = Packed(examples, training, sequence_length, config.packing, weighted, seed)
    validation = Packed(validated, held, sequence_length, config.packing, False)
    lines = describe(mixture, validation, config, inputs.tokenizer)
    identity = {
        "data 1": f"{len(examples):,} chats, hash {examples.content}",
        "validation": (
            f"{config.validation_fraction:g} of the chats held out, drawn by their tokens"
            if judge is None
            else f"{len(judge):,} chats, hash {judge.content}"
        ),
        "rows": f"chats, trained on {config.train_on}, packing {config.packing}",
        "sequence_length": str(sequence_length),
        "global_batch_size": str(global_batch_size),
        "seed": str(seed),
    }
    return ChatLoader(mixture, validation, global_batch_size, inputs.tokenizer, lines, identity)


def divide(
    examples: Examples, judge: Examples | None, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """The examples to train on, and those to validate on, which are of `judge` if there is one.
    Which are held out is decided by their tokens: copies are together. Where chance draws none, it
    is the one with the smallest hash. Raises ValueError where nothing is left to train on.
    """
    useful = np.flatnonzero(examples.predictions())
    hashes = examples.hashes[useful]
    if judge is not None:
        held = np.flatnonzero(judge.predictions())
        training = useful[~np.isin(hashes, judge.hashes)]
    elif not fraction:
        training, held = useful, useful[:0]
    else:
        drawn = hashes < np.uint64(int(fraction * 2**64))
        if not drawn.any():
            drawn = hashes == hashes.min(initial=2**64 - 1)
        training, held = useful[~drawn], useful[drawn]
    if not len(training):
        raise ValueError(
            f"--data.path {examples.name}: of {counted(len(examples), 'chat')} none is left to "
            f"train on ({len(examples) - len(useful):,} have no trained token within "
            f"sequence_length + 1 ({examples.longest}), {len(useful):,} are held out): give more, "
            "or set --train.sequence-length or --data.validation-fraction"
        )
    return training, held


def describe(
    mixture: Packed, validation: Packed, config: DataConfig, tokenizer: PreTrainedTokenizer
) -> list[str]:
    """What is trained on, for the header of a run, and an example of it."""
    examples = mixture.examples
    places = int(examples.places()[mixture.chosen].sum())
    full = places / (len(mixture.rows) * mixture.sequence_length)
    lines = [
        f"{examples.name}: {counted(len(mixture.chosen), 'chat')} to train on of "
        f"{len(examples):,}, {mixture.tokens:,} trained tokens ({config.train_on}) of {places:,}, "
        f"{counted(len(mixture.rows), 'sequence')} of {mixture.sequence_length} per epoch, "
        f"{full:.1%} full"
    ]
    if examples.cut:
        lines.append(
            f"the ends of {counted(examples.cut, 'chat')} of over {examples.longest:,} tokens are "
            "cut off (--train.sequence-length)"
        )
    if useless := int((examples.predictions() == 0).sum()):
        lines.append(f"left out: {counted(useless, 'chat')} in which no token would be trained")
    lines.append(
        f"validation: {counted(len(validation.chosen), 'chat')}, {validation.tokens:,} tokens"
        if validation.tokens
        else "validation: none (--data.validation-fraction is 0)"
    )
    shown = marked(examples, int(mixture.chosen[0]), tokenizer)
    return [*lines, f"trained is what stands in »«, as of chat {mixture.chosen[0]}: {shown}"]


def marked(examples: Examples, index: int, tokenizer: PreTrainedTokenizer) -> str:
    """The text of an example on one line, with what is trained of it in »«."""
    span = examples.span(index)
    ids, trained = examples.tokens[span].tolist(), examples.trained[span] > 0
    edges = np.flatnonzero(np.diff(trained, prepend=not trained[0])).tolist()
    text = ""
    for first, end in zip(edges, [*edges[1:], len(ids)], strict=True):
        piece = printable(tokenizer.decode(ids[first:end]))
        text += f"»{piece}«" if trained[first] else piece
    at = max(0, text.find("»") - SHOWN // 2)
    before, behind = "... " if at else "", " ..." if at + SHOWN < len(text) else ""
    return before + text[at : at + SHOWN] + behind
