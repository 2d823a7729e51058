"""What each verb may be told (command.py reads it from words).

Nothing here imports torch or transformers: `--help` and a mistyped option do not owe their seconds.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, Any, TypeVar

import tyro

from dolmen.comparison.config import DiffConfig, DiffWork
from dolmen.conversion.config import ConvertConfig, ExportConfig
from dolmen.data.config import TokenizeConfig
from dolmen.evaluation.config import EvaluateConfig, VerifyConfig
from dolmen.planning.config import DryrunConfig, PlanConfig
from dolmen.serving.config import ChatConfig, GenerateConfig
from dolmen.serving.http.config import ServeConfig
from dolmen.training.config import RunConfig
from dolmen.training.request import Handling, Request
from dolmen.vocabulary.config import VocabExtendConfig, VocabMergeConfig, VocabTrainConfig
from dolmen.watching.config import ShowConfig


@dataclass(frozen=True)
class Beginning:
    """Where a run begins."""

    recipe: tyro.conf.Positional[str]
    """Recipe or YAML file."""
    model: Any  # of the class that `run_options` is given
    init: str | None = None
    """Where the weights to start from are, and the model: a transformers directory, a hub id,
    another run or one of its checkpoints.
    """
    reward: tuple[str, ...] = ()
    """What judges answers that the model has drawn: `exact` (1 where it is the row's `answer`,
    white space at the ends aside), `regex:PATTERN` (1 where that is found in it), `gsm8k` (1 where
    its last number is that of the row's `answer`), `stub` (the share of its characters that are
    vowels), `MODULE:FUNCTION`, which is called as function(prompt, completion, row) in a process of
    its own, and gives a number, or the folder of a reward model. Several are added up, each times
    its weight: `0.7:gsm8k 0.3:models/reward`.
    """
    environment: str | None = None
    """What answers the model in turns: `MODULE:FUNCTION`, called as function(prompt, turns, row) in
    a process of its own when the model has ended its turn, where `turns` are the texts so far, the
    last the model's. It gives what is said next, as it stands in the text, or None at the end.
    """


@dataclass(frozen=True)
class TrainOptions(Handling, Beginning):
    """Train a model: a built-in recipe (dolmen recipes) or a YAML file, changed by options."""

    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


SECTIONS = [f for f in fields(RunConfig) if f.name not in ("name", "init", "model")]


@dataclass(frozen=True)
class DryrunOptions(DryrunConfig, Beginning):
    """Run one step of a recipe, a YAML file or a folder with a config.json as some ranks of its
    layout would, on tensors without values, in this process: what each holds, computes and sends.
    It needs neither the GPUs nor their memory, and stops where the real step would.

        dolmen dryrun gpt3-175b --layout.tp 8 --layout.pp 16 --layout.dp 8
    """

    exact: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


Words = TypeVar("Words", bound=Beginning)
# Verbs whose words are those of a run.
RUNS: dict[str, type[Beginning]] = {"train": TrainOptions, "dryrun": DryrunOptions}


def run_options(model: type, of: type[Words]) -> type[Words]:
    """`of` with the `model` that `model_options.options` makes for a family, and each section of a
    run.
    """
    known = {f.name for f in fields(of)}
    sections = [(f.name, f.type, field(default=f.default)) for f in SECTIONS if f.name not in known]
    return make_dataclass(
        of.__name__,
        [("model", model), *sections],
        bases=(of,),
        namespace={"__doc__": of.__doc__},
        frozen=True,
    )


@dataclass(frozen=True)
class FamiliesOptions:
    """The families of models that are read, trained and written, how close each is to its
    reference, and on which layouts.
    """


@dataclass(frozen=True)
class RecipesOptions:
    """The built-in runs, for `dolmen train RECIPE`; `dolmen train RECIPE --help` shows its
    defaults.
    """


@dataclass(frozen=True)
class ExportOptions(ExportConfig):
    """Write a run, a checkpoint or another transformers directory as a transformers directory:
    model.safetensors, config.json, tokenizer. One tensor is in memory at a time.
    """

    source: tyro.conf.Positional[str]


@dataclass(frozen=True)
class ConvertOptions(ConvertConfig):
    """Write a model of any format (a transformers directory, a run, a Megatron checkpoint: it is
    recognised by itself) in another one, one tensor in memory at a time. What is written is opened
    again and compared: every tensor, then the logits. Nothing stands at DESTINATION before that.
    """

    source: tyro.conf.Positional[str]
    destination: tyro.conf.Positional[str]


@dataclass(frozen=True)
class VerifyOptions(VerifyConfig):
    """Compare a model as dolmen computes it with transformers itself: logits, loss, gradients,
    greedy tokens, in float32. Exit code 1 if they differ. Of a run or checkpoint transformers is
    given a temporary export.
    """

    folder: tyro.conf.Positional[str]


@dataclass(frozen=True)
class DiffOptions(DiffConfig):
    """Find the first tensor in which two programs of one model part: dolmen under one layout and
    under another, or beside transformers. Weights by name, then what forward computes, gradients
    from the head down, and one update. Exit code 1 if they part.

        dolmen diff MODEL transformers --a.layout.tp 2
    """

    first: tyro.conf.Positional[str]
    second: tyro.conf.Positional[str]


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(GenerateConfig):
    """Continue a prompt, or several, and print them; or all rows of a file, into another one, as
    many at once as is fastest. Greedy, unless --temperature or the model's generation_config.json
    says otherwise.

        dolmen generate MODEL --input in.jsonl --output out.jsonl
    """

    folder: tyro.conf.Positional[str]
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    skip_bad: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False

    def __post_init__(self):
        if self.input is not None and self.prompt:
            raise ValueError("--prompt and --input are both given: use one of them")
        if self.input is None and not self.prompt:
            raise ValueError("missing --prompt (Text to continue), or --input (File of prompts)")
        super().__post_init__()
        if self.input is None and (alone := [name for name in OF_FILES if self.__dict__[name]]):
            raise ValueError(f"--{alone[0].replace('_', '-')} is for --input FILE")
        if self.input is None and max(self.num_samples, self.layout.dp) > 1:
            raise ValueError("--num-samples and --layout.dp are for --input FILE")


OF_FILES = ("output", "best", "reward", "resume", "skip_bad", "max_input_tokens", "logprobs")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(ChatConfig):
    """Chat with a model that has a chat template. An answer is shown as it is written; Ctrl-C ends
    it, and not the chat. What else can be said is told as it begins.
    """

    folder: tyro.conf.Positional[str]
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ServeConfig):
    """Serve a model over HTTP, by OpenAI's interface: completions and chat completions, streamed or
    whole, to many clients at once. Needs an extra: pip install 'dolmen[serve]'.

        dolmen serve MODEL --port 8000
    """

    folder: tyro.conf.Positional[str]


@dataclass(frozen=True)
class EvaluateOptions(EvaluateConfig):
    """How well a transformers directory, or a run, foretells a text, over all of it: loss in nats
    per token, perplexity, bits per byte, and how many tokens are the likeliest. Each document is
    read by itself, whole up to --window tokens, with no special tokens; every token but the first
    of a window is counted, and all bytes of the text are.
    """

    source: tyro.conf.Positional[str]


@dataclass(frozen=True)
class ScheduleOptions:
    """Time a pipeline schedule, and draw it; or search the shortest for measured times and a
    memory. Times are of one microbatch through all layers of a rank, in any unit.
    """

    schedule: tyro.conf.Positional[str]
    """gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v, a .txt or .yaml file with one line of
    actions (F0 F1 B0 B1) per rank, or search, which finds such lists.
    """
    pp: int | None = None
    """Pipeline ranks. Default: 4; those of the file."""
    microbatches: int | None = None
    """Microbatches per step. Default: 8; those of the file."""
    virtual_stages: int | None = None
    """Chunks of layers per rank. Default: 1, or 2 where the schedule needs several; those of
    the file; of search both, and the shortest is told.
    """
    out: str | None = None
    """File to write: the picture, .svg or .png, or the actions, .txt or .yaml, as
    --layout.schedule takes them.
    """
    list: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the actions of each rank, as a file would hold them."""
    forward: float = 1
    """Time of a forward (F)."""
    backward: float = 2
    """Time of a whole backward (B)."""
    input: float = 1
    """Time of the part of a backward that earlier stages wait for (I)."""
    weight: float = 1
    """Time of the rest of it (W)."""
    send: float = 0
    """Time from the end of an action until another rank has its result."""
    costs: str | None = None
    """JSON file with these times instead (forward, backward, input, weight, send), each one number
    or a list of every rank, or of every stage.
    """
    memory: float | None = None
    """Of search: the most microbatches that a rank may hold activations of, in units of the
    activations of all its layers, as the column `live microbatches` counts. Default: --pp, what
    1f1b, zero-bubble and zero-bubble-v hold.
    """


