"""Chats as tokens on disk, memory-mapped, built once and reused until something that they depend on
changes (corpus.py):

    tokens.bin     the tokens of every example, little-endian uint16, or uint32 if the tokenizer has
                   more than 65,536 tokens
    trained.bin    uint8 of each: whether it is trained
    offsets.npy    int64 [examples + 1]: example i is tokens[offsets[i]:offsets[i + 1]]
    weights.npy    float32 [examples]
    hashes.npy     uint64 [examples], of tokens, by which some are held out
    said.npy       float32 [examples], of the answer: see chats.py

An example predicts each of its tokens but the first, so one of n tokens takes n - 1 places.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from dolmen.core.log import bar
from dolmen.core.messages import plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.chats import Chat, chats, completions, pairs
from dolmen.data.config import ChatRows
from dolmen.data.corpus import Form, found_or_built, identities, write_index
from dolmen.data.sources import Source
from dolmen.data.template import MaskingStrategy, Template
from dolmen.files.kinds import EXAMPLES

FORMAT = 2
FORM = Form(
    EXAMPLES,
    ("tokens.bin", "trained.bin", "offsets.npy", "weights.npy", "hashes.npy", "said.npy"),
)
READERS = {"chats": chats, "pairs": pairs, "completions": completions}


@dataclass(frozen=True, eq=False)
class Examples:
    """Of one source, none longer than `longest`: the end of one that is, is cut off."""

    name: str
    tokens: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    hashes: np.ndarray
    said: np.ndarray
    longest: int
    content: str
    """Hash of all of it."""

    def __len__(self) -> int:
        return len(self.weights)

    def span(self, index: int) -> slice:
        first, end = (int(at) for at in self.offsets[index : index + 2])
        return slice(first, min(end, first + self.longest))

    def last_learned(self, index: int) -> int:
        """The last token of an example, one that has any, that is trained on."""
        span = self.span(index)
        return int(self.tokens[span][np.flatnonzero(self.trained[span] > 0)[-1]])

    def places(self) -> np.ndarray:
        """Of each example, how many places it takes."""
        return np.minimum(np.diff(self.offsets), self.longest) - 1

    def predictions(self) -> np.ndarray:
        """Of each, how many of its tokens are trained: none where it weighs nothing."""
        before = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        first = np.minimum(self.offsets[:-1] + 1, self.offsets[1:])  # the first is not predicted
        end = np.minimum(self.offsets[1:], self.offsets[:-1] + self.longest)
        return (before[np.maximum(first, end)] - before[first]) * (self.weights > 0)

    @property
    def long(self) -> np.ndarray:
        """Of each, whether it is too long."""
        return np.diff(self.offsets) > self.longest

    @property
    def weighted(self) -> bool:
        """Whether they differ in what they weigh, but for those that weigh nothing."""
        return bool(((self.weights != 0) & (self.weights != 1)).any())


def open_examples(
    source: Source,
    template: Template,
    train_on: MaskingStrategy,
    longest: int,
    cache: Path,
    progress: bool = True,
    option: str = "--data.path",
    verify: bool = True,
    rows: ChatRows = "chats",
    max_row_bytes: int | None = None,
) -> Examples:
    """From the cache or built into it; of pairs two examples each. Raises
    ValueError where there are no chats, or where none or all of their tokens would be trained.
    """
    tokenizer = template.tokenizer
    origin = {
        "format": FORMAT,
        **identities(source, option),
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "vocabulary": tokenizers.vocabulary_size(tokenizer),
        "template": hashlib.blake2b(template.text.encode(), digest_size=16).hexdigest(),
        "train_on": f"{train_on} of {rows}",
        "dtype": tokenizers.token_dtype(tokenizer).str,
    }

    def build(folder: Path) -> None:
        _build(
            READERS[rows](source, option, max_row_bytes),
            source.name,
            template,
            train_on,
            origin,
            folder,
            progress,
            option,
        )

    folder, index = found_or_built(cache, origin, FORM, build, verify, progress)
    _refuse_all_or_none(index, train_on, source.name, option)
    return Examples(
        source.name,
        np.asarray(np.memmap(folder / "tokens.bin", np.dtype(index["dtype"]), mode="r")),
        np.asarray(np.memmap(folder / "trained.bin", np.uint8, mode="r")),
        np.load(folder / "offsets.npy"),
        np.load(folder / "weights.npy"),
        np.load(folder / "hashes.npy"),
        np.load(folder / "said.npy"),
        longest,
        index["content"],
    )


def _refuse_all_or_none(index: dict, train_on: MaskingStrategy, name: str, option: str) -> None:
    """Raises ValueError where training would have nothing to learn, or does not know an answer from
    its question.
    """
    told = f"{option} {name}: of {plural(index['tokens'], 'token')} of chats"
    how = f"--data.masking-strategy {train_on}"
    if not index["trained"]:
        raise ValueError(
            f"{told} none would be trained ({how}): give chats with turns of the assistant, or a "
            "--data.template that writes them"
        )
    if index["trained"] == index["tokens"] and train_on != "all":
        raise ValueError(
            f"{told} all would be trained ({how}): the chat template does not tell what the "
            "assistant says; give another --data.template, or --data.masking-strategy all"
        )


def _build(
    read: Iterator[Chat],
    name: str,
    template: Template,
    train_on: MaskingStrategy,
    origin: dict,
    folder: Path,
    progress: bool,
    option: str,
) -> None:
    """Writes the files of FORM and the index."""
    ends, weights, hashes, said = [0], [], [], []
    trained_in_all, untrained, largest = 0, 0, 0
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "trained.bin", "wb") as marks,
        bar(f"reading the rows of {name}", None, progress) as reach,
    ):
        for chat in read:
            ids, trained = template.tokens(chat, train_on)
            data = ids.astype(origin["dtype"]).tobytes()
            tokens.write(data)
            marks.write(trained.astype(np.uint8).tobytes())
            ends.append(ends[-1] + len(ids))
            weights.append(chat.weight)
            said.append(chat.said)
            hashes.append(xxhash.xxh3_64_intdigest(data))
            largest = max(largest, int(ids.max()))
            trained_in_all += int(trained.sum())
            untrained += not trained[1:].any()
            reach(ends[-1])
    if not weights:
        raise ValueError(f"{option} {name}: there are no chats in it")
    np.save(folder / "offsets.npy", np.array(ends, "<i8"))
    np.save(folder / "weights.npy", np.array(weights, "<f4"))
    np.save(folder / "hashes.npy", np.array(hashes, "<u8"))
    np.save(folder / "said.npy", np.array(said, "<f4"))
    index = {
        **origin,
        "examples": len(weights),
        "tokens": ends[-1],
        "trained": trained_in_all,
        "untrained": untrained,
        "largest": largest,
        "content": hashlib.blake2b(
            np.array(hashes, "<u8").tobytes() + np.array([weights, said], "<f4").tobytes(),
            digest_size=8,
        ).hexdigest(),
    }
    write_index(folder, FORM, index)
