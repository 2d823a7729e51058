"""Options of `verify` and `evaluate`. Imports no torch."""

from dataclasses import asdict
from typing import Annotated, Literal

from dolmen.core.config import (
    AboveZero,
    Count,
    LocalName,
    Mark,
    Name,
    NonNegative,
    Positive,
    config,
    require,
)
from dolmen.data.config import TextConfig
from dolmen.model.layout import Layout, TensorParallelLayout
from dolmen.serving.config import Numerics


@config()
class VerifyConfig:
    """Compare dolmen with transformers on one model: logits, loss, gradients and greedy tokens, in
    float32. Exit code 1 if they differ. A run or checkpoint is exported to a temporary directory
    for transformers.
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest complete checkpoint is used) or
    one of its checkpoints; a Megatron checkpoint, or Meta's files of a Llama.
    """
    against: str | None = None
    """Model that transformers loads. Default: FOLDER."""
    length: Positive = 64
    """Length of the random sequences in tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: TensorParallelLayout = TensorParallelLayout()


@config("layout")
class Axes:
    """How the model is split over processes."""

    tp: Positive = 1
    """Tensor parallelism: processes that share every layer."""
    cp: Positive = 1
    """Context parallelism: processes that share every sequence."""
    pp: Positive = 1
    """Pipeline parallelism: processes that hold different layers."""
    dp: Positive | None = None
    """Data parallelism: processes that read different texts. Default: the number of processes
    divided by the other sizes.
    """
    ep: Positive = 1
    """Expert parallelism: processes of dp x cp that hold different experts. Adds no processes."""

    @property
    def layout(self) -> Layout:
        """The `Layout` with these sizes."""
        return Layout(**asdict(self))


Limit = Annotated[AboveZero, require(lambda n: n < 1 or n == int(n), "a whole number, or below 1")]


@config(kw_only=True)
class TasksConfig:
    """Tasks of lm_eval, an extra: `pip install 'dolmen[tasks]'`."""

    tasks: Name | None = None
    """Tasks of lm_eval to evaluate, comma-separated names."""
    num_fewshot: Count | None = None
    """Few-shot examples before each question. Default: the task's own number."""
    limit: Limit | None = None
    """Maximum number of questions of each task, or, below 1, the fraction of them."""
    apply_chat_template: bool = False
    """Format questions as user turns with the tokenizer's chat template."""
    tasks_path: Name | None = None
    """Folder with your own task files (.yaml)."""

    @property
    def names(self) -> list[str]:
        """The task names in --tasks, split at commas; empty if unset."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


@config("evaluate", kw_only=True)
class DuringConfig(TasksConfig):
    """Evaluation during training: tasks of lm_eval (pip install 'dolmen[tasks]'), and completions
    of some prompts.
    """

    every: Positive | None = None
    """Steps between evaluations; unset: ten per run. The last step is always evaluated."""
    samples: Name | None = None
    """Text file with one prompt per line. The model completes each; completions are written to
    samples.jsonl in the run's folder.
    """
    max_new_tokens: Positive = 64
    """Maximum tokens of a sample; an end-of-sequence token ends it earlier."""
    temperature: NonNegative = 0.0
    """Sampling temperature: 0 is greedy decoding, 1 samples from the model's unscaled distribution.
    """
    seed: int = 0
    """Seed of the samples, the same at every step."""

    def __post_init__(self):
        """Raise ValueError for an interval without tasks or samples to evaluate."""
        if self.every is not None and not self.enabled:
            raise ValueError(
                f"evaluate.every is {self.every}, but there is nothing to evaluate: give "
                "--evaluate.tasks or --evaluate.samples"
            )

    @property
    def enabled(self) -> bool:
        """True if tasks or sample completions are evaluated during training."""
        return self.tasks is not None or self.samples is not None


@config()
class EvaluateConfig(Numerics, TasksConfig):
    """Evaluate how well a model predicts a text: loss in nats per token, perplexity, bits per byte,
    and top-1 accuracy (the share of tokens to which the model gives the highest probability). Each
    document is evaluated separately, in windows of at most --window tokens, without special tokens.
    The first token of a window is context and not counted; bits per byte counts all bytes of the
    text.
    """

    source: Annotated[str, Mark.POSITIONAL]
    """Transformers directory or hub id; a run's folder (its newest complete checkpoint is used) or
    one of its checkpoints; a Megatron checkpoint, or Meta's files of a Llama.
    """
    window: int | None = None
    """Maximum tokens of one forward: a longer document is cut into windows. Default:
    max_position_embeddings of the model.
    """
    stride: int | None = None
    """Tokens between the starts of two successive windows. Smaller than --window, windows overlap:
    each token is predicted from more context, at a higher cost. Default: --window, without overlap.
    """
    json: LocalName | None = None
    """JSON file to write the numbers to."""
    data: TextConfig = TextConfig()
    layout: Axes = Axes()
