"""The command line. Torch is not imported before all options are parsed.

Exit codes: 0 done; 1 a run or a comparison failed; 2 bad input, found before any process started
and with nothing written; 130 and 143 after Ctrl-C and SIGTERM, which save first.

    command.py     words to the configuration of a command, and the function that runs it
    parse.py       `--a.b value` to a nested dict, and the help of a command
    jobs.py        launch
    runs.py        train, replay, and the options of a run over a recipe or YAML file
    generation.py  generate, chat, serve
    evaluation.py  evaluate, diff, verify
    conversion.py  convert, export, tokenize, vocab
    planning.py    plan, dryrun, schedule
    listings.py    recipes, families, show
"""

import os
import sys
import warnings

from dolmen.core import environment
from dolmen.core.messages import BadInput, brief, did_you_mean, escape, one_line

VERBS = {
    "recipes": "list the built-in runs",
    "families": "list the model families: how close to transformers, and on which layouts",
    "train": "train, fine-tune or align a model: a recipe or a YAML file, with options",
    "replay": "repeat a step of a run with exact numerics, and compare the bits",
    "launch": "write the job file of a run for SLURM, Kubeflow Trainer or SkyPilot, and submit it",
    "vocab": "train a tokenizer, merge it into another, add its tokens to a model",
    "tokenize": "write text as a data set of Megatron-LM, .bin and .idx",
    "export": "write a run or any model as a transformers directory",
    "convert": "convert a checkpoint to another format, and compare the two",
    "verify": "compare a model with transformers: logits, loss, gradients, greedy tokens",
    "diff": "find the first tensor that differs between two computations of a model",
    "generate": "generate completions of a prompt, or of every row of a file",
    "chat": "chat with a model in a terminal",
    "serve": "serve a model over HTTP with OpenAI's API",
    "evaluate": "measure loss, perplexity and bits per byte of a text, or run lm_eval tasks",
    "show": "show runs as an HTML page: losses, speed, memory, samples; live with --serve",
    "schedule": "draw and time a pipeline schedule",
    "plan": "find the fastest layouts of a model on a cluster, with memory per rank",
    "dryrun": "run a step without GPUs as any rank: memory, FLOPs, messages",
}

USAGE = (
    "usage: dolmen VERB ...\n\n"
    + "".join(f"  {verb:10s}{text}\n" for verb, text in VERBS.items())
    + """
  dolmen VERB --help explains a verb; dolmen --version prints the version.
"""
)


LOADING = ("train", "replay", "dryrun", "generate", "chat", "serve", "verify", "evaluate")
"""Verbs that import torch and open a model, which takes seconds to minutes."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line of dolmen (`argv`, by default that of this process) and return its exit
    code: 0 done; 1 a run or a comparison failed; 2 bad input; 130 after Ctrl-C, 143 after SIGTERM.
    Prints usage, the version, or errors (to stderr, on the first process of a host only).
    """
    from dolmen.launch import process

    # before anything else, so that a worker never outlives its launcher
    process.die_with_agent()
    process.obey_interrupts()
    environment.set_defaults(os.environ)
    # pydantic would look for plugins in the metadata of every installed package, which takes 30 ms
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    warnings.formatwarning = lambda text, *_: f"warning: {one_line(str(text))}\n"
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] in ("--version", "-V", "version"):
        from dolmen import __version__

        print(f"dolmen {__version__}")
        return 0
    if argv[0] not in VERBS:
        hint = did_you_mean(argv[0], VERBS, most=1)
        text = f"dolmen: there is no verb {brief(argv[0])}{': ' * bool(hint)}{hint}\n\n{USAGE}"
        print(text, end="", file=sys.stderr)
        return 2
    # pydantic and YAML take 0.1 s to import, a verb with torch a second and more: `--version` waits
    # for neither, and `VERB --help` only for the first
    from dolmen.cli import command

    try:
        file = process.run_file()
        if file is not None:
            options = command.read_handed(argv[0], file)
        else:
            options = command.read(argv[0], argv[1:])
            _announce(argv[0], argv[1:])  # before torch is imported
        return command.run(argv[0], options)
    except BadInput as error:
        if _is_first():
            print(f"dolmen {command.full_verb(argv)}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # or Python would fail again as it flushes stdout at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _announce(verb: str, words: list[str]) -> None:
    """Print to stderr that a model is loading, for verbs that load one: at a terminal, and for
    `serve` always; not for --help, without arguments, or on other processes than the first.
    `words`: what follows the verb.
    """
    if verb not in LOADING or {"-h", "--help"} & {*words} or not words or not _is_first():
        return
    if verb == "serve" or sys.stderr.isatty():
        name = "" if words[0].startswith("-") else f" {escape(words[0])}"
        print(f"loading model{name} ...", file=sys.stderr, flush=True)


def _is_first() -> bool:
    """Return whether this process has local rank 0 on its host (by LOCAL_RANK or SLURM_LOCALID, or
    without either), and so prints.
    """
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
