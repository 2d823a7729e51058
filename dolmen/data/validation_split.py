"""The validation split: chooses the documents that are held out, divides each source into training
text and validation text, and keeps copies of validation text out of training.

Problem. The split must not move when the seed, the tokenizer or the order of files changes, and a
text must not be both trained on and validated, however many sources hold a copy of it.

Idea. Content decides. Each document has two hashes (tokenise.TextHash):

    words    of its text without white space: two documents with the same words are copies,
             whatever their line ends, indentation or last newline. Near duplicates are not found.
    hash     of its bytes: where only the end of a document is held out, the copies to cut

A document is held out when its words' hash, as a fraction of 2^64, is below the fraction: one
decision for all copies in all sources. Additions move no other document, with two exceptions, both
in sources of few documents:

    a quarter     a chosen document is trained on while it is more than a quarter of any source: it
                  is held out once that source has grown, and trained on again once a source is
                  added of which it is more than a quarter
    at least one  where no document of a source is chosen, the one with the smallest hash is taken
                  instead, or the end of the longest, until the source grows

The fate of a document and its copies:

    a document is    held out whole     held out at its end           in --data.validation
    training reads   nothing of it      the beginning of every        nothing of it
                     nor of its copies  copy with the same bytes
    validation reads its first copy     the end of its first copy     all of it, as it is given

Validation reads a text once, in the first source that has it. Megatron's order does not use the
hashes: it splits by --data.split, in the order of sequences (`divide_by_split`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from dolmen.core.messages import plural
from dolmen.data.corpus import Corpus, total_size
from dolmen.data.mixture import TokenStream, normalize_weights
from dolmen.data.sources import DataSource
from dolmen.data.tokenise import pieces
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files.remote_file import TextFile


@dataclass(frozen=True)
class ValidationSplit:
    """Text of a source that validation reads."""

    stream: TokenStream
    documents: int
    size: int | None
    """Bytes of the text, exactly; None where they are not known."""
    files: tuple[TextFile, ...]
    """The files that it consists of, or () unless each document is a whole file."""
    note: str
    name: str = ""
    """Name of the source."""


@dataclass(frozen=True)
class Division:
    """A source divided into training text and validation split."""

    training: TokenStream
    validation: ValidationSplit | None
    notes: tuple[str, ...]
    """Notes on text that is neither trained on nor validated."""


@dataclass(frozen=True)
class Choice:
    """Documents that are held out. `whole`: words of the documents that are held out whole, uint64,
    sorted. `cut`: {exact: words} of documents whose end is held out.
    """

    whole: np.ndarray
    cut: dict[int, int]


def choose_held_out(tables: Sequence[np.ndarray], fraction: float) -> Choice:
    """Choose held-out documents from each source's table (fields `bytes`, `hash`, `words`).

    A document with more than a quarter of a source's bytes, copies counted once, is never held out
    whole. A source in which chance selects none gives the one of the others whose words have the
    smallest hash; if it has no others (one document, or a few large ones), the end of its longest.
    """
    if not fraction:
        return Choice(np.zeros(0, np.uint64), {})
    # large in any source: held out whole in none
    large = union([large_words(table) for table in tables])
    # what may be held out whole
    kept_tables = [table[~np.isin(table["words"], large)] for table in tables]
    limit = np.uint64(int(fraction * 2**64))
    # one decision for all copies in all sources
    chance = union([other["words"][other["words"] < limit] for other in kept_tables])
    chosen, ends = [chance], []
    for table, other in zip(tables, kept_tables, strict=True):
        if np.isin(other["words"], chance).any():
            continue
        if len(other):
            chosen.append(other["words"][[np.argmin(other["words"])]])
        else:
            longest = table[table["bytes"] == table["bytes"].max()]
            # of equally long ones always the same
            record = longest[np.argmin(longest["hash"])]
            ends.append((int(record["words"]), int(record["hash"])))
    # of copies that differ in white space one is cut: two cuts need not be at the same word
    return Choice(
        union(chosen), {exact: words for words, exact in dict(sorted(ends)[::-1]).items()}
    )


def overlap_error(name: str) -> ValueError:
    """Return the error to raise where nothing of the source `name` is left to train on."""
    return ValueError(
        f"all of --data.path {name} is also in --data.validation: give another --data.validation, "
        "or leave it out"
    )


def large_words(table: np.ndarray) -> np.ndarray:
    """Return the hashes (the field `words` of `table`: hash of a text without white space) of the
    documents with more than a quarter of the source's bytes; copies count once, as large as the
    largest.
    """
    words, which = np.unique(table["words"], return_inverse=True)
    sizes = np.zeros(len(words), np.int64)
    np.maximum.at(sizes, which, table["bytes"])
    return words[sizes * 4 > sizes.sum()]


def union(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sorted distinct values of all arrays, uint64."""
    return np.unique(np.concatenate([*parts, np.zeros(0, np.uint64)]))


