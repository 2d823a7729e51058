"""Rules of exact numerics (--train.numerics exact): what has the same bits at every layout, and the
sizes that its trees take. Everything that no test covers raises a ValueError.
"""

from dataclasses import fields
from functools import reduce
from typing import Any

from dolmen.core.messages import divisor
from dolmen.model.spec import (
    AlibiSpec,
    AttentionSpec,
    EmbeddingSpec,
    FalconAlibiSpec,
    LatentAttentionSpec,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    ParallelResidual,
    PositionTable,
    RopeSpec,
    RouterSpec,
    SequentialResidual,
)
from dolmen.ops.numerics import ExactConfig
from dolmen.rl.rewards import is_reward_model, parse_rewards
from dolmen.training.config import RunConfig

FAST = "or set --train.numerics fast"
OPTIONS: dict[str, tuple[Any, ...]] = {
    "train.dtype": ("float32", "bfloat16"),
    "train.precision": (None,),
    "train.device": ("auto", "cpu"),
    "train.compile": (False,),
    "train.new_rows.share": (0.0,),
    "objective.name": ("tokens", "grpo"),
    "data.rows": ("text", "prompts"),
    "rollout.loss_type": ("grpo",),
    "rollout.temperature": (1.0,),
    "rollout.advantage_estimator": ("grpo", "rloo"),
    "rollout.entropy_coef": (0.0,),
    "rollout.beta": (0.0,),
    "rollout.reward_kl_coef": (0.0,),
    "rollout.weights": ("stated",),
    "rollout.compile": (False,),
    "adapter.rank": (None,),
    "layout.zero": (1, 2, 3),
}
"""The values of options that exact numerics cover."""
COMPONENTS: dict[type, set[str]] = {
    EmbeddingSpec: {"rows", "scale", "norm", "positions"},
    PositionTable: {"length", "offset"},
    LMHeadSpec: {"scale", "tied", "soft_cap", "bias"},
    NormSpec: {field.name for field in fields(NormSpec)},
    SequentialResidual: {"norms", "residual", "residual_scale", "branch_scale"},
    ParallelResidual: {"norms"},
    AttentionSpec: {field.name for field in fields(AttentionSpec)} - {"mask"},
    LatentAttentionSpec: {field.name for field in fields(LatentAttentionSpec)},
    MLPSpec: {"size", "gated", "activation", "bias"},
    MoESpec: {field.name for field in fields(MoESpec)},
    RouterSpec: {field.name for field in fields(RouterSpec)},
    RopeSpec: {"size", "theta", "scaling", "interleaved", "halved"},
    AlibiSpec: set(),
    FalconAlibiSpec: set(),
}
"""The components of a model that exact numerics cover, and their fields that may have any value;
others have their default.
"""


def check_exact(config: RunConfig) -> None:
    """Raise ValueError, with the numbers and the option, if --train.numerics is exact and exact
    numerics do not cover an option, a component of the model or a size; and if --train.exact.* is
    set while --train.numerics is fast.
    """
    if config.train.numerics == "fast":
        default = ExactConfig()
        for name in ("tp", "cp"):
            limit = getattr(config.train.exact, name)
            if limit != getattr(default, name):
                raise ValueError(
                    f"train.exact.{name} ({limit}) is a limit of exact numerics, and "
                    "train.numerics is fast: set --train.numerics exact, or leave it out"
                )
        return
    _check_options(config)
    check_components(config.spec)
    _check_context(config)
    _check_model_sizes(config)
    _check_batch_sizes(config)


def _check_options(config: RunConfig) -> None:
    """Raise ValueError for the first option whose value exact numerics do not cover (OPTIONS has
    those that they do); for rollouts of a model with experts, latent attention or sinks, or with a
    reward model; and if several processes do not add in a fixed order (--layout.reduction).
    """
    for path, allowed in OPTIONS.items():
        value = reduce(getattr, path.split("."), config)
        if value not in allowed:
            option = path.replace("_", "-")
            section, _, name = option.rpartition(".")
            switch = f"{section}.no-{name}" if value is True else f"{option} {allowed[0]}"
            raise ValueError(
                f"{option} is {value}, and train.numerics exact covers "
                f"{' or '.join(map(str, allowed))} alone: set --{switch}, {FAST}"
            )
    trains_only = config.spec.experts or any(
        isinstance(block.mixer, LatentAttentionSpec) or block.mixer.sinks
        for block in config.spec.blocks
    )
    if config.objective.uses_rollouts and trains_only:
        raise ValueError(
            f"objective.name is {config.objective.name}, and train.numerics exact covers models "
            "with experts, latent attention or sinks for objective.name tokens alone: set "
            f"--objective.name tokens, {FAST}"
        )
    models = [name for _, name in parse_rewards(config.reward) if is_reward_model(name)]
    if config.objective.uses_rollouts and models:
        raise ValueError(
            f"reward {models[0]} is a model, whose scores depend on the layout in their last bits, "
            "and train.numerics exact covers rules and functions alone: set another --reward, "
            f"{FAST}"
        )
    if config.layout.world > 1 and config.layout.reduction != "fixed":
        raise ValueError(
            "train.numerics exact adds sums of processes in order, and layout.reduction is "
            f"{config.layout.reduction}: set --layout.reduction fixed, {FAST}"
        )


