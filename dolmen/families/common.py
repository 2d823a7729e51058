"""Fields and spec pieces that every family has under its own names: vocabulary, norm eps,
initializer range, tied head, head size, sliding windows. `names` of family.py maps the common names
to each family's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from annotated_types import MaxLen

from dolmen.core.config import NonNegative
from dolmen.core.messages import divisor, plural
from dolmen.families import rope
from dolmen.families.family import (
    ACTIVATION,
    ACTIVATIONS,
    Family,
    Field,
    activation,
    activation_name,
    expect,
    flag,
    names,
)
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlankInfilling,
    BlockSpec,
    EmbeddingSpec,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    group_repeats,
)

# Sliding windows: in all layers, or in those whose layer type is "sliding_attention".

FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW_SIZE = Field(
    "sliding_window",
    kinds.POSITION | None,
    None,
    "Sliding window in tokens, including the query. None: no window.",
)
USE_WINDOWS = Field("use_sliding_window", bool, False, "Use sliding windows.")
# `only` of families without layer types, and of those without a window
NO_LAYER_TYPES = {"layer_types": (None,)}
NO_WINDOWS = {**NO_LAYER_TYPES, WINDOW_SIZE.name: (None,)}


def layer_types_field(otherwise: str) -> Field:
    """Return the config.json Field `layer_types`: full_attention or sliding_attention per layer,
    default null. `otherwise`: text for its help that says which layers slide if it is null.
    """
    kind = Annotated[list[Literal[FULL, SLIDING]] | None, MaxLen(kinds.MOST_LAYERS)]
    return Field("layer_types", kind, None, f"{FULL} or {SLIDING}, per layer; None: {otherwise}.")


def pattern_fields(every: int) -> tuple[Field, Field]:
    """Return the config.json Fields layer_types and sliding_window_pattern of a family in which
    every n-th layer has full attention and all others a window; `every`: the default n.
    """
    name = "sliding_window_pattern"
    help_text = "Every n-th layer has full attention, if layer_types is None."
    otherwise = f"all are sliding_attention but every {name}-th"
    return layer_types_field(otherwise), Field(name, kinds.LAYERS, every, help_text)


def pattern_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the sliding window of each layer in tokens (None: full attention), by layer_types or
    else by sliding_window_pattern n: layers n, 2n, ..., counted from 1, are full. Raises ValueError
    as `typed_windows`.
    """
    interval = config["sliding_window_pattern"]
    # numbered from 1: every n-th has full attention
    layers = range(1, config["num_hidden_layers"] + 1)
    return typed_windows(config, [SLIDING if i % interval else FULL for i in layers])


