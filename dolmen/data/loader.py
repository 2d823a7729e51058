"""Builds the loader of a run from its checked inputs (`load`, after `check_inputs`), and the loader
of text: windows of a mixture to train on, and validation text read once, from its first token to
its last (`InOrder`).

    tokens    a b c . d e .                two documents; `.` is the end-of-text token
    windows   .|a b c    c|. d e    e|. -  of 3 predictions: the token before |, and what it is to
                                           predict; `-` is IGNORED

In validation each token is predicted exactly once, the ends of documents too, from the tokens
before it in its window; the first token of a document from an end of text. No window sees the one
before it.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from dolmen.core.determinism import seed_of
from dolmen.core.messages import plural
from dolmen.data import chat_loader
from dolmen.data import tokenizer as tokenizers
from dolmen.data.base_loader import Description, HeldOutRows, Loader
from dolmen.data.batch import Batch
from dolmen.data.config import DataConfig
from dolmen.data.corpus import Corpus, total_size
from dolmen.data.inputs import Inputs, open_corpus
from dolmen.data.masked_lm import Cloze, cloze_for_tokenizer
from dolmen.data.mixture import TokenStream
from dolmen.data.order import Order, data_sets, make_order
from dolmen.data.validation_split import (
    Division,
    ValidationSplit,
    check_length,
    divide_by_split,
    exclude_validation,
    hold_out,
    split_documents,
)
from dolmen.files.remote_file import TextFile
from dolmen.model.spec import ModelSpec
from dolmen.ops.loss import IGNORED


class InOrder:
    """Windows of `sequence_length` predictions over the validation splits `parts`, in order.
    `boundary`: id of the token that attention does not look past; None: it sees its whole window.
    """

    def __init__(
        self,
        parts: Sequence[ValidationSplit],
        sequence_length: int,
        boundary: int | None,
        cloze: Cloze | None = None,
    ):
        """`parts`: validation splits, read one after the other. `sequence_length`: predictions of a
        window. `boundary`: id of the token that attention does not look past; None: it sees its
        whole window. `cloze`: masking for a masked LM, which predicts the masked tokens only.
        """
        self.parts, self.sequence_length, self.boundary = parts, sequence_length, boundary
        self.cloze = cloze

    @cached_property
    def stream(self) -> TokenStream:
        """All validation splits as one token stream."""
        return TokenStream.join([part.stream for part in self.parts])

    @property
    def tokens(self) -> int:
        """Number of predictions in a full pass: every token, end-of-text tokens included."""
        return len(self.stream) if self.parts else 0

    @property
    def bytes(self) -> int | None:
        """Bytes of the validation text, exactly; None where they are not known."""
        return total_size([part.size for part in self.parts])

    @property
    def documents(self) -> int:
        """Number of documents in the validation splits."""
        return sum(part.documents for part in self.parts)

    @property
    def windows(self) -> int:
        """Number of windows of a full pass, the last one partly filled."""
        return -(-self.tokens // self.sequence_length)

    def batches(
        self,
        batch_size: int,
        max_sequences: int | None = None,
        first_row: int = 0,
        rows: int | None = None,
    ) -> Iterator[Batch]:
        """Yield batches of `batch_size` windows in order, or only rows `first_row` to `first_row +
        rows` of each. `max_sequences`: only so many windows, evenly spread. All batches are full;
        the last is padded with IGNORED labels.
        """
        windows, rows = self.windows, rows or batch_size
        chosen = min(windows, max_sequences or windows)
        # whole batches, so that every rank runs equally many
        padded = -(-chosen // batch_size) * batch_size
        for first in range(first_row, padded, batch_size):
            numbers = [
                # evenly spread; number `windows` is an empty window
                index * windows // chosen if index < chosen else windows
                for index in range(first, first + rows)
            ]
            yield self._batch(np.stack([self.window(number) for number in numbers]), numbers)

    def _batch(self, rows: np.ndarray, numbers: list[int]) -> Batch:
        """Return the windows `rows` as a batch, masked if the model is a masked LM; `numbers` are
        the windows' numbers, which seed the masks.
        """
        if self.cloze is None:
            return Batch.from_windows(rows, self.boundary)

        def other(row: int) -> np.ndarray:
            """Return another text, for next-sentence prediction: the window half of all windows
            further on.
            """
            return self.window((numbers[row] + self.windows // 2) % self.windows)

        return self.cloze.batch(rows, [f"held out {number}" for number in numbers], other)

    def window(self, index: int) -> np.ndarray:
        """Return window `index`, int64 [sequence_length + 1], with IGNORED behind the last
        token.
        """
        length = self.sequence_length
        window, start = np.full(length + 1, IGNORED, np.int64), index * length
        real = min(length, self.tokens - start)
        # windows behind the last are all IGNORED
        if real > 0:
            # position -1 is the last: an end of text
            window[: real + 1] = self.stream.read(start - 1, real + 1)
        return window


ELSEWHERE = 1 << 16  # samples, within which a text of elsewhere is found


class TextLoader(Loader):
    """Loader of text: windows of a mixture of sources, and validation windows in order."""

    mixture: Order
    validation: InOrder

    def __init__(
        self,
        mixture: Order,
        held_out: tuple[ValidationSplit, ...],
        global_batch_size: int,
        tokenizer: tokenizers.PreTrainedTokenizer,
        end_of_text: int,
        description: Description,
        identity: dict[str, str],
        document_mask: bool = False,
        cloze: Cloze | None = None,
    ):
        """`held_out`: validation split of each source. `document_mask`: attention does not look
        past an end of text. `cloze`: masking for a masked LM. `identity`: what decides the batches.
        """
        # what attention does not look behind
        self.boundary = end_of_text if document_mask else None
        validation = InOrder(held_out, mixture.sequence_length, self.boundary, cloze)
        super().__init__(mixture, validation, global_batch_size, tokenizer, description, identity)
        self.held_out, self.end_of_text, self.cloze = held_out, end_of_text, cloze

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """Return the rows of global batch `step` (from 0) that data-parallel rank `rank` of `ranks`
        holds: consecutive samples.
        """
        rows = self.rows(ranks)
        first = self.first(step) + rank * rows
        windows = self.mixture.windows(first, rows)
        if self.cloze is None:
            return Batch.from_windows(windows, self.boundary)
        seed = self.cloze.seed

        def other(row: int) -> np.ndarray:
            """Return an unrelated text, for next-sentence prediction: that of a sample up to
            ELSEWHERE (65,536) samples later.
            """
            away = 1 + seed_of(seed, "other text", first + row) % ELSEWHERE
            return self.mixture.windows(first + row + away, 1)[0]

        return self.cloze.batch(windows, range(first, first + rows), other)

    @property
    def validation_by_source(self) -> dict[str, HeldOutRows]:
        """Validation windows per source, by name; empty with one source."""
        if len(self.held_out) < 2:
            return {}
        length = self.mixture.sequence_length
        return {
            split.name: InOrder((split,), length, self.boundary, self.cloze)
            for split in self.held_out
        }

    @property
    def validation_files(self) -> tuple[TextFile, ...]:
        """The held-out files, or () if some held-out document is not a whole file."""
        whole_files = all(split.files for split in self.held_out)
        return tuple(file for split in self.held_out for file in split.files) if whole_files else ()


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the differences between two fingerprints of a run's data (name -> text), a line each:
    `name: before -> after`.
    """
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


