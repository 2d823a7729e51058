"""Fields and spec pieces that every family has under its own names: vocabulary, norm eps,
initializer range, tied head, head size. `names` of family.py maps the common names to each family's
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dolmen.core.config import NonNegative
from dolmen.core.messages import divisor
from dolmen.families.family import Field, activation, expect, flag, names
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
    group_repeats,
)

INITIALIZER_RANGE = Field(
    "initializer_range",
    NonNegative,
    0.02,
    "Standard deviation of initial weights; output projections get it divided by sqrt(2 * layers).",
)


def vocab_size(default: int) -> Field:
    """Return the field `vocab_size`, the first one of each family, with its default."""
    help_text = "Rows of the embedding and of the head, tokens."
    return Field("vocab_size", kinds.VOCABULARY, default, help_text)


def eps(name: str, default: float) -> Field:
    """Return the field of the norms' epsilon under the family's `name`, with its default."""
    help_text = "Added to the variance inside every norm."
    return Field(name, NonNegative, default, help_text, common=("norm_eps",))


QKV = tuple(f"layers.{{}}.attn.{part}" for part in "qkv")  # ours, of what stores them as one
LAYER_NORM_EPS = eps("layer_norm_epsilon", 1e-5)
# tie_word_embeddings, by the default of the family
TIED = {
    default: Field("tie_word_embeddings", bool, default, "Head and embedding are one parameter.")
    for default in (False, True)
}


def last_fields(eps: Field, tied: bool) -> tuple[Field, ...]:
    """Return the last fields of each family: the norms' `eps`, initializer_range, and
    tie_word_embeddings, whose default is `tied`.
    """
    return eps, INITIALIZER_RANGE, TIED[tied]


def layer_norm(config: dict[str, Any], eps: Field = LAYER_NORM_EPS) -> NormSpec:
    """Return the spec of a LayerNorm with bias, whose epsilon is the config's field `eps`."""
    return NormSpec("layernorm", float(config[eps.name]), bias=True)


def head_size(config: dict[str, Any], fields: Sequence[Field], instead: str = "") -> int:
    """Return hidden_size / num_attention_heads. Raises ValueError with both numbers, the option to
    set and the alternative `instead` if it is not an integer.
    """
    own = names(fields)
    hidden, heads = own["hidden_size"], own["num_attention_heads"]
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
    own = names(fields)
    inner = config[own["intermediate_size"]]
    size = 4 * config[own["hidden_size"]] if inner is None else inner
    return MLPSpec(size, False, activation(config, own["hidden_act"]), bias)


def make_spec(
    config: dict[str, Any],
    fields: Sequence[Field],
    blocks: Sequence[BlockSpec],
    embedding: EmbeddingSpec | None = None,
    blanks: BlankInfilling | None = None,
) -> ModelSpec:
    """Return the ModelSpec of these blocks with the embedding, head, length and initializer range
    that `fields` state; the final norm is that of the first block. `embedding` unset: a plain token
    table. Raises ValueError for an `initializer_range` that is not finite.
    """
    own = names(fields)
    return ModelSpec(
        hidden_size=config[own["hidden_size"]],
        embedding=EmbeddingSpec(config[own["vocab_size"]]) if embedding is None else embedding,
        runs=group_repeats(blocks),
        final_norm=blocks[0].norm,
        head=LMHeadSpec(tied=config["tie_word_embeddings"]),
        max_position_embeddings=config[own["max_position_embeddings"]],
        initializer_range=float(config[own["initializer_range"]]),
        blanks=blanks,
    )


def write(spec: ModelSpec, fields: Sequence[Field]) -> dict[str, Any]:
    """Return the fields outside the layers, under the names of `fields`: sizes, norm eps, tied
    head.
    """
    stated = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.layers,
        "max_position_embeddings": spec.max_position_embeddings,
        "norm_eps": spec.blocks[0].norm.eps,
        "initializer_range": spec.initializer_range,
        "tie_word_embeddings": spec.head.tied,
    }
    own = names(fields)
    return {own[name]: value for name, value in stated.items() if name in own}


def map_blocks(spec: ModelSpec, change: Callable[[BlockSpec], BlockSpec]) -> ModelSpec:
    """Return the spec with each block replaced by `change(block)`."""
    return replace(spec, runs=group_repeats([change(block) for block in spec.blocks]))


def attention(spec: ModelSpec) -> AttentionSpec:
    """Return the first layer's attention spec. Raises ValueError if its mixer is latent
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
