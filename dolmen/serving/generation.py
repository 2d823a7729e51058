"""Completions of prompts in this process: encoding, stop strings, results of `model.generate`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from dolmen.conversion.source import Source
from dolmen.core.messages import brief
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import Model, special_tokens
from dolmen.files import tokenizer_files
from dolmen.model.decoder import Decoder
from dolmen.serving import engine
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import GenerateConfig
from dolmen.serving.detokenizer import Detokenizer
from dolmen.serving.engine import Engine
from dolmen.serving.kv_cache import CacheUsage
from dolmen.serving.request import FinishedSequence, FinishReason, Limits, Request, StepOutput


def encode(tokenizer: PreTrainedTokenizer, prompt: str, model: Model) -> list[int]:
    """Return the token ids of a prompt, with the special tokens of the tokenizer and the model.

    An empty prompt is the BOS token, or else the EOS token. Raises ValueError where there is
    neither, and for a prompt that is not text.
    """
    check_text(prompt)
    with tokenizer_files.refused_by_name("--prompt"):
        tokens = special_tokens.frame_prompt(model, tokenizer(prompt)["input_ids"])
    begin = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokens = tokens or [token for token in begin if token is not None][:1]
    if not tokens:
        raise ValueError(
            "--prompt is empty and the tokenizer names no token to begin with: give a prompt"
        )
    return tokens


def check_text(prompt: str) -> None:
    """Raise ValueError for a prompt that is not text, or has a lone surrogate: Python decodes bytes
    of a command line that are not UTF-8 to these, and no tokenizer takes them.
    """
    if not isinstance(prompt, str):
        raise ValueError(f"the prompt is {brief(prompt)}: it must be a text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"--prompt is not UTF-8 text: character {error.start + 1} is a lone surrogate "
            f"(U+{ord(prompt[error.start]):04X})"
        ) from None


def generate_tokens(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: Source,
    prompts: Sequence[Sequence[int]],
    asked: GenerateConfig,
    on_token: Callable[[int, int], None] | None = None,
    on_memory: Callable[[CacheUsage], None] | None = None,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each encoded prompt, by `engine.generate`.

    Sequences end at the EOS tokens of the source and at `ends`; with a tokenizer, only its ids are
    sampled.
    """
    params = asked.of_tokens
    return engine.generate(
        model,
        prompts,
        params.max_new_tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        engine.stop_tokens(source) | {*ends},
        asked.seed,
        on_token,
        None if tokenizer is None else tokenizer.get_vocab().values(),
        batch,
        on_memory,
    )


class StopStrings:
    """Detokenizes running samples to finish them at stop strings, which tokens do not show: one may
    span several tokens, or be a part of one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizer | None, stop: Sequence[str]):
        if stop and tokenizer is None:
            raise ValueError("--stop is text, and there is no tokenizer: leave it out")
        self.tokenizer, self.stop = tokenizer, stop
        self._texts: dict[tuple[int, int], Detokenizer] = {}

    def finish(self, engine: Engine, output: StepOutput) -> list[FinishedSequence]:
        """Cancel the samples that have reached a stop string in this step; return all that are
        finished.
        """
        finished = list(output.finished)
        if not self.stop or self.tokenizer is None:
            return finished
        for new in output.new_tokens:
            key = new.number, new.sample
            text = self._texts.setdefault(key, Detokenizer(self.tokenizer, self.stop))
            text.add(new.token)
            if text.stopped is not None:
                finished += engine.cancel(*key)
        return finished

    def take_text(self, finished: FinishedSequence) -> tuple[str | None, FinishReason]:
        """Return the text of a finished sample, without its stop string, and why it finished."""
        text = self._texts.pop((finished.number, finished.sample), None)
        if text is not None:
            text.end()
            if text.stopped is not None:
                return text.whole, "stop"
        if self.tokenizer is None:
            return None, finished.finish_reason
        decoded = str(self.tokenizer.decode(finished.tokens, skip_special_tokens=True))
        return decoded, finished.finish_reason


@dataclass(frozen=True)
class Generated:
    """A completion of a prompt. As a string it is the prompt and the text."""

    prompt: str | list[int]
    """As the caller gave it."""
    tokens: list[int]
    """New tokens; the last is the stop token, if one was sampled."""
    text: str | None
    """New text; None without a tokenizer."""
    logprobs: list[float] | None
    """Of each new token; None if not requested."""
    finish_reason: FinishReason

    def __str__(self) -> str:
        if isinstance(self.prompt, str):
            return self.prompt + (self.text or "")
        return str([*self.prompt, *self.tokens])


@dataclass(frozen=True)
class Prompt:
    """A prompt as the caller gave it, and its tokens."""

    given: str | list[int]
    tokens: Sequence[int]
    adapter: str | None = None
    """Name of the LoRA adapter; None: the base model alone."""


def generate_samples(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: Source,
    prompts: Sequence[Prompt],
    asked: GenerateConfig,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
    adapters: Adapters | None = None,
) -> list[list[Generated]]:
    """Return the samples of each prompt, in order.

    Sequences end at the EOS tokens of the source and at `ends`; with a tokenizer, only its ids are
    sampled. `adapters`: those that prompts name. Raises ValueError as `Engine.add`, and for logits
    that are not finite.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    stops = StopStrings(tokenizer, asked.stop)
    out: list[dict[int, Generated]] = [{} for _ in prompts]
    known = None if tokenizer is None else tokenizer.get_vocab().values()
    stop = engine.stop_tokens(source) | {*ends}
    limits = Limits(rows=batch, tokens=asked.max_batch_tokens)
    with Engine(
        model, stop=stop, known=known, limits=limits, weights=asked.weights, adapters=adapters
    ) as running:
        for i, prompt in enumerate(prompts):  # request i has number i
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
            finished = stops.finish(running, running.step())
            engine.require_finite(finished)
            for one in finished:
                text, reason = stops.take_text(one)
                logprobs = [each.logprob for each in one.logprobs] if asked.logprobs else None
                given = prompts[one.number].given
                out[one.number][one.sample] = Generated(given, one.tokens, text, logprobs, reason)
    return [[samples[i] for i in range(asked.num_samples)] for samples in out]
