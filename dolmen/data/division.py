"""Training text and held-out text, apart: each source's tokens without what validation reads and
without its copies.

    what            held out whole     its end is held out           given by --data.validation
    training reads  nothing of it      the beginning of every        nothing of it
                    nor of its copies  copy with the same bytes
    validation      its first copy     the end of its first copy     all of it, as it is given
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dolmen.core.messages import counted
from dolmen.data.corpus import Corpus, added
from dolmen.data.ending import Ending, ending
from dolmen.data.heldout import Choice, all_validated, choose_held_out
from dolmen.data.megatron import split_of
from dolmen.data.mixture import TokenStream
from dolmen.data.sources import Source
from dolmen.data.tokenizer import PreTrainedTokenizer


@dataclass(frozen=True)
class HeldOut:
    """What validation reads. `size`: bytes of its text, exactly; None where they are not known.
    `files`: those that it is made of, or () unless each document is a whole file. `name`: of the
    source.
    """

    stream: TokenStream
    documents: int
    size: int | None
    files: tuple[Path, ...]
    note: str
    name: str = ""


@dataclass(frozen=True)
class Division:
    """A source, divided. `notes` say what is kept out of training beside what validation reads."""

    training: TokenStream
    held: HeldOut | None
    notes: tuple[str, ...]


def hold_out(
    corpora: Sequence[Corpus],
    sources: Sequence[Source],
    fraction: float,
    tokenizer: PreTrainedTokenizer,
    text_field: str,
) -> list[Division]:
    """`fraction` of the documents of all sources, by one choice."""
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
    """Each source by `choice`; `endings` has where the documents of `choice.cut` are cut, by their
    exact hash; `why`: how the held-out ones were chosen. What several sources have is validated in
    the first of them alone.
    """
    judged: set[int] = set()
    return [divide_one(corpus, choice, endings, judged, why) for corpus in corpora]


def divide_one(
    corpus: Corpus, choice: Choice, endings: dict[int, Ending], judged: set[int], why: str
) -> Division:
    """One source; `judged` has the words that sources before it have held out, and gets its own."""
    # Masks over all documents at once, of which there may be millions:
    #   whole   a held-out text, or a copy of one: not trained on
    #   cut     its end is held out: trained on up to the cut, every copy of the same bytes
    #   aside   a copy of a cut text in other white space: not trained on
    # Documents that are cut alone are looked at one by one: a text per source at most, and its
    # copies.
    table = corpus.documents
    words, starts, stops = table["words"], corpus.offsets[:-1], corpus.offsets[1:]
    whole = np.isin(words, choice.whole)
    cut = np.isin(table["hash"], np.array(list(choice.cut), np.uint64))
    # the same words in other white space have no place to cut that is sure to be the same
    aside = np.isin(words, np.array(list(choice.cut.values()), np.uint64)) & ~cut
    if cut.any():
        stops = np.array(stops)
    for index in np.flatnonzero(cut):
        stops[index] = starts[index] + endings[int(table["hash"][index])].token
    training = ~whole & ~aside
    judge, ends = first_of(words, whole, judged), first_of(words, cut, judged)
    held = [everything(corpus, judge, why)] if len(judge) else []
    held += [tail(corpus, index, endings[int(table["hash"][index])]) for index in ends]
    copies = np.setdiff1d(np.flatnonzero(whole | aside), judge)
    return Division(
        corpus.stream(starts[training], stops[training]),
        together(held) if held else None,
        (kept_out(corpus, copies, "copies of held-out text"),) if len(copies) else (),
    )


def without(corpora: Sequence[Corpus], judge: Corpus) -> list[Division]:
    """Each source without the documents that `judge`, the text of --data.validation, has too.
    Raises ValueError where nothing is left.
    """
    theirs, found = np.unique(judge.documents["words"]), []
    for corpus in corpora:
        both = np.isin(corpus.documents["words"], theirs)
        if both.all():
            raise all_validated(corpus.name)
        stream = corpus.stream(corpus.offsets[:-1][~both], corpus.offsets[1:][~both])
        note = kept_out(corpus, np.flatnonzero(both), "also in --data.validation")
        found.append(Division(stream, None, (note,) if both.any() else ()))
    return found


def by_split(corpus: Corpus, shares: str) -> Division:
    """A corpus of one data set, divided as Megatron does, by its sequences: in order, whatever they
    hold. What is to test on is left alone.
    """
    (bounds,), why = corpus.sequences, f", by --data.split {shares}"
    train, judge, test = split_of(shares, len(bounds) - 1)
    training, held, left = (
        corpus.stream(bounds[[a]], bounds[[b]]) for a, b in (train, judge, test)
    )
    validation = None
    if len(held) and corpus.byte_count is not None:  # its sequences are its documents
        validation = everything(corpus, range(*judge), why)
    elif len(held):
        count = judge[1] - judge[0]
        note = f"{counted(count, 'sequence')} of {corpus.name}, {len(held):,} tokens{why}"
        validation = HeldOut(held, count, None, (), note, corpus.name)
    left_out = counted(test[1] - test[0], "sequence")
    note = f"not trained on: {left_out} of {corpus.name}, to test on{why}"
    return Division(training, validation, (note,) if len(left) else ())


def first_of(words: np.ndarray, mask: np.ndarray, judged: set[int]) -> np.ndarray:
    """Indices of the first document in `mask` with each words that are not in `judged`, which gets
    them.
    """
    indices = np.flatnonzero(mask)
    different, first = np.unique(words[indices], return_index=True)
    new = np.array([value not in judged for value in different.tolist()], bool)
    judged.update(different.tolist())
    return np.sort(indices[first[new]])


def everything(corpus: Corpus, indices: Iterable[int], why: str = "") -> HeldOut:
    """The documents at `indices` as held-out ones; `why` says how they were chosen. `files` is
    empty unless each is a whole file.
    """
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
    return HeldOut(stream, len(chosen), size if known else None, files, note, corpus.name)


def tail(corpus: Corpus, index: int, ending: Ending) -> HeldOut:
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
    return HeldOut(stream, 1, size, (), note, corpus.name)


def together(held: Sequence[HeldOut]) -> HeldOut:
    if len(held) == 1:
        return held[0]
    whole = all(each.files for each in held)
    return HeldOut(
        TokenStream.join([each.stream for each in held]),
        sum(each.documents for each in held),
        added([each.size for each in held]),
        tuple(file for each in held for file in each.files) if whole else (),
        "; ".join(each.note for each in held),
        held[0].name,
    )


def kept_out(corpus: Corpus, indices: np.ndarray, why: str) -> str:
    tokens = int((corpus.offsets[indices + 1] - corpus.offsets[indices]).sum())
    return (
        f"not trained on: {len(indices):,} of {corpus.document_count:,} documents of "
        f"{corpus.name}, {tokens:,} tokens ({tokens / corpus.token_count:.1%}), {why}"
    )


def check_length(division: Division, corpus: Corpus, sequence_length: int) -> None:
    """Raises ValueError where fewer tokens of a source than one window are left, and says where
    they went.
    """
    left = len(division.training)
    if left > sequence_length:
        return
    held = len(division.held.stream) if division.held else 0
    copies = corpus.document_count - corpus.different_count
    told = [
        f"{corpus.name} has {left:,} tokens to train on, fewer than one window of sequence_length "
        f"+ 1 ({sequence_length + 1:,})",
        f"it has {corpus.token_count:,} tokens in {counted(corpus.document_count, 'document')}"
        + (f", of which {copies:,} are copies of others" if copies else ""),
        f"{held:,} tokens are held out" if held else "",
        *division.notes,
    ]
    shorter = f"--train.sequence-length {left - 1} or less, or " if left >= 16 else ""
    raise ValueError(f"{'; '.join(filter(None, told))}: use {shorter}more data (--data.path)")