def check_components(spec: ModelSpec) -> None:
    """Raise ValueError for the first component of the model (embedding, head, norms, attention,
    MLP, positions), or field of one, that exact numerics do not cover.
    """
    table, norm = spec.embedding.positions, spec.embedding.norm
    parts: list[Any] = [spec.embedding, table, norm, spec.head, spec.final_norm]
    for block in dict.fromkeys(spec.blocks):
        parts += [block.norm, block.arrangement, block.mixer, block.mlp]
        parts += [getattr(block.mixer, name, None) for name in ("positions", "qk_norm", "norm")]
        parts += [getattr(block.mlp, name, None) for name in ("router", "shared")]
    for part in parts:
        if part is None:
            continue
        kind = type(part)
        if kind not in COMPONENTS:
            raise ValueError(f"train.numerics exact does not cover {kind.__name__}: {FAST[3:]}")
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name not in COMPONENTS[kind] and value != field.default:
                raise ValueError(
                    f"the model's {kind.__name__}.{field.name} is {value}, and train.numerics "
                    f"exact covers {field.default} alone: {FAST[3:]}"
                )


def _check_divides(option: str, size: int, limited_by: str, limit: int) -> None:
    """Raise ValueError unless the `size` of an option divides the `limit` of exact numerics, the
    largest size with the same bits.
    """
    if limit % size:
        raise ValueError(
            f"{option} ({size}) does not divide {limited_by} ({limit}): set --{option} "
            f"{divisor(limit, near=size)} or a larger --{limited_by}, which gives other bits, "
            f"{FAST}"
        )


def _check_context(config: RunConfig) -> None:
    """Raise ValueError unless the layout's cp divides train.exact.cp (the largest cp with the same
    bits), whose chunks divide a sequence into parts for which products are invariant; unless keys
    are gathered, a microbatch is one sequence and ep is 1 where cp splits sequences; and for
    rollouts with a limit over 1.
    """
    limit, layout, length = config.train.exact.cp, config.layout, config.sequence_length
    _check_divides("layout.cp", layout.cp, "train.exact.cp", limit)
    if limit > 1 and config.objective.uses_rollouts:
        raise ValueError(
            f"train.exact.cp is {limit}, and objective {config.objective.name} samples from a "
            "model that attends to whole sequences, with other bits than to their chunks: set "
            f"--train.exact.cp 1 and --layout.cp 1, {FAST}"
        )
    # Products of other small matrices depend on how many are multiplied at once: oneDNN's in bf16,
    # and in fp32 those of whole matrices of probabilities, which dropout forms, of odd sizes.
    dropout = config.train.dropout > 0
    least = 16 if config.train.dtype == "bfloat16" else 8 if dropout else 1
    multiple = least * (2 * limit if limit > 1 else 1)
    if (limit > 1 or dropout) and length % multiple:
        chunks = f"2 x train.exact.cp ({2 * limit}) chunks of " if limit > 1 else ""
        why = " with train.dropout" if dropout else ""
        raise ValueError(
            f"train.sequence-length ({length}) is not divisible by {multiple}: {chunks}a multiple "
            f"of {least} tokens{why}: set --train.sequence-length "
            f"{-(-length // multiple) * multiple}, {FAST}"
        )
    if layout.cp > 1 and layout.context != "gather":
        raise ValueError(
            f"layout.context is {layout.context}, which adds gradients of keys in the order in "
            "which they pass a rank, and train.numerics exact adds them in one order: set "
            f"--layout.context gather, {FAST}"
        )
    if layout.cp > 1 and layout.ep > 1:
        raise ValueError(
            f"layout.ep is {layout.ep} and layout.cp {layout.cp}, and train.numerics exact covers "
            f"one of both: set --layout.ep 1 or --layout.cp 1, {FAST}"
        )
    if layout.cp > 1 and config.microbatch_size > 1:
        raise ValueError(
            f"train.microbatch-size ({config.microbatch_size}): with layout.cp ({layout.cp}) "
            "train.numerics exact adds the parts of a sequence before those of the next: set "
            f"--train.microbatch-size 1, {FAST}"
        )


