"""Prompts continued in this process, from Python: what `model.generate` gives back."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dolmen.conversion.source import Source
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.model.decoder import Decoder
from dolmen.serving import engine
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import GenerateConfig
from dolmen.serving.engine import Engine
from dolmen.serving.request import Chosen, Ended, Limits, Request, Why
from dolmen.serving.text import Incremental


@dataclass(frozen=True)
class Generated:
    """What follows a prompt. As a string it is the prompt and the text."""

    prompt: str | list[int]
    """As it was given."""
    tokens: list[int]
    """The new ones, with the one that ended the text, where one did."""
    text: str | None
    """The new text; None where there is no tokenizer."""
    logprobs: list[float] | None
    """Of each new token; None where they were not asked for."""
    why: Why
    """What ended it."""

    def __str__(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt + (self.text or "")
        return str([*self.prompt, *self.tokens])


@dataclass(frozen=True)
class Prompt:
    """As it was given, and its tokens."""

    given: str | list[int]
    tokens: Sequence[int]
    adapter: str | None = None
    """That of the engine which goes on with it."""


def continued(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: Source,
    prompts: Sequence[Prompt],
    asked: GenerateConfig,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
    adapters: Adapters | None = None,
) -> list[list[Generated]]:
    """Of each prompt its samples, in order. What a source says of it holds: where a text ends, at
    `ends` too, and, with a tokenizer, which tokens there are. `adapters`: of which prompts name
    one. Raises ValueError as `Engine.add`, and for logits that are not finite.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    texts = _Texts(tokenizer, asked.stop)
    out: list[dict[int, Generated]] = [{} for _ in prompts]
    known = None if tokenizer is None else tokenizer.get_vocab().values()
    stop = engine.stop_tokens(source) | {*ends}
    limits = Limits(rows=batch, tokens=asked.max_batch_tokens)
    with Engine(
        model, stop=stop, known=known, limits=limits, weights=asked.weights, adapters=adapters
    ) as running:
        for i, prompt in enumerate(prompts):
            running.add(
                Request(
                    prompt.tokens,
                    asked.of_tokens,
                    id=i,
                    seed=asked.seed,
                    samples=asked.num_samples,
                    logprobs=asked.logprobs,
                    adapter=prompt.adapter,
                )
            )
        while running.busy:
            happened = running.step()
            ended = list(happened.ended)
            for chosen in happened.chosen if asked.stop else ():
                if texts.stopped(chosen):
                    ended += running.cancel(chosen.number, chosen.sample)
            engine.require_finite(ended)
            for one in ended:
                made = _generated(prompts[one.number], one, tokenizer, texts.take(one), asked)
                out[one.number][one.sample] = made
    return [[own[i] for i in range(asked.num_samples)] for own in out]


class _Texts:
    """What is written, as text, where stop strings may end it."""

    def __init__(self, tokenizer: PreTrainedTokenizer | None, stop: Sequence[str]):
        if stop and tokenizer is None:
            raise ValueError("--stop is text, and there is no tokenizer: leave it out")
        self.tokenizer, self.stop = tokenizer, stop
        self._running: dict[tuple[int, int], Incremental] = {}

    def stopped(self, chosen: Chosen) -> bool:
        """Whether this token brings the text to its end."""
        assert self.tokenizer is not None, "it has been asked for"
        key = chosen.number, chosen.sample
        text = self._running.setdefault(key, Incremental(self.tokenizer, self.stop))
        text.add(chosen.token)
        return text.stopped is not None

    def take(self, ended: Ended) -> Incremental | None:
        """That of a sample, which is not needed any more."""
        return self._running.pop((ended.number, ended.sample), None)


def _generated(
    prompt: Prompt,
    ended: Ended,
    tokenizer: PreTrainedTokenizer | None,
    stopping: Incremental | None,
    asked: GenerateConfig,
) -> Generated:
    text, why = None, ended.why
    if tokenizer is not None:
        text = str(tokenizer.decode(ended.tokens, skip_special_tokens=True))
    if stopping is not None:
        stopping.end()
        if stopping.stopped is not None:
            text, why = stopping.whole, "stop"
    logprobs = None if asked.logprobs is None else [one.logprob for one in ended.logprobs]
    return Generated(prompt.given, ended.tokens, text, logprobs, why)
