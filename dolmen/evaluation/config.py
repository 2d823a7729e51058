"""What `verify` and `evaluate` may be told. Without torch."""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty
from dolmen.data.config import TextConfig
from dolmen.model.layout import Layout
from dolmen.serving.config import Split


@dataclass(frozen=True)
class VerifyConfig:
    """A model, and what it is compared with."""

    folder: str
    """Transformers directory or hub id; a run's folder (its newest whole checkpoint is taken), or
    one checkpoint in it; a Megatron checkpoint, or Meta's files of a Llama.
    """
    against: str | None = None
    """What transformers loads. Default: the same."""
    length: int = 64
    """Tokens of the random sequences."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    layout: Split = Split()


@dataclass(frozen=True)
class Axes:
    """How the model is split, and its work shared."""

    tp: int = 1
    """Tensor parallelism: processes that share every layer."""
    cp: int = 1
    """Context parallelism: processes that share every sequence."""
    pp: int = 1
    """Pipeline parallelism: processes that hold different layers."""
    dp: int | None = None
    """Data parallelism: processes that read different texts. Default: what the processes leave."""
    ep: int = 1
    """Expert parallelism: processes of dp x cp that hold different experts. Adds no processes."""

    def __post_init__(self):
        _ = self.layout  # which refuses its own

    @property
    def layout(self) -> Layout:
        """As a run has it."""
        return Layout(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class TasksConfig:
    """Tasks of lm_eval, an extra: `pip install 'dolmen[tasks]'`."""

    tasks: str | None = None
    """Tasks of lm_eval to score the model by, names between commas."""
    num_fewshot: int | None = None
    """Examples before each question. Default: what the task says."""
    limit: float | None = None
    """Of each task at most so many questions, or, below 1, such a share of them."""
    apply_chat_template: bool = False
    """Put questions as a user's turns, by the tokenizer's chat template."""
    tasks_path: str | None = None
    """Folder of task files (.yaml) of one's own."""

    def __post_init__(self):
        refuse_empty("tasks", self.tasks)
        refuse_empty("tasks_path", self.tasks_path)
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise ValueError(f"num-fewshot is {self.num_fewshot}: it must not be negative")
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise ValueError(f"limit is {self.limit}: it must be finite and over 0")
        if self.limit is not None and self.limit > 1 and self.limit != int(self.limit):
            raise ValueError(f"limit is {self.limit}: it must be a whole number, or below 1")

    @property
    def names(self) -> list[str]:
        """Of the tasks."""
        return [name.strip() for name in (self.tasks or "").split(",") if name.strip()]


@dataclass(frozen=True, kw_only=True)
class DuringConfig(TasksConfig):
    """What a run is judged by while it trains: tasks of lm_eval (pip install 'dolmen[tasks]'), and
    what it writes after some prompts.
    """

    every: int | None = None
    """Steps between evaluations; unset: ten per run. The last step is always evaluated."""
    samples: str | None = None
    """Text file with a prompt per line, which the model continues: samples.jsonl of the run's
    folder.
    """
    max_new_tokens: int = 64
    """Most tokens of a sample; an end of text ends it earlier."""
    temperature: float = 0.0
    """Of samples: 0 takes the likeliest token; 1 draws from the model's own distribution."""
    seed: int = 0
    """Of the draws of samples, which are the same ones at every step."""

    def __post_init__(self):
        super().__post_init__()
        refuse_empty("evaluate.samples", self.samples)
        for name in ("every", "max_new_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"evaluate.{name.replace('_', '-')} is {value}: it must be at least 1"
                )
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"evaluate.temperature is {self.temperature}: it must be finite and not negative"
            )
        if self.every is not None and not self.asked:
            raise ValueError(
                f"evaluate.every is {self.every}, and nothing is evaluated: give "
                "--evaluate.tasks or --evaluate.samples"
            )

    @property
    def asked(self) -> bool:
        """Whether anything is."""
        return self.tasks is not None or self.samples is not None


@dataclass(frozen=True)
class EvaluateConfig(TasksConfig):
    """A model, and what it is measured by."""

    source: str
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
    json: str | None = None
    """File to write the numbers to."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type to compute in. Default: that of config.json."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes the GPUs if any are visible, else the CPU."""
    data: TextConfig = TextConfig()
    layout: Axes = Axes()

    def __post_init__(self):
        super().__post_init__()
        refuse_empty("json", self.json)
