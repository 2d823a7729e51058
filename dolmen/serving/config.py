"""Options of `generate`, `chat` and `serve`, and how a model is split for the verbs that read one.
Imports neither torch nor the HTTP server.
"""

import ipaddress
import math
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import (
    AboveZero,
    Count,
    LocalName,
    Mark,
    Name,
    NonNegative,
    Port,
    Positive,
    ValueOptional,
    config,
    require,
)
from dolmen.core.filesystem import expand
from dolmen.core.messages import brief
from dolmen.model.layout import TensorParallelLayout
from dolmen.serving.request import Limits, MinP, SamplingParams, Temperature, TopP


@config("layout")
class GenerateLayout:
    """How the model is split and replicated."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer."""
    pp: Positive = 1
    """Pipeline parallelism: groups of processes that have some layers each."""
    dp: Positive = 1
    """Data parallelism: replicas of the model; each takes the next row when it is free."""


@config(kw_only=True)
class Numerics:
    """Numbers and device of a forward, for the verbs that do not train the model."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Compute dtype. Default: that of config.json."""
    weights: Literal["stated", "int8"] = "stated"
    """stated: in `dtype`. int8: products of 8-bit integers, on a CPU: weights with a scale per row,
    activations with a scale per token (W8A8).
    """
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""


@config(kw_only=True)
class Decoding(Numerics):
    """Options of the verbs that decode tokens."""

    compile: bool = False
    """Compile decode steps with torch.compile (vLLM's default, without --enforce-eager). The first
    start compiles for up to a minute, later ones take the graphs from the cache of torch. Tokens
    differ from those of uncompiled steps in near ties; with bf16 or int8 also where the last bit of
    a compiled norm moves an activation by a step of the format. Needs a C++ compiler on a CPU.
    """


@config("speculative", kw_only=True)
class SpeculativeConfig:
    """Speculative decoding: tokens are drafted, and one forward of the model verifies several of
    them. The tokens are those of the model without it: the same ones with greedy decoding and with
    ngram (near ties aside), and of the same distribution where a draft model's were sampled.
    """

    method: Literal["ngram", "draft"] | None = None
    """ngram: draft what followed an earlier occurrence of the last tokens (prompt lookup); needs no
    model. draft: sample from a smaller model. Default: no drafts.
    """
    num_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 4
    """Tokens that are drafted at once for a sequence."""
    prompt_lookup_max: Positive = 4
    """Most last tokens that ngram looks for."""
    prompt_lookup_min: Positive = 2
    """Fewest last tokens that ngram looks for."""
    model: Name | None = None
    """Draft model: anything that `dolmen generate` takes, with the vocabulary of the model."""

    def __post_init__(self):
        """Raise ValueError unless a model is given exactly with method draft, and for
        prompt_lookup_min above prompt_lookup_max.
        """
        if (self.model is not None) != (self.method == "draft"):
            raise ValueError(
                f"speculative.method is {self.method or 'not set'}, and speculative.model is "
                f"{self.model or 'not set'}: method draft needs a model, and no other takes one"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"speculative.prompt-lookup-min ({self.prompt_lookup_min}) exceeds "
                f"speculative.prompt-lookup-max ({self.prompt_lookup_max}): set it to "
                f"{self.prompt_lookup_max} or less"
            )

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models to load besides the one that is served: the draft model, or none."""
        return () if self.model is None else (self.model,)


StopText = Annotated[str, require(bool, "a text of at least one character")]


@config(kw_only=True)
class Sampling:
    """Sampling parameters. Those that are not set come from the model's generation_config.json."""

    max_new_tokens: Positive | None = None
    """Maximum new tokens; an EOS token ends the completion earlier. Default: that of
    generation_config.json, or 64.
    """
    min_new_tokens: Count | None = None
    """No EOS token is sampled before this many new tokens."""
    temperature: Temperature | None = None
    """0 is greedy decoding; 1 samples from the model's own distribution. Default: that of
    generation_config.json, or 0.
    """
    top_k: Positive | None = None
    """Sample from the k most likely tokens."""
    top_p: TopP | None = None
    """Sample from the smallest set of most likely tokens whose probabilities sum to p or more."""
    min_p: MinP | None = None
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    repetition_penalty: AboveZero | None = None
    """Above 1: tokens of the sequence, prompt included, become less likely (1909.05858)."""
    presence_penalty: float | None = None
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float | None = None
    """Subtracted from the logit of a token for each time that it was generated before."""
    logit_bias: str | None = None
    """Values added to logits of token ids, as ID:NUMBER,ID:NUMBER; -inf forbids a token."""

    @property
    def sampling_params(self) -> SamplingParams:
        """These options as the engine's `SamplingParams`; temperature 0 (greedy) unless one is set.
        Raises ValueError for a malformed logit_bias.
        """
        fields = {name: value for name in NUMBERS if (value := self.__dict__[name]) is not None}
        # greedy by default: an explicit 1.0 is needed to sample
        bias = {} if self.logit_bias is None else parse_logit_bias(self.logit_bias)
        return SamplingParams(**{"temperature": 0.0, **fields}, logit_bias=bias)


