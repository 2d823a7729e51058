"""Rows of chats, preference pairs and completions as tokenised examples on disk.

Chats come in the three forms in which they are published, distinguished by their fields:

    messages        [{role, content}, ...], as chat templates take them
    conversations   [{from, value}, ...], of ShareGPT: human, gpt, system, tool
    instruction     with `output`, and optionally `input`, of Alpaca: one question and its answer

A row may also have a `system` message and a `weight` for its loss. The tokens are memory-mapped,
built once and reused until something that they depend on changes (token_cache.py):

    tokens.bin     the tokens of every example, little-endian uint16, or uint32 if the tokenizer has
                   more than 65,536 tokens
    trained.bin    uint8 per token: whether it is trained on
    offsets.npy    int64 [examples + 1]: example i is tokens[offsets[i]:offsets[i + 1]]
    weights.npy    float32 [examples]: weight of the example's loss
    hashes.npy     uint64 [examples], of the tokens, which decide the validation split
    preference.npy float32 [examples]: margin of a pair; 1 for a desirable completion, else -1

An example predicts each of its tokens but the first, so one of n tokens takes n - 1 positions.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from dolmen.core.log import bar
from dolmen.core.messages import choices, plural
from dolmen.data import tokenizer as tokenizers
from dolmen.data.config import ChatRows
from dolmen.data.corpus import identities
from dolmen.data.sources import DataSource
from dolmen.data.template import ASSISTANT, Chat, MaskingStrategy, Template
from dolmen.data.token_cache import Form, find_or_build, write_index
from dolmen.data.tokenise import rows
from dolmen.files import gate
from dolmen.files.kinds import CHAT_ROWS, COMPLETION_ROW, EXAMPLES, PAIR_ROW

# who speaks in ShareGPT, and in what was made after it
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    "assistant": ASSISTANT,
    "bot": ASSISTANT,
    "chatgpt": ASSISTANT,
    "model": ASSISTANT,
    "function_call": ASSISTANT,
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def chats(source: DataSource, max_bytes: int | None = None) -> Iterator[Chat]:
    """Yield a chat for each row of `source`. `max_bytes`: bound of a row. Raises ValueError, naming
    the row, for one that is not a chat.
    """
    for row, where in rows(source, max_bytes):
        yield chat_of(row, where)


def pairs(source: DataSource, max_bytes: int | None = None) -> Iterator[Chat]:
    """Yield two chats for each row of `source`: prompt with the chosen, then with the rejected
    completion. Raises ValueError, naming the row, for one without two completions.
    """
    for row, where in rows(source, max_bytes):
        yield from pair_of(row, where)


def completions(source: DataSource, max_bytes: int | None = None) -> Iterator[Chat]:
    """Yield a chat per completion of `source`, labelled 1 (desirable) or -1; a row with a chosen
    and a rejected completion gives two. Raises ValueError, naming the row, for one without a
    completion.
    """
    for row, where in rows(source, max_bytes):
        if row.get("completion") is None and row.get("chosen") is not None:
            chosen, rejected = pair_of(row, where)
            yield replace(chosen, preference=1.0)
            yield replace(rejected, preference=-1.0)
        else:
            yield completion_of(row, where)


def pair_of(row: dict[str, Any], where: str) -> tuple[Chat, Chat]:
    """Return the chats with the chosen and the rejected completion of a row, both with its margin.
    Raises Refused, naming `where`, for a row without two completions, or without a prompt.
    """
    row = {name: value for name, value in row.items() if value is not None}
    gate.check_schema(row, where, PAIR_ROW)
    margin = float(row.get("margin", 0.0))
    chosen, rejected = (_join_completion(row, name, where) for name in ("chosen", "rejected"))
    return replace(chosen, preference=margin), replace(rejected, preference=margin)


def completion_of(row: dict[str, Any], where: str) -> Chat:
    """Return the chat of a row with `completion` and `label`. Raises Refused, naming `where`, where
    these or the prompt are missing.
    """
    row = {name: value for name, value in row.items() if value is not None}
    gate.check_schema(row, where, COMPLETION_ROW)
    return replace(
        _join_completion(row, "completion", where), preference=1.0 if row["label"] else -1.0
    )


def _join_completion(row: dict[str, Any], name: str, where: str) -> Chat:
    """Join a row's prompt (and system message) with the completion in its field `name`, which may
    also be the whole chat. Raises Refused where it does not end with a turn of the assistant.
    """
    # text, or messages
    prompt = row.get("prompt", [])
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if row.get("system"):
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    # text, or messages
    completion = row[name]
    if isinstance(completion, str):
        completion = [{"role": ASSISTANT, "content": completion}]
    # a whole chat, or what follows the prompt
    full = completion if completion[: len(prompt)] == prompt else [*prompt, *completion]
    if len(full) < 2 or full[-1]["role"] != ASSISTANT:
        raise gate.refuse(
            where,
            f"`{name}` is not a completion of a prompt: give `prompt`, or the whole chat, ending "
            "with the assistant's turn",
        )
    return Chat(full, 1.0, where)


def chat_of(row: dict[str, Any], where: str) -> Chat:
    """Return the chat of a row in one of the three published forms. Raises Refused, naming `where`,
    for a row in none of them, or malformed.
    """
    # a table has the columns of all its rows, and null where a row has no such field
    row = {name: value for name, value in row.items() if value is not None}
    form = next((name for name in CHAT_ROWS if name in row), None)
    if form is None:
        raise gate.refuse(
            where,
            f"not a chat, its keys are {', '.join(str(name)[:40] for name in list(row)[:6])}: it "
            "needs `messages`, `conversations`, or `instruction` and `output`",
        )
    gate.check_schema(row, where, CHAT_ROWS[form])
    messages = {
        "messages": _openai_messages,
        "conversations": _sharegpt_messages,
        "instruction": _alpaca_messages,
    }[form](row, where)
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return Chat(messages, float(row.get("weight", 1.0)), where)


def _openai_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of a row in OpenAI's form (`messages`), as they are."""
    return row["messages"]