def load(
    config: DataConfig,
    inputs: Inputs,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    progress: bool = True,
    verify: bool = True,
    steps: int | None = None,
    model: ModelSpec | None = None,
) -> Loader:
    """Return the loader of a run's data, from inputs that `check_inputs` has opened: text is
    tokenised or read from the cache, a validation split held out, and the rest mixed or packed into
    samples. `verify`: compare the cache with its digests (once per host). `steps`: of the whole
    run, which Megatron's order needs. `model`: reads the batches; a bidirectional one gets masked
    tokens. Raises ValueError for data that cannot be used or are too short.
    """
    if config.rows != "text":
        return chat_loader.prepare(
            config, inputs, sequence_length, global_batch_size, seed, progress, verify, model
        )
    sources = data_sets(config, inputs.sources)
    corpora = [open_corpus(source, config, inputs, progress, verify) for source in sources]
    validation_corpus = None
    if inputs.validation is not None:
        validation_corpus = open_corpus(inputs.validation, config, inputs, progress, verify)
    divisions, held_out = divide_corpora(config, inputs, corpora, validation_corpus)
    cloze = make_cloze(config, inputs, sequence_length, seed, model)
    # tokens of text per sample; a window has one more
    window = sequence_length if cloze is None else cloze.text - 1
    for division, corpus in zip(divisions, corpora, strict=True):
        # after holding out: what is left must fill a window
        check_length(division, corpus, window)
    samples = None if steps is None else steps * global_batch_size
    mixture = make_order(config, sources, corpora, divisions, window, seed, samples)
    left_out = [
        f"warning: skipped: {note}" for source in inputs.sources for note in source.left_out
    ]
    kept_out = [note for division in divisions for note in division.notes]
    kept_out += [note for corpus in corpora for note in corpus.notes]
    identity = {
        **identify(config, mixture, corpora, validation_corpus),
        "tokenizer": tokenizers.fingerprint(inputs.tokenizer),
        "end of text": str(inputs.end_of_text),
        "sequence_length": str(sequence_length),
        "global_batch_size": str(global_batch_size),
        "seed": str(seed),
        **({"document_mask": "True"} if config.document_mask else {}),
        **({"masked": f"{cloze.fraction:g}, pairs {cloze.pairs}"} if cloze else {}),
    }
    return TextLoader(
        mixture,
        tuple(held_out),
        global_batch_size,
        inputs.tokenizer,
        inputs.end_of_text,
        describe(mixture, corpora, held_out, [*left_out, *kept_out], config),
        identity,
        config.document_mask,
        cloze,
    )