def alternating_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer in tokens (None: full attention): by layer_types, or else on
    layers 0, 2, 4, ... Raises ValueError as `typed_windows`.
    """
    layers = range(config["num_hidden_layers"])
    return typed_windows(config, [FULL if i % 2 else SLIDING for i in layers])


def uniform_windows(config: dict[str, Any], used: bool = True) -> list[int | None]:
    """Return the same window for every layer: the config's sliding_window in tokens if `used`, else
    None (full attention).
    """
    return [config[WINDOW_SIZE.name] if used else None] * config["num_hidden_layers"]


def typed_windows(
    config: dict[str, Any], otherwise: Sequence[str], used: bool = True
) -> list[int | None]:
    """Return the window of each layer in tokens: the config's sliding_window where the layer's type
    is sliding_attention and `used`, else None (full attention). The types are the config's
    `layer_types`, or `otherwise` if that is null. Raises ValueError if their number is not that of
    the layers, and if a layer slides without a window size.
    """
    layers, stated = config["num_hidden_layers"], config["layer_types"]
    of = list(otherwise if stated is None else stated)
    if len(of) != layers:
        entries = plural(len(of), "entry", "entries")
        raise ValueError(
            f"layer_types has {entries}, but num_hidden_layers is {layers}: set "
            f"{flag('layer_types')} to one per layer"
        )
    size = config[WINDOW_SIZE.name] if used else None
    # `used` is False: the file has a size and switches it off (Qwen2)
    if size is None and SLIDING in of:
        missing = f"{WINDOW_SIZE.name} is None" if used else f"{USE_WINDOWS.name} is False"
        sliding = plural(of.count(SLIDING), "layer")
        raise ValueError(
            f"layer_types has {sliding} of {SLIDING}, but {missing}: set "
            f"{flag(WINDOW_SIZE.name if used else USE_WINDOWS.name)}, or other types"
        )
    return [size if kind == SLIDING else None for kind in of]


def window_sizes(spec: ModelSpec) -> list[int | None]:
    """Return the window of each layer of a spec (None: full attention). Raises ValueError if a
    mixer is not plain attention.
    """
    return [expect(block.mixer, AttentionSpec, "mixer").window for block in spec.blocks]


def first_window(spec: ModelSpec) -> int | None:
    """Return the window in tokens of the first layer that has one (the field sliding_window); None
    if no layer has.
    """
    return next((size for size in window_sizes(spec) if size is not None), None)


def layer_types(spec: ModelSpec) -> list[str]:
    """Return the field layer_types for a spec: "sliding_attention" for each layer with a window,
    else "full_attention".
    """
    return [FULL if size is None else SLIDING for size in window_sizes(spec)]


# Other fields and pieces of the spec.

INITIALIZER_RANGE = Field(
    "initializer_range",
    NonNegative,
    0.02,
    "Standard deviation of initial weights; output projections get it divided by sqrt(2 * layers).",
)


def vocab_size(default: int) -> Field:
    """Return the config.json Field `vocab_size`, the first one of each family, with this
    default.
    """
    help_text = "Rows of the embedding and of the head, tokens."
    return Field("vocab_size", kinds.VOCABULARY, default, help_text)


def eps(name: str, default: float) -> Field:
    """Return the config.json Field for the epsilon of the norms, which the family calls `name`,
    with this default; the command line also accepts `norm_eps`.
    """
    help_text = "Added to the variance inside every norm."
    return Field(name, NonNegative, default, help_text, common=("norm_eps",))


STANDARD = {
    field.name: field
    for field in (
        Field("hidden_size", kinds.WIDTH, help="Width of the residual stream."),
        Field("intermediate_size", kinds.WIDTH, help="Width of the feed-forward layer."),
        Field("num_hidden_layers", kinds.LAYERS, help="Decoder blocks."),
        Field("num_attention_heads", kinds.HEADS, help="Query heads."),
        Field(
            "hidden_act",
            ACTIVATION,
            help="Activation of the feed-forward layer: silu, gelu (the exact erf form), gelu_new "
            "or gelu_pytorch_tanh (the tanh form), relu.",
        ),
        Field("max_position_embeddings", kinds.POSITIONS, help="Longest sequence, tokens."),
    )
}
"""Fields that most families have, by their usual names."""
ALIBI_LENGTH = "Maximum sequence length in tokens (ALiBi itself has no limit)."
FOUR_TIMES = "Width of the feed-forward layer; None: 4 times hidden_size."
TABLE_LENGTH = "Maximum sequence length in tokens: rows of the position embedding."


def standard(
    name: str, default: Any, family_name: str = "", *, aliased: bool = False, help: str = ""
) -> Field:
    """Return the config.json Field of STANDARD that is usually called `name`, with the family's
    `default` (None: null is allowed too). `family_name`: the family's name of it, if that is
    another one; the usual name then works on the command line and, if `aliased`, in a config.json.
    `help`: another help text.
    """
    field = STANDARD[name]
    usual = (name,) if family_name else ()
    return replace(
        field,
        name=family_name or name,
        kind=field.kind | None if default is None else field.kind,
        default=default,
        help=help or field.help,
        aliases=usual if aliased else (),
        common=() if aliased else usual,
    )


# our modules of what many files store as one
QKV = tuple(f"layers.{{}}.attn.{part}" for part in "qkv")
GATE_UP = tuple(f"layers.{{}}.mlp.{part}" for part in ("gate", "up"))
LAYER_NORM_EPS = eps("layer_norm_epsilon", 1e-5)
# tie_word_embeddings, by the default of the family
TIED = {
    default: Field("tie_word_embeddings", bool, default, "Head and embedding are one parameter.")
    for default in (False, True)
}


def last_fields(eps: Field, tied: bool) -> tuple[Field, ...]:
    """Return the three config.json Fields that end each family's list: the norms' `eps`,
    initializer_range, and tie_word_embeddings, whose default is `tied`.
    """
    return eps, INITIALIZER_RANGE, TIED[tied]


def layer_norm(config: dict[str, Any], eps: Field = LAYER_NORM_EPS) -> NormSpec:
    """Return the spec of a LayerNorm with weight and bias, whose epsilon is the value of the field
    `eps` in the config.
    """
    return NormSpec("layernorm", float(config[eps.name]), bias=True)


def head_size(config: dict[str, Any], fields: Sequence[Field], instead: str = "") -> int:
    """Return hidden_size / num_attention_heads of a config, whose family has `fields`. Raises
    ValueError if it is not an integer, with both numbers, the option to set and `instead`, a text
    that names an alternative.
    """
    family_names = names(fields)
    hidden, heads = family_names["hidden_size"], family_names["num_attention_heads"]
    width, number = config[hidden], config[heads]
    if width % number:
        raise ValueError(
            f"{hidden} ({width}) is not divisible by {heads} ({number}): set {flag(heads)} to a "
            f"divisor, such as {divisor(width, near=number)}{instead}"
        )
    return width // number


def biased_attention(
    config: dict[str, Any], fields: Sequence[Field], bias: bool = True, **more: Any
) -> AttentionSpec:
    """Return the attention spec of the heads that the family's `fields` state, as many for keys and
    values as for queries. `bias`: q, k, v and the output projection have biases. `more`: other
    fields of AttentionSpec. Raises ValueError as `head_size`.
    """
    heads = config[names(fields)["num_attention_heads"]]
    biases = dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), bias)
    options: dict[str, Any] = {"heads": heads, "kv_heads": heads, **biases, **more}
    return AttentionSpec(head_size=head_size(config, fields), **options)


def plain_mlp(config: dict[str, Any], fields: Sequence[Field], bias: bool = True) -> MLPSpec:
    """Return the spec of an ungated feed-forward layer, by the family's `fields`. An intermediate
    size of None is 4 times the hidden size; `bias`: both projections have biases.
    """
    family_names = names(fields)
    inner = config[family_names["intermediate_size"]]
    size = 4 * config[family_names["hidden_size"]] if inner is None else inner
    return MLPSpec(size, False, activation(config, family_names["hidden_act"]), bias)


def make_spec(
    config: dict[str, Any],
    fields: Sequence[Field],
    blocks: Sequence[BlockSpec],
    embedding: EmbeddingSpec | None = None,
    blanks: BlankInfilling | None = None,
) -> ModelSpec:
    """Return the ModelSpec of these blocks with the embedding, head, length and initializer range
    that `fields` state; the final norm is that of the first block. `embedding` unset: a plain token
    table.
    """
    family_names = names(fields)
    return ModelSpec(
        hidden_size=config[family_names["hidden_size"]],
        embedding=EmbeddingSpec(config[family_names["vocab_size"]])
        if embedding is None
        else embedding,
        runs=group_repeats(blocks),
        final_norm=blocks[0].norm,
        head=LMHeadSpec(tied=config["tie_word_embeddings"]),
        max_position_embeddings=config[family_names["max_position_embeddings"]],
        initializer_range=float(config[family_names["initializer_range"]]),
        blanks=blanks,
    )


def write(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json fields that determine the spec, under the family's names: those common
    to all families (sizes, heads, experts of the first MoE layer), and those that `family.write`
    states itself, which win. Raises ValueError for a spec with components that the family cannot
    express.
    """
    family_names, stated = names(family.fields), family.write(spec)
    left = {name for name, field in family_names.items() if field not in stated}
    written = {family_names[name]: value(spec) for name, value in WRITTEN.items() if name in left}
    if sparse := sparse_layers(spec):
        experts = WRITTEN_EXPERTS.items()
        written |= {family_names[name]: value(sparse[0]) for name, value in experts if name in left}
    for name in {"hidden_act", "rope_parameters"} & left:
        written[family_names[name]] = (_write_act if name == "hidden_act" else _write_rope)(
            family, spec
        )
    return written | stated