def _sharegpt_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the messages of a row in ShareGPT's form (`conversations`), its speakers mapped to
    roles. Raises Refused, naming `where`, for an unknown speaker.
    """
    messages = []
    for turn in row["conversations"]:
        role = SPEAKERS.get(turn["from"].lower())
        if role is None:
            raise gate.refuse(
                where, f"`from` is {turn['from']!r}: {choices(turn['from'], SPEAKERS)}"
            )
        messages.append({"role": role, "content": turn.get("value") or ""})
    return messages


def _alpaca_messages(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return two messages for a row in Alpaca's form: the instruction (and its input) as the
    user's, the output as the assistant's.
    """
    question = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": row["output"]}]


FORMAT = 3
FORM = Form(
    EXAMPLES,
    ("tokens.bin", "trained.bin", "offsets.npy", "weights.npy", "hashes.npy", "preference.npy"),
)
READERS = {"chats": chats, "pairs": pairs, "completions": completions}


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokenised examples of one source, each truncated to `longest` tokens; `tokens` and `trained`
    are memory-mapped.
    """

    name: str
    tokens: np.ndarray
    trained: np.ndarray
    offsets: np.ndarray
    weights: np.ndarray
    hashes: np.ndarray
    preference: np.ndarray
    longest: int
    content: str
    """Hash of all of it."""

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.weights)

    def span(self, index: int) -> slice:
        """Return the slice of example `index` in `tokens`, truncated to `longest` tokens."""
        first, end = (int(at) for at in self.offsets[index : index + 2])
        return slice(first, min(end, first + self.longest))

    def last_learned(self, index: int) -> int:
        """Return the id of the last trained token of example `index`, which must have one."""
        span = self.span(index)
        return int(self.tokens[span][np.flatnonzero(self.trained[span] > 0)[-1]])

    def places(self) -> np.ndarray:
        """Return the number of positions that each example takes in a row, [examples]: its tokens,
        truncated, less one.
        """
        return np.minimum(np.diff(self.offsets), self.longest) - 1

    def predictions(self) -> np.ndarray:
        """Return the number of trained tokens of each example, truncated, [examples]; 0 where its
        weight is 0. The first token is not predicted.
        """
        # prefix sums: a count per example by two lookups
        before = np.concatenate([[0], np.cumsum(self.trained, dtype=np.int64)])
        first = np.minimum(self.offsets[:-1] + 1, self.offsets[1:])  # the first is not predicted
        end = np.minimum(self.offsets[1:], self.offsets[:-1] + self.longest)
        return (before[np.maximum(first, end)] - before[first]) * (self.weights > 0)

    @property
    def long(self) -> np.ndarray:
        """True for each example that is truncated to `longest` tokens, [examples]."""
        return np.diff(self.offsets) > self.longest

    @property
    def weighted(self) -> bool:
        """True if examples have other weights than 0 and 1."""
        return bool(((self.weights != 0) & (self.weights != 1)).any())


def open_examples(
    source: DataSource,
    template: Template,
    train_on: MaskingStrategy,
    longest: int,
    cache: Path,
    progress: bool = True,
    verify: bool = True,
    rows: ChatRows = "chats",
    max_row_bytes: int | None = None,
) -> Examples:
    """Open the tokenised examples of a source, from the cache or built into it now; a pair is two
    consecutive examples. `longest`: tokens to truncate to; `max_row_bytes`: bound of a row. Raises
    ValueError where there are no rows, or the template leaves none or all of their tokens to train
    on.
    """
    tokenizer = template.tokenizer
    origin = {
        "format": FORMAT,
        **identities(source),
        "tokenizer": tokenizers.fingerprint(tokenizer),
        "vocabulary": tokenizers.vocabulary_size(tokenizer),
        "template": hashlib.blake2b(template.text.encode(), digest_size=16).hexdigest(),
        "train_on": f"{train_on} of {rows}",
        "dtype": tokenizers.token_dtype(tokenizer).str,
    }

    def build(folder: Path) -> None:
        """Tokenise the rows of the source into the new cache folder."""
        _build(
            READERS[rows](source, max_row_bytes),
            source,
            template,
            train_on,
            origin,
            folder,
            progress,
        )

    folder, index = find_or_build(cache, origin, FORM, build, verify, progress)
    _refuse_all_or_none(index, train_on, source)
    return Examples(
        source.name,
        np.asarray(np.memmap(folder / "tokens.bin", np.dtype(index["dtype"]), mode="r")),
        np.asarray(np.memmap(folder / "trained.bin", np.uint8, mode="r")),
        np.load(folder / "offsets.npy"),
        np.load(folder / "weights.npy"),
        np.load(folder / "hashes.npy"),
        np.load(folder / "preference.npy"),
        longest,
        index["content"],
    )


def _refuse_all_or_none(index: dict, train_on: MaskingStrategy, source: DataSource) -> None:
    """Raise ValueError where no token would be trained, or (unless `train_on` is "all") all,
    which means that the template does not separate completions from prompts.
    """
    counts = f"{source.label}: of {plural(index['tokens'], 'token')} of chats"
    how = f"--data.masking-strategy {train_on}"
    if not index["trained"]:
        raise ValueError(
            f"{counts} none would be trained ({how}): give chats with assistant turns, or a "
            "--data.template that renders them"
        )
    if index["trained"] == index["tokens"] and train_on != "all":
        raise ValueError(
            f"{counts} all would be trained ({how}): the chat template does not separate the "
            "assistant's turns; give another --data.template, or --data.masking-strategy all"
        )


def _build(
    read: Iterator[Chat],
    source: DataSource,
    template: Template,
    train_on: MaskingStrategy,
    origin: dict,
    folder: Path,
    progress: bool,
) -> None:
    """Tokenise all chats in `read` and write the cache files and the index into `folder`. Raises
    ValueError where there are none.
    """
    ends, weights, hashes, preferences = [0], [], [], []
    trained_in_all, untrained, largest = 0, 0, 0
    with (
        open(folder / "tokens.bin", "wb") as tokens,
        open(folder / "trained.bin", "wb") as marks,
        bar(f"reading the rows of {source.name}", None, progress) as reach,
    ):
        for chat in read:
            ids, trained = template.tokens(chat, train_on)
            data = ids.astype(origin["dtype"]).tobytes()
            tokens.write(data)
            marks.write(trained.astype(np.uint8).tobytes())
            ends.append(ends[-1] + len(ids))
            weights.append(chat.weight)
            preferences.append(chat.preference)
            # of tokens: equal chats in two files are copies
            hashes.append(xxhash.xxh3_64_intdigest(data))
            largest = max(largest, int(ids.max()))
            trained_in_all += int(trained.sum())
            # the first token is never predicted
            untrained += not trained[1:].any()
            reach(ends[-1])
    if not weights:
        raise ValueError(f"{source.label} contains no chats")
    np.save(folder / "offsets.npy", np.array(ends, "<i8"))
    np.save(folder / "weights.npy", np.array(weights, "<f4"))
    np.save(folder / "hashes.npy", np.array(hashes, "<u8"))
    np.save(folder / "preference.npy", np.array(preferences, "<f4"))
    index = {
        **origin,
        "examples": len(weights),
        "tokens": ends[-1],
        "trained": trained_in_all,
        "untrained": untrained,
        "largest": largest,
        "content": hashlib.blake2b(
            np.array(hashes, "<u8").tobytes() + np.array([weights, preferences], "<f4").tobytes(),
            digest_size=8,
        ).hexdigest(),
    }
    write_index(folder, FORM, index)
