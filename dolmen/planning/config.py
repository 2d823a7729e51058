"""Options of `dolmen plan`, `dolmen dryrun` and `dolmen schedule`. Nothing here imports torch."""

from typing import Annotated, Literal

from pydantic import Field

from dolmen.core.config import (
    AboveZero,
    Below1,
    LocalName,
    Mark,
    Name,
    NonNegative,
    Positive,
    ValueOptional,
    config,
    require,
)
from dolmen.planning.space import Pins
from dolmen.training.config import RunConfig

Device = Literal["cpu", "v100", "a100", "h100", "h200", "b200", "gb200"]


@config()
class DryrunConfig:
    """Run one step of a recipe, a YAML file or a folder with a config.json as some ranks of its
    layout would, on tensors without values (meta tensors), in this process; report the memory,
    FLOPs and messages of each. Needs neither the GPUs nor their memory, and fails where the real
    step would.

        dolmen dryrun gpt3-175b --layout.tp 8 --layout.pp 16 --layout.dp 8
    """

    ranks: str = "first,middle,last"
    """Ranks of the world to run as: first, middle, last, or numbers, separated by commas."""
    device: Device = "h100"
    """Device for which kernels are chosen. This machine need not have one."""
    exact: bool = False
    """Run every microbatch of the step, in place of the pipeline's steady state once."""
    max_load: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Load of each rank's experts relative to perfect balance, in tokens."""
    json: LocalName | None = None
    """JSON file to write the counts to."""


@config()
class DryrunRequest:
    """A run, and the options of its dry run."""

    run: RunConfig
    options: DryrunConfig


