"""Options of `verify` and `evaluate`. Imports no torch."""

from dataclasses import asdict
from typing import Annotated, Literal

from dolmen.core.config import AboveZero, Count, Mark, Name, NonNegative, Positive, config
from dolmen.data.config import TextConfig
from dolmen.model.layout import Layout, Split


@config()
class VerifyConfig:
    """Compare a model as dolmen computes it with transformers itself: logits, loss, gradients,
    greedy tokens, in float32. Exit code 1 if they differ. Of a run or checkpoint transformers is
    given a temporary export.
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    against: str | None = None
    """Model that transformers loads. Default: the same."""
    length: int = 64
    """Tokens of the random sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@config("layout")
class Axes:
    """How the model is split, and its work shared."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer."""
    cp: Positive = 1
    """Context parallelism: processes that share every sequence."""
    pp: Positive = 1
    """Pipeline parallelism: processes that hold different layers."""
    dp: Positive | None = None
    """Data parallelism: processes that read different texts. Default: what the processes leave."""
    ep: Positive = 1
    """Expert parallelism: processes of dp x cp that hold different experts. Adds no processes."""

    @property
    def layout(self) -> Layout:
        """Layout of these sizes, as a run has it."""
        return Layout(**asdict(self))


@config(kw_only=True)
class TasksConfig:
    """Tasks of lm_eval, an extra: `pip install 'dolmen[tasks]'`."""

    tasks: Name | None = None
    """Tasks of lm_eval to score the model by, names between commas."""
    num_fewshot: Count | None = None
    """Examples before each question. Default: what the task says."""
    limit: AboveZero | None = None
    """Most questions of each task, or, below 1, the share of them."""
    apply_chat_template: bool = False
    """Put questions as a user's turns, by the tokenizer's chat template."""
    tasks_path: Name | None = None
    """Folder of task files (.yaml) of one's own."""

    def __post_init__(self):
        if self.limit is not None and self.limit > 1 and self.limit != int(self.limit):
            raise ValueError(f"limit is {self.limit}: it must be a whole number, or below 1")

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


@config("evaluate", kw_only=True)
class DuringConfig(TasksConfig):
    """Evaluation of a run while it trains: tasks of lm_eval (pip install 'dolmen[tasks]'), and
    what it writes after some prompts.
    """

    every: Positive | None = None
    """Steps between evaluations; unset: ten per run. The last step is always evaluated."""
    samples: Name | None = None
    """Text file with a prompt per line, which the model continues: samples.jsonl of the run's
    folder.
    """
    max_new_tokens: Positive = 64
    """Most tokens of a sample; an end of text ends it earlier."""
    temperature: NonNegative = 0.0
    """Sampling temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
    """
    seed: int = 0
    """Seed of the samples, the same at every step."""

    def __post_init__(self):
        super().__post_init__()
        if self.every is not None and not self.asked:
            raise ValueError(
                f"evaluate.every is {self.every}, and nothing is evaluated: give "
                "--evaluate.tasks or --evaluate.samples"
            )

    @property
    def asked(self) -> bool:
        """True if anything is evaluated."""
        return self.tasks is not None or self.samples is not None


@config()
class EvaluateConfig(TasksConfig):
    """How well a transformers directory, or a run, foretells a text, over all of it: loss in nats
    per token, perplexity, bits per byte, and how many tokens are the likeliest. Each document is
    read by itself, whole up to --window tokens, with no special tokens; every token but the first
    of a window is counted, and all bytes of the text are.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    window: int | None = None
    """Tokens of a text that are read at once: a longer document is cut into windows. Default:
    max_position_embeddings, all that the model takes.
    """
    stride: int | None = None
    """Tokens from the beginning of a window to that of the next: a smaller one sees more and costs
    more. Default: that of --window, so that windows do not overlap.
    """
    json: Name | None = None
    """File to write the numbers to."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    data: TextConfig = TextConfig()
    layout: Axes = Axes()