@dataclass(frozen=True)
class PlanOptions(PlanConfig):
    """The fastest layouts of a model on a cluster, with 90 % intervals, and what each rank of them
    holds; nothing is trained, and no GPU is needed. Parts of the layout can be given.

        dolmen plan gpt-1t --cluster dgx-a100:384 --train.global-batch-size 3072
    """

    model: tyro.conf.Positional[str] = ""
    """Recipe (dolmen recipes), YAML file of a run, or folder with a config.json."""
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    measure: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    inference: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


@dataclass(frozen=True)
class TokenizeOptions(TokenizeConfig):
    """Write text as a data set of Megatron: PREFIX.bin, each document's tokens and its end of text,
    and PREFIX.idx, which says where documents begin. Both Megatron-LM and `dolmen train
    --data.path` read it.
    """


@dataclass(frozen=True)
class VocabTrainOptions(VocabTrainConfig):
    """Learn a vocabulary from text, as a folder that transformers opens: with a tokenizer.json,
    and of unigram and bpe tokenizer.model. Any amount of text is read once.

        dolmen vocab train --data.path zh/ --size 20000 --kind bpe --to zh-tokens
    """


@dataclass(frozen=True)
class VocabMergeOptions(VocabMergeConfig):
    """Give a tokenizer the tokens of another one, behind its own, whose ids, scores and merges stay
    as they are. What is written is opened by transformers, and beside sentencepiece, before it
    stands there.

        dolmen vocab merge path/to/model zh-tokens --to merged
    """

    base: tyro.conf.Positional[str]
    new: tyro.conf.Positional[str]


