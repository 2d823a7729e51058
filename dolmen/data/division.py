"""Divides each source into training text and its validation split, and keeps copies of validation
text out of training.

    a document is    held out whole     held out at its end           in --data.validation
    training reads   nothing of it      the beginning of every        nothing of it
                     nor of its copies  copy with the same bytes
    validation reads its first copy     the end of its first copy     all of it, as it is given

Which documents these are is decided by content (heldout.py), so every copy in every source has the
same fate; validation reads a text once, in the first source that has it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dolmen.core.messages import plural
from dolmen.data.corpus import Corpus, added
from dolmen.data.ending import Ending, ending
from dolmen.data.heldout import Choice, all_validated, choose_held_out
from dolmen.data.megatron import split_of
from dolmen.data.mixture import TokenStream
from dolmen.data.sources import Source
from dolmen.data.tokenizer import PreTrainedTokenizer


@dataclass(frozen=True)
class ValidationSplit:
    """Text of a source that validation reads."""

    stream: TokenStream
    documents: int
    size: int | None
    """Bytes of the text, exactly; None where they are not known."""
    files: tuple[Path, ...]
    """The files that it consists of, or () unless each document is a whole file."""
    note: str
    name: str = ""
    """Of the source."""


@dataclass(frozen=True)
class Division:
    """A source, divided into training text and validation split."""

    training: TokenStream
    validation: ValidationSplit | None
    notes: tuple[str, ...]
    """What is kept out of training that validation does not read either."""


def hold_out(
    corpora: Sequence[Corpus],
    sources: Sequence[Source],
    fraction: float,
    tokenizer: PreTrainedTokenizer,
    text_field: str,
) -> list[Division]:
    """Divide all sources by one choice of `fraction` of their documents."""
    choice = choose_held_out([corpus.documents for corpus in corpora], fraction)
    endings: dict[int, Ending] = {}
    for exact in choice.cut:
        source, corpus, copies = next(
            (source, corpus, found)
            for source, corpus in zip(sources, corpora, strict=True)
            if len(found := np.flatnonzero(corpus.documents["hash"] == exact))
        )
        endings[exact] = ending(corpus, source, int(copies[0]), fraction, tokenizer, text_field)
    return divide_sources(corpora, choice, endings, ", chosen by a hash of their text")


def divide_sources(
    corpora: Sequence[Corpus], choice: Choice, endings: dict[int, Ending], why: str
) -> list[Division]:
    """Divide each source by `choice`. `endings` says where the documents of `choice.cut` are cut,
    by their exact hash; `why` says how the held-out ones were chosen, for the notes.
    """
    validated: set[int] = set()
    return [divide_one(corpus, choice, endings, validated, why) for corpus in corpora]


class Masks(NamedTuple):
    """The documents of a source that are not trained on as they are: three masks over all, as there
    may be millions.
    """

    whole: np.ndarray
    """Held out whole, or a copy of one that is."""
    cut: np.ndarray
    """The end is held out: documents with the bytes of one that is cut."""
    variant: np.ndarray
    """A copy of a cut document in other white space, in which the cut has no certain place."""


def find_held_out(documents: np.ndarray, choice: Choice) -> Masks:
    """Find the documents of a source that `choice` holds out, and their copies."""
    words, exact = documents["words"], documents["hash"]
    cut = np.isin(exact, np.array(list(choice.cut), np.uint64))
    same_words = np.isin(words, np.array(list(choice.cut.values()), np.uint64))
    return Masks(np.isin(words, choice.whole), cut, same_words & ~cut)


def divide_one(
    corpus: Corpus, choice: Choice, endings: dict[int, Ending], validated: set[int], why: str
) -> Division:
    """Divide one source. `validated` has the words of what the sources before it validate, and gets
    those of this one.
    """
    words, exact = corpus.documents["words"], corpus.documents["hash"]
    masks = find_held_out(corpus.documents, choice)
    # documents that are cut are looked at one by one: a text per source at most, and its copies
    cuts = {int(i): endings[int(exact[i])] for i in np.flatnonzero(masks.cut)}
    starts, stops = corpus.offsets[:-1], corpus.offsets[1:]
    if cuts:
        stops = np.array(stops)
    for index, cut in cuts.items():
        stops[index] = starts[index] + cut.token
    trained = ~(masks.whole | masks.variant)

    whole = first_copies(words, masks.whole, validated)
    ends = first_copies(words, masks.cut, validated)
    parts = [whole_documents(corpus, whole, why)] if len(whole) else []
    parts += [document_end(corpus, index, cuts[int(index)]) for index in ends]
    copies = np.setdiff1d(np.flatnonzero(~trained), whole)
    return Division(
        corpus.stream(starts[trained], stops[trained]),
        join_parts(parts) if parts else None,
        (exclusion_note(corpus, copies, "copies of held-out text"),) if len(copies) else (),
    )


def exclude_validation(corpora: Sequence[Corpus], validation: Corpus) -> list[Division]:
    """Take the documents of --data.validation out of each source. Raises ValueError where nothing
    is left.
    """
    words, divisions = np.unique(validation.documents["words"]), []
    for corpus in corpora:
        both = np.isin(corpus.documents["words"], words)
        if both.all():
            raise all_validated(corpus.name)
        stream = corpus.stream(corpus.offsets[:-1][~both], corpus.offsets[1:][~both])
        note = exclusion_note(corpus, np.flatnonzero(both), "also in --data.validation")
        divisions.append(Division(stream, None, (note,) if both.any() else ()))
    return divisions


def divide_by_split(corpus: Corpus, shares: str) -> Division:
    """Divide a corpus of one data set as Megatron does, by its sequences in order, whatever they
    hold. The test split is neither trained on nor validated.
    """
    (bounds,), why = corpus.sequences, f", by --data.split {shares}"
    train, valid, test = split_of(shares, len(bounds) - 1)
    training, held_out, left = (
        corpus.stream(bounds[[a]], bounds[[b]]) for a, b in (train, valid, test)
    )
    validation = None
    if len(held_out) and corpus.byte_count is not None:  # its sequences are its documents
        validation = whole_documents(corpus, range(*valid), why)
    elif len(held_out):
        count = valid[1] - valid[0]
        note = f"{plural(count, 'sequence')} of {corpus.name}, {len(held_out):,} tokens{why}"
        validation = ValidationSplit(held_out, count, None, (), note, corpus.name)
    left_out = plural(test[1] - test[0], "sequence")
    note = f"not trained on: {left_out} of {corpus.name}, to test on{why}"
    return Division(training, validation, (note,) if len(left) else ())


def first_copies(words: np.ndarray, mask: np.ndarray, validated: set[int]) -> np.ndarray:
    """Indices of the first document in `mask` with each words that are not in `validated`, which
    gets them.
    """
    indices = np.flatnonzero(mask)
    different, first = np.unique(words[indices], return_index=True)
    new = np.array([value not in validated for value in different.tolist()], bool)
    validated.update(different.tolist())
    return np.sort(indices[first[new]])


def whole_documents(corpus: Corpus, indices: Iterable[int], why: str = "") -> ValidationSplit:
    """The documents at `indices`, held out whole; `why` says how they were chosen."""
    chosen = np.asarray(indices)
    stream = corpus.stream(corpus.offsets[chosen], corpus.offsets[chosen + 1])
    whole = (corpus.documents["file"][chosen] >= 0).all()
    files = tuple(corpus.files[number] for number in corpus.documents["file"][chosen] if whole)
    note = (
        f"{len(chosen):,} of {corpus.document_count:,} documents of {corpus.name}, "
        f"{len(stream):,} tokens{why}"
    )
    size = int(corpus.documents["bytes"][chosen].sum())
    known = corpus.byte_count is not None
    return ValidationSplit(stream, len(chosen), size if known else None, files, note, corpus.name)


def document_end(corpus: Corpus, index: int, ending: Ending) -> ValidationSplit:
    """The end of document `index`, which is too large to be held out whole."""
    start, stop = int(corpus.offsets[index]) + ending.token, int(corpus.offsets[index + 1])
    length = stop - int(corpus.offsets[index])
    note = (
        f"the last {stop - start:,} of {length:,} tokens ({(stop - start) / length:.1%}) of "
        f"{corpus.file(index) or f'document {index} of {corpus.name}'}, as no document is small "
        "enough to be held out whole"
    )
    stream = corpus.stream(np.array([start]), np.array([stop]))
    size = ending.bytes if corpus.byte_count is not None else None
    return ValidationSplit(stream, 1, size, (), note, corpus.name)


def join_parts(parts: Sequence[ValidationSplit]) -> ValidationSplit:
    """Join the parts of one source."""
    if len(parts) == 1:
        return parts[0]
    whole = all(each.files for each in parts)
    return ValidationSplit(
        TokenStream.join([each.stream for each in parts]),
        sum(each.documents for each in parts),
        added([each.size for each in parts]),
        tuple(file for each in parts for file in each.files) if whole else (),
        "; ".join(each.note for each in parts),
        parts[0].name,
    )


def exclusion_note(corpus: Corpus, indices: np.ndarray, why: str) -> str:
    """Say which share of a source is not trained on."""
    tokens = int((corpus.offsets[indices + 1] - corpus.offsets[indices]).sum())
    return (
        f"not trained on: {len(indices):,} of {corpus.document_count:,} documents of "
        f"{corpus.name}, {tokens:,} tokens ({tokens / corpus.token_count:.1%}), {why}"
    )


def check_length(division: Division, corpus: Corpus, sequence_length: int) -> None:
    """Raise ValueError where a source has fewer tokens left than one window; it says where they
    went.
    """
    left = len(division.training)
    if left > sequence_length:
        return
    held_out = len(division.validation.stream) if division.validation else 0
    copies = corpus.document_count - corpus.different_count
    reasons = [
        f"{corpus.name} has {left:,} tokens to train on, fewer than one window of sequence_length "
        f"+ 1 ({sequence_length + 1:,})",
        f"it has {corpus.token_count:,} tokens in {plural(corpus.document_count, 'document')}"
        + (f", of which {copies:,} are copies of others" if copies else ""),
        f"{held_out:,} tokens are held out" if held_out else "",
        *division.notes,
    ]
    shorter = f"--train.sequence-length {left - 1} or less, or " if left >= 16 else ""
    raise ValueError(f"{'; '.join(filter(None, reasons))}: use {shorter}more data (--data.path)")
