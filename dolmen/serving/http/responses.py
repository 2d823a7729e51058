"""Responses of OpenAI's protocol as plain values: JSON objects, and the chunks of a stream.

    tokens          Hel   lo   \\n   \\n  Bye            with the stop string \\n\\n
    deltas         "Hel" "lo"   -    finish: "stop"     the newline waited, and is not sent

`CompletionStream` turns the tokens of one completion into deltas of text with their
log-probabilities. A delta is text that is certain: whole characters, and nothing that may be the
beginning of a stop string. A response that is not streamed is its deltas joined, so it equals the
streamed one.

`ChatFormat` and `CompletionFormat` are the formats of the two endpoints: names, log-probabilities
and chunks. `usage` counts each prompt once, and all sampled tokens, also those that ended a
completion.
"""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from dolmen.data.tokenizer import PreTrainedTokenizer, bytes_of
from dolmen.serving.generation import UNFINISHED, Detokenizer
from dolmen.serving.http.request_parser import ParsedRequest
from dolmen.serving.request import LogProb, NewToken

Finish = Literal["stop", "length"]
LOWEST_LOGPROB = -9999.0
"""Log-probability reported for a token of probability 0, as OpenAI does; JSON has no infinity."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token as text, and its log-probability."""

    text: str
    logprob: float
    part: bytes | None = None
    """Bytes of a token that is a part of a character and so has no text of its own."""

    @property
    def bytes(self) -> list[int] | None:
        """UTF-8 bytes of the token; None for a part of a character whose bytes the tokenizer does
        not tell.
        """
        if self.part is None and UNFINISHED in self.text:
            return None
        return list(self.text.encode() if self.part is None else self.part)

    @property
    def escaped(self) -> str:
        r"""Text of the token; of a part of a character its bytes, as \xe4\xbd, so that different
        parts differ.
        """
        if self.part is None:
            return self.text
        return "".join(f"\\x{byte:02x}" for byte in self.part)

    @property
    def name(self) -> str:
        r"""Text of the token as /v1/completions has it; of a part of a character bytes:\xe4\xbd."""
        return self.text if self.part is None else f"bytes:{self.escaped}"


@dataclass(frozen=True)
class LogprobEntry:
    """Log-probabilities of one token of a completion."""

    sampled: TokenLogprob
    top: Sequence[TokenLogprob]
    """The most likely tokens in its place, most likely first."""
    offset: int
    """Characters of the completion before it."""


@dataclass(frozen=True)
class Delta:
    """The next part of a completion (OpenAI's delta)."""

    index: int
    """Index of the completion within its request."""
    text: str
    entries: Sequence[LogprobEntry] = ()
    """Log-probabilities of the tokens that begin in `text`."""
    finish: Finish | None = None
    """Finish reason, on the last delta."""


class TokenTexts:
    """Decodes single tokens, each as it reads after other text, with a cache of 65,536 tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizer):
        """Creates an empty cache for the tokenizer's tokens."""
        # SentencePiece drops the leading space of the first token, so decode behind an "a"
        ids = tokenizer.encode("a", add_special_tokens=False)
        before = tokenizer.decode(ids)

        @lru_cache(maxsize=1 << 16)
        def text(token: int) -> str:
            """Return the text of a token: that of an "a" and the token, without the "a"."""
            both = tokenizer.decode([*ids, token])
            return both.removeprefix(before) if both.startswith(before) else both

        self.text = text
        self.vocabulary = {number: token for token, number in tokenizer.get_vocab().items()}

    def token_logprob(self, token: int, logprob: float) -> TokenLogprob:
        """Return a token's text with its log-probability, at least LOWEST_LOGPROB (-9999)."""
        text = self.text(token)
        # byte tokens decode to U+FFFD alone
        part = bytes_of(self.vocabulary.get(token, text)) if UNFINISHED in text else None
        return TokenLogprob(text, max(logprob, LOWEST_LOGPROB), part)

    def entry(self, token: int, logprob: LogProb, offset: int) -> LogprobEntry:
        """Return the log-probability entry of a token of a completion or prompt, with its most
        likely alternatives. `offset`: characters before it.
        """
        top = [self.token_logprob(token, value) for token, value in logprob.top]
        return LogprobEntry(self.token_logprob(token, logprob.logprob), top, offset)


