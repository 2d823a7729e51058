r"""Text generation in this process: prompts to tokens, tokens to text, and the results of
`model.generate`.

    text = Detokenizer(tokenizer, ["\n\n"])
    text.add(token)    returns the text that can be shown now; text.stopped is the stop string, once
                       it is reached
    text.whole         all of the text, up to the stop string

Problem: a stream must never take back text that it has sent. A token alone has no text: a character
may consist of several tokens, and the token before decides whether a word begins with a space. A
stop string may begin in the middle of a token and end in a later one.

Idea: the last tokens are decoded twice, without and with the new one, and the difference is the new
text. Text is held back while it ends in a part of a character (at most HELD tokens) or in what may
be the beginning of a stop string.

generation_config.json has a model's defaults of the sampling parameters that a user leaves open.
Its `do_sample` decides whether tokens are sampled: without it temperature, top_k, top_p and min_p
have no effect, as in transformers, unless the user sets a temperature.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dolmen.conversion.source import ModelSource
from dolmen.core.mesh import SINGLE
from dolmen.core.messages import brief
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.families import ModelConfig, special_tokens
from dolmen.files import gate, kinds, tokenizer_files
from dolmen.model.decoder import Decoder
from dolmen.serving import engine
from dolmen.serving.adapters import Adapters
from dolmen.serving.config import NUMBERS, GenerateConfig, Sampling
from dolmen.serving.engine import Engine
from dolmen.serving.kv_cache import CacheUsage
from dolmen.serving.request import FinishedSequence, FinishReason, Limits, Request, StepOutput

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
HELD = 8  # tokens that may wait for the rest of a character; UTF-8 has at most 4 bytes


class Detokenizer:
    """Turns the tokens of one sequence into text as they come, up to the first stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizer, stop: Sequence[str] = ()):
        """Begin without tokens. `stop`: texts that end the sequence."""
        self.tokenizer, self.stop = tokenizer, stop
        self.tokens: list[int] = []
        self.stopped: str | None = None
        """The stop string that was reached."""
        self.offset = 0
        """Characters before the text of the newest token."""
        self._before = self._read = (
            0  # tokens decoded as context from here; tokens whose text is known
        )
        self._text = ""  # of the tokens up to `_read`
        self._shown = 0  # characters of it

    def add(self, token: int) -> str:
        """Append a token; return the text that became certain with it ("" while it is held
        back).
        """
        self.tokens.append(token)
        known = self._decode(self._before, self._read)
        text = self._decode(self._before, len(self.tokens))
        if self._read < len(self.tokens) - 1:
            # bytes held back are characters of their own, unless this token completes them
            before = self._decode(self._before, len(self.tokens) - 1)
            appended = len(text) > len(before) and text.startswith(before)
            start = len(self._text) + (len(before) - len(known) if appended else 0)
        else:
            start = len(self._text)
        self.offset = max(self.offset, start)
        if text.endswith(UNFINISHED) and len(self.tokens) - self._read < HELD:
            return ""
        return self._append(text[len(known) :])

    def end(self) -> str:
        """Return the text that is still held back, incomplete characters too, as no further token
        follows.
        """
        known = self._decode(self._before, self._read)
        new = self._append(self._decode(self._before, len(self.tokens))[len(known) :])
        left = "" if self.stopped is not None else self._text[self._shown :]
        self._shown = len(self._text)
        return new + left

    @property
    def whole(self) -> str:
        """All text so far, up to the stop string: also what `add` holds back because it may begin a
        stop string, but no incomplete character.
        """
        return self._text

    def _append(self, new: str) -> str:
        """Append decoded text, look for a stop string, and return the text that is certain now and
        was not returned before.
        """
        if self.stopped is not None:
            return ""
        if new:  # context without text would not show whether a word has a space before it
            self._before = self._read
        self._read = len(self.tokens)
        longest = max(map(len, self.stop), default=1)
        start = max(0, len(self._text) - longest + 1)  # a stop string may have begun here
        self._text += new
        matches = [(at, s) for s in self.stop if (at := self._text.find(s, start)) >= 0]
        if matches:
            at, self.stopped = min(matches)
            self._text = self._text[:at]
            certain = at
        else:
            certain = len(self._text) - self._partial_stop()
        new_text, self._shown = self._text[self._shown : certain], max(self._shown, certain)
        return new_text

    def _partial_stop(self) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string
        (0: none).
        """
        most = max((len(s) - 1 for s in self.stop), default=0)
        for length in range(min(most, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-length:]) for s in self.stop):
                return length
        return 0

    def _decode(self, first: int, end: int) -> str:
        """Decode tokens `first` to `end`, without special tokens."""
        return self.tokenizer.decode(self.tokens[first:end], skip_special_tokens=True)


def encode(tokenizer: PreTrainedTokenizer, prompt: str, model: ModelConfig) -> list[int]:
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
            "--prompt is empty and the tokenizer has neither a BOS nor an EOS token: give a prompt"
        )
    return tokens


def check_text(prompt: str) -> None:
    """Raise ValueError for a prompt that is no string, or has a lone surrogate: Python decodes
    bytes of a command line that are not UTF-8 to these, and no tokenizer takes them.
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
    source: ModelSource,
    prompts: Sequence[Sequence[int]],
    config: GenerateConfig,
    on_token: Callable[[int, int], None] | None = None,
    on_memory: Callable[[CacheUsage], None] | None = None,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each encoded prompt, by `engine.generate` with the options of
    `config`.

    Sequences end at the EOS tokens of the source and at `ends`; with a tokenizer, only its ids are
    sampled. `batch`: most prompts at once.
    """
    params = config.sampling_params
    return engine.generate(
        model,
        prompts,
        params.max_new_tokens,
        params.temperature,
        params.top_k,
        params.top_p,
        engine.stop_tokens(source) | {*ends},
        config.seed,
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
        """Raise ValueError for stop strings without a tokenizer."""
        if stop and tokenizer is None:
            raise ValueError("--stop needs a tokenizer, but the model has none: leave it out")
        self.tokenizer, self.stop = tokenizer, stop
        self._texts: dict[tuple[int, int], Detokenizer] = {}

    def finish(self, engine: Engine, output: StepOutput) -> list[FinishedSequence]:
        """Cancel the samples that have reached a stop string in this step; return all samples that
        finished in it, for whatever reason.
        """
        finished = list(output.finished)
        if not self.stop or self.tokenizer is None:
            return finished
        for new in output.new_tokens:
            key = new.number, new.sample
            text = self._texts.setdefault(key, Detokenizer(self.tokenizer, self.stop))
            text.add(new.token)
            if text.stopped is not None:
                # the engine has tokens only; without this it would go on to max_new_tokens
                finished += engine.cancel(*key)
        return finished

    def take_text(self, finished: FinishedSequence) -> tuple[str | None, FinishReason]:
        """Return the text of a finished sample, without its stop string, and its finish reason
        ("stop" if a stop string was reached); forget the sample. The text is None without a
        tokenizer.
        """
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
    """The prompt as the caller gave it."""
    tokens: list[int]
    """New tokens; the last is the stop token, if one was sampled."""
    text: str | None
    """New text; None without a tokenizer."""
    logprobs: list[float] | None
    """Log-probability of each new token; None if not requested."""
    finish_reason: FinishReason

    def __str__(self) -> str:
        """Return prompt and text; for a prompt of token ids the list of all ids."""
        if isinstance(self.prompt, str):
            return self.prompt + (self.text or "")
        return str([*self.prompt, *self.tokens])


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the caller gave it, and its token ids."""

    prompt: str | list[int]
    tokens: Sequence[int]
    adapter: str | None = None
    """Name of the LoRA adapter; None: the base model alone."""


