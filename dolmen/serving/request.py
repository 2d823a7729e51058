"""Requests to an engine with their sampling parameters, results, and the checks of a request
against the model.

All are plain values without torch: the command line reads the parameters, and every rank is given
the same requests.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import AboveZero, Count, NonNegative, Positive, config, require
from dolmen.core.messages import plural
from dolmen.model.spec import LatentAttentionSpec, ModelSpec, MoESpec, PositionSpan
from dolmen.model.spec.positions import prefix_span
from dolmen.serving.block_table import PAGE_SIZE


def _is_valid_bias(bias: Mapping[int, float]) -> bool:
    """Return whether `bias` (token id -> value added to its logit) has ids from 0 and no value that
    is NaN or +inf: two logits of +inf would make the softmax NaN.
    """
    return all(token >= 0 and value < math.inf for token, value in bias.items())


Temperature = Annotated[
    NonNegative,
    # of a subnormal number too few bits are left to divide by it
    require(lambda t: t == 0 or t >= sys.float_info.min, "0 (greedy), or at least 1e-307"),
]
TopP = Annotated[float, Field(gt=0, le=1)]
MinP = Annotated[float, Field(ge=0, le=1)]
LogitBias = Annotated[
    Mapping[int, float], require(_is_valid_bias, "ids of the vocabulary, and numbers or -inf")
]


@config()
class SamplingParams:
    """Sampling parameters. By default tokens are sampled from the model's own distribution."""

    temperature: Temperature = 1.0
    """Logits are divided by it; 0 is greedy decoding."""
    top_k: Positive | None = None
    """Sample from the k most likely tokens."""
    top_p: TopP | None = None
    """Sample from the smallest set of most likely tokens whose probabilities sum to p or more."""
    min_p: MinP | None = None
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: AboveZero = 1.0
    """The logit of a token that the sequence has, prompt included, is divided by it if positive,
    else multiplied (1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of a token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it was generated before."""
    logit_bias: LogitBias = field(default_factory=dict, hash=False)
    """Token id -> number added to its logit; -inf forbids it."""
    min_new_tokens: Count = 0
    """No stop token is sampled before this many new tokens."""
    max_new_tokens: Count = 64
    """Most new tokens; 0 reads the prompt alone."""
    stop: tuple[int, ...] = ()
    """Token ids that end the sequence, besides the EOS tokens of the model."""

    def check(self) -> None:
        """Raise ValueError that names the option: for a filter (top_k, top_p, min_p) at temperature
        0, or min_new_tokens above max_new_tokens.
        """
        # an option that changes nothing is a mistake
        drawing = (("--top-k", self.top_k), ("--top-p", self.top_p), ("--min-p", self.min_p))
        for name, value in drawing:
            if value is not None and not self.temperature:
                raise ValueError(f"{name} has no effect without sampling: add --temperature 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens ({self.min_new_tokens}) exceeds max_new_tokens "
                f"({self.max_new_tokens}): increase --max-new-tokens"
            )


LogProbabilities = Literal["raw", "processed"]
"""Log-probabilities under the model's own distribution, as in training (raw), or under the one that
is sampled from (processed)."""
FinishReason = Literal["stop", "length", "not finite", "cancelled"]
"""A stop token was sampled; max_new_tokens was reached; the logits are not finite; cancelled."""


@dataclass(frozen=True)
class Request:
    """A prompt, and how it is continued."""

    tokens: Sequence[int]
    """Token ids of the prompt."""
    params: SamplingParams = SamplingParams()
    id: int | str = 0
    """Random numbers follow from (seed, id, sample) alone: the id of a row, or its line."""
    seed: int = 0
    samples: int = 1
    """Independent continuations, which share the pages of the prompt."""
    logprobs: LogProbabilities | None = None
    """Kind of log-probabilities that are returned for new tokens; None: none."""
    top: int = 0
    """Likeliest tokens whose log-probabilities are returned with each new token."""
    prompt_logprobs: bool = False
    """Also return log-probabilities of the prompt's tokens after the first, always `raw`."""
    adapter: str | None = None
    """Name of the LoRA adapter that reads and writes it; None: the base model alone."""


@dataclass(frozen=True)
class LogProb:
    """Log-probability of a token, and of the most likely tokens in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """Ids and log-probabilities, most likely first."""


@dataclass(frozen=True)
class NewToken:
    """A token that was sampled in a step."""

    number: int
    """Number of the request, as `Engine.add` returned it."""
    sample: int
    token: int
    logprob: LogProb | None


@dataclass(frozen=True)
class FinishedSequence:
    """A finished sample of a request."""

    number: int
    sample: int
    id: int | str
    tokens: list[int]
    """New tokens; the last is the stop token, if one was sampled."""
    finish_reason: FinishReason
    logprobs: list[LogProb]
    """Log-probability of each new token, if requested."""
    prompt_logprobs: list[LogProb]
    """Log-probability of each token of the prompt but the first, if requested."""
    close: int
    """Number of tokens beside which another one lay within `sampling.CLOSE`: in another batch or
    layout it may have been sampled instead.
    """
    num_draft_tokens: int = 0
    """Drafts of it that were verified (speculative decoding)."""
    num_accepted_tokens: int = 0
    """Drafts that are among its tokens."""


@dataclass(frozen=True)
class StepOutput:
    """Result of a step of the engine."""

    new_tokens: list[NewToken] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens that the model has read, drafts included."""