@dataclass(eq=False)
class CompletionStream:
    """A completion while it is generated: tokens in, deltas of text out."""

    index: int
    """Index of the completion within its request."""
    text: Detokenizer
    token_texts: TokenTexts | None
    """None: no log-probabilities are requested."""
    count: int = 0
    """Number of tokens, with the one that ended it."""
    finish: Finish | None = None
    prompt_logprobs: list[LogProb] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens but the first, if requested."""
    _sent: int = 0
    _pending: list[LogprobEntry] = field(default_factory=list)

    def add(self, token: NewToken) -> Delta | None:
        """Add a sampled token; return the text and log-probabilities that became certain with it,
        or None. The delta has a finish reason if a stop string was reached.
        """
        self.count += 1
        new = self.text.add(token.token)
        if self.token_texts is not None and token.logprob is not None:
            # held until its text is certain: it may turn out to belong to a stop string
            entry = self.token_texts.entry(token.token, token.logprob, self.text.offset)
            self._pending.append(entry)
        self._sent += len(new)
        if self.text.stopped is not None:
            return self._last_delta(new, "stop")
        entries = self._certain(self._sent)
        return Delta(self.index, new, entries) if new or entries else None

    def end(self, why: Finish) -> Delta:
        """End the completion for the reason `why` and return its last delta, with all text that was
        held back. A stop string in that text makes the reason "stop".
        """
        new = self.text.end()
        return self._last_delta(new, "stop" if self.text.stopped is not None else why)

    def _last_delta(self, new: str, why: Finish) -> Delta:
        """Set the finish reason, and return the last delta, with the log-probability entries that
        were not sent yet. If a stop string was found, the entries from it on are dropped.
        """
        self.finish = why
        cut = self.text.stopped is not None
        # the tokens of a stop string are not part of the completion
        entries = self._certain(len(self.text.whole)) if cut else self._pending
        self._pending = []
        return Delta(self.index, new, entries, why)

    def _certain(self, end: int) -> list[LogprobEntry]:
        """Remove and return the entries of tokens that begin before the character `end`."""
        # offsets only rise, so these are the first ones
        entries = [entry for entry in self._pending if entry.offset < end]
        self._pending = self._pending[len(entries) :]
        return entries


@dataclass
class CompleteText:
    """A completion that is sent at once: its deltas joined."""

    index: int
    text: str = ""
    entries: list[LogprobEntry] = field(default_factory=list)
    finish: Finish | None = None

    def add(self, delta: Delta) -> None:
        """Append the text, entries and finish reason of a delta."""
        self.text += delta.text
        self.entries += delta.entries
        self.finish = delta.finish or self.finish


@dataclass(frozen=True)
class EchoedPrompt:
    """A prompt that is sent before its completion (echo)."""

    text: str
    tokens: Sequence[int]
    """Token ids of the prompt."""


class ChoiceFormat:
    """Response format of one endpoint: builds JSON objects and chunks from deltas. Subclasses
    define the format of a choice.
    """

    prefix, object, chunk_object = "", "", ""

    def __init__(self, model: str, request: ParsedRequest, completions: Sequence[CompletionStream]):
        """`model`: name as the request has it. `completions`: those of the request, by index."""
        self.request, self.completions = request, completions
        self.logprobs = request.top is not None
        self.shared = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks that are streamed before the first token."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the chunk of a stream that carries one delta."""
        return self._chunk([self._delta_choice(delta)])

    def usage(self) -> dict[str, int]:
        """Return prompt_tokens, completion_tokens and total_tokens of the request; a prompt with
        several samples counts once.
        """
        prompt, new = (
            self.request.prompt_tokens,
            sum(completion.count for completion in self.completions),
        )
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`: token counts, no choices."""
        # OpenAI sends it with an empty list of choices
        return {**self._chunk([]), "usage": self.usage()}

    def response(self, deltas: Iterable[Delta]) -> dict[str, Any]:
        """Return the whole response (not streamed) from all deltas of all completions."""
        texts = [CompleteText(completion.index) for completion in self.completions]
        for delta in deltas:
            # the same deltas as of a stream, so both give the same text
            texts[delta.index].add(delta)
        choices = [self._choice(text) for text in texts]
        return {**self.shared, "object": self.object, "choices": choices, "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a chunk of a stream with these choices."""
        return {**self.shared, "object": self.chunk_object, "choices": choices}

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        """Return the entry of `choices` of a streamed chunk."""
        raise NotImplementedError

    def _choice(self, completion: CompleteText) -> dict[str, Any]:
        """Return the entry of `choices` of a whole response."""
        raise NotImplementedError


class ChatFormat(ChoiceFormat):
    """Format of /v1/chat/completions."""

    # as OpenAI names them
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return a chunk per completion that announces the assistant's role, with empty content."""
        start = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": completion.index, "delta": start, "finish_reason": None}])
            for completion in self.completions
        ]

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        """Return index, delta (content), log-probabilities and finish reason; an empty last delta
        is {}.
        """
        return {
            "index": delta.index,
            # OpenAI's last chunk has an empty delta and the finish reason
            "delta": {"content": delta.text} if delta.text or not delta.finish else {},
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def _choice(self, completion: CompleteText) -> dict[str, Any]:
        """Return index, message, log-probabilities and finish reason."""
        return {
            "index": completion.index,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs(completion.entries),
            "finish_reason": completion.finish,
        }

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        """Return OpenAI's `logprobs` object of a chat: per token text, log-probability, bytes and
        top_logprobs; None if not requested.
        """
        if not self.logprobs:
            return None
        content = [
            {
                **_token_fields(entry.sampled),
                "top_logprobs": [_token_fields(candidate) for candidate in entry.top],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def top_logprobs(top: Sequence[TokenLogprob]) -> dict[str, float]:
    """Return token name -> log-probability of tokens that are sorted, the most likely first. Of
    tokens with the same name the first counts.
    """
    # reversed: the later entry of a dict wins, and that should be the most likely
    return {candidate.name: candidate.logprob for candidate in reversed(top)}


def _token_fields(logprob: TokenLogprob) -> dict[str, Any]:
    """Return token, logprob and bytes, as chat log-probabilities have them."""
    return {"token": logprob.escaped, "logprob": logprob.logprob, "bytes": logprob.bytes}


class CompletionFormat(ChoiceFormat):
    """Format of /v1/completions."""

    # here a chunk is named as the whole response
    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        request: ParsedRequest,
        completions: Sequence[CompletionStream],
        echo: Sequence[EchoedPrompt],
        token_texts: TokenTexts,
    ):
        """`echo`: the prompts, if they are sent before their completions; else empty."""
        super().__init__(model, request, completions)
        self.echo, self.token_texts = echo, token_texts
        # completions are ordered by prompt, then sample
        self.samples = len(completions) // len(request.requests)

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return a chunk per completion with its prompt, if prompts are echoed."""
        return [
            self.chunk(Delta(number * self.samples + sample, echo.text))
            for number, echo in enumerate(self.echo)
            for sample in range(self.samples)
        ]

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        """Return index, text, log-probabilities and finish reason."""
        return {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta.entries),
            "finish_reason": delta.finish,
        }

    def _choice(self, completion: CompleteText) -> dict[str, Any]:
        """Return index, text (after the echoed prompt, if any), log-probabilities and finish
        reason.
        """
        part = self._delta_choice(
            Delta(completion.index, completion.text, completion.entries, completion.finish)
        )
        if self.echo:
            echo = self.echo[completion.index // self.samples]
            part["text"] = echo.text + completion.text
            if self.logprobs:
                part["logprobs"] = self._echo_logprobs(echo, completion)
        return part

    def _logprobs(self, entries: Sequence[LogprobEntry]) -> dict[str, Any] | None:
        """Return OpenAI's `logprobs` object of a completion: parallel lists of tokens,
        log-probabilities, top_logprobs and text offsets; None if not requested.
        """
        if not self.logprobs:
            return None
        return {
            "tokens": [entry.sampled.name for entry in entries],
            "token_logprobs": [entry.sampled.logprob for entry in entries],
            "top_logprobs": [top_logprobs(entry.top) for entry in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _echo_logprobs(self, echo: EchoedPrompt, completion: CompleteText) -> dict[str, Any]:
        """Return `logprobs` of an echoed prompt and its completion, with offsets from the prompt's
        start. The first token of the prompt has no log-probability.
        """
        texts, offset, entries = [self.token_texts.text(token) for token in echo.tokens], 0, []
        logprobs = self.completions[completion.index].prompt_logprobs
        for token, before, logprob in zip(echo.tokens[1:], texts, logprobs, strict=False):
            # of the prompt's tokens decoded one by one
            offset += len(before)
            entries.append(self.token_texts.entry(token, logprob, offset))
        first = {
            "tokens": [
                self.token_texts.token_logprob(token, 0.0).name for token in echo.tokens[:1]
            ],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        prompt, new = self._logprobs(entries), self._logprobs(completion.entries)
        assert prompt is not None and new is not None, "log-probabilities were requested"
        # offsets of the completion count from its own start until here
        new["text_offset"] = [len(echo.text) + offset for offset in new["text_offset"]]
        return {name: [*first[name], *prompt[name], *new[name]] for name in first}
