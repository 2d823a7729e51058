"""Rules across sections: a run is refused here, with the numbers and the knob,
before any process starts and before anything is written.
"""

from dataclasses import replace

from dolmen.conversion import hf_export
from dolmen.conversion.source import open_source
from dolmen.data import inputs
from dolmen.families import scored
from dolmen.model.tree import Head, Scalar, check_rounding, check_tokens
from dolmen.training import folder, judged, loggers, pretraining
from dolmen.training.check_drawn import check_drawn
from dolmen.training.check_init import (
    check_adapter,
    check_init,
    check_moments,
    own_tokenizer,
    with_new_rows,
    with_padding,
)
from dolmen.training.check_ppo import check_ppo
from dolmen.training.config import RunConfig


def check_run(run: RunConfig, processes: int | None, verify: bool = True) -> RunConfig:
    """The run with its layout resolved for `processes` (None: as many as the layout says). Raises
    ValueError or KeyError. Without `verify`, which is once per host, a tokenizer's expressions are
    not tried.
    """
    run = check_computed(run, processes)
    if run.objective.name == "reward":
        run = with_padding(run)
    check_adapter(run)
    check_programs(run)
    if run.init is not None:
        check_init(run, run.init)
    if run.optimizer.from_init:
        check_moments(run)
    if run.train.new_rows.share:
        run = with_new_rows(run)
    if run.init is not None and run.training.fp8 is not None and run.training.fp8.delayed:
        # what lies there may be no scales: it is refused here
        _ = open_source(run.init, run.known_model).scaling
    own = own_tokenizer(run.init)
    found = inputs.check_inputs(
        run.data, own, run.tree.vocab_size, run.sequence_length, verify=verify
    )
    if run.ppo.pretraining_coef:
        pretraining.check(run, found.tokenizer)
    if run.evaluate.asked:
        judged.check(run.evaluate, found.tokenizer, run.known_model)
    return run


def check_computed(run: RunConfig, processes: int | None) -> RunConfig:
    """The same of what a run computes, without what it reads."""
    model = run.model
    if model is None:
        raise ValueError(
            "there is no model: give --init a transformers directory or hub id, make one of "
            "--model.model-type and its fields, or choose a recipe that has one (dolmen recipes)"
        )
    if run.objective.name == "reward":
        model = scored(model)
        run = replace(run, model=model)
    if run.finish.export:
        check_exportable(run)
    if (run.finish.verify or run.finish.sample is not None) and not run.finish.export:
        raise ValueError(
            "finish.verify and finish.sample read the exported model: set --finish.export too"
        )
    run = replace(run, layout=run.layout.resolve(processes))
    tree = model.tree
    if tree.both_ways and (run.finish.sample is not None or run.finish.compressors):
        asked = "compressors" if run.finish.sample is None else "sample"
        raise ValueError(
            f"finish.{asked} is for models that foretell the next token, and {model.model_type} "
            "fills in masked ones: leave it out"
        )
    if run.evaluate.asked and (tree.both_ways or not isinstance(tree.head, Head)):
        raise ValueError(
            f"evaluate.tasks and samples are for models that foretell the next token, and "
            f"{model.model_type} does not: leave them out"
        )
    if tree.blanks is not None:
        tree.blanks.check()
    run.check_length()
    check_said_once(run)
    if run.steps is not None:
        check_profile(run, run.steps)
    check_drawn(run)
    check_ppo(run)
    check_objective(run)
    run.layout.check(tree, run.sequence_length, run.train.global_batch_size, run.microbatch_size)
    schedule = run.layout.make_schedule(run.train.global_batch_size, run.microbatch_size)
    if schedule.splits_backward:
        run.refuse_compiled()
    check_precision(run)
    if run.optimizer.muon.dtype == "bfloat16" and run.train.dtype == "float64":
        raise ValueError(
            "optimizer.muon.dtype bfloat16 keeps 8 bits of the 53 of train.dtype float64: use "
            "--optimizer.muon.dtype float32, which of float64 rounds nothing"
        )
    return run


def check_said_once(run: RunConfig) -> None:
    """Raises ValueError, with the numbers, where two options say different things of how long the
    run or its warm-up is.
    """
    train, optimizer, each = run.train, run.optimizer, run.tokens_per_step
    a_step = (
        f"a step has {each:,} tokens ({run.train.global_batch_size} sequences of "
        f"{run.sequence_length})"
    )
    if train.epochs is not None and (train.steps is not None or train.tokens is not None):
        other = "tokens" if train.steps is None else "steps"
        raise ValueError(
            f"train.epochs ({train.epochs:g}) and train.{other} ({getattr(train, other):,g}) each "
            f"say how long the run is: leave one out, or set --train.{other} None"
        )
    if train.steps is not None and train.tokens is not None:
        told = replace(run, train=replace(train, steps=None)).steps
        if told != train.steps:
            raise ValueError(
                f"train.steps is {train.steps:,}, and train.tokens ({train.tokens:,g}) are "
                f"{told:,}: {a_step}; leave one out, or set --train.steps {told}"
            )
    if optimizer.warmup_steps and optimizer.warmup_tokens is not None:
        if run.warmup_steps != optimizer.warmup_steps:
            raise ValueError(
                f"optimizer.warmup-steps is {optimizer.warmup_steps:,}, and "
                f"optimizer.warmup-tokens ({optimizer.warmup_tokens:,g}) are "
                f"{run.warmup_steps:,g}: {a_step}; leave one out, or set "
                "--optimizer.warmup-steps 0"
            )