def _check_model_sizes(config: RunConfig) -> None:
    """Raise ValueError unless the layout's tp divides train.exact.tp (the largest tp with the same
    bits), this divides hidden size, query heads, key-value heads and intermediate size, and tp cuts
    the vocabulary between the blocks into which train.exact.tp cuts it.
    """
    limit, tp, spec = config.train.exact.tp, config.layout.tp, config.spec
    _check_divides("layout.tp", tp, "train.exact.tp", limit)
    if config.objective.uses_rollouts:
        _check_divides("rollout.tp", config.rollout.tp or 1, "train.exact.tp", limit)
    sizes = {"hidden_size": spec.hidden_size}
    for block in spec.blocks:
        sizes["num_attention_heads"] = block.mixer.heads
        if isinstance(block.mixer, AttentionSpec):
            sizes["num_key_value_heads"] = block.mixer.kv_heads
        sizes |= _widths(block.mlp)
        for name, size in sizes.items():
            if size % limit:
                raise ValueError(
                    f"{name} ({size}) is not divisible by train.exact.tp ({limit}): set "
                    f"--train.exact.tp {size & -size} or less, which has to be {tp} or more, {FAST}"
                )
    rows, full = -(-spec.vocab_size // tp), limit // tp * -(-spec.vocab_size // limit)
    if tp > 1 and rows != full:
        raise ValueError(
            f"vocab_size ({spec.vocab_size:,}): tp ({tp}) gives {rows:,} rows to a process, and "
            f"train.exact.tp ({limit}) cuts them into blocks of {full * tp // limit:,}, which "
            f"{rows:,} is no multiple of: set --layout.tp 1 or {limit}, {FAST}"
        )


def _widths(mlp: MLPSpec | MoESpec) -> dict[str, int]:
    """Return option -> width of each feed-forward layer of a block that tp splits."""
    if isinstance(mlp, MLPSpec):
        return {"intermediate_size": mlp.size}
    shared = {} if mlp.shared is None else {"width of the shared expert": mlp.shared.size}
    return {"moe_intermediate_size": mlp.size} | shared


def _check_batch_sizes(config: RunConfig) -> None:
    """Raise ValueError unless sums over parts equal exact numerics' one binary tree: the sequences
    of a microbatch, and of a data-parallel process, must be a power of two (unless one has all of
    them), so must ep (unless it is dp), and the tokens of a tensor-parallel rank under sequence
    parallelism must be whole leaves.
    """
    batch, micro = config.train.global_batch_size, config.microbatch_size
    layout, length, limit = config.layout, config.sequence_length, config.train.exact.tp
    dp = layout.dp or 1
    local_batch = batch // dp
    splits_tokens = layout.sequence_parallel and layout.tp > 1
    if micro & (micro - 1) and (micro < batch or splits_tokens):
        raise ValueError(
            f"train.microbatch-size ({micro}) is no power of two, and train.numerics exact adds "
            f"sequences by a tree: set --train.microbatch-size {local_batch & -local_batch}, {FAST}"
        )
    if dp > 1 and local_batch & (local_batch - 1):
        raise ValueError(
            f"train.global-batch-size ({batch}) / dp ({dp}) = {local_batch} sequences per process, "
            "no power of two, and train.numerics exact adds them by a tree: set "
            f"--train.global-batch-size {dp << local_batch.bit_length() - 1}, {FAST}"
        )
    if layout.ep & (layout.ep - 1) and layout.ep != dp:
        raise ValueError(
            f"layout.ep ({layout.ep}) is no power of two, and train.numerics exact adds the ranks "
            f"of dp ({dp}) by a tree: set --layout.ep {divisor(dp & -dp, near=layout.ep)}, {FAST}"
        )
    exact = config.training.exact
    assert exact is not None
    local = length // layout.cp
    if splits_tokens and micro * local // layout.tp % exact.token_leaf:
        raise ValueError(
            f"sequence parallelism gives each of tp ({layout.tp}) {micro * local / layout.tp:g} "
            f"of the {micro} x {local} tokens of a microbatch, and train.exact.tp ({limit}) adds "
            f"them by leaves of {exact.token_leaf}: set --train.sequence-length to a multiple of "
            f"{limit * exact.cp}, {FAST}"
        )