def _write_act(family: Family, spec: ModelSpec) -> str:
    """Return the value of hidden_act for a spec: the family's default name if that denotes the
    first layer's activation (gelu_new), else transformers' usual name of it.
    """
    stated = names(family.fields)["hidden_act"]
    default = next(field.default for field in family.fields if field.name == stated)
    ours = spec.blocks[0].mlp.activation
    return default if ACTIVATIONS.get(default) == ours else activation_name(ours)


def _write_rope(family: Family, spec: ModelSpec) -> dict[str, Any]:
    """Return the field rope_parameters for the first layer that has positions, always in
    transformers 5's spelling; `spell_field` translates it into a file's own when fields are edited.
    Raises ValueError if these are not rope, or no layer has positions.
    """
    known = (block.mixer.positions for block in spec.blocks)
    # Cohere2: the first layers with positions are those with a window
    positions = expect(next((p for p in known if p is not None), None), RopeSpec, "positions")
    part = rope.PART.name in names(family.fields)
    return rope.write(positions, attention(spec).head_size if part else None)


# Common name of a field -> how a new config.json states it.
WRITTEN: dict[str, Callable[[ModelSpec], Any]] = {
    "vocab_size": lambda spec: spec.vocab_size,
    "hidden_size": lambda spec: spec.hidden_size,
    "num_hidden_layers": lambda spec: spec.layers,
    "max_position_embeddings": lambda spec: spec.max_position_embeddings,
    "norm_eps": lambda spec: spec.blocks[0].norm.eps,
    "initializer_range": lambda spec: spec.initializer_range,
    "tie_word_embeddings": lambda spec: spec.head.tied,
    "num_attention_heads": lambda spec: attention(spec).heads,
    "num_key_value_heads": lambda spec: attention(spec).kv_heads,
    "head_dim": lambda spec: attention(spec).head_size,
    "attention_bias": lambda spec: attention(spec).q_bias,
    "clip_qkv": lambda spec: attention(spec).clip,
    "sliding_window": first_window,
    "layer_types": layer_types,
    # where dense layers and experts differ, the field is of the dense ones
    "intermediate_size": lambda spec: (dense_layers(spec) or sparse_layers(spec))[0].size,
    "mlp_bias": lambda spec: mlp(spec).bias,
    "decoder_sparse_step": lambda spec: 1,
    "mlp_only_layers": lambda spec: [i for i, b in enumerate(spec.blocks) if not b.mlp.experts],
}
WRITTEN_EXPERTS: dict[str, Callable[[MoESpec], Any]] = {
    "num_local_experts": lambda layer: layer.number,
    "num_experts_per_tok": lambda layer: layer.per_token,
    "moe_intermediate_size": lambda layer: layer.size,
    "norm_topk_prob": lambda layer: layer.router.normalise,
    "router_aux_loss_coef": lambda layer: layer.router.aux_loss_coef,
}


def map_blocks(spec: ModelSpec, change: Callable[[BlockSpec], BlockSpec]) -> ModelSpec:
    """Return the spec with each block replaced by `change(block)`."""
    return replace(spec, runs=group_repeats([change(block) for block in spec.blocks]))


def attention(spec: ModelSpec) -> AttentionSpec:
    """Return the attention spec of the first layer. Raises ValueError if that layer has latent
    attention.
    """
    return expect(spec.blocks[0].mixer, AttentionSpec, "mixer")


def mlp(spec: ModelSpec) -> MLPSpec:
    """Return the first layer's MLPSpec. Raises ValueError if it is an MoE layer."""
    return expect(spec.blocks[0].mlp, MLPSpec, "mlp")


def dense_layers(spec: ModelSpec) -> list[MLPSpec]:
    """Return the spec of every feed-forward layer without experts, in order."""
    return [expect(b.mlp, MLPSpec, "mlp") for b in spec.blocks if not b.mlp.experts]


def sparse_layers(spec: ModelSpec) -> list[MoESpec]:
    """Return the spec of every MoE layer, in order."""
    return [expect(b.mlp, MoESpec, "mlp") for b in spec.blocks if b.mlp.experts]
