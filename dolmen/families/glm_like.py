"""What the GLMs before GLM-4 share (chatglm.py, chatglm2.py, glm_10b.py, glm_130b.py): names of
fields, biased attention under a prefix mask, and names of tensors.
"""

from typing import Any

from dolmen.families import common
from dolmen.families.family import Field
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.model.tree import Attention, Rope, Tree


def sizes(width: int, layers: int, heads: int) -> tuple[Field, ...]:
    """What there is of each, where a config.json does not say."""
    return (
        Field("hidden_size", kinds.WIDTH, width, "Width of the residual stream."),
        Field("num_layers", kinds.LAYERS, layers, "Decoder blocks.", common=("num_hidden_layers",)),
        Field("num_attention_heads", kinds.HEADS, heads, "Heads."),
    )


def longest(default: int, what: str = "Longest sequence, tokens.") -> Field:
    common_name = ("max_position_embeddings",)
    return Field("max_sequence_length", kinds.POSITIONS, default, what, common=common_name)


def attention(
    config: dict[str, Any], fields: tuple[Field, ...], positions: Rope | None = None
) -> Attention:
    """All projections have biases; the tokens of a prefix see one another."""
    heads, size = config["num_attention_heads"], common.head_size(config, fields)
    return Attention(
        heads,
        heads,
        size,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
        positions=positions,
        mask="prefix",
    )


def rules(
    tree: Tree,
    embedding: str = "transformer.word_embeddings",
    encoder: str = "transformer.",
    attention: str = "attention.",
    head: str = "lm_head",
    packed: tuple[int, tuple[int, int, int]] | None = None,
    first: str | tuple[str, str] = "up",
    more: tuple[Rule, ...] = (),
) -> list[Rule]:
    """`packed`: groups and counts of what holds q, k and v; None: each head has its three. `first`:
    what dense_h_to_4h holds of the feed-forward layer, one matrix or two halves. `more`: of what
    lies beside the embedding.
    """
    layer, ours = f"{encoder}layers.{{}}.", "layers.{}."
    groups, counts = packed or (common.attention(tree).heads, (1, 1, 1))
    into = layer + "mlp.dense_h_to_4h"
    return [
        Rename(embedding, "embed"),
        *more,
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + attention + "query_key_value", common.QKV, groups, counts),
        Rename(layer + attention + "dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Rename(into, f"{ours}mlp.{first}")
        if isinstance(first, str)
        else Split(into, tuple(f"{ours}mlp.{half}" for half in first), 1, (1, 1)),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename(encoder + "final_layernorm", "final_norm"),
        Rename(head, "head"),
    ]