def generate_samples(
    model: Decoder,
    tokenizer: PreTrainedTokenizer | None,
    source: ModelSource,
    prompts: Sequence[EncodedPrompt],
    config: GenerateConfig,
    batch: int = engine.AT_ONCE,
    ends: Collection[int] = (),
    adapters: Adapters | None = None,
    draft: Decoder | None = None,
) -> list[list[Generated]]:
    """Return for each prompt its `config.num_samples` completions, in order.

    Sequences end at stop strings, at the EOS tokens of the source and at `ends`; with a tokenizer,
    only its ids are sampled. `batch`: most sequences at once. `adapters`: LoRA adapters that
    prompts name. `draft`: the model of --speculative.method draft. Raises ValueError for an unknown
    adapter, for prompts and options that the model cannot take, and for logits that are not finite.
    """
    if batch < 1:
        raise ValueError(f"batch is {batch}: it must be at least 1")
    stops = StopStrings(tokenizer, config.stop)
    out: list[dict[int, Generated]] = [{} for _ in prompts]
    # padded rows of the embedding have no text
    known = None if tokenizer is None else tokenizer.get_vocab().values()
    stop = engine.stop_tokens(source) | {*ends}
    # all requests are queued at once: the engine admits `batch` of them
    limits = Limits(rows=batch, tokens=config.max_batch_tokens)
    mesh = replace(SINGLE, device=model.device)
    proposer = engine.build_proposer(config.speculative, draft, mesh, config.weights, limits)
    with Engine(
        model,
        stop=stop,
        known=known,
        limits=limits,
        weights=config.weights,
        adapters=adapters,
        proposer=proposer,
        compile=config.compile,
    ) as running:
        for i, prompt in enumerate(prompts):  # request i has number i
            running.add(
                Request(
                    prompt.tokens,
                    config.sampling_params,
                    id=i,
                    seed=config.seed,
                    samples=config.num_samples,
                    logprobs=config.logprobs,
                    adapter=prompt.adapter,
                )
            )
        while running.busy:
            finished = stops.finish(running, running.step())
            engine.require_finite(finished)
            for sequence in finished:
                text, reason = stops.take_text(sequence)
                logprobs = (
                    [logprob.logprob for logprob in sequence.logprobs] if config.logprobs else None
                )
                prompt = prompts[sequence.number].prompt
                out[sequence.number][sequence.sample] = Generated(
                    prompt, sequence.tokens, text, logprobs, reason
                )
    return [[samples[i] for i in range(config.num_samples)] for samples in out]


