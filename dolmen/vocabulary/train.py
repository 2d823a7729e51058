"""Samples text and learns a vocabulary from it.

Text to learn a vocabulary from: all of it, or what was drawn of it at random, in one pass over
any amount, within a number of bytes.

Each line draws a number. While what is kept is too much, the lines of the largest numbers are let
go, and from then on none with such a number is kept (a sample by keys, Efraimidis and Spirakis,
2006, all weights equal): so what remains is a draw without preference for a place.

`dolmen vocab train`: a vocabulary learned from text, as a folder that `transformers` opens and
`dolmen vocab merge` takes: of sentencepiece with its tokenizer.model, or a BPE over bytes.

What a model of sentencepiece gets here: no normalisation and no space taken away, so that a text
comes back as it was; a piece for each byte, so that it does whatever is in it; a space before each
text, as Llama has, so that a word is the same piece wherever it stands; digits one by one.
"""

import heapq
import io
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sentencepiece

from dolmen.conversion import hf_export, writing
from dolmen.core.log import bar, say
from dolmen.core.messages import plural
from dolmen.data.tokenise import find_cut
from dolmen.data.tokenizer import load_tokenizer, train_bpe
from dolmen.files import sentencepiece_model
from dolmen.vocabulary.check import (
    Counts,
    Text,
    check_round_trip,
    check_sentencepiece,
    count,
    lines_of,
    open_text,
)
from dolmen.vocabulary.config import BYTES, FRAME, VocabTrainConfig
from dolmen.vocabulary.merge import CONFIG, write_files
from dolmen.vocabulary.tokenizer_folder import (
    JSON,
    MODELS,
    TOKENIZER_CLASS,
    sentencepiece_as_json,
    special_tokens,
)

PROGRESS_LINES = 1000  # lines, after which a bar moves
LONGEST = 4000
"""Bytes of a line; a longer one is cut, as sentencepiece passes over those of more than 4,192."""


@dataclass(frozen=True)
class Sample:
    """Random sample of a text's lines, in their original order."""

    lines: list[str]
    """Sampled lines, without line ends."""
    bytes: int
    """Bytes of the lines."""
    whole: int
    """Bytes of all text that was read."""
    characters: frozenset[str]
    """Distinct characters of the lines."""


def sample_lines(
    text: Text, most: int, seed: int, reach: Callable[[int], None] = lambda done: None
) -> Sample:
    """Return a uniform random sample, without replacement, of the lines of the text: at most `most`
    bytes in total, read in one pass and in memory of about that size. `reach(bytes read)` reports
    progress. Raises ValueError for unreadable text.
    """
    chance = random.Random(seed)
    heap: list[tuple[float, int, str, int]] = []  # the largest number first, as its negative
    total, full, limit = 0, 0, 1.0
    for place, line in enumerate(_lines(text)):
        size = len(line.encode())
        full += size
        if place % PROGRESS_LINES == 0:
            reach(full)
        number = chance.random()
        if number >= limit:
            continue
        # place: no two entries are compared by their text
        heapq.heappush(heap, (-number, place, line, size))
        total += size
        # drop the largest keys until the sample fits
        while total > most:
            largest, _, _, gone = heapq.heappop(heap)
            # A line whose number is not below that of the last one dropped could not stay: it is
            # not kept at all.
            total, limit = total - gone, -largest
    # back to the order of the text
    heap.sort(key=lambda item: item[1])
    lines = [line for _, _, line, _ in heap]
    return Sample(lines, total, full, frozenset().union(*lines))


