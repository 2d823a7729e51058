"""Options of `dolmen plan` and `dolmen dryrun`. Nothing here imports torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty
from dolmen.planning.space import Pins
from dolmen.training.config import RunConfig

Device = Literal["cpu", "v100", "a100", "h100", "h200", "b200", "gb200"]


@dataclass(frozen=True)
class DryrunConfig:
    """A dry run of a step."""

    ranks: str = "first,middle,last"
    """Ranks of the world to run as: first, middle, last, or numbers, separated by commas."""
    device: Device = "h100"
    """Device for which kernels are chosen. None need be here."""
    exact: bool = False
    """Run every microbatch of the step, and not the steady state of the pipeline once."""
    max_load: float = 1.0
    """Rows that the experts of each rank get, over those of a router that sends equally many to
    all.
    """
    json: str | None = None
    """File to write what was counted to."""

    def __post_init__(self):
        refuse_empty("json", self.json)
        if not 0 < self.max_load <= 1e6:
            raise ValueError(
                f"max-load is {self.max_load:g}: it must be above 0, and 1 where all experts get "
                "equally many rows"
            )


@dataclass(frozen=True)
class DryrunRequest:
    """A dry run of a run."""

    run: RunConfig
    options: DryrunConfig


def ranks_of(text: str, world: int) -> list[int]:
    """The ranks of a world of so many that a list names, each once, in its order. Raises
    ValueError.
    """
    named = {"first": 0, "middle": world // 2, "last": world - 1}
    found: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        if word not in named and not (word.isascii() and word.isdigit() and len(word) < 10):
            raise ValueError(
                f"--ranks has {word[:40]!r}: give first, middle, last or numbers, such as "
                "--ranks first,last or --ranks 0,8"
            )
        rank = named[word] if word in named else int(word)
        if rank >= world:
            raise ValueError(
                f"--ranks has {rank}, but the layout has {world} ranks: give numbers of 0 to "
                f"{world - 1}"
            )
        found += [rank] if rank not in found else []
    return found


@dataclass(frozen=True)
class StepConfig:
    """A training step; unset options are those of the model's recipe or file."""

    global_batch_size: int | None = None
    """Sequences of one update, over all GPUs."""
    sequence_length: int | None = None
    """Tokens of a sequence."""
    microbatch_size: int | None = None
    """Sequences that a GPU computes at once. Unset: searched."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Arithmetic of forward and backward. Unset: bfloat16, or float16 on a device without it."""
    dropout: float | None = None
    """Dropout after embedding, attention and feed-forward, and on attention probabilities."""
    compile: bool | None = None
    """Compile each block: no zero-bubble schedule is considered then."""

    @property
    def said(self) -> dict:
        """Options that were given."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class PlanConfig:
    """Options of `dolmen plan`."""

    cluster: str | None = None
    """Cluster: NAME or NAME:NODES of one that dolmen knows, a number of GPUs such as 64xh100, or a
    YAML file, FILE.yaml:NODES.
    """
    layout: Pins = Pins()
    train: StepConfig = StepConfig()
    top: int = 10
    """Layouts to list."""
    explain: bool = False
    """Say of each layout what bounds it, and what one change of it would buy."""
    dryrun: bool = True
    """Run the step of the first layout without values, as its first, middle and last rank."""
    tokens: float | None = None
    """Tokens to train on: days, GPU hours, energy and, with prices, money."""
    rent: float = 0.0
    """Price of a GPU for an hour."""
    node_price: float = 0.0
    """Price of a node with its share of the network, to own."""
    years: float = 4.0
    """Over which an owned node is written off."""
    kilowatt_hour: float = 0.0
    """Price of a kilowatt hour, of owned nodes."""
    as_recipe: str | None = None
    """YAML file to write the first layout to, as a run that dolmen train takes."""
    json: str | None = None
    """File to write the plan to; - and no value: print it, and no table."""
    report: str | None = None
    """Folder to write an HTML page to."""
    measure: bool = False
    """Measure this machine, as the cluster `local`, for some seconds. Needs no model."""
    inference: bool = False
    """Memory and bandwidth of weights and cache for generation, in place of training."""
    batch: int = 1
    """Sequences at once, for --inference."""
    length: int | None = None
    """Tokens of each sequence, for --inference. Unset: the model's longest."""

    def __post_init__(self):
        for name in ("json", "as_recipe", "report", "cluster"):
            refuse_empty(name.replace("_", "-"), getattr(self, name))
        for name, least in (("top", 1), ("batch", 1), ("length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}: it must be at least {least}")
        if not self.inference and (self.batch, self.length) != (1, None):
            raise ValueError(
                "batch and length are of generation: give --inference too, or for training "
                "--train.global-batch-size and --train.sequence-length"
            )
        of_training = ("as_recipe", "report", "tokens", "rent", "explain")
        if self.inference and (said := [name for name in of_training if getattr(self, name)]):
            raise ValueError(
                f"{said[0].replace('_', '-')} is of training, and --inference is in place of it: "
                "leave one of the two out"
            )
        for name in ("tokens", "rent", "node_price", "years", "kilowatt_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1e30:
                knob = name.replace("_", "-")
                raise ValueError(f"{knob} is {value:g}: it must not be negative, and be finite")
        if self.years == 0:
            raise ValueError("years is 0: an owned node lasts longer")


@dataclass(frozen=True)
class PlanRequest:
    """A plan of a run, whose model it must have."""

    name: str
    """Name of the model, for a person."""
    run: RunConfig
    options: PlanConfig