@config("limits")
class Limits:
    """Capacity of an engine."""

    rows: Positive = 256
    """Most sequences of a forward, each sample counted (vLLM's max_num_seqs)."""
    tokens: Positive = 1 << 12
    """Most tokens of a forward (max_batch_tokens; vLLM's max_num_batched_tokens). A prompt with a
    bidirectional prefix is read whole, however long it is.
    """
    pages: Positive | None = None
    """Pages of the KV cache. Where they run out, the youngest sequence is preempted. None: as many
    as the sequences need.
    """
    page: Positive = PAGE_SIZE
    """Tokens per page."""


def check(model: ModelSpec, request: Request, limits: Limits) -> str | None:
    """Check a request against the model and the limits. Raises ValueError for sampling options,
    tokens or counts out of range, for more pages than the cache has, and for more positions than
    the model has.

    Returns a warning where the sequence may grow beyond the positions that the model was trained
    on, else None.
    """
    request.params.check()
    name, params = f"prompt {request.id}", request.params
    _check_tokens(name, request.tokens, model.vocab_size)
    if request.samples < 1:
        raise ValueError(f"samples is {request.samples}: use --num-samples 1 or more")
    # there are no more tokens than these
    if not 0 <= request.top <= model.vocab_size:
        raise ValueError(
            f"{request.top} top log-probabilities exceed the model's vocab_size, "
            f"{model.vocab_size}: request fewer"
        )
    beyond = [t for t in (*params.logit_bias, *params.stop) if not 0 <= t < model.vocab_size]
    if beyond:
        raise ValueError(
            f"logit_bias or stop has token {beyond[0]}, but the model's vocab_size is "
            f"{model.vocab_size}: use the tokenizer of the model"
        )
    # the last new token is not read
    read = len(request.tokens) + max(params.max_new_tokens - 1, 0)
    # of one sample: others can wait or be preempted
    needed = -(-read // limits.page)
    if limits.pages is not None and needed > limits.pages:
        raise ValueError(
            f"{name} may take {plural(needed, 'page')} of {limits.page} tokens, but the KV cache "
            f"has {limits.pages}: enlarge it, or use --max-new-tokens "
            f"{max(limits.pages * limits.page - len(request.tokens) + 1, 0)}"
        )
    return _warn_beyond_context(model, len(request.tokens), params.max_new_tokens, read)


def check_int8(model: ModelSpec, device: str, sharded: bool) -> None:
    """Raise ValueError where int8 weights are impossible: experts, latent attention, a device that
    is no CPU, or weights sharded over dp.
    """
    # int8 is implemented for plain matrix products only
    kinds = {type(part) for block in model.blocks for part in (block.mixer, block.mlp)}
    why = None
    if MoESpec in kinds:
        why = "int8 is not supported for experts"
    elif LatentAttentionSpec in kinds:
        why = "int8 is not supported for latent attention"
    elif device != "cpu":
        why = f"int8 is supported only on a CPU, but the model is on {device}"
    elif sharded:
        why = "int8 is not supported for a model sharded over dp"
    if why is not None:
        raise ValueError(f"{why}: leave out --weights int8")


def check_compile(tp: int, device: str, section: str = "") -> None:
    """Raise ValueError where decode steps cannot be compiled: with tp, whose sums are not, or on a
    CPU for which torch finds no C++ compiler. `section`: "rollout." for a run's options.
    """
    from dolmen.core.torch_private import compute  # torch, which other requests' checks do without

    option, tp_option = f"--{section}compile", f"--{section or 'layout.'}tp"
    if tp > 1:
        raise ValueError(
            f"{option} compiles no sums over tp, but tp is {tp}: leave it out, or set {tp_option} 1"
        )
    if device == "cpu" and not compute.find_compiler():
        raise ValueError(
            f"{option} needs a C++ compiler, but torch finds none: install g++, or leave it out"
        )


def _check_tokens(name: str, tokens: Sequence[int], vocabulary: int) -> None:
    """Raise ValueError, with the prompt's `name`, for an empty prompt or token ids outside the
    vocabulary.
    """
    if len(tokens) == 0:
        raise ValueError(
            f"{name} has 0 tokens: give at least 1, such as the tokenizer's beginning of text"
        )
    # a wrong id would index past the embedding: a crash on a GPU
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        raise ValueError(
            f"{name} has tokens {min(tokens)} to {max(tokens)}, but the model's vocab_size is "
            f"{vocabulary}: use the tokenizer of the model"
        )


def _warn_beyond_context(model: ModelSpec, prompt: int, new: int, read: int) -> str | None:
    """Return a warning if `read` positions exceed those of the training (None if not); raise
    ValueError if the model has a table of positions, and none for them. `prompt`, `new`: numbers of
    tokens, for the message.
    """
    most = model.max_position_embeddings
    if read <= most:
        return None
    text = (
        f"a prompt of {plural(prompt, 'token')} and {new:,} new ones read {read:,} positions, but "
        f"max_position_embeddings is {most}"
    )
    # rope has an angle for any position; a learned embedding ends
    if model.longest is None:
        # a warning only: rope extrapolates
        return f"{text}: quality may degrade beyond it"
    knob = f"use --max-new-tokens {most - prompt + 1}" if prompt <= most else "use a shorter prompt"
    raise ValueError(f"{text}: {knob}")


def span_of(model: ModelSpec, prompt: Sequence[int]) -> PositionSpan | None:
    """Return the bidirectional prefix and the positions of a prompt; None: causal, each token at
    its index.

    Raises ValueError where the special tokens that decide them are not known.
    """
    if model.blanks is not None:
        # GLM: blanks are marked by special tokens
        return model.blanks.span(prompt)
    return prefix_span(len(prompt), model.streams) if model.has_prefix_mask else None
