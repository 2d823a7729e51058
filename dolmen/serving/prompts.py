"""Rows as an engine takes them: their tokens, cut and checked against the model, before work begins
and again as each one's turn comes.
"""

from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dolmen.conversion.source import Source
from dolmen.core.messages import counted
from dolmen.data.chats import Chat
from dolmen.data.template import Template, own_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate
from dolmen.files.gate import Refused
from dolmen.serving import checked
from dolmen.serving.adapters import check_name
from dolmen.serving.config import GenerateConfig
from dolmen.serving.prompt import encode
from dolmen.serving.request import Limits, Request
from dolmen.serving.rows import Row, lines


@dataclass(frozen=True)
class Read:
    """What was found of a file, before any of it is answered."""

    places: array
    """Of the rows that can be answered, among all that are there."""
    cut: int
    """Those of them that were longer than --max-input-tokens."""
    short: int
    """Those whose answer may end earlier, as the model has no position for more."""
    bad: int
    """Rows that cannot be answered."""


@dataclass(frozen=True)
class Prompts:
    """The rows of a file, for a model."""

    config: GenerateConfig
    """With what generation_config.json says."""
    source: Source
    tokenizer: PreTrainedTokenizer
    file: Path
    adapters: Collection[str] = ()
    """Names of those that a row may be answered by."""

    def read(self) -> Read:
        """All of it. Raises Refused for the first row that cannot be answered, unless these are to
        be left out, and ValueError for a file without any other.
        """
        places, bad, cut, short = array("q"), 0, 0, 0
        most = self.config.of_tokens.max_new_tokens
        for place, line in enumerate(lines(self.file)):
            try:
                request, whole = self.request(line.row())
            except Refused:
                if not self.config.skip_bad:
                    raise
                bad += 1
                continue
            places.append(place)
            cut += not whole
            short += request.options.max_new_tokens < most
        if not places:
            raise ValueError(f"--input {self.file} has no row that can be answered")
        return Read(places, cut, short, bad)

    def at(self, places: array) -> Iterator[Row]:
        """The rows at these places, in order. Raises ValueError where the file has changed since
        it was read.
        """
        wanted = iter(places)
        place = next(wanted, None)
        for here, line in enumerate(lines(self.file)):
            if here == place:
                yield line.row()
                place = next(wanted, None)
        if place is not None:
            raise ValueError(f"--input {self.file} has changed since it was read")

    def request(self, row: Row) -> tuple[Request, bool]:
        """What the engine is asked, and whether it is the whole prompt. Raises Refused."""
        config, tree = self.config, self.source.model.tree
        try:
            tokens = self._tokens(row)
        except Refused:
            raise
        except ValueError as error:
            raise gate.refuse(row.where, error) from error
        whole = len(tokens)
        if config.max_input_tokens is not None and whole > config.max_input_tokens:
            tokens = self._cut(tokens, config.max_input_tokens)
        options, most = config.of_tokens, tree.max_position_embeddings
        if len(tokens) > most:
            raise gate.refuse(
                row.where,
                f"its prompt has {counted(len(tokens), 'token')}, max_position_embeddings is "
                f"{most:,}: use --max-input-tokens {most} or fewer",
            )
        if tree.longest is not None:  # the last new token is not read
            options = replace(
                options, max_new_tokens=min(options.max_new_tokens, most - len(tokens) + 1)
            )
        request = Request(
            tokens,
            options,
            row.id,
            config.seed,
            config.num_samples,
            config.logprobs,
            adapter=row.adapter(config.adapter),
        )
        try:
            check_name(request.adapter, self.adapters)
            checked.check(tree, request, Limits())
            checked.span_of(tree, tokens)
        except ValueError as error:
            raise gate.refuse(row.where, error) from error
        return request, len(tokens) == whole

    def _tokens(self, row: Row) -> list[int]:
        if isinstance(row.prompt, str):
            return encode(self.tokenizer, row.prompt, self.source.model)
        return self._template.prompt(Chat(row.prompt, 1.0, row.where))

    @cached_property
    def _template(self) -> Template:
        return own_template(
            self.tokenizer,
            "give rows with `prompt` in place of `messages`, or a model that is made for chats",
            "give a model with one",
        )

    def _cut(self, tokens: list[int], most: int) -> list[int]:
        """From the left; the token that begins every text stays."""
        begin = tokens[:1] if tokens[0] == self.tokenizer.bos_token_id else []
        return [*begin, *tokens[len(tokens) - most + len(begin) :]]