T = TypeVar("T", bound=Sampling)
SAMPLING_ONLY = ("top_k", "top_p", "min_p")
# Options of transformers that are not supported, with the values that switch them off.
UNSUPPORTED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "bad_words_ids": None,
    "force_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "sequence_bias": None,
    "guidance_scale": None,
    "exponential_decay_length_penalty": None,
    "dola_layers": None,
    "stop_strings": None,
}


def apply_generation_config(config: T, generation_config: Mapping[str, Any]) -> tuple[T, list[str]]:
    """Fill sampling options that the user left open from generation_config.json. Returns the
    completed options, and lines for the user: values that were taken, and settings that are not
    supported.

    Without `do_sample` in the file, and unless the user sets a temperature, decoding is greedy and
    top_k, top_p and min_p are not taken. Raises Refused for invalid values of the file.
    """
    where = "generation_config.json"
    gate.check_schema(dict(generation_config), where, kinds.SamplingFields)
    values = {name: generation_config.get(name) for name in NUMBERS}
    do_sample = bool(generation_config.get("do_sample"))
    if do_sample and values["temperature"] is None:
        values["temperature"] = 1.0
    if config.temperature is None and not do_sample:
        values["temperature"] = None
    temperature = values["temperature"] if config.temperature is None else config.temperature
    # greedy: filters would be errors (`SamplingParams.check`)
    if not temperature:
        values |= dict.fromkeys(SAMPLING_ONLY)
    if values["top_k"] == 0:  # how transformers switches it off
        values["top_k"] = None
    defaults = {
        name: value
        for name, value in values.items()
        if value is not None and config.__dict__[name] is None
    }
    least, most = (
        defaults.get(name, config.__dict__[name]) for name in ("min_new_tokens", "max_new_tokens")
    )
    if "min_new_tokens" in defaults and most is not None and least > most:
        del defaults["min_new_tokens"]  # the user requests fewer
    notes = []
    if defaults:
        # never silently: they change what the user gets
        notes.append(f"from {where}: {', '.join(f'{n} {v:g}' for n, v in defaults.items())}")
    unsupported = [
        name for name, off in UNSUPPORTED.items() if generation_config.get(name, off) != off
    ]
    unsupported = [name for name in unsupported if generation_config[name] is not None]
    if unsupported:
        notes.append(f"{where} also has {', '.join(unsupported)}, which is not supported")
    return replace(config, **defaults), notes