NUMBERS = (
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The fields of `Sampling` that `SamplingParams` has too, as they are."""


def parse_logit_bias(text: str) -> dict[int, float]:
    """Parse ID:NUMBER,ID:NUMBER to token id -> value. Raises ValueError for a malformed entry, NaN,
    or an id that is given twice.
    """
    biases: dict[int, float] = {}
    # "13:-5,7:2"
    for name in text.split(","):
        token, sign, number = name.partition(":")
        try:
            value = float(number)
            # isdigit alone takes digits of other scripts, and superscripts, which int() refuses
            if not (sign and token.strip().isascii() and token.strip().isdigit()):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"logit_bias has {brief(name)}: use --logit-bias ID:NUMBER,ID:NUMBER, such as 13:-5"
            ) from None
        # inf is checked with the other sampling parameters
        if math.isnan(value) or int(token) in biases:
            raise ValueError(f"logit_bias has {brief(name)}: give each id once, and a number")
        biases[int(token)] = value
    return biases


FILE_OPTIONS = ("output", "best", "reward", "resume", "skip_bad", "max_input_tokens", "logprobs")
"""Options of `generate` that need a file of prompts."""


@config(kw_only=True)
class GenerateConfig(Decoding, Sampling):
    """Generate completions: of --prompt, printed, or of all rows of a file, written to another
    file. Decoding is greedy unless --temperature or the model's generation_config.json sets a
    temperature.

        dolmen generate MODEL --input in.jsonl --output out.jsonl
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest complete checkpoint is used) or
    one of its checkpoints; a Megatron checkpoint, or Meta's files of a Llama.
    """
    prompt: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    """Text to continue; printed with its completion."""
    input: str | None = None
    """File of prompts: a .jsonl with `prompt`, `query` or `messages` in each row, or a .txt with a
    prompt per line.
    """
    output: LocalName | None = None
    """File to write: the input rows, with `text`, `tokens` and `finish_reason` added."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the model, NAME=FOLDER each: folders of PEFT or dolmen export --adapters, or
    runs with adapters. A row of --input names one in its field `adapter`.
    """
    adapter: str | None = None
    """Adapter of prompts that name none. Default: the base model."""
    stop: Annotated[tuple[StopText, ...], Mark.REPEATED] = ()
    """Text that ends a completion and is not part of it."""
    num_samples: Positive = 1
    """Independent samples per row of a file, written as `samples`."""
    best: LocalName | None = None
    """Second file to write: each row with its sample of the highest --reward, and its `reward`;
    rows without a reward are left out.
    """
    reward: tuple[str, ...] = ()
    """Reward of the samples for --best, as in dolmen train grpo: exact, gsm8k, regex:PATTERN,
    MODULE:FUNCTION or the folder of a reward model; several are added, each times its weight.
    """
    logprobs: Annotated[Literal["raw", "processed"] | None, ValueOptional("raw")] = None
    """Write the log-probability of each token: under the model's own distribution (raw), or the one
    that was sampled from (processed).
    """
    max_input_tokens: Positive | None = None
    """Truncate longer prompts to this many tokens, from the left."""
    max_row_bytes: Positive = 4 * 2**20
    """Maximum bytes of a row of the input file; tokenising 4 MiB takes 12 s and 700 MB of memory.
    """
    resume: bool = False
    """Resume an interrupted run with the same --output; no row is lost or repeated."""
    skip_bad: bool = False
    """Leave out invalid rows, and count them."""
    max_batch_tokens: Positive = Limits.tokens
    """Maximum tokens per forward (vLLM's max_num_batched_tokens)."""
    seed: int = 0
    """Seed of sampling."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    layout: GenerateLayout = GenerateLayout()

    def check_source(self) -> None:
        """Raise ValueError unless prompts come from either --prompt or --input, and for options
        that only the other one has.
        """
        if self.input is not None and self.prompt:
            raise ValueError("--prompt and --input are both given: use one of them")
        if self.input is None and not self.prompt:
            raise ValueError("missing --prompt (Text to continue), or --input (File of prompts)")
        # set to anything but their (empty) defaults
        file_only = [name for name in FILE_OPTIONS if getattr(self, name)]
        if self.input is None and file_only:
            raise ValueError(f"--{file_only[0].replace('_', '-')} needs --input FILE")
        if self.input is None and max(self.num_samples, self.layout.dp) > 1:
            raise ValueError("--num-samples and --layout.dp need --input FILE")


@config(kw_only=True)
class ChatConfig(Decoding, Sampling):
    """Chat with a model that has a chat template. Replies are streamed; Ctrl-C interrupts a reply,
    not the chat. /help lists further commands.
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Model to chat with: anything that `dolmen generate` takes, with a chat template."""
    system: str | None = None
    """System prompt."""
    stop: Annotated[tuple[StopText, ...], Mark.REPEATED] = ()
    """Text that ends a completion and is not part of it."""
    seed: int = 0
    """Seed of sampling."""
    speculative: SpeculativeConfig = SpeculativeConfig()


@config(kw_only=True)
class ServeConfig(Decoding):
    """Serve a model over HTTP with OpenAI's API: completions and chat completions, streamed or not,
    to many clients at once. Needs an extra: pip install 'dolmen[serve]'.

        dolmen serve MODEL --port 8000
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Model to serve: anything that `dolmen generate` takes."""
    host: Name = "127.0.0.1"
    """Address to listen at. The default is reachable from this machine only; 0.0.0.0 listens on all
    networks, unencrypted.
    """
    port: Port = 8000
    """Port to listen at; 0: a free one, which is printed."""
    key: str | None = None
    """API key that requests must send. Default: a new one for each start, which is printed. Other
    users of this machine can see command lines: use --key-file for a lasting key.
    """
    key_file: str | None = None
    """File that contains the key."""
    name: Name | None = None
    """Name of the model in requests. Default: the name of its folder."""
    adapters: tuple[str, ...] = ()
    """LoRA adapters of the model, NAME=FOLDER each: folders of PEFT or dolmen export --adapters, or
    runs with adapters. Requests choose one as `model`.
    """
    max_length: Annotated[int, Field(ge=2)] | None = None
    """Maximum tokens of a prompt and its completion together. Default: max_position_embeddings + 1,
    as the last token needs no position.
    """
    max_rows: Positive = Limits.rows
    """Maximum completions that run at once (vLLM's max_num_seqs); further ones wait."""
    max_waiting: Count = 1024
    """Maximum completions that wait; further requests get status 429."""
    max_batch_tokens: Positive = Limits.tokens
    """Maximum tokens per forward (vLLM's max_num_batched_tokens)."""
    max_cache_tokens: Annotated[int, Field(ge=Limits.page)] | None = None
    """Tokens of the KV cache; when it is full, the youngest completions are preempted. Default: as
    many as --max-rows completions need.
    """
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * 2**20
    """Maximum bytes of a request body."""
    max_connections: Positive = 4096
    """Maximum open connections; requests over further ones get status 503."""
    max_head_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024
    """Maximum bytes of a request line and headers."""
    head_time: Annotated[float, Field(ge=0.1)] = 10.0
    """Seconds in which request line and headers must arrive; then the connection is closed."""
    time_limit: Annotated[float, Field(ge=0.1)] = 600.0
    """Seconds that a request may take, waiting included; then it ends with an error."""
    grace: NonNegative = 30.0
    """Seconds that open requests have to finish once the server stops."""
    speculative: SpeculativeConfig = SpeculativeConfig()
    layout: TensorParallelLayout = TensorParallelLayout()

    def __post_init__(self):
        """Raise ValueError for both --key and --key-file, and for a key with fewer than 8
        characters, spaces or characters outside printable ASCII.
        """
        if self.key is not None and self.key_file is not None:
            raise ValueError("--key and --key-file are both given: use one of them")
        if self.key is not None:
            check_key(self.key, "--key")

    @property
    def model_name(self) -> str:
        """Name of the model in requests: --name, or else that of its folder."""
        # resolved, so that "." has a name too
        return self.name or Path(expand(self.folder)).resolve().name

    @property
    def limits(self) -> Limits:
        """Limits of the engine: rows, tokens per forward, and pages of the KV cache."""
        tokens = self.max_cache_tokens
        # rounded down: whole pages only
        pages = None if tokens is None else tokens // Limits.page
        return Limits(rows=self.max_rows, tokens=self.max_batch_tokens, pages=pages)

    @property
    def capacity(self) -> int:
        """Most completions that run or wait at once."""
        # waiting ones cost little: their tokens, and no cache
        return self.max_rows + self.max_waiting

    @property
    def local(self) -> bool:
        """True if the host to listen at is a loopback address: only this machine can reach it."""
        try:
            # 127.0.0.0/8 and ::1
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            # other names may resolve to any address
            return self.host == "localhost"


def check_key(key: str, option: str) -> None:
    """Raise ValueError, which names `option`, for a key that a header cannot hold (not printable
    ASCII, or with spaces) or that has fewer than 8 characters.
    """
    # a Bearer token ends at a space, and header values are ASCII
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ValueError(f"{option} must be of printable ASCII characters, without spaces")
    # far fewer than the 32 of a generated key, but not guessed in one session
    if len(key) < 8:
        raise ValueError(f"{option} has {len(key)} characters: give 8 or more")