def split_of(text: str, count: int) -> list[tuple[int, int]]:
    """Divide `count` sequences into ranges (first, end) for training, validation and test, by
    shares such as "969,30,1" ("99,1" is 99,1,0). Raises ValueError for malformed shares, and where
    nothing is trained on.
    """
    words = [word for word in re.split(r"[,\s/]+", text.strip()) if word]
    if not 1 <= len(words) <= 3 or not all(
        re.fullmatch(r"[0-9]+\.?[0-9]*|\.[0-9]+", w) for w in words
    ):
        raise ValueError(
            f"data.split is {text!r}: it must be the ratio of training, validation and test "
            "data, such as 969,30,1"
        )
    shares = [float(word) for word in words] + [0.0] * (3 - len(words))
    if not shares[0]:
        raise ValueError(f"data.split {text} leaves nothing to train on: its first number is 0")
    marks = [0.0]
    for share in normalize_weights(shares):
        marks.append(marks[-1] + share)
    # rounded as Megatron does, so that the split is the same
    rounded = [int(round(mark * float(count))) for mark in marks]
    return list(zip(rounded[:-1], rounded[1:], strict=True))


PIECES = 8  # held-out pieces from which on a cut between two pieces misses the fraction by < 7 %


class Ending(NamedTuple):
    """Held-out end of a document: its first `token`, counted in the document, and the `bytes` of
    text from there.
    """

    token: int
    bytes: int


def find_ending(
    corpus: Corpus,
    source: DataSource,
    index: int,
    fraction: float,
    tokenizer: PreTrainedTokenizer,
    text_field: str,
) -> Ending:
    """Return where to cut off the last `fraction` of the tokens of document `index`: at least one
    token and the end of text, at a token that begins with a character. `source` is read again if
    need be. Raises ValueError if the text has changed since it was tokenised, or offsets are not
    known.
    """
    length = int(corpus.offsets[index + 1] - corpus.offsets[index])
    size = int(corpus.documents["bytes"][index])
    target = max(0, length - max(2, round(fraction * length)))
    if corpus.byte_count is None:
        return Ending(target, 0)
    ends = seams(corpus, index, length, size)
    # Text was tokenised in pieces, so between two of them nothing has to be read to know that a
    # token ends where the text is cut. Where the pieces are too few, the one that has the target is
    # read and tokenised once more, and cut between two tokens that share no character.
    if len(ends) * fraction >= PIECES:
        inner = ends[:-1]
        token, byte = inner[np.argmin(np.abs(inner[:, 0] - target))]
        return Ending(int(token), size - int(byte))
    # the piece that holds the target
    number = min(int(np.searchsorted(ends[:, 0], target, side="right")), len(ends) - 1)
    begin, byte = map(int, ends[number - 1] if number else (0, 0))
    text = next(islice(document(source, index, text_field), number, None), "")
    places = cuts(tokenizer, text, target - begin)
    if len(places) != ends[number, 0] - begin or len(text.encode()) != ends[number, 1] - byte:
        raise ValueError(f"{source.name}: the text changed after it was tokenised; start again")
    # tokens that begin where a character begins
    clean = [at for at, place in enumerate(places) if place is not None]
    if not clean:
        raise ValueError(
            f"{source.name}: no validation split can be taken from its longest document, as the "
            "tokenizer has no character offsets: use --data.validation, or "
            "--data.validation-fraction 0"
        )
    at = min(clean, key=lambda at: (abs(at - (target - begin)), -at))
    return Ending(begin + at, size - byte - len(text[: places[at]].encode()))