@dataclass(frozen=True)
class VocabExtendOptions(VocabExtendConfig):
    """Give a model rows for the new tokens of a merged tokenizer, and write it as a transformers
    directory. Its logits of old tokens stay as they are.

        dolmen vocab extend path/to/model --tokenizer merged --to extended
    """

    model: tyro.conf.Positional[str]


@dataclass(frozen=True)
class ShowOptions(ShowConfig):
    """Runs as one page to look at, while they go on or afterwards: losses over each other, learning
    rate, gradients, speed, memory, experts, samples, options and how they differ, checkpoints,
    starts.

        dolmen show runs/one runs/two
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    serve: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


# What our launcher hands its workers, where it is not what words say.
HANDED = {"train": Request, "diff": DiffWork}
VERBS = {
    "recipes": RecipesOptions,
    "tokenize": TokenizeOptions,
    "families": FamiliesOptions,
    "export": ExportOptions,
    "convert": ConvertOptions,
    "verify": VerifyOptions,
    "diff": DiffOptions,
    "generate": GenerateOptions,
    "chat": ChatOptions,
    "serve": ServeOptions,
    "evaluate": EvaluateOptions,
    "schedule": ScheduleOptions,
    "plan": PlanOptions,
    "show": ShowOptions,
}
# A verb of several parts -> what is said of it, and each with its options.
PARTS: dict[str, tuple[str, dict[str, type]]] = {
    "vocab": (
        "A vocabulary for another language: train one, merge it into a tokenizer, give a model its "
        "tokens.",
        {"train": VocabTrainOptions, "merge": VocabMergeOptions, "extend": VocabExtendOptions},
    )
}
# Options that may stand without their value -> the one that they have then.
BARE = {
    "generate": {"logprobs": "raw"},
    "plan": {"json": "-", "layout.sequence-parallel": "True", "train.compile": "True"},
}
# And those that switch another one off.
NEVER = {
    "plan": {
        "layout.no-sequence-parallel": "layout.sequence-parallel",
        "train.no-compile": "train.compile",
    }
}
