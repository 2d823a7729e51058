"""Warnings before the first step, of what can be done but is hardly intended."""

import math
from collections.abc import Mapping

from dolmen.core.messages import plural, printable
from dolmen.data import tokenizer as tokenizers
from dolmen.data.base_loader import Loader
from dolmen.data.chat_loader import ChatLoader
from dolmen.families.unknown import model_warnings
from dolmen.serving.engine import stop_tokens
from dolmen.training.config import RunConfig
from dolmen.training.resolve import ResolvedRun

MISMATCH = "rollout/logprob_difference_over_tolerance"
LOOKED_AT = 100  # completions
UNUSED_SHARE, UNUSED_ROWS = 0.1, 128  # more is no padding: published models pad to 128 at most


def warnings(resolved: ResolvedRun, loader: Loader, step: int, steps: int) -> list[str]:
    """Return the warnings, a line of text each, for a run that is about to train from `step` to
    `steps`: what works but is hardly intended (warm-up over the whole run, a tiny validation split,
    unused vocabulary rows, ...). Empty if no step is left.
    """
    run = resolved.config
    if step >= steps:
        return []
    message = [
        warmup_over_run(run, steps),
        small_validation_split(run, loader),
        batch_over_epoch(run, loader),
        profile_out_of_range(run, step, steps),
        no_replay_source(run, loader),
        one_validation_source(run, loader),
        no_eos_learned(resolved, loader),
        *model_warnings(run.known_model),
    ]
    if run.init is None and step == 0:  # a trained model keeps its size
        tokens = tokenizers.vocabulary_size(loader.tokenizer)
        message.append(unused_rows(run.spec.vocab_size, tokens))
    return [line for line in message if line]


def warmup_over_run(run: RunConfig, steps: int) -> str | None:
    """Return a warning if the learning-rate warm-up takes all `steps` steps of the run, or more;
    else None.
    """
    warmup, lr = math.ceil(run.warmup_steps), run.optimizer.lr
    if warmup < steps or steps == 1 == warmup:
        return None
    if warmup == steps:
        return (
            f"optimizer.warmup-steps ({warmup}) are all steps of the run: the learning rate "
            f"reaches {lr:g} in the last step; set --optimizer.warmup-steps {max(1, steps // 10)}"
        )
    return (
        f"optimizer.warmup-steps ({warmup}) exceeds the run's {plural(steps, 'step')}: the "
        f"learning rate ends at {lr * steps / warmup:.3g} and never reaches {lr:g}; set "
        f"--optimizer.warmup-steps {max(1, steps - 1)} or less, or --train.steps over {warmup}"
    )


def batch_over_epoch(run: RunConfig, loader: Loader) -> str | None:
    """Return a warning if one global batch reads all training data more than once; else None, and
    None with rollouts.
    """
    batch = run.train.global_batch_size
    passes = min(loader.mixture.epochs(batch).values())
    if run.objective.uses_rollouts or passes <= 1:  # prompts may be sampled again
        return None
    # sequences of an epoch of the source that lasts longest
    most = int(batch / passes)
    return (
        f"train.global-batch-size ({batch:,}) exceeds an epoch of the training data "
        f"({plural(most, 'sequence')}): each step reads every sequence {passes:.3g} times; set "
        f"--train.global-batch-size {most} or less, or give more data"
    )


def no_replay_source(run: RunConfig, loader: Loader) -> str | None:
    """Return a warning if rows of new tokens are to be trained first (another language), and there
    is a single data source, so that the model forgets what it knew; else None.
    """
    if not run.train.new_rows.share or len(loader.mixture.parts) > 1:
        return None
    return (
        "data.path has only one source: a model trained only on a new language forgets the old "
        "one; mix in some old text, such as --data.path 0.8:NEW 0.2:OLD"
    )


def one_validation_source(run: RunConfig, loader: Loader) -> str | None:
    """Return a warning if --log.validate-sources asks for a validation loss per data source and
    there is none: data.validation is one set for all, or fewer than two sources have validation
    text. None if data.path is a single source.
    """
    if not run.log.validate_sources or loader.validation_by_source or len(loader.mixture.parts) < 2:
        return None
    single = run.data.validation is not None
    return (
        "log.validate-sources reports the validation loss per source of data.path, but "
        + (
            "data.validation is not per source"
            if single
            else "fewer than two sources have validation text"
        )
        + ": "
        + ("leave it out" if single else "set a larger --data.validation-fraction")
    )


