"""Rules that every run is checked by, in order, before any process starts and before anything is
written: length, loss, layout, precision, evaluation, export. The rules on models and on rollouts
are in modules of their own.

Validation is the second of three steps:

    resolve     opens each model once and fills in what the options leave open   training/resolve.py
    validate    checks the resolved values; writes nothing                       training/checks/
    run         trains; assumes that every rule here holds                       training/run.py

So a rule is stated once, where all values are known, and no later code repeats it. `validate` is
for a run; `validate_computation` is the part that a dry run can check too, which has a model and a
layout but neither data nor initial weights. The output folder is checked separately
(checks/folder.py): a dry run has none.
"""

from collections.abc import Sequence
from dataclasses import replace

from dolmen.conversion import hf_export
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.evaluation import tasks
from dolmen.evaluation.config import DuringConfig
from dolmen.families import ModelConfig
from dolmen.model.spec import (
    LMHeadSpec,
    ModelSpec,
    ScalarHeadSpec,
    check_fp8_sharding,
    check_fp8_tokens,
)
from dolmen.serving.generation import encode
from dolmen.training import folder, metrics
from dolmen.training.checks import rollout
from dolmen.training.checks.exact import check_exact
from dolmen.training.checks.model import check_adapter, check_init, check_moments, check_new_rows
from dolmen.training.config import RunConfig
from dolmen.training.evaluate import read_prompts
from dolmen.training.resolve import ResolvedRun, resolve_model


def check_finish(config: RunConfig) -> None:
    """Raise ValueError for options of --finish and --evaluate that the model does not support, such
    as an export that transformers cannot express or samples of an encoder, and for verification or
    a sample without export.
    """
    model, finish, model_spec = config.known_model, config.finish, config.spec
    if finish.export:
        check_exportable(config)
    reading = {"verify": "no-verify"} if finish.verify else {}
    reading |= {"sample": "sample None"} if finish.sample is not None else {}
    for option, off in reading.items():
        if not finish.export:
            raise ValueError(
                f"finish.{option} reads the exported model: set --finish.export too, or "
                f"--finish.{off}"
            )
        if isinstance(model_spec.head, ScalarHeadSpec):
            raise ValueError(
                f"finish.{option} needs a language model, but a reward model has a scalar head: "
                f"set --finish.{off}"
            )
    if model_spec.both_ways and (finish.sample is not None or finish.compressors):
        option = "compressors" if finish.sample is None else "sample"
        raise ValueError(
            f"finish.{option} is for causal language models, but {model.model_type} is a masked "
            "language model: leave it out"
        )
    if config.evaluate.enabled and (
        model_spec.both_ways or not isinstance(model_spec.head, LMHeadSpec)
    ):
        raise ValueError(
            "evaluate.tasks and evaluate.samples are for causal language models, which "
            f"{model.model_type} is not: leave them out"
        )


def check_exportable(config: RunConfig) -> None:
    """Raise ValueError if the trained model cannot be written as a transformers directory, as no
    config.json there expresses it.
    """
    hf_export.check_expressible(config.known_model, config.train.training.apply_to(config.spec))


def check_evaluation(
    options: DuringConfig, model: ModelConfig, tokenizer: PreTrainedTokenizer
) -> None:
    """Raise ValueError for unknown tasks of --evaluate.tasks, and if a prompt in the file of
    --evaluate.samples, with its new tokens, is too long for the model.
    """
    if options.tasks is not None:
        tasks.check_tasks(options)
    if options.samples is None:
        return
    for number, prompt in enumerate(read_prompts(options.samples), 1):
        check_prompt(model.spec, options, number, encode(tokenizer, prompt, model))


def check_prompt(
    model_spec: ModelSpec, options: DuringConfig, number: int, tokens: Sequence[int]
) -> None:
    """Raise ValueError if the `tokens` of the prompt `number` in the file of --evaluate.samples,
    with the new ones, are more than the model's max_position_embeddings.
    """
    most = model_spec.max_position_embeddings
    if len(tokens) + options.max_new_tokens > most:
        raise ValueError(
            f"--evaluate.samples {options.samples}: prompt {number} has {len(tokens):,} tokens, "
            f"with {options.max_new_tokens} new ones more than the model's "
            f"max_position_embeddings ({most}): shorten it, or set a smaller "
            "--evaluate.max-new-tokens"
        )