def seams(corpus: Corpus, index: int, length: int, size: int) -> np.ndarray:
    """Return the tokens and bytes of a document up to the end of each of the pieces in which it was
    tokenised, int64 [pieces, 2]; one piece where no seams are recorded. `length`, `size`: its
    tokens (with the end-of-text token, which that one piece leaves out) and bytes.
    """
    document_seams = corpus.seams[corpus.seams["document"] == index]
    if not len(document_seams):
        return np.array([[length - 1, size]])
    return np.stack([document_seams["tokens"], document_seams["bytes"]], 1)


def document(source: DataSource, index: int, text_field: str) -> Iterator[str]:
    """Yield the text of the source's document number `index`, in pieces; all documents before it
    are read.
    """
    number = 0
    for piece in pieces(source, text_field):
        if number == index:
            yield piece.text
        number += piece.last
        if number > index:
            return


def cuts(tokenizer: PreTrainedTokenizer, text: str, near: int) -> list[int | None]:
    """Return for each token of `text` the number of characters before it, where the text may be
    cut; None where a cut there would split a character, and, for tokenizers without offsets, far
    from token `near`.
    """
    if not tokenizer.is_fast:
        return slow_cuts(tokenizer, text, near)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    places, reached = [], 0
    for start, stop in backend.encode(text, add_special_tokens=False).offsets:
        # not `start`: some tokenizers leave a word's space out of its offsets
        places.append(reached if start >= reached else None)
        reached = max(reached, stop)
    return places


