"""What `generate` and `chat` may be told, and how every verb that reads a model is split. Without
torch.
"""

import math
from typing import Annotated, Literal

from dolmen.core.config import Mark, Positive, ValueOptional, config
from dolmen.core.messages import brief
from dolmen.serving.request import Limits
from dolmen.serving.sampling_params import SamplingParams


@config("layout")
class Spread:
    """How the model is split, and how often it is there."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer."""
    pp: Positive = 1
    """Pipeline parallelism: groups of processes that have some layers each."""
    dp: Positive = 1
    """Whole models side by side: each takes the next row when it is free."""


@config(kw_only=True)
class Sampling:
    """How each token is chosen. What is unset is as the model's generation_config.json says."""

    max_new_tokens: Positive | None = None
    """Most tokens to add; an end-of-text token ends earlier. Default: as generation_config.json
    says, or 64.
    """
    min_new_tokens: int | None = None
    """No end-of-text token before so many."""
    temperature: float | None = None
    """0 takes the likeliest token; 1 draws from the model's own distribution. Default: as
    generation_config.json says, or 0.
    """
    top_k: int | None = None
    """Draw from this many likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens that hold this much probability."""
    min_p: float | None = None
    """Draw from the tokens that have at least this share of the likeliest one's probability."""
    repetition_penalty: float | None = None
    """Above 1: tokens that the text has, prompt included, become less likely."""
    presence_penalty: float | None = None
    """Taken from the score of a new token that has come before."""
    frequency_penalty: float | None = None
    """Taken from it for each time that it has."""
    logit_bias: str | None = None
    """Added to scores: ID:NUMBER,ID:NUMBER; -inf forbids a token."""

    @property
    def of_tokens(self) -> SamplingParams:
        """Greedy, where no temperature is said. Raises ValueError for a logit_bias that is none."""
        said = {name: value for name in NUMBERS if (value := self.__dict__[name]) is not None}
        bias = {} if self.logit_bias is None else biases(self.logit_bias)
        return SamplingParams(**{"temperature": 0.0, **said}, logit_bias=bias)


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


def biases(text: str) -> dict[int, float]:
    """Token id -> what is added to its score. Raises ValueError."""
    found: dict[int, float] = {}
    for one in text.split(","):
        token, sign, number = one.partition(":")
        try:
            value = float(number)
            if not (sign and token.strip().isascii() and token.strip().isdigit()):
                raise ValueError
        except ValueError:
            raise ValueError(
                f"logit_bias has {brief(one)}: use --logit-bias ID:NUMBER,ID:NUMBER, such as 13:-5"
            ) from None
        if math.isnan(value) or int(token) in found:
            raise ValueError(f"logit_bias has {brief(one)}: give each id once, and a number")
        found[int(token)] = value
    return found


OF_FILES = ("output", "best", "reward", "resume", "skip_bad", "max_input_tokens", "logprobs")
"""Options of `generate` that need a file of prompts."""


@config(kw_only=True)
class GenerateConfig(Sampling):
    """Continue a prompt, or several, and print them; or all rows of a file, into another one, as
    many at once as is fastest. Greedy, unless --temperature or the model's generation_config.json
    says otherwise.

        dolmen generate MODEL --input in.jsonl --output out.jsonl
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    prompt: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    """Text to continue, printed with what follows."""
    input: str | None = None
    """File of prompts: a .jsonl with `prompt`, `query` or `messages` in each row, or a .txt with a
    prompt per line.
    """
    output: str | None = None
    """File to write: the same rows, each with its `text`, `tokens` and `finish_reason`."""
    adapters: tuple[str, ...] = ()
    """Adapters over the model, NAME=FOLDER each: folders that PEFT or dolmen export --adapters has
    written, or runs with adapters. A row of --input names one in its field `adapter`.
    """
    adapter: str | None = None
    """The one of them that answers where a row names none. Default: the model alone does."""
    stop: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    """Text that ends an answer, and is not part of it."""
    num_samples: int = 1
    """Answers per row of a file, drawn each by itself; a row has them as `samples`."""
    best: str | None = None
    """File to write besides: each row with the best of its samples, by --reward, and its `reward`;
    rows without any reward are left out.
    """
    reward: tuple[str, ...] = ()
    """What judges the samples for --best, as of dolmen train grpo: exact, gsm8k, regex:PATTERN,
    MODULE:FUNCTION or the folder of a reward model; several are added up, each times its weight.
    """
    logprobs: Annotated[Literal["raw", "processed"] | None, ValueOptional("raw")] = None
    """Write the log-probability of each token: of the model's own distribution (raw), or of the one
    that was drawn from.
    """
    max_input_tokens: int | None = None
    """Cut longer prompts to so many tokens, from the left."""
    max_row_bytes: Positive = 4 * 2**20
    """Most bytes of a row of the input file: 4 MiB are tokenised in 12 s, with 700 MB of memory."""
    resume: bool = False
    """Go on where a run with the same output was ended; nothing is lost or repeated."""
    skip_bad: bool = False
    """Leave out rows that cannot be answered, and count them."""
    max_batch_tokens: int = Limits.tokens
    """Most tokens that one forward reads."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    weights: Literal["stated", "int8"] = "stated"
    """stated: in `dtype`. int8: the rows of matrices as eight bits and a scale each, on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Spread = Spread()

    def check_source(self) -> None:
        """Raises ValueError unless prompts come from either --prompt or --input, and for an option
        of the other one.
        """
        if self.input is not None and self.prompt:
            raise ValueError("--prompt and --input are both given: use one of them")
        if self.input is None and not self.prompt:
            raise ValueError("missing --prompt (Text to continue), or --input (File of prompts)")
        of_file = [name for name in OF_FILES if getattr(self, name)]
        if self.input is None and of_file:
            raise ValueError(f"--{of_file[0].replace('_', '-')} is for --input FILE")
        if self.input is None and max(self.num_samples, self.layout.dp) > 1:
            raise ValueError("--num-samples and --layout.dp are for --input FILE")


@config(kw_only=True)
class ChatConfig(Sampling):
    """Chat with a model that has a chat template. An answer is shown as it is written; Ctrl-C ends
    it, and not the chat. What else can be said is told as it begins.
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Model to chat with: anything that `dolmen generate` takes, with a chat template."""
    system: str | None = None
    """What the model is told before the chat."""
    stop: Annotated[tuple[str, ...], Mark.REPEATED] = ()
    """Text that ends an answer, and is not part of it."""
    seed: int = 0
    """Of the draws."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    weights: Literal["stated", "int8"] = "stated"
    """stated: in `dtype`. int8: the rows of matrices as eight bits and a scale each, on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