def check_layout(config: RunConfig) -> None:
    """Raise ValueError for a layout that does not fit the model or the batch, and for a compiled
    model with a schedule that splits backward.
    """
    batch, microbatch = config.train.global_batch_size, config.microbatch_size
    config.layout.check(config.spec, config.sequence_length, batch, microbatch)
    if config.layout.make_schedule(batch, microbatch).splits_backward:
        config.refuse_compiled()


def usable_processes(config: RunConfig, processes: int) -> int:
    """Return the largest number, up to `processes`, of processes on which the run's layout fits
    model and batch; if none does, `processes` itself, so that the caller raises its error.
    """
    inner = config.layout.inner
    for size in range(processes // inner * inner, 0, -inner):
        try:
            resolved = resolve_model(config, size)
            check_layout(resolved)
            check_exact(resolved)
        except ValueError:
            continue
        return size
    return processes


def check_precision(config: RunConfig) -> None:
    """Raise ValueError, with the numbers, for precision options that contradict each other or the
    layout: Muon's bfloat16 with float64, no layer left in fp8, shards that cut a block with one fp8
    scale.
    """
    if config.optimizer.muon.dtype == "bfloat16" and config.train.dtype == "float64":
        raise ValueError(
            "optimizer.muon.dtype bfloat16 is too coarse for train.dtype float64: use "
            "--optimizer.muon.dtype float32, which keeps float64 here"
        )
    recipe, layout = config.training.fp8, config.layout
    if recipe is None:
        return
    specs = config.trained.params
    if all(spec.fp8 is None for spec in specs.values()):
        fp8 = config.train.fp8
        raise ValueError(
            f"train.fp8.first-layers ({fp8.first_layers}) and train.fp8.last-layers "
            f"({fp8.last_layers}) leave none of the {config.spec.layers} layers in fp8: set "
            "fewer, or leave out --train.precision"
        )
    check_fp8_sharding(specs, {"tp": layout.tp})
    length = config.sequence_length
    # tokens of one rank, in which a block that shares a scale must lie
    local = config.microbatch_size * length // layout.cp
    tokens = {}
    if layout.cp > 1:
        tokens[f"layout.cp ({layout.cp})"] = length // (2 * layout.cp)
    if (layout.dp or 1) > 1:
        tokens[f"layout.dp ({layout.dp})"] = local
    if layout.sequence_parallel and layout.tp > 1:
        tokens[f"layout.tp ({layout.tp}) with sequence parallelism"] = local // layout.tp
    check_fp8_tokens(recipe, tokens)


def check_length(config: RunConfig) -> None:
    """Raise ValueError for a sequence longer than the model's maximum, for contradictory lengths of
    the run or its warm-up, and for a step to be profiled after the last one.
    """
    config.check_length()
    check_agreement(config)
    if config.steps is not None:
        check_profile(config.log.profile, config.steps)


def check_agreement(config: RunConfig) -> None:
    """Raise ValueError, with the numbers, where two options set the length of the run, or of its
    warm-up, to different values.
    """
    train, optimizer, tokens = config.train, config.optimizer, config.tokens_per_step
    a_step = (
        f"a step has {tokens:,} tokens ({train.global_batch_size} sequences of "
        f"{config.sequence_length})"
    )
    if train.epochs is not None and (train.steps is not None or train.tokens is not None):
        other = "tokens" if train.steps is None else "steps"
        raise ValueError(
            f"train.epochs ({train.epochs:g}) and train.{other} ({getattr(train, other):,g}) both "
            f"set the length of the run: leave one out, or set --train.{other} None"
        )
    if train.steps is not None and train.tokens is not None:
        # as many steps as --train.tokens alone would give
        steps = replace(config, train=replace(train, steps=None)).steps
        if steps != train.steps:
            raise ValueError(
                f"train.steps is {train.steps:,}, but train.tokens ({train.tokens:,g}) are "
                f"{steps:,}: {a_step}; leave one out, or set --train.steps {steps}"
            )
    if optimizer.warmup_steps and optimizer.warmup_tokens is not None:
        if config.warmup_steps != optimizer.warmup_steps:
            raise ValueError(
                f"optimizer.warmup-steps is {optimizer.warmup_steps:,}, but "
                f"optimizer.warmup-tokens ({optimizer.warmup_tokens:,g}) are "
                f"{config.warmup_steps:,g}: {a_step}; leave one out, or set "
                "--optimizer.warmup-steps 0"
            )


def check_profile(step: int | None, steps: int) -> None:
    """Raise Unusable where the `step` to be profiled is after the last of `steps`."""
    if step is not None and step > steps:
        raise folder.Unusable(
            f"log.profile ({step}) exceeds the run's {steps} steps: use "
            f"--log.profile {steps} or less, or --train.steps {step} or more"
        )


def check_objective(resolved: ResolvedRun) -> None:
    """Raise ValueError if --objective.name does not fit the kind of data (--data.rows) or the
    model's head, the reference model has another vocabulary, or pairs cannot be divided over
    processes and microbatches.
    """
    config = resolved.config
    objective, rows = config.objective, config.data.rows
    required = objective.rows or (rows if rows in ("text", "chats") else "chats")
    if rows != required:
        kind = f" with loss-type {objective.loss_type}" if objective.name == "dpo" else ""
        raise ValueError(
            f"objective.name {objective.name}{kind} and data.rows {rows} do not fit together: use "
            f"--data.rows {required}, or another objective"
        )
    if objective.name != "reward" and isinstance(config.spec.head, ScalarHeadSpec):
        raise ValueError(
            f"objective.name {objective.name} needs an LM head, but the model has a scalar head "
            "(a reward model): use --objective.name reward, or start from another --init"
        )
    if resolved.reference is not None:
        option = f"objective.reference {objective.reference}"
        config.spec.check_same_vocabulary(option, resolved.reference.spec)
    if rows in ("pairs", "completions"):
        check_pairs(config)


def check_pairs(config: RunConfig) -> None:
    """Raise ValueError for batches or microbatches with an odd number of rows, which would split a
    pair, and for DPO without an initial model.
    """
    batch = config.train.global_batch_size // (config.layout.dp or 1)
    if batch % 2 or config.microbatch_size % 2:
        raise ValueError(
            f"a pair is two sequences, but a process has {batch} of them "
            f"({config.microbatch_size} at once): use an even --train.global-batch-size per "
            "process, and an even --train.microbatch-size"
        )
    if config.objective.name == "dpo" and config.init is None:
        raise ValueError(
            "objective.name dpo needs a trained model, but the initial model is random: give --init"
        )


def validate(resolved: ResolvedRun) -> None:
    """Check all rules on a run's options and models, data and output folder excepted. Raises
    ValueError or KeyError, with a message for the user, for a run that cannot be trained.
    """
    validate_computation(resolved)
    check_adapter(resolved.config)
    check_start_trackers(resolved.config.log.trackers)
    check_init(resolved)
    check_moments(resolved)
    check_new_rows(resolved)


def validate_computation(resolved: ResolvedRun) -> None:
    """Check the rules on a run that do not depend on initial weights and data, which a dry run
    checks too: lengths, objective, rollouts, layout, precision, exact numerics, export. Raises
    ValueError.
    """
    config = resolved.config
    if config.spec.blanks is not None:
        config.spec.blanks.check()
    check_length(config)
    check_precision(config)
    rollout.check_ppo(resolved)
    rollout.check_rollout(resolved)
    check_objective(resolved)
    check_finish(config)
    check_layout(config)
    if config.objective.uses_rollouts:
        rollout.check_rollout_layout(config, resolved.rewards)
    check_exact(config)


def check_start_trackers(trackers: Sequence[str]) -> None:
    """Raise ValueError if the package of one of the experiment `trackers` of --log.to is not
    installed; none is started.
    """
    if lacking := metrics.not_installed(trackers):
        raise ValueError(
            f"log.to has {lacking[0]}, which is not installed: pip install 'dolmen[log]', or leave "
            "it out of --log.to"
        )
