"""Requests to an engine and its results, and their validation against the model.

What an engine is asked, and what it tells: plain values, which every rank is given alike.

What an engine is asked, against the model: refused with the numbers and the knob, before any
token is read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dolmen.core.messages import counted
from dolmen.model.tree import Experts, LatentAttention, Span, Tree
from dolmen.model.tree.blanks import of_prefix
from dolmen.serving.options import Options
from dolmen.serving.pages import SIZE

LogProbabilities = Literal["raw", "processed"]
"""Of the model's own distribution, as training sees it; or of the one that is drawn from."""
Why = Literal["stop", "length", "not finite", "cancelled"]
"""Its last token ends it; it has max_new_tokens; its scores are not numbers; it was cancelled."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued."""

    tokens: Sequence[int]
    """Of the prompt."""
    options: Options = Options()
    id: int | str = 0
    """Draws follow from (seed, id, sample) alone: a row's own id, or its line."""
    seed: int = 0
    samples: int = 1
    """Continuations, each drawn by itself. They share the pages of the prompt."""
    logprobs: LogProbabilities | None = None
    """Which log-probabilities of the new tokens are wanted."""
    top: int = 0
    """So many likeliest tokens are told beside each, with theirs."""
    prompt_logprobs: bool = False
    """Those of the prompt's tokens, too, after its first: always `raw`."""
    adapter: str | None = None
    """The name of the engine's adapter that reads and writes it; None: the base alone does."""


@dataclass(frozen=True)
class LogProb:
    """Of one token."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log-probabilities of the likeliest tokens, from the likeliest on."""


@dataclass(frozen=True)
class Chosen:
    """A new token."""

    number: int
    """Of the request, as `Engine.add` gave it."""
    sample: int
    token: int
    logprob: LogProb | None


@dataclass(frozen=True)
class Ended:
    """A sample that has ended."""

    number: int
    sample: int
    id: int | str
    tokens: list[int]
    """The new ones; the last is one that stops where it stopped at one."""
    why: Why
    logprobs: list[LogProb]
    """Of each new token, where they were asked for."""
    prompt_logprobs: list[LogProb]
    """Of each token of the prompt but the first, where they were asked for."""
    close: int
    """Tokens beside which another lay within `sample.CLOSE`: in another batch or layout it may
    have been that one.
    """


@dataclass(frozen=True)
class Happened:
    """In one step."""

    chosen: list[Chosen] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    read: int = 0
    """Tokens that the model has read."""


@dataclass(frozen=True)
class Limits:
    """What an engine may take at once."""

    rows: int = 256
    """Texts in a forward, each sample counted."""
    tokens: int = 1 << 12
    """Tokens of a forward (max_batch_tokens). A prompt that sees both ways is read whole, however
    long it is.
    """
    pages: int | None = None
    """Pages of the cache. A text that no page is left for is put back and read again later, the
    youngest first. None: as many as the texts need.
    """
    page: int = SIZE
    """Tokens of a page."""

    def __post_init__(self) -> None:
        known = dict(rows=self.rows, tokens=self.tokens, pages=self.pages, page=self.page)
        for name, value in known.items():
            if value is not None and value < 1:
                raise ValueError(f"limits.{name} is {value}: it must be at least 1")


def check(model: Tree, request: Request, limits: Limits) -> str | None:
    """Raises ValueError for what the model or the limits cannot take. -> What is to be warned of:
    the text goes beyond what the model was made for.
    """
    request.options.check()
    name, options = f"prompt {request.id}", request.options
    _check_tokens(name, request.tokens, model.vocab_size)
    if request.samples < 1:
        raise ValueError(f"samples is {request.samples}: use --num-samples 1 or more")
    if not 0 <= request.top <= model.vocab_size:
        raise ValueError(
            f"{request.top} top log-probabilities are asked for, the model's vocab_size is "
            f"{model.vocab_size}: ask for as many, or fewer"
        )
    beyond = [t for t in (*options.logit_bias, *options.stop) if not 0 <= t < model.vocab_size]
    if beyond:
        raise ValueError(
            f"logit_bias or stop has token {beyond[0]}, the model's vocab_size is "
            f"{model.vocab_size}: use the tokenizer of the model"
        )
    # the last new token is not read
    read = len(request.tokens) + max(options.max_new_tokens - 1, 0)
    needed = -(-read // limits.page)
    if limits.pages is not None and needed > limits.pages:
        raise ValueError(
            f"{name} may take {counted(needed, 'page')} of {limits.page} tokens, and the cache has "
            f"{limits.pages}: give it more, or use --max-new-tokens "
            f"{max(limits.pages * limits.page - len(request.tokens) + 1, 0)}"
        )
    return _beyond(model, len(request.tokens), options.max_new_tokens, read)


def check_int8(model: Tree, device: str, sharded: bool) -> None:
    """Raises ValueError where weights cannot be held as int8."""
    kinds = {type(part) for block in model.blocks for part in (block.mixer, block.mlp)}
    why = None
    if Experts in kinds:
        why = "the model has experts, whose weights are multiplied in stacks"
    elif LatentAttention in kinds:
        why = "the model has latent attention, which multiplies queries by weights as they are"
    elif device != "cpu":
        why = f"the model is on a device of kind {device}, and int8 products are a CPU's"
    elif sharded:
        why = "the model is sharded over dp, and its weights are here for a moment each"
    if why is not None:
        raise ValueError(f"{why}: leave out --weights int8")


def _check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    if len(tokens) == 0:
        raise ValueError(
            f"{name} has 0 tokens: give at least 1, such as the tokenizer's beginning of text"
        )
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(
            f"{name} has tokens {min(tokens)} to {max(tokens)}, the model's vocab_size is "
            f"{vocabulary}: use the tokenizer of the model"
        )


def _beyond(model: Tree, prompt: int, new: int, read: int) -> str | None:
    most = model.max_position_embeddings
    if read <= most:
        return None
    text = (
        f"a prompt of {counted(prompt, 'token')} and {new:,} new ones read {read:,} positions, "
        f"max_position_embeddings is {most}"
    )
    if model.longest is None:
        return f"{text}: the model was not made for more, and its text may be poor"
    knob = f"use --max-new-tokens {most - prompt + 1}" if prompt <= most else "use a shorter prompt"
    raise ValueError(f"{text}: {knob}")


def span_of(model: Tree, prompt: Sequence[int]) -> Span | None:
    """How the tokens of a prompt, and of what follows it, stand for the model; None: each at its
    index, and all see back alone. Raises ValueError where nobody has said which tokens say it.
    """
    if model.blanks is not None:
        return model.blanks.span(prompt)
    return of_prefix(len(prompt), model.streams) if model.prefixed else None