def make_cloze(
    config: DataConfig, inputs: Inputs, sequence_length: int, seed: int, model: ModelSpec | None
) -> Cloze | None:
    """Return the masking for a masked LM; None for other models. Raises ValueError for options that
    do not apply to masked LM.
    """
    if model is None or not model.both_ways:
        return None
    if config.document_mask or config.order != "dolmen":
        option = "document-mask" if config.document_mask else f"order {config.order}"
        raise ValueError(
            f"data.{option} is for causal language models, but this one is a masked language "
            "model: leave it out"
        )
    return cloze_for_tokenizer(
        inputs.tokenizer, sequence_length, config.masked_fraction, model.head.follows, seed
    )


def divide_corpora(
    config: DataConfig, inputs: Inputs, corpora: list[Corpus], validation_corpus: Corpus | None
) -> tuple[list[Division], list[ValidationSplit]]:
    """Divide each corpus into training and validation text, and return the divisions and the
    validation splits. Validation is all of `validation_corpus` (--data.validation) if given, whose
    copies are not trained on; else a fraction of the documents, or in Megatron's order the second
    share of --data.split.
    """
    if config.order == "megatron":
        divisions = [divide_by_split(corpus, config.shares) for corpus in corpora]
    elif validation_corpus is not None:
        divisions = exclude_validation(corpora, validation_corpus)
    else:
        divisions = hold_out(
            corpora, inputs.sources, config.validation_fraction, inputs.tokenizer, config.text_field
        )
    if validation_corpus is not None:
        return divisions, [
            split_documents(validation_corpus, range(validation_corpus.document_count))
        ]
    return divisions, [division.validation for division in divisions if division.validation]


def identify(
    config: DataConfig, mixture: Order, corpora: list[Corpus], validation_corpus: Corpus | None
) -> dict[str, str]:
    """Return the entries of the run's fingerprint for its data (name -> text): each corpus, the
    order and the validation split, by content and not by path.
    """
    split = (
        f"{config.validation_fraction:g} of the documents held out, chosen by a hash of their text"
    )
    if config.order == "megatron":
        split = f"split {config.shares}"
    return {
        **{
            f"data {number}": f"{content(corpus)}, weight {float(part.weight):g}"
            for number, (part, corpus) in enumerate(zip(mixture.parts, corpora, strict=True), 1)
        },
        "validation": content(validation_corpus) if validation_corpus is not None else split,
        **({"order": mixture.name} if mixture.name else {}),
    }


def content(corpus: Corpus) -> str:
    """Return a line that identifies a corpus by its numbers of documents and bytes and a hash."""
    return f"{corpus.document_count:,} documents, {amount(corpus)}, hash {corpus.content}"


def amount(corpus: Corpus) -> str:
    """Return the size of a corpus for messages, in bytes of text, or in tokens where its text is
    unknown.
    """
    if corpus.byte_count is None:
        return plural(corpus.token_count, "token")
    return plural(corpus.byte_count, "byte")


def describe(
    mixture: Order,
    corpora: list[Corpus],
    held_out: list[ValidationSplit],
    changes: list[str],
    config: DataConfig,
) -> Description:
    """Return the lines of a run's header about its data: one source in full, or sums over several,
    with each in the details. `changes`: notes on what was left out.
    """
    sources = []
    for part, weight, size, corpus in zip(
        mixture.parts, mixture.weights, mixture.sizes, corpora, strict=True
    ):
        copies = corpus.document_count - corpus.different_count
        copies_note = f", {copies:,} copies of others" if copies else ""
        share = f"{weight / sum(mixture.weights):.1%} of the batches: " if len(corpora) > 1 else ""
        sources.append(
            f"{share}{part.name}: {len(part.stream):,} tokens to train on of "
            f"{corpus.token_count:,} in {plural(corpus.document_count, 'document')} "
            f"({amount(corpus)}{copies_note}), {size:,} windows of "
            f"{mixture.sequence_length:,} per epoch"
        )
    training = sources[0]
    if len(sources) > 1:
        training = (
            f"{len(sources)} sources: {sum(len(part.stream) for part in mixture.parts):,} tokens "
            f"to train on, {sum(mixture.sizes):,} windows of {mixture.sequence_length:,}"
        )
    if mixture.name:
        training += f", in the order of {mixture.name}"
    zero = f"split is {config.shares}" if config.order == "megatron" else "validation-fraction is 0"
    return Description(
        training,
        "; ".join(out.note for out in held_out) or f"none (--data.{zero})",
        tuple(changes),
        tuple(sources) if len(sources) > 1 else (),
    )
