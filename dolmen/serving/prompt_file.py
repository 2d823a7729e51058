"""Prompt file of `dolmen generate --input`: rows, checked against the model, as requests.

    {"id": 7, "prompt": "Once upon a time", "adapter": "fr"}
    {"messages": [{"role": "user", "content": "Which is the highest mountain?"}]}

A line of a .jsonl is an object with `prompt`, `query` (Pai-Megatron-Patch's name) or `messages`; a
line of a .txt is a prompt. Other fields of a row are copied to the output. All rows are checked
before work begins, and read again, one by one, as the engine has room.
"""

import json
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dolmen.conversion.source import ModelSource
from dolmen.core.messages import plural
from dolmen.data.readers import check_row_bytes, form, open_decompressed
from dolmen.data.template import ASSISTANT, Chat, Template, tokenizer_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate
from dolmen.files.gate import Refused
from dolmen.files.kinds import PROMPT_ROWS, TEXT_ROW
from dolmen.serving.adapters import check_name
from dolmen.serving.config import GenerateConfig
from dolmen.serving.generation import encode
from dolmen.serving.request import Limits, Request, check, span_of

OUTPUT_FIELDS = ("text", "tokens", "finish_reason", "logprobs", "samples")
"""Fields that the output adds to a row."""


@dataclass(frozen=True)
class PromptRow:
    """A prompt, as a row of a file."""

    where: str
    """File and line, for messages."""
    id: int | str
    """Random numbers follow from it: its own `id`, or else its line."""
    fields: dict[str, Any]
    """All fields, which are copied to the output."""

    @property
    def prompt(self) -> str | list[dict[str, Any]]:
        """The prompt: a text (`prompt`, `query`), or a list of chat messages (`messages`)."""
        return next(self.fields[name] for name in PROMPT_ROWS if name in self.fields)

    def adapter(self, default: str | None) -> str | None:
        """Return the name of the LoRA adapter that the row names, or else `default`. None (null in
        a row) is the base model.
        """
        return self.fields.get("adapter", default)


@dataclass(frozen=True)
class Line:
    """A line of the file that is not blank."""

    file: Path
    number: int
    """Number of the line, from 1."""
    content: bytes

    def row(self, max_bytes: int | None = None) -> PromptRow:
        """Parse the line; the row's id is its `id`, or else the number of the line. Raises Refused
        for a malformed line, and for one of over `max_bytes`.
        """
        where = f"{self.file}, line {self.number}"
        check_row_bytes(len(self.content), max_bytes, where, "--max-row-bytes")
        fields = PARSERS[form(self.file) or ""](self.content, where)
        return PromptRow(where, fields.get("id", self.number), fields)


def check_file(file: Path) -> None:
    """Raise ValueError for a file of an unknown suffix; OSError where it cannot be read."""
    if form(file) not in PARSERS:
        raise ValueError(
            f"--input {file}: use a .jsonl (rows with `prompt`, `query` or `messages`) or a .txt "
            "(a prompt per line), optionally compressed as .gz or .zst"
        )
    with gate.open_file(file):
        pass


def read_lines(file: Path) -> Iterator[Line]:
    """Yield the lines of a file (also .gz, .zst) that are not blank, with their numbers. Raises
    ValueError for a damaged archive, and Refused for a line that is too long for memory.
    """
    with open_decompressed(file) as stream:
        for number, content in enumerate(iter(lambda: stream.readline(TEXT_ROW.size + 1), b""), 1):
            if len(content) > TEXT_ROW.size:  # the next would be its rest
                raise gate.refuse(f"{file}, line {number}", f"has over {TEXT_ROW.size:,} bytes")
            if content.strip():
                yield Line(file, number, content)


def _parse_txt(line: bytes, where: str) -> dict[str, Any]:
    """Return a line of a .txt as a row: its text, without the line end, as `prompt`. Raises Refused
    if it is not UTF-8.
    """
    return {"prompt": gate.decode(line, where).rstrip("\r\n")}


def _parse_jsonl(line: bytes, where: str) -> dict[str, Any]:
    """Return the row (a dict) of a line of a .jsonl, checked. Raises Refused for malformed JSON, a
    row without exactly one of `prompt`, `query` and `messages`, a field that the output adds, a
    chat that ends with the assistant, and a lone surrogate.
    """
    fields = gate.parse_json(line, where, TEXT_ROW)
    gate.check_form(fields, where, PROMPT_ROWS)
    if taken := [name for name in OUTPUT_FIELDS if name in fields]:
        raise gate.refuse(
            where,
            f"it has a field `{taken[0]}`, where the completion is written: rename that field",
        )
    # the template would open a second assistant turn behind it
    if "messages" in fields and fields["messages"][-1]["role"] == ASSISTANT:
        raise gate.refuse(where, "its last message is the assistant's: it must end with the user's")
    try:
        json_line(fields)
    # found now, not when the row is written
    except UnicodeEncodeError:
        raise gate.refuse(where, "it has a lone surrogate, which is not valid text") from None
    return fields


PARSERS = {".jsonl": _parse_jsonl, ".txt": _parse_txt}