def _lines(text: Text) -> Iterator[str]:
    """Yield the lines of the text that are not blank; lines that may be longer than 4,000 bytes are
    cut, at a word boundary where possible, into parts of at most 4,000 bytes.
    """
    most = LONGEST // 4  # a character has up to 4 bytes
    for piece in text.pieces():
        for line in piece.splitlines():
            start = 0
            # cut near the middle or later, so that parts are not tiny
            while len(line) - start > most:
                end = find_cut(line, start + most // 2, start + most)
                yield line[start:end]
                start = end
            if line[start:].strip():
                yield line[start:]


COVERAGE = 0.9995
"""Share of the characters of the text that get a piece of their own: sentencepiece's default, made
for Chinese and Japanese. The others are bytes.
"""
ROUND_TRIP_LINES = 1000  # lines that are cut and put together again


@dataclass(frozen=True)
class Trained:
    """Result of `train`."""

    kind: str
    size: int
    read: int
    """Bytes of the text, without the ends of lines."""
    learned_from: int
    """Bytes of the sample that was learned from."""
    counts: Counts
    """Counts of the text that was learned from."""

    def lines(self) -> list[str]:
        """Return the lines of a report: size and kind of the vocabulary, bytes of the text that it
        was learned from, and characters and bytes per token on that text.
        """
        part = "" if self.read == self.learned_from else f" of {plural(self.read, 'byte')}"
        return [
            f"{self.size:,} tokens ({self.kind}), learned from "
            f"{plural(self.learned_from, 'byte')}{part}",
            f"on that text: {self.counts}",
        ]


def train(config: VocabTrainConfig, progress: bool = True) -> Trained:
    """Train a tokenizer on (a sample of) the text of config.data, check that transformers, and
    sentencepiece where it applies, read it and decode lines to themselves, and write it as the new
    folder config.to. Return a report. `progress`: bars on stderr. Raises ValueError or OSError,
    with nothing written, for unreadable text, and for text with too few different tokens.
    """
    to = Path(config.to).expanduser()
    hf_export.check_target(to)
    text = open_text(config.data)
    if text is None:
        raise ValueError("no text: use --data.path with a file, a folder, a glob or a hub id")
    with bar(f"reading {text.name}", text.size, progress) as reach:
        sample = sample_lines(text, config.max_bytes, config.seed, reach)
    check_size(config, sample)
    say(f"learning {config.size:,} tokens from {plural(sample.bytes, 'byte')}", progress)
    with writing.replace_when_complete(to) as (part, _):
        LEARN[config.kind](config, sample, part)
        tokenizer = load_tokenizer(str(part), "--to")
        lines = [line for entry in sample.lines[:ROUND_TRIP_LINES] for line in lines_of(entry)]
        check_round_trip(tokenizer, lines, "--to")
        if config.kind != "byte-bpe":
            check_sentencepiece(tokenizer, str(part / MODELS[0]), lines)
        counts = count(tokenizer, sample.lines, text.name)
    return Trained(config.kind, config.size, sample.whole, sample.bytes, counts)


def check_size(config: VocabTrainConfig, sample: Sample) -> None:
    """Raise ValueError if the sample of text has no lines, or fewer bytes than config.size asks for
    tokens beside single bytes and special tokens.
    """
    if not sample.lines:
        raise ValueError(f"--data.path {', '.join(config.data.path[:3])} contains no text")
    # tokens that need no text
    fixed = BYTES + (1 if config.kind == "byte-bpe" else FRAME)
    # each token that is learned is a run of the text of its own
    if (merges := config.size - fixed) > sample.bytes:
        raise ValueError(
            f"--size is {config.size:,}, but {plural(sample.bytes, 'byte')} of text are too few "
            f"for {merges:,} tokens besides single bytes: use --size "
            f"{fixed + sample.bytes // 10:,} or less, or more text"
        )


def _train_sentencepiece(config: VocabTrainConfig, sample: Sample, folder: Path) -> None:
    """Train a unigram or BPE model (config.kind) of config.size pieces on the sample with
    sentencepiece, and write tokenizer.model, tokenizer.json and tokenizer_config.json to `folder`.
    Raises ValueError if the text has too few pieces or too many characters.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample.lines),
            model_writer=model,
            vocab_size=config.size,
            model_type=config.kind,
            character_coverage=COVERAGE,
            byte_fallback=True,
            # texts must decode to themselves, byte for byte
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=True,
            split_digits=True,
            max_sentence_length=LONGEST,
            shuffle_input_sentence=False,
            minloglevel=2,
        )
    except (RuntimeError, OSError, ValueError) as error:
        raise ValueError(_explain_error(config, str(error))) from error
    content = model.getvalue()
    read = sentencepiece_model.parse(content, "the model of sentencepiece")
    write_files(
        folder,
        {
            MODELS[0]: content,
            JSON: sentencepiece_as_json(read),
            CONFIG: {
                "tokenizer_class": TOKENIZER_CLASS,
                "clean_up_tokenization_spaces": False,
                **special_tokens(read.pieces),
            },
        },
    )


def _explain_error(config: VocabTrainConfig, error: str) -> str:
    """Return a message for an error of sentencepiece, with the option --size and a size that works
    if the error names one; for any other error, its own text.
    """
    # sentencepiece's own message names the possible size
    if match := re.search(r"value <= ([0-9]+)", error):
        return (
            f"--size is {config.size:,}, but the text has only {int(match[1]):,} pieces: use "
            f"--size {match[1]} or less, or more text"
        )
    if match := re.search(r"required_chars. [0-9]+ vs ([0-9]+)", error):
        return (
            f"--size is {config.size:,}, but single bytes and characters of the text need "
            f"{int(match[1]):,}: use a larger --size"
        )
    return f"sentencepiece failed: {error}"


def _train_byte_bpe(config: VocabTrainConfig, sample: Sample, folder: Path) -> None:
    """Train a byte-level BPE of config.size tokens on the sample with the library `tokenizers`, and
    write it to `folder`. Raises ValueError if the text gives fewer tokens.
    """
    # line ends were cut off, and are text to a byte-level BPE
    train_bpe((line + "\n" for line in sample.lines), config.size, folder, progress=False)
    learned = len(load_tokenizer(str(folder), "--to").get_vocab())
    if learned < config.size:
        raise ValueError(
            f"--size is {config.size:,}, but the text gives only {learned:,} tokens: use --size "
            f"{learned} or less, or more text"
        )


LEARN: dict[str, Callable[[VocabTrainConfig, Sample, Path], None]] = {
    "unigram": _train_sentencepiece,
    "bpe": _train_sentencepiece,
    "byte-bpe": _train_byte_bpe,
}