def check_precision(run: RunConfig) -> None:
    """Raises ValueError, with the numbers, where products in eight bits cannot be as asked: nothing
    is left to round, or the layout cuts what shares a scale.
    """
    recipe, layout = run.training.fp8, run.layout
    if recipe is None:
        return
    leaves = run.trained.leaves
    if all(leaf.fp8 is None for leaf in leaves.values()):
        raise ValueError(
            f"train.fp8.first-layers ({run.train.fp8.first_layers}) and train.fp8.last-layers "
            f"({run.train.fp8.last_layers}) leave none of the {run.tree.layers} layers: set fewer, "
            "or leave out --train.precision"
        )
    check_rounding(leaves, {"tp": layout.tp})
    length, here = run.sequence_length, run.microbatch_size * run.sequence_length // layout.cp
    tokens = {}
    if layout.cp > 1:
        tokens[f"layout.cp ({layout.cp})"] = length // (2 * layout.cp)
    if (layout.dp or 1) > 1:
        tokens[f"layout.dp ({layout.dp})"] = here
    if layout.sequence_parallel and layout.tp > 1:
        tokens[f"layout.tp ({layout.tp}) with sequence parallelism"] = here // layout.tp
    check_tokens(recipe, tokens)


def check_objective(run: RunConfig) -> None:
    """Raises ValueError where what is trained to, the data and the model do not belong together."""
    asked, rows = run.objective, run.data.rows
    wanted = asked.rows or (rows if rows in ("text", "chats") else "chats")
    if rows != wanted:
        kind = f" of type {asked.loss_type}" if asked.name == "dpo" else ""
        raise ValueError(
            f"objective.name {asked.name}{kind} and data.rows {rows} do not belong together: use "
            f"--data.rows {wanted}, or another objective"
        )
    if asked.name != "reward" and isinstance(run.tree.head, Scalar):
        raise ValueError(
            f"objective.name {asked.name} is of tokens, and the model ends in one number, as a "
            "reward model does: use --objective.name reward, or start from another --init"
        )
    if asked.name == "reward" and (run.finish.verify or run.finish.sample is not None):
        raise ValueError(
            "finish.verify and finish.sample are of models that foretell tokens, and a reward "
            "model ends in one number: leave them out"
        )
    check_reference(run)
    if asked.rows not in ("pairs", "completions"):
        return
    batch, micro = run.train.global_batch_size // (run.layout.dp or 1), run.microbatch_size
    if batch % 2 or micro % 2:
        raise ValueError(
            f"a pair takes two sequences, and a process has {batch} of them ({micro} at once): use "
            "an even --train.global-batch-size per process, and an even --train.microbatch-size"
        )
    if asked.name == "reward":
        return
    if run.init is None:
        raise ValueError(
            "objective.name dpo is learned from answers, and a random model knows none: give --init"
        )


def check_reference(run: RunConfig) -> None:
    """Raises ValueError for a reference of other tokens."""
    if run.objective.reference is None:
        return
    source = open_source(run.objective.reference)
    if source.tree.vocab_size != run.tree.vocab_size:
        raise ValueError(
            f"objective.reference {run.objective.reference} has a vocab_size of "
            f"{source.tree.vocab_size:,}, the model {run.tree.vocab_size:,}: give a reference "
            "of the same tokens"
        )


def check_exportable(run: RunConfig) -> None:
    """Raises ValueError where a config.json cannot say what is trained."""
    hf_export.check_expressible(run.known_model, run.train.training.applied(run.tree))


def check_programs(run: RunConfig) -> None:
    """Raises ValueError where one that is to get numbers is not installed."""
    if lacking := loggers.missing(run.log.programs):
        raise ValueError(
            f"log.to has {lacking[0]}, which is not installed: pip install 'dolmen[log]', or leave "
            "it out of --log.to"
        )


def check_profile(run: RunConfig, steps: int) -> None:
    """Raises Unusable where a run of so many steps never comes to the one to be profiled."""
    if run.log.profile is not None and run.log.profile > steps:
        raise folder.Unusable(
            f"log.profile ({run.log.profile}) is over the run's {steps} steps: use --log.profile "
            f"{steps} or less, or --train.steps {run.log.profile} or more"
        )
