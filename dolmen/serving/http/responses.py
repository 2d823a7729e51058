"""Responses of OpenAI's interface as plain values: whole objects, and the chunks of a stream.

A form (`ChatForm`, `CompletionForm`) is the format of one endpoint: text, log-probabilities and
chunks; both are given the same pieces (session.py). `usage` counts each prompt once, and the tokens
of all completions, with those that ended them.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dolmen.serving.http.session import Entry, Finish, Likely, Piece, Session


@dataclass
class Whole:
    """A completion that is sent at once: its pieces, put together."""

    index: int
    text: str = ""
    entries: list[Entry] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.entries += piece.entries
        self.finish = piece.finish or self.finish


@dataclass(frozen=True)
class Echo:
    """A prompt that is sent before its completion (echo)."""

    text: str
    tokens: Sequence[int]


class Form:
    """Response format of one endpoint."""

    prefix, whole, chunk = "", "", ""

    def __init__(self, model: str, session: Session):
        assert session.asked is not None, "it has been opened"
        self.session, self.logprobs = session, session.asked.top is not None
        self.shared = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def first(self) -> list[dict[str, Any]]:
        """Return the chunks before any token."""
        return []

    def piece(self, piece: Piece) -> dict[str, Any]:
        """Return a piece as a chunk."""
        return self._chunk([self._part(piece)])

    def usage(self) -> dict[str, int]:
        """Return the token counts of the request."""
        assert self.session.asked is not None, "it has been opened"
        prompt, new = (
            self.session.asked.prompt_tokens,
            sum(one.count for one in self.session.written),
        )
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def last(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`."""
        return {**self._chunk([]), "usage": self.usage()}

    def answer(self, pieces: Iterable[Piece]) -> dict[str, Any]:
        """Return the whole response."""
        whole = [Whole(one.index) for one in self.session.written]
        for piece in pieces:
            whole[piece.index].add(piece)
        choices = [self._choice(one) for one in whole]
        return {**self.shared, "object": self.whole, "choices": choices, "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.shared, "object": self.chunk, "choices": choices}

    def _part(self, piece: Piece) -> dict[str, Any]:
        raise NotImplementedError

    def _choice(self, whole: Whole) -> dict[str, Any]:
        raise NotImplementedError


class ChatForm(Form):
    """Format of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        begun = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": one.index, "delta": begun, "finish_reason": None}])
            for one in self.session.written
        ]

    def _part(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "delta": {"content": piece.text} if piece.text or not piece.finish else {},
            "logprobs": self._told(piece.entries),
            "finish_reason": piece.finish,
        }

    def _choice(self, whole: Whole) -> dict[str, Any]:
        return {
            "index": whole.index,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._told(whole.entries),
            "finish_reason": whole.finish,
        }

    def _told(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {**_token(entry.own), "top_logprobs": [_token(one) for one in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def by_name(top: Sequence[Likely]) -> dict[str, float]:
    """Return text -> log-probability, of tokens with the same text that of the likeliest."""
    return {one.name: one.logprob for one in reversed(top)}


def _token(one: Likely) -> dict[str, Any]:
    return {"token": one.escaped, "logprob": one.logprob, "bytes": one.bytes}


class CompletionForm(Form):
    """Format of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, session: Session, echo: Sequence[Echo]):
        """`echo`: the prompts, if they are sent too."""
        super().__init__(model, session)
        self.echo = echo
        assert session.asked is not None, "it has been opened"
        self.samples = session.count // len(session.asked.requests)

    def first(self) -> list[dict[str, Any]]:
        return [
            self.piece(Piece(number * self.samples + sample, echo.text))
            for number, echo in enumerate(self.echo)
            for sample in range(self.samples)
        ]

    def _part(self, piece: Piece) -> dict[str, Any]:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._told(piece.entries),
            "finish_reason": piece.finish,
        }

    def _choice(self, whole: Whole) -> dict[str, Any]:
        part = self._part(Piece(whole.index, whole.text, whole.entries, whole.finish))
        if self.echo:
            echo = self.echo[whole.index // self.samples]
            part["text"] = echo.text + whole.text
            if self.logprobs:
                part["logprobs"] = self._with_prompt(echo, whole)
        return part

    def _told(self, entries: Sequence[Entry]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return {
            "tokens": [entry.own.name for entry in entries],
            "token_logprobs": [entry.own.logprob for entry in entries],
            "top_logprobs": [by_name(entry.top) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _with_prompt(self, echo: Echo, whole: Whole) -> dict[str, Any]:
        """Log-probabilities of the prompt and the completion; the first token has none."""
        known = self.session.sessions.tokens
        texts, offset, entries = [known.text(token) for token in echo.tokens], 0, []
        found = self.session.of_prompts[whole.index]
        for token, before, one in zip(echo.tokens[1:], texts, found, strict=False):
            offset += len(before)
            entries.append(known.entry(token, one, offset))
        first = {
            "tokens": [known.likely(token, 0.0).name for token in echo.tokens[:1]],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        prompt, new = self._told(entries), self._told(whole.entries)
        assert prompt is not None and new is not None, "they are asked for"
        new["text_offset"] = [len(echo.text) + offset for offset in new["text_offset"]]
        return {name: [*first[name], *prompt[name], *new[name]] for name in first}
