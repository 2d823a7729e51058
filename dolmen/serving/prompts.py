"""Encodes prompts and checks rows of a prompt file against the model.

From prompts to the tokens a model begins with, and to those that follow: the same for the
command line, Python and the end of a run.

Rows as an engine takes them: their tokens, cut and checked against the model, before work begins
and again as each one's turn comes.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from dolmen.conversion.source import Source
from dolmen.core.messages import counted, shown
from dolmen.data.chats import Chat
from dolmen.data.template import Template, own_template
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import Model, special_tokens
from dolmen.files import gate, tokenizer_files
from dolmen.files.gate import Refused
from dolmen.model.decoder import Decoder
from dolmen.serving import engine
from dolmen.serving.adapters import check_name
from dolmen.serving.cache import Memory
from dolmen.serving.config import GenerateConfig
from dolmen.serving.request import Limits, Request, check, span_of
from dolmen.serving.rows import Row, lines


def encode(tokenizer: PreTrainedTokenizer, prompt: str, model: Model) -> list[int]:
    """The tokens of `prompt`, as the tokenizer would begin a text and the model's code frames it;
    of an empty one the tokenizer's beginning of text, or else its end. Raises ValueError where
    there is none, and for what is no text.
    """
    check_text(prompt)
    with tokenizer_files.refused_by_name("--prompt"):
        tokens = special_tokens.framed(model, tokenizer(prompt)["input_ids"])
    begin = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokens = tokens or [token for token in begin if token is not None][:1]
    if not tokens:
        raise ValueError(
            "--prompt is empty and the tokenizer names no token to begin with: give a prompt"
        )
    return tokens


def check_text(prompt: str) -> None:
    """Raises ValueError for what is no text, and for half a character: bytes of a command line that
    are not UTF-8 reach Python so, and no tokenizer takes them.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt is {shown(prompt)}: it must be a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt is not UTF-8 text: character {error.start + 1} is a lone surrogate "
            f"(U+{ord(prompt[error.start]):04X})"
        ) from None


def answer(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: Source,
    prompts: Sequence[Sequence[int]],
    asked: GenerateConfig,
    on_token: Callable[[int, int], None] | None = None,
    on_memory: Callable[[Memory], None] | None = None,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """`engine.generate` as it is asked for, with what a source says of it: where a text ends, at
    `ends` too, and, with a tokenizer, which tokens there are. `prompts` are of `encode`.
    """
    options = asked.of_tokens
    return engine.generate(
        model,
        prompts,
        options.max_new_tokens,
        options.temperature,
        options.top_k,
        options.top_p,
        engine.stop_tokens(source) | {*ends},
        asked.seed,
        on_token,
        None if tokenizer is None else tokenizer.get_vocab().values(),
        batch,
        on_memory,
    )


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
                request, whole = self.request(line.row(self.config.max_row_bytes))
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
            check(tree, request, Limits())
            span_of(tree, tokens)
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
