"""Batches as a function of (seed, step): resuming is a number, and no split over ranks changes what
is trained on.

`prepare` is the whole road from a DataConfig to a Loader, `check` its cheap first part: what can be
refused is refused there, before anything is written.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dolmen.data import tokenizer as tokenizers
from dolmen.data.batch import IGNORED, Batch
from dolmen.data.bpe import tokenizer_folder
from dolmen.data.config import DataConfig
from dolmen.data.corpus import Corpus, open_corpus
from dolmen.data.mixture import Mixture, Part
from dolmen.data.sources import WHOLE_FILE, Source, pieces, resolve
from dolmen.data.stream import HeldOut, TokenStream, everything, split


class Loader:
    """Training batches of `mixture`, validation batches of `held_out`."""

    def __init__(
        self,
        mixture: Mixture,
        held_out: tuple[HeldOut, ...],
        global_batch_size: int,
        tokenizer,
        end_of_text: int,
        lines: list[str],
        identity: dict[str, str],
        document_mask: bool = False,
    ):
        self.mixture, self.held_out, self.global_batch_size = mixture, held_out, global_batch_size
        self.tokenizer = tokenizer
        self.end_of_text = end_of_text
        self.lines = lines
        self.identity = identity
        # what attention does not look behind
        self.boundary = end_of_text if document_mask else None
        self.validation = TokenStream.join([held.stream for held in held_out]) if held_out else None

    def batch(self, step: int, rank: int = 0, ranks: int = 1) -> Batch:
        """The rows of global batch `step` (from 0) that data-parallel rank `rank` holds:
        consecutive samples.
        """
        rows = self.rows(ranks)
        return Batch.of_windows(
            self.mixture.windows(step * self.global_batch_size + rank * rows, rows), self.boundary
        )

    def documents(self, step: int) -> list[str]:
        """Which documents the rows of global batch `step` were cut from, a line each: `source:
        documents a..b`.
        """
        lines = self.mixture.documents(step * self.global_batch_size, self.global_batch_size)
        return lines if len(lines) <= 16 else [*lines[:16], f"and {len(lines) - 16} more rows"]

    def starting_at(self, step: int, rank: int = 0, ranks: int = 1) -> Iterator[tuple[int, Batch]]:
        """(step, batch) for ever; a thread prepares the next batch while this one is used."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            coming = thread.submit(self.batch, step, rank, ranks)
            for now in count(step):
                batch, coming = coming.result(), thread.submit(self.batch, now + 1, rank, ranks)
                yield now, batch

    def validation_batches(
        self, max_sequences: int | None = None, rank: int = 0, ranks: int = 1
    ) -> Iterator[Batch]:
        """The held-out tokens in order, each predicted exactly once (the first from an end-of-text
        token). With `max_sequences`, only that many windows, evenly spread. Every rank gets equally
        many full batches, the last ones filled up with positions that are IGNORED.
        """
        if self.validation is None:
            raise ValueError(
                "nothing is held out: --data.validation-fraction is 0; use more, or "
                "--data.validation"
            )
        length, rows = self.mixture.sequence_length, self.rows(ranks)
        windows = -(-len(self.validation) // length)
        chosen = min(windows, max_sequences or windows)
        padded = -(-chosen // self.global_batch_size) * self.global_batch_size
        for first in range(rank * rows, padded, self.global_batch_size):
            yield Batch.of_windows(
                np.stack(
                    [
                        self.validation_window(
                            index * windows // chosen if index < chosen else windows
                        )
                        for index in range(first, first + rows)
                    ]
                ),
                self.boundary,
            )

    def validation_window(self, index: int) -> np.ndarray:
        """int64 [sequence_length + 1], IGNORED behind the last held-out token."""
        length = self.mixture.sequence_length
        window, start = np.full(length + 1, IGNORED, np.int64), index * length
        real = min(length, len(self.validation) - start)
        if real > 0:
            # position -1 is the last: an end of text
            window[: real + 1] = self.validation.read(start - 1, real + 1)
        return window

    def rows(self, ranks: int) -> int:
        """Sequences of a global batch that one of `ranks` data-parallel ranks holds."""
        if self.global_batch_size % ranks:
            raise ValueError(
                f"global_batch_size ({self.global_batch_size}) is not divisible by the {ranks} "
                "data-parallel ranks: use --train.global-batch-size "
                f"{-(-self.global_batch_size // ranks) * ranks}"
            )
        return self.global_batch_size // ranks

    def epochs(self, step: int) -> dict[str, float]:
        """How often each source has been read after `step` steps."""
        return self.mixture.epochs(step * self.global_batch_size)

    @property
    def validation_tokens(self) -> int:
        """Predictions of a full validation: every held-out token, the ends of documents
        included.
        """
        return 0 if self.validation is None else len(self.validation)

    @cached_property
    def validation_bytes(self) -> int:
        """Bytes of held-out text (exact for whole documents, to 2 bytes for an end that begins
        inside a character).

        Bits per byte = sum of the validation losses in nats / ln 2 / validation_bytes.
        """
        texts = [
            self.tokenizer.decode(tail.read(0, len(tail) - 1), clean_up_tokenization_spaces=False)
            for held in self.held_out
            for tail in held.tails
        ]
        return sum(held.size for held in self.held_out) + sum(len(text.encode()) for text in texts)

    @property
    def validation_files(self) -> tuple[Path, ...]:
        """The held-out files, or () if some held-out document is not a whole file."""
        whole = all(held.files for held in self.held_out)
        return tuple(file for held in self.held_out for file in held.files) if whole else ()

    def description(self) -> list[str]:
        """What is trained and validated on, for the header of a run."""
        return self.lines

    def fingerprint(self) -> dict[str, str]:
        """What decides the batches, by content and not by path: equal here and on another
        machine.
        """
        return self.identity


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """What differs between two fingerprints, a line each."""
    return [
        f"{name}: {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
    ]


class Inputs(NamedTuple):
    """What `check` has found in order."""

    sources: tuple[Source, ...]
    validation: Source | None
    tokenizer: object
    end_of_text: int


def check(
    config: DataConfig,
    tokenizer: str | None,
    vocab_size: int | None,
    sequence_length: int,
    progress: bool = True,
) -> Inputs:
    """Refuses, with the numbers and the knob, what can be refused without reading all data; writes
    nothing but the tokenizer of `bpe:N`, into the cache.

    Missing, empty or unreadable data, a missing field in the first rows, too little text for one
    window, no tokenizer or end-of-text token, a tokenizer larger than `vocab_size` (None: no model
    yet). `tokenizer`: used if the config has none.
    """
    sources = resolve(config.path)
    validation = None
    if config.validation is not None:
        (validation,) = resolve([config.validation], "--data.validation")
        both = {file for source in sources for file in source.files} & set(validation.files)
        if both:
            raise ValueError(
                f"{len(both)} files are in both --data.path and --data.validation (first "
                f"{min(both)}): validation would judge what was learned by heart"
            )
    elif not 0 <= config.validation_fraction <= 0.5:
        raise ValueError(
            f"--data.validation-fraction is {config.validation_fraction}: use 0 (no validation) "
            f"to 0.5"
        )
    for source, option in [(source, "--data.path") for source in sources] + [
        (validation, "--data.validation")
    ]:
        if source is not None and not source.hubs:
            look_at(
                source,
                config.text_field,
                1 if source is validation else sequence_length + 1,
                option,
            )
    loaded = tokenizers.load_tokenizer(
        tokenizer_folder(config, sources, vocab_size, progress) or tokenizer
    )
    if vocab_size is not None:
        tokenizers.check_vocabulary(loaded, vocab_size)
    return Inputs(
        sources, validation, loaded, tokenizers.end_of_text_id(loaded, config.end_of_text)
    )


def look_at(source: Source, text_field: str, least: int, option: str) -> None:
    """Reads the first document. A token has a byte or is an end of text, so sizes alone refuse very
    short text.
    """
    if next(pieces(source, text_field, option), None) is None:
        raise ValueError(f"{option} {source.name}: no text in {len(source.files)} files")
    sizes = [file.stat().st_size for file in source.files if file.suffix in WHOLE_FILE]
    most = sum(sizes) + sum(size > 0 for size in sizes)
    if len(sizes) == len(source.files) and most < least:
        raise ValueError(
            f"{option} {source.name}: {sum(sizes):,} bytes of text give at most {most:,} tokens, "
            f"fewer than one window of sequence_length + 1 ({least:,}): use a smaller "
            "--train.sequence-length, or more data"
        )


def prepare(
    config: DataConfig,
    tokenizer: str | None,
    vocab_size: int | None,
    sequence_length: int,
    global_batch_size: int,
    seed: int,
    progress: bool = True,
) -> Loader:
    """From options to batches: check, tokenise or find in the cache, hold out, mix."""
    inputs = check(config, tokenizer, vocab_size, sequence_length, progress)

    def corpus(source: Source, option: str) -> Corpus:
        return open_corpus(
            source,
            inputs.tokenizer,
            inputs.end_of_text,
            config.text_field,
            config.cache_folder,
            config.workers,
            progress,
            option,
        )

    parts, held, corpora = [], [], []
    fraction = config.validation_fraction if inputs.validation is None else 0
    for source in inputs.sources:
        corpora.append(corpus(source, "--data.path"))
        stream, out = split(corpora[-1], fraction)
        parts.append(Part(source.name, source.weight or Fraction(1), stream, corpora[-1].offsets))
        held += [out] if out else []
    if inputs.validation is not None:
        judge = corpus(inputs.validation, "--data.validation")
        held.append(everything(judge, np.ones(judge.document_count, bool)))
    mixture = Mixture(parts, sequence_length, seed)
    identity = {
        **{
            f"data {number}": f"{content(corpus)}, weight {float(part.weight):g}"
            for number, (part, corpus) in enumerate(zip(parts, corpora, strict=True), 1)
        },
        "validation": content(judge)
        if inputs.validation
        else f"{fraction:g} of the documents held out",
        "tokenizer": tokenizers.fingerprint(inputs.tokenizer),
        "end of text": str(inputs.end_of_text),
        "sequence_length": str(sequence_length),
        "global_batch_size": str(global_batch_size),
        "seed": str(seed),
        **({"document_mask": "True"} if config.document_mask else {}),
    }
    return Loader(
        mixture,
        tuple(held),
        global_batch_size,
        inputs.tokenizer,
        inputs.end_of_text,
        describe(mixture, corpora, held),
        identity,
        config.document_mask,
    )


def content(corpus: Corpus) -> str:
    return (
        f"{corpus.document_count:,} documents, {corpus.byte_count:,} bytes, hash {corpus.content}"
    )


def describe(mixture: Mixture, corpora: list[Corpus], held: list[HeldOut]) -> list[str]:
    lines = []
    for part, weight, size, corpus in zip(
        mixture.parts, mixture.weights, mixture.sizes, corpora, strict=True
    ):
        share = f"{weight / sum(mixture.weights):.1%} of the batches: " if len(corpora) > 1 else ""
        lines.append(
            f"{share}{part.name}: {len(part.stream):,} tokens to train on of "
            f"{corpus.token_count:,} in {corpus.document_count:,} documents ({corpus.byte_count:,} "
            f"bytes), {size:,} windows of {mixture.sequence_length:,} an epoch"
        )
    none = "validation: none (--data.validation-fraction is 0)"
    return lines + ([f"validation: {out.note}" for out in held] or [none])