def slow_cuts(
    tokenizer: PreTrainedTokenizer, text: str, near: int, reach: int = 8
) -> list[int | None]:
    """Return for each token of `text` the number of characters before it, for a tokenizer without
    offsets: tried within `reach` tokens of `near`, None elsewhere and where the tokens before and
    behind do not decode to the whole text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    places: list[int | None] = [None] * len(ids)
    for at in range(max(0, near - reach), min(len(ids), near + reach)):
        before, behind = (
            tokenizer.decode(part, clean_up_tokenization_spaces=False)
            for part in (ids[:at], ids[at:])
        )
        if before + behind == text:
            places[at] = len(before)
    return places


def hold_out(
    corpora: Sequence[Corpus],
    sources: Sequence[DataSource],
    fraction: float,
    tokenizer: PreTrainedTokenizer,
    text_field: str,
) -> list[Division]:
    """Divide each source into training and validation text: `fraction` of all documents, chosen by
    a hash of their text, so that copies in all sources are held out together. Where all documents
    of a source are too large, the end of its longest is held out.
    """
    choice = choose_held_out([corpus.documents for corpus in corpora], fraction)
    endings: dict[int, Ending] = {}
    for exact in choice.cut:
        source, corpus, copies = next(
            (source, corpus, matches)
            for source, corpus in zip(sources, corpora, strict=True)
            if len(matches := np.flatnonzero(corpus.documents["hash"] == exact))
        )
        endings[exact] = find_ending(
            corpus, source, int(copies[0]), fraction, tokenizer, text_field
        )
    return divide_sources(corpora, choice, endings, ", chosen by a hash of their text")


def divide_sources(
    corpora: Sequence[Corpus], choice: Choice, endings: dict[int, Ending], why: str
) -> list[Division]:
    """Divide each source into training and validation text by `choice`, in order: a text is
    validated in the first source that has it. `endings`: exact hash of a document in `choice.cut`
    -> where it is cut; `why`: how the held-out ones were chosen, for the notes.
    """
    validated: set[int] = set()
    return [divide_one(corpus, choice, endings, validated, why) for corpus in corpora]


class Masks(NamedTuple):
    """Masks [documents] of the documents of a source that are not trained on as they are."""

    whole: np.ndarray
    """Held out whole, or a copy of one that is."""
    cut: np.ndarray
    """The end is held out: documents with the bytes of one that is cut."""
    variant: np.ndarray
    """A copy of a cut document in other white space, in which the cut has no certain place."""


def find_held_out(documents: np.ndarray, choice: Choice) -> Masks:
    """Return masks of the documents of a source that `choice` holds out whole or at their end, and
    of copies of the latter in other white space.
    """
    words, exact = documents["words"], documents["hash"]
    cut = np.isin(exact, np.array(list(choice.cut), np.uint64))
    same_words = np.isin(words, np.array(list(choice.cut.values()), np.uint64))
    return Masks(np.isin(words, choice.whole), cut, same_words & ~cut)


def divide_one(
    corpus: Corpus, choice: Choice, endings: dict[int, Ending], validated: set[int], why: str
) -> Division:
    """Divide one source into training and validation text. `endings`: exact hash of a document ->
    where it is cut, for all that are. `validated`: words' hashes that earlier sources validate
    already; those of this source are added to it. `why`: how documents were chosen, for the note.
    """
    words, exact = corpus.documents["words"], corpus.documents["hash"]
    masks = find_held_out(corpus.documents, choice)
    # documents that are cut are looked at one by one: a text per source at most, and its copies
    cuts = {int(i): endings[int(exact[i])] for i in np.flatnonzero(masks.cut)}
    starts, stops = corpus.offsets[:-1], corpus.offsets[1:]
    if cuts:
        stops = np.array(stops)
    for index, cut in cuts.items():
        # training reads the beginning of the document
        stops[index] = starts[index] + cut.token
    trained = ~(masks.whole | masks.variant)

    full = first_copies(words, masks.whole, validated)
    ends = first_copies(words, masks.cut, validated)
    parts = [split_documents(corpus, full, why)] if len(full) else []
    parts += [document_end(corpus, index, cuts[int(index)]) for index in ends]
    # neither trained on nor validated
    copies = np.setdiff1d(np.flatnonzero(~trained), full)
    return Division(
        corpus.stream(starts[trained], stops[trained]),
        join_parts(parts) if parts else None,
        (exclusion_note(corpus, copies, "copies of held-out text"),) if len(copies) else (),
    )


def exclude_validation(corpora: Sequence[Corpus], validation: Corpus) -> list[Division]:
    """Divide each source by removing the documents (and copies) of --data.validation from its
    training text. Raises ValueError where nothing is left of a source.
    """
    words, divisions = np.unique(validation.documents["words"]), []
    for corpus in corpora:
        both = np.isin(corpus.documents["words"], words)
        if both.all():
            raise overlap_error(corpus.name)
        stream = corpus.stream(corpus.offsets[:-1][~both], corpus.offsets[1:][~both])
        note = exclusion_note(corpus, np.flatnonzero(both), "also in --data.validation")
        divisions.append(Division(stream, None, (note,) if both.any() else ()))
    return divisions


def divide_by_split(corpus: Corpus, shares: str) -> Division:
    """Divide a corpus of one data set as Megatron does: its sequences in order, by `shares` such as
    "969,30,1". The test split is neither trained on nor validated.
    """
    (bounds,), why = corpus.sequences, f", by --data.split {shares}"
    train, valid, test = split_of(shares, len(bounds) - 1)
    training, held_out, left = (
        corpus.stream(bounds[[a]], bounds[[b]]) for a, b in (train, valid, test)
    )
    validation = None
    if len(held_out) and corpus.byte_count is not None:  # its sequences are its documents
        validation = split_documents(corpus, range(*valid), why)
    elif len(held_out):
        count = valid[1] - valid[0]
        note = f"{plural(count, 'sequence')} of {corpus.name}, {len(held_out):,} tokens{why}"
        validation = ValidationSplit(held_out, count, None, (), note, corpus.name)
    left_out = plural(test[1] - test[0], "sequence")
    note = f"not trained on: {left_out} of {corpus.name}, to test on{why}"
    return Division(training, validation, (note,) if len(left) else ())


def first_copies(words: np.ndarray, mask: np.ndarray, validated: set[int]) -> np.ndarray:
    """Return the indices of the documents in `mask` that are the first with their words' hash,
    except for hashes in `validated`, to which the new ones are added.
    """
    indices = np.flatnonzero(mask)
    different, first = np.unique(words[indices], return_index=True)
    # validated once, in the first source that has it
    new = np.array([value not in validated for value in different.tolist()], bool)
    validated.update(different.tolist())
    return np.sort(indices[first[new]])


def split_documents(corpus: Corpus, indices: Iterable[int], why: str = "") -> ValidationSplit:
    """Return the documents at `indices` as a validation split; `why`: how they were chosen, for its
    note.
    """
    chosen = np.asarray(indices)
    stream = corpus.stream(corpus.offsets[chosen], corpus.offsets[chosen + 1])
    whole_files = (corpus.documents["file"][chosen] >= 0).all()
    files = tuple(
        corpus.files[number] for number in corpus.documents["file"][chosen] if whole_files
    )
    note = (
        f"{len(chosen):,} of {corpus.document_count:,} documents of {corpus.name}, "
        f"{len(stream):,} tokens{why}"
    )
    size = int(corpus.documents["bytes"][chosen].sum())
    known = corpus.byte_count is not None
    return ValidationSplit(stream, len(chosen), size if known else None, files, note, corpus.name)


def document_end(corpus: Corpus, index: int, ending: Ending) -> ValidationSplit:
    """Return the end of document `index`, from `ending.token` on, as a validation split."""
    start, stop = int(corpus.offsets[index]) + ending.token, int(corpus.offsets[index + 1])
    length = stop - int(corpus.offsets[index])
    note = (
        f"the last {stop - start:,} of {length:,} tokens ({(stop - start) / length:.1%}) of "
        f"{corpus.file(index) or f'document {index} of {corpus.name}'}, as every document is too "
        "large to be held out as a whole"
    )
    stream = corpus.stream(np.array([start]), np.array([stop]))
    size = ending.bytes if corpus.byte_count is not None else None
    return ValidationSplit(stream, 1, size, (), note, corpus.name)


def join_parts(parts: Sequence[ValidationSplit]) -> ValidationSplit:
    """Return the validation splits of one source joined into one."""
    if len(parts) == 1:
        return parts[0]
    whole_files = all(part.files for part in parts)
    return ValidationSplit(
        TokenStream.join([part.stream for part in parts]),
        sum(part.documents for part in parts),
        total_size([part.size for part in parts]),
        tuple(file for part in parts for file in part.files) if whole_files else (),
        "; ".join(part.note for part in parts),
        parts[0].name,
    )


def exclusion_note(corpus: Corpus, indices: np.ndarray, why: str) -> str:
    """Return a line for the run's header: how many documents and tokens of a source (`indices`) are
    not trained on, and `why`.
    """
    tokens = int((corpus.offsets[indices + 1] - corpus.offsets[indices]).sum())
    return (
        f"not trained on: {len(indices):,} of {corpus.document_count:,} documents of "
        f"{corpus.name}, {tokens:,} tokens ({tokens / corpus.token_count:.1%}), {why}"
    )


def check_length(division: Division, corpus: Corpus, sequence_length: int) -> None:
    """Raise ValueError if less than one window (sequence_length + 1 tokens) of `corpus` is left to
    train on; the message says how many tokens are copies or held out.
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