# Characters that end a line for some programs, but not in a .jsonl.
LINE_ENDS = {ord(end): f"\\u{ord(end):04x}" for end in "\u0085\u2028\u2029"}


def json_line(fields: dict[str, Any]) -> bytes:
    """Encode a row as a line of a .jsonl, UTF-8 with the line end. Raises UnicodeEncodeError for a
    lone surrogate.
    """
    return json.dumps(fields, ensure_ascii=False).translate(LINE_ENDS).encode() + b"\n"


@dataclass(frozen=True)
class FileSummary:
    """Rows of a file, as counted before any is sent to the engine."""

    places: array
    """Indices of the valid rows."""
    cut: int
    """Number of prompts cut to --max-input-tokens."""
    short: int
    """Number of rows whose completion is limited by the model's positions."""
    bad: int
    """Number of invalid rows."""


@dataclass(frozen=True)
class PromptFile:
    """A file of prompts, as requests to the engine of a model."""

    config: GenerateConfig
    """Options, with the defaults of generation_config.json."""
    source: ModelSource
    tokenizer: PreTrainedTokenizer
    file: Path
    adapters: Collection[str] = ()
    """Names of the LoRA adapters that a row may name."""

    def check_rows(self) -> FileSummary:
        """Tokenize and check all rows, and return their summary. Raises Refused for the first
        invalid row, unless --skip-bad leaves them out, and ValueError for a file without a valid
        one.
        """
        # 8 bytes per row: a file of 10 million rows takes 80 MB
        places, bad, cut, short = array("q"), 0, 0, 0
        most = self.config.sampling_params.max_new_tokens
        for place, line in enumerate(read_lines(self.file)):
            try:
                request, full = self.request(line.row(self.config.max_row_bytes))
            except Refused:
                if not self.config.skip_bad:
                    raise
                bad += 1
                continue
            # an index, not a line number: blank lines do not count
            places.append(place)
            # counted for the summary that is printed
            cut += not full
            short += request.params.max_new_tokens < most
        if not places:
            raise ValueError(f"--input {self.file} has no valid row")
        return FileSummary(places, cut, short, bad)

    def rows_at(self, places: array) -> Iterator[PromptRow]:
        """Yield the rows of these indices (among non-blank lines), in order, reading the file
        again. Raises ValueError where the file has fewer rows than when it was checked.
        """
        # the file is read again from its start: rows are not held in memory
        remaining = iter(places)
        place = next(remaining, None)
        for here, line in enumerate(read_lines(self.file)):
            if here == place:
                yield line.row()
                place = next(remaining, None)
        if place is not None:
            raise ValueError(f"--input {self.file} has changed since it was read")

    def request(self, row: PromptRow) -> tuple[Request, bool]:
        """Return the engine request of a row, and whether its prompt is whole (False: cut to
        --max-input-tokens). Where positions end, it lowers max_new_tokens. Raises Refused for
        a row that the model cannot take.
        """
        config, spec = self.config, self.source.model.spec
        try:
            tokens = self._tokens(row)
        except Refused:
            raise
        except ValueError as error:
            raise gate.refuse(row.where, error) from error
        full = len(tokens)
        if config.max_input_tokens is not None and full > config.max_input_tokens:
            tokens = self._cut(tokens, config.max_input_tokens)
        params, most = config.sampling_params, spec.max_position_embeddings
        if len(tokens) > most:
            raise gate.refuse(
                row.where,
                f"its prompt has {plural(len(tokens), 'token')}, but max_position_embeddings is "
                f"{most:,}: use --max-input-tokens {most} or fewer",
            )
        if spec.longest is not None:  # the last new token is not read
            params = replace(
                params, max_new_tokens=min(params.max_new_tokens, most - len(tokens) + 1)
            )
        request = Request(
            tokens,
            params,
            row.id,
            config.seed,
            config.num_samples,
            config.logprobs,
            adapter=row.adapter(config.adapter),
        )
        try:
            check_name(request.adapter, self.adapters)
            # an offline engine's cache grows as needed, so that only the model limits a row
            check(spec, request, Limits())
            span_of(spec, tokens)
        except ValueError as error:
            raise gate.refuse(row.where, error) from error
        return request, len(tokens) == full

    def _tokens(self, row: PromptRow) -> list[int]:
        """Return the token ids of a row's prompt; a chat goes through the chat template. Raises
        ValueError.
        """
        if isinstance(row.prompt, str):
            return encode(self.tokenizer, row.prompt, self.source.model)
        return self._template.prompt(Chat(row.prompt, 1.0, row.where))

    @cached_property
    def _template(self) -> Template:
        """The model's chat template. Raises ValueError if it has none."""
        return tokenizer_template(
            self.tokenizer,
            "give rows with `prompt` in place of `messages`, or a chat model",
            "give a model with one",
        )

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        """Truncate a prompt from the left to its last `most` tokens; if it begins with a BOS token,
        to that and its last `most - 1`.
        """
        # models answer badly without their BOS token
        begin = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id else []
        return [*begin, *tokens[len(tokens) - most + len(begin) :]]