def ranks_of(text: str, world: int) -> list[int]:
    """Parse --ranks (first, middle, last, or numbers) for a world of `world` ranks: each rank once,
    in order of the list. Raises ValueError.
    """
    # embedding and head are on the first and the last
    named = {"first": 0, "middle": world // 2, "last": world - 1}
    ranks: list[int] = []
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
        # first and middle are one rank in a world of 1
        ranks += [rank] if rank not in ranks else []
    return ranks


@config("train")
class StepConfig:
    """The training step. Unset options have the values of the model's recipe or file."""

    global_batch_size: Positive | None = None
    """Sequences of one update, over all GPUs."""
    sequence_length: Positive | None = None
    """Tokens of a sequence."""
    microbatch_size: Positive | None = None
    """Sequences per forward of a GPU. Unset: searched."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Arithmetic of forward and backward. Unset: bfloat16, or float16 on a device without it."""
    dropout: Below1 | None = None
    """Dropout after embedding, attention and feed-forward, and on attention probabilities."""
    compile: bool | None = None
    """Compile each block. Excludes zero-bubble schedules."""

    @property
    def specified(self) -> dict:
        """Name -> value of the options that are set."""
        return {name: value for name, value in vars(self).items() if value is not None}


RecipeFile = Annotated[
    LocalName, require(lambda file: file.endswith((".yaml", ".yml")), "a .yaml file")
]


@config()
class PlanConfig:
    """List the fastest layouts to train a model on a cluster, with predicted step times (90 %
    intervals) and memory per rank. Nothing is trained, and no GPU is needed. Parts of the layout
    can be fixed with --layout.*.

        dolmen plan gpt-1t --cluster dgx-a100:384 --train.global-batch-size 3072
    """

    model: Annotated[str, Mark.POSITIONAL] = ""
    """Recipe (dolmen recipes), YAML file of a run, or folder with a config.json."""
    cluster: Name | None = None
    """Cluster: a built-in one as NAME or NAME:NODES, a number of GPUs such as 64xh100, or a YAML
    file as FILE.yaml:NODES.
    """
    layout: Pins = Pins()
    train: StepConfig = StepConfig()
    top: Positive = 10
    """Number of layouts to list."""
    headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of each GPU's memory that layouts leave free, for fragmentation of the allocator and
    for what the closed forms miss.
    """
    explain: bool = False
    """Explain what limits each layout, and how much faster or slower single changes would make it.
    """
    dryrun: bool = True
    """Check the fastest layout by a dry run: run its step on tensors without values as the first,
    middle and last rank.
    """
    tokens: Annotated[float, Field(ge=0, lt=1e30)] | None = None
    """Tokens to train on. Adds days, GPU hours, energy and, with prices, the cost."""
    rent: Annotated[float, Field(ge=0, lt=1e30)] = 0.0
    """Price of renting one GPU for one hour."""
    node_price: Annotated[float, Field(ge=0, lt=1e30)] = 0.0
    """Purchase price of one node, with its share of the network."""
    years: Annotated[float, Field(gt=0, lt=1e30)] = 4.0
    """Years over which a purchased node is depreciated."""
    kilowatt_hour: Annotated[float, Field(ge=0, lt=1e30)] = 0.0
    """Price of a kilowatt hour, for purchased nodes."""
    as_recipe: RecipeFile | None = None
    """YAML file to write the fastest layout to, as a recipe for `dolmen train`."""
    json: Annotated[LocalName | None, ValueOptional("-")] = None
    """JSON file to write the plan to. `-` or no value prints the JSON in place of the table."""
    report: LocalName | None = None
    """HTML file to write, or a folder to write index.html to."""
    measure: bool = False
    """Measure this machine for a few seconds and save it as the cluster `local`. Needs no model."""
    inference: bool = False
    """Plan generation in place of training: memory and bandwidth of weights and KV cache."""
    batch: Positive = 1
    """Concurrent sequences, for --inference."""
    length: Positive | None = None
    """Tokens of each sequence, for --inference. Unset: the model's longest."""

    def __post_init__(self):
        """Raise ValueError for options of generation without --inference, and options of training
        with it.
        """
        if not self.inference and (self.batch, self.length) != (1, None):
            raise ValueError(
                "--batch and --length are for generation: add --inference, or use "
                "--train.global-batch-size and --train.sequence-length for training"
            )
        # they have no meaning for generation
        of_training = ("as_recipe", "report", "tokens", "rent", "explain")
        if self.inference and (stated := [name for name in of_training if getattr(self, name)]):
            raise ValueError(
                f"{stated[0].replace('_', '-')} is for training, but --inference plans generation: "
                "leave one of the two out"
            )
        if self.inference and self.headroom != PlanConfig.headroom:
            raise ValueError(
                f"headroom ({self.headroom:g}) is for training, but --inference counts all of the "
                "memory: leave one of the two out"
            )


@config()
class PlanRequest:
    """A plan of a run, whose model it must have."""

    name: str
    """Name of the model, for a person."""
    run: RunConfig
    options: PlanConfig


@config()
class ScheduleOptions:
    """Time and draw a pipeline schedule, or search the shortest one for measured times and a memory
    limit. Times are those of one microbatch through all layers of a rank, in any unit.
    """

    schedule: Annotated[str, Mark.POSITIONAL]
    """gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v, a .txt or .yaml file with one line of
    actions (F0 F1 B0 B1) per rank, or search, which finds such lists.
    """
    pp: Positive | None = None
    """Pipeline ranks. Default: 4; those of the file."""
    microbatches: Positive | None = None
    """Microbatches per step. Default: 8; those of the file."""
    virtual_stages: Positive | None = None
    """Chunks of layers per rank. Default: 1, or 2 where the schedule needs several; those of
    the file; search tries both.
    """
    out: LocalName | None = None
    """File to write: the picture, .svg or .png, or the actions, .txt or .yaml, as
    --layout.schedule takes them.
    """
    list: bool = False
    """Print the actions of each rank, as a file would hold them."""
    forward: AboveZero = 1
    """Time of a forward (F)."""
    backward: AboveZero = 2
    """Time of a whole backward (B)."""
    input: AboveZero = 1
    """Time of the part of a backward that earlier stages wait for (I)."""
    weight: AboveZero = 1
    """Time of the rest of it (W)."""
    send: NonNegative = 0
    """Time from the end of an action until another rank has its result."""
    costs: str | None = None
    """JSON file with these times instead (forward, backward, input, weight, send), each one number
    or a list of every rank, or of every stage.
    """
    memory: float | None = None
    """Memory limit of search: microbatches whose activations a rank may hold, in units of the
    activations of all its layers, as the column `live microbatches` counts. Default: --pp, what
    1f1b, zero-bubble and zero-bubble-v hold.
    """
