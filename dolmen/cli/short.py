"""The help of `train RECIPE`: one command and the few options that decide most, a line each, with
the recipe's own defaults. `--help --all` lists every option.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from dolmen.core.config import to_dict
from dolmen.recipes import RECIPES
from dolmen.training.config import RunConfig
from dolmen.training.request import Handling

INIT = {"init": "model to start from: a folder, a hub id or a run"}
LENGTH = {
    "train.epochs": "passes over the data; or --train.steps, or --train.tokens",
    "train.sequence-length": "tokens per sequence; unset, 512 or the model's maximum",
    "train.global-batch-size": "sequences of an update",
    "train.microbatch-size": "of these at once per process; fewer take less memory",
}
DRAWN = {
    "train.steps": "updates in all; unset, one pass over the prompts",
    "train.global-batch-size": "answers that an update learns from",
    "train.microbatch-size": "of these at once per process; fewer take less memory",
}
RATE = {"optimizer.lr": "peak learning rate; ten times as much for adapters"}
ADAPTER = {"adapter.rank": "train LoRA of this rank in place of all weights"}
MACHINE = {
    "train.dtype": "what is computed in: float32, bfloat16, float16",
    "layout.tp": "processes that share every layer",
}
EXPORT = {"finish.export": "write the end as a transformers directory, OUT/hf"}
OUT = {"out": "folder of the run; unset, runs/NAME"}
ANSWERS = {
    "rollout.max-new-tokens": "tokens of an answer, at most",
    "rollout.temperature": "of what is drawn, and of what is learned from",
}
REWARD = {"reward": "gsm8k, exact, regex:X, stub, MODULE:FUNCTION or a reward model"}


@dataclass(frozen=True)
class Short:
    """What the help of a recipe begins with."""

    example: str
    options: Mapping[str, str]
    """Each with a line of its own words."""
    needed: frozenset[str]
    """Of these, without which there is no run."""
    note: str = ""


SHORT = {
    "pretrain": Short(
        "dolmen train {name} --data.path text/",
        {
            "init": "a model to continue from: a folder, a hub id or a run; unset, a new one",
            "model.model-type": "family of a new model; --help --all lists its sizes",
            "data.path": "text: files, folders, .jsonl, .parquet, .bin, ids of the hub",
            "data.tokenizer": "a folder, a hub id, or bpe:N, trained on the data",
            "train.steps": "updates in all; or --train.tokens, or --train.epochs",
            "train.sequence-length": LENGTH["train.sequence-length"],
            "train.global-batch-size": LENGTH["train.global-batch-size"],
            "train.microbatch-size": LENGTH["train.microbatch-size"],
            "optimizer.lr": "the peak learning rate",
            **MACHINE,
            "layout.pp": "processes that hold different layers",
            "checkpoint.every": "steps between checkpoints; 0 saves the last one only",
            **EXPORT,
            **OUT,
        },
        frozenset({"data.path"}),
    ),
    "sft": Short(
        "dolmen train sft --init Qwen/Qwen3-0.6B --data.path chats.jsonl --finish.export",
        {
            **INIT,
            "data.path": "rows with `messages`, `conversations` or `instruction`",
            "data.template": "of chats, where the tokenizer has none: a file, chatml, alpaca",
            "data.masking-strategy": "turns in the loss: assistant, last or all",
            "data.validation-fraction": "share of the chats that is held out",
            **LENGTH,
            **RATE,
            **ADAPTER,
            **MACHINE,
            **EXPORT,
            **OUT,
        },
        frozenset({"init", "data.path"}),
    ),
    "reward": Short(
        "dolmen train reward --init runs/sft --data.path pairs.jsonl --finish.export",
        {
            **INIT,
            "data.path": "rows with `chosen` and `rejected`, and a `prompt`",
            "objective.margin": "by how much the chosen answer is to be ahead; unset, 0",
            "objective.center-rewards-coefficient": "what scores that are not about 0 cost",
            "data.validation-fraction": "share of the pairs that is held out",
            **LENGTH,
            **RATE,
            **ADAPTER,
            **MACHINE,
            **EXPORT,
            **OUT,
        },
        frozenset({"init", "data.path"}),
    ),
    "dpo": Short(
        "dolmen train dpo --init runs/sft --data.path pairs.jsonl --finish.export",
        {
            **INIT,
            "data.path": "rows with `chosen` and `rejected`, and a `prompt`",
            "objective.loss-type": "sigmoid, ipo, hinge, robust, sppo, exo, simpo, orpo, kto",
            "objective.beta": "the smaller, the further from the reference it may go",
            "objective.reference": "what is compared with; unset, the model at the start",
            **LENGTH,
            **RATE,
            **ADAPTER,
            **MACHINE,
            **EXPORT,
            **OUT,
        },
        frozenset({"init", "data.path"}),
    ),
    "grpo": Short(
        "dolmen train grpo --init runs/sft --data.path questions.jsonl --reward gsm8k",
        {
            **INIT,
            "data.path": "rows with a `prompt` or `messages`",
            **REWARD,
            "rollout.num-generations": "answers to each prompt, which are compared with each other",
            **ANSWERS,
            "rollout.loss-type": "the loss: grpo, bnpo, dr-grpo, dapo, gspo or cispo",
            "rollout.beta": "weight of the KL from the start, in the loss",
            **DRAWN,
            **RATE,
            **ADAPTER,
            "layout.tp": MACHINE["layout.tp"],
            **OUT,
        },
        frozenset({"init", "data.path", "reward"}),
    ),
    "ppo": Short(
        "dolmen train ppo --init runs/sft --data.path questions.jsonl --reward runs/reward/hf",
        {
            "init": "the model to start from; unset, a small one that knows nothing",
            "data.path": "rows with a `prompt` or `messages`",
            **REWARD,
            "critic.init": "what the critic begins as; unset, as the model itself",
            **ANSWERS,
            "rollout.epochs": "how often the answers of a phase are learned from",
            "ppo.kl-coef": "what a nat of KL from the start takes from the reward",
            **DRAWN,
            "train.steps": "updates in all",
            **RATE,
            "critic.lr": "the critic's own; unset, as --optimizer.lr",
            "layout.tp": MACHINE["layout.tp"],
            **OUT,
        },
        frozenset({"reward"}),
        "With --init other numbers are usual: dolmen train ppo --init MODEL --help shows them.",
    ),
}
"""Of recipes, and of the other runs with their objective."""


def short(name: str | None, run: RunConfig) -> str:
    """The help of a recipe or file that people read first, with the defaults of `run`; of no
    recipe, how one is named.
    """
    about = "a built-in recipe (dolmen recipes) or a YAML file, changed by options"
    if name in RECIPES:
        about = " ".join((RECIPES[name].__doc__ or "").split())
    kind = _kind(run) if name not in SHORT else name
    return text(kind, name or "RECIPE", about, run)


def _kind(run: RunConfig) -> str:
    """The short help that is for a run."""
    if run.data.rows == "chats":
        return "sft"
    return run.objective.name if run.objective.name in SHORT else "pretrain"


def text(kind: str, name: str, about: str, run: RunConfig) -> str:
    """The short help of this kind for the recipe `name`, which does `about`."""
    short, page = SHORT[kind], "how-to/data.md" if kind == "pretrain" else "how-to/tuning.md"
    width = max(map(len, short.options)) + 2
    known = to_dict(run) | to_dict(Handling()) | {"model": {"model_type": _family(run)}}
    lines = []
    for option, words in short.options.items():
        value = _value(known, option)
        told = " (needed)" if option in short.needed and not value else value and f" [{value}]"
        lines.append(f"  --{option:{width}}{words}{told}")
    return "\n".join(
        [
            f"usage: dolmen train {name} [OPTIONS]",
            "",
            *wrap(f"{name}: {about}.", 96),
            "",
            f"  {short.example.format(name=name)}",
            "",
            "The options that matter most, and in [] their defaults:",
            "",
            *lines,
            "",
            *([short.note] if short.note else []),
            f"dolmen train {name} --help --all lists every option; docs/{page} tells the rest.",
        ]
    )


def _family(run: RunConfig) -> str | None:
    return None if run.model is None else run.model.model_type


def _value(known: Mapping[str, Any], option: str) -> str:
    """As it is typed; nothing where it is unset."""
    found: Any = known
    for part in option.replace("-", "_").split("."):
        found = found[part]
    match found:
        case None:
            return ""
        case bool():
            return "yes" if found else "no"
        case list() | tuple():
            return " ".join(map(str, found))
        case float():
            return f"{found:g}"
    return str(found)