def no_eos_learned(resolved: ResolvedRun, loader: Loader) -> str | None:
    """Return a warning if none of the first 100 completions of a run on chats or preference pairs
    ends with an EOS token, so that the trained model would not stop generating; else None.
    """
    run = resolved.config
    learned = run.objective.name in ("tokens", "dpo") and run.data.masking_strategy != "all"
    if not isinstance(loader, ChatLoader) or not learned or resolved.init is None:
        return None
    eos_tokens = stop_tokens(resolved.init) | {loader.tokenizer.eos_token_id}
    examples = loader.mixture.examples
    # a template ends all completions with the same token: some are enough
    last = [examples.last_learned(int(i)) for i in loader.mixture.chosen[:LOOKED_AT]]
    if eos_tokens & {*last}:
        return None
    decoded = printable(loader.tokenizer.decode([last[0]]))
    return (
        f"completions end with {decoded!r} (token {last[0]}), which is not an EOS token: "
        "generation will not stop there. Use --data.template alpaca, "
        "whose completions end with the "
        "tokenizer's EOS token, or give the end of a completion when generating (--stop)"
    )


def profile_out_of_range(run: RunConfig, step: int, steps: int) -> str | None:
    """Return a warning if --log.profile names a step outside of those that the run makes now, after
    `step` up to `steps`; else None.
    """
    number = run.log.profile
    if number is None or step < number <= steps:
        return None
    return (
        f"log.profile ({number}) is not profiled: the run is from step {step + 1} to {steps}; set "
        f"--log.profile {min(step + 2, steps)}"
    )


def unused_rows(vocab_size: int, tokens: int) -> str | None:
    """Return a warning if more rows of the embedding have no token than padding explains (over 128,
    and over a tenth of `vocab_size`); else None. `tokens`: of the tokenizer.
    """
    unused = vocab_size - tokens
    if unused <= max(UNUSED_ROWS, UNUSED_SHARE * vocab_size):
        return None
    return (
        f"vocab_size is {vocab_size:,}, but the tokenizer has only {tokens:,} tokens: {unused:,} "
        f"rows of the embedding are never used; set --model.vocab-size {tokens}"
    )


def small_validation_split(run: RunConfig, loader: Loader) -> str | None:
    """Return a warning if the validation split is less than a fifth of the requested share of the
    data, or less than one batch; else None, and None without a validation split.
    """
    held_out, unit = loader.validation_tokens, loader.unit
    share, batch = loader.validation_share(run.sequence_length)
    by_hash = run.data.validation is None and run.data.order == "dolmen"
    requested = run.data.validation_fraction if by_hash else 0.0
    if not held_out or (held_out >= batch and share >= requested / 5):
        return None
    share_text = "text" if unit == "token" else f"{unit}s"
    shares = f" ({share:.2%} of the {share_text}, {requested:.2%} requested)" if requested else ""
    option = (
        "a larger --data.validation-fraction, or give --data.validation" if requested else "more"
    )
    return (
        f"the validation text has {plural(held_out, unit)}{shares}, and a batch {batch:,}: its "
        f"loss is noisy; use {option}" + ("" if requested else " text in --data.validation")
    )


def constant_reward(metrics: Mapping[str, float]) -> str:
    """Return the warning for a run in which all rewards were equal in every rollout iteration, so
    that nothing was learned. `metrics`: of the last iteration.
    """
    return (
        f"all rewards of this run were equal, in the last iteration {metrics['rollout/reward']:g}: "
        "advantages were 0, and nothing was learned. Check the reward of the completions in "
        "rollouts/"
    )


def logprob_mismatch(run: RunConfig, metrics: Mapping[str, float], step: int) -> str | None:
    """Return a warning if trainer and generator gave the tokens of completions log-probabilities
    that differ by more than the tolerance, or are not finite. None if they agree, or differ because
    rollouts use int8 weights, which importance sampling corrects for. `metrics`: of the rollout
    iteration after `step`.
    """
    ratio = metrics.get(MISMATCH, 0.0)
    expected = run.rollout.weights == "int8" and not math.isnan(ratio)
    if ratio <= 1 or expected:  # and not where it is no number
        return None
    message = f"after step {step} trainer and generator disagree: a log-probability is "
    if math.isnan(ratio):
        return f"{message}not finite ({MISMATCH})"
    message += (
        f"{ratio:.3g} times as far off as expected ({MISMATCH}), on average by "
        f"{metrics['rollout/logprob_difference']:.2g}"
    )
    if run.train.dtype in ("bfloat16", "float16"):
        capped = run.objective.name != "grpo" or run.rollout.importance_sampling_cap is not None
        weighed = (
            ""
            if capped
            else "--rollout.importance-sampling-cap 2 corrects for it by weighting tokens, and "
        )
        return (
            f"{message}. Rounding to {run.train.dtype} can explain it: {weighed}--train.dtype "
            "float32 shows whether there is another cause"
        )
    return (
        f"{message}. In {run.train.dtype} this indicates a fault: the policy is trained on other "
        "probabilities than were sampled from. Check whether it grows with the steps (stale "
        "rollout weights: compare --rollout.tp 1), with the length of completions (positions or "
        "KV cache) or with the layout (compare one process), and whether `dolmen verify` of the "
        "export agrees"
    )
