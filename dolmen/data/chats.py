"""Rows that are chats, in the three forms in which they are published, told apart by their fields:

    messages        [{role, content}, ...], as chat templates take them
    conversations   [{from, value}, ...], of ShareGPT: human, gpt, system, tool
    instruction     with `output`, and maybe `input`, of Alpaca: one question and its answer

A row may have a `system` message and a `weight` of its loss besides.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dolmen.core.messages import choices
from dolmen.data.sources import Source
from dolmen.data.tokenise import rows
from dolmen.files import gate
from dolmen.files.kinds import CHAT_ROWS, COMPLETION_ROW, PAIR_ROW

ASSISTANT = "assistant"
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


@dataclass(frozen=True)
class Chat:
    """Messages as a chat template takes them, each with its `role` and `content`."""

    messages: list[dict[str, Any]]
    weight: float
    """Of the loss of its tokens."""
    where: str
    """File and row, for a person."""
    said: float = 0.0
    """What its row says of the answer: of a pair by how much the chosen one is to be ahead, of a
    completion whether it is wanted, 1 or -1.
    """


def chats(
    source: Source, option: str = "--data.path", max_bytes: int | None = None
) -> Iterator[Chat]:
    """Of all rows of `source`, in order. Raises ValueError, with the row, for one that is no
    chat.
    """
    for row, where in rows(source, option, max_bytes):
        yield chat_of(row, where)


def pairs(
    source: Source, option: str = "--data.path", max_bytes: int | None = None
) -> Iterator[Chat]:
    """Of all rows of `source`, in order, the chat with the chosen answer and the one with the
    rejected. Raises ValueError, with the row, for one that has no two answers.
    """
    for row, where in rows(source, option, max_bytes):
        yield from pair_of(row, where)


def completions(
    source: Source, option: str = "--data.path", max_bytes: int | None = None
) -> Iterator[Chat]:
    """Of all rows of `source`, in order, the chat with the completion, or of a row with two answers
    both, of which the chosen one is wanted. Raises as `pairs`.
    """
    for row, where in rows(source, option, max_bytes):
        if row.get("completion") is None and row.get("chosen") is not None:
            chosen, rejected = pair_of(row, where)
            yield replace(chosen, said=1.0)
            yield replace(rejected, said=-1.0)
        else:
            yield completion_of(row, where)


def pair_of(row: dict[str, Any], where: str) -> tuple[Chat, Chat]:
    """Raises Refused for a row without two answers, and where an answer has no prompt before it."""
    row = {name: value for name, value in row.items() if value is not None}
    gate.check_schema(row, where, PAIR_ROW)
    margin = float(row.get("margin", 0.0))
    chosen, rejected = (_answered(row, name, where) for name in ("chosen", "rejected"))
    return replace(chosen, said=margin), replace(rejected, said=margin)


def completion_of(row: dict[str, Any], where: str) -> Chat:
    """Raises Refused for a row that has no completion, or does not say whether it is wanted, and
    where there is no prompt before it.
    """
    row = {name: value for name, value in row.items() if value is not None}
    gate.check_schema(row, where, COMPLETION_ROW)
    return replace(_answered(row, "completion", where), said=1.0 if row["label"] else -1.0)


def _answered(row: dict[str, Any], name: str, where: str) -> Chat:
    """The prompt of a row, and the answer that is its field `name`."""
    prompt = row.get("prompt", [])
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if row.get("system"):
        prompt = [{"role": "system", "content": row["system"]}, *prompt]
    answer = row[name]
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    # a whole chat, or what follows the prompt
    whole = answer if answer[: len(prompt)] == prompt else [*prompt, *answer]
    if len(whole) < 2 or whole[-1]["role"] != ASSISTANT:
        raise gate.refuse(
            where,
            f"`{name}` is no answer of the assistant to a prompt: give `prompt`, or the whole "
            "chat, which ends with the answer",
        )
    return Chat(whole, 1.0, where)


def chat_of(row: dict[str, Any], where: str) -> Chat:
    """Raises Refused for a row of no known form, and for one that is not what its form says."""
    # a table has the columns of all its rows, and null where a row has no such field
    row = {name: value for name, value in row.items() if value is not None}
    form = next((name for name in CHAT_ROWS if name in row), None)
    if form is None:
        raise gate.refuse(
            where,
            f"no chat but keys {', '.join(str(name)[:40] for name in list(row)[:6])}: it needs "
            "`messages`, `conversations`, or `instruction` and `output`",
        )
    gate.check_schema(row, where, CHAT_ROWS[form])
    messages = {"messages": _spoken, "conversations": _shared, "instruction": _asked}[form](
        row, where
    )
    if row.get("system"):
        messages = [{"role": "system", "content": row["system"]}, *messages]
    return Chat(messages, float(row.get("weight", 1.0)), where)


def _spoken(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return row["messages"]


def _shared(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    made = []
    for turn in row["conversations"]:
        role = SPEAKERS.get(turn["from"].lower())
        if role is None:
            raise gate.refuse(
                where, f"`from` is {turn['from']!r}: {choices(turn['from'], SPEAKERS)}"
            )
        made.append({"role": role, "content": turn.get("value") or ""})
    return made


def _asked(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    question = row["instruction"] + (f"\n\n{row['input']}" if row.get("input") else "")
    return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": row["output"]}]
