"""What BERT and RoBERTa share: encoders, whose tokens see both ways and whose head says what a
masked token was.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dolmen.families import common
from dolmen.families.family import ACTIVATION, Field, activation, activation_name, expect
from dolmen.families.family import BESIDE as SPECIAL
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.tree import (
    Attention,
    Block,
    Embedding,
    Head,
    Mlp,
    Sequential,
    Table,
    Transform,
    Tree,
)
from dolmen.model.tree.mlp import Activation

EPS = common.eps("layer_norm_eps", 1e-12)
FIELDS = (
    common.vocab_size(30522),
    Field("hidden_size", kinds.WIDTH, 768, "Width of the residual stream."),
    Field("num_hidden_layers", kinds.LAYERS, 12, "Encoder blocks."),
    Field("num_attention_heads", kinds.HEADS, 12, "Heads."),
    Field("intermediate_size", kinds.WIDTH, 3072, "Width of the feed-forward layer."),
    Field(
        "hidden_act",
        ACTIVATION,
        "gelu",
        "Activation of the feed-forward layer and of the head: gelu (the exact erf form), "
        "gelu_new, relu, silu.",
    ),
    Field("max_position_embeddings", kinds.POSITIONS, 512, "Rows of the table of positions."),
    Field("type_vocab_size", kinds.VOCABULARY, 2, "Types of tokens: of which text one is."),
    *common.ends(EPS, tied=True),
)
ONLY = {
    "is_decoder": (False, None),
    "position_embedding_type": ("absolute", None),
    "embedding_size": (None,),
}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BESIDE = {**SPECIAL, **DROPOUT}
HARMLESS = ("classifier_dropout", *DROPOUT)
LAYER = {
    "attention.self.query": "attn.q",
    "attention.self.key": "attn.k",
    "attention.self.value": "attn.v",
    "attention.output.dense": "attn.o",
    "attention.output.LayerNorm": "attn_norm",
    "intermediate.dense": "mlp.up",
    "output.dense": "mlp.down",
    "output.LayerNorm": "mlp_norm",
}
EMBEDDINGS = {
    "word_embeddings": "embed",
    "position_embeddings": "positions",
    "token_type_embeddings": "types",
    "LayerNorm": "embed_norm",
}


def read(
    config: dict[str, Any],
    padding: int | None = None,
    follows: bool = False,
    head_activation: Activation | None = None,
) -> Tree:
    """The tree of a config.json; `padding`: a token that no position counts, behind whose row in
    the table of positions that of the first is; `follows`: it says of two texts whether the second
    follows; `head_activation`: unset, that of the layers. Raises ValueError naming the field.
    """
    offset = 0 if padding is None else padding + 1
    if not config["tie_word_embeddings"]:
        raise ValueError(
            "tie_word_embeddings is False: a file of transformers then has two biases of logits, "
            "of which one is dead; dolmen has the head that is the embedding alone"
        )
    heads, norm = config["num_attention_heads"], common.layer_norm(config, EPS)
    act, longest = activation(config, "hidden_act"), config["max_position_embeddings"] - offset
    if longest < 1:
        raise ValueError(
            f"max_position_embeddings ({longest + offset}) has no row behind the first {offset}, "
            "which no position has: use a larger --model.max-position-embeddings"
        )
    mixer = Attention(
        heads,
        heads,
        common.head_size(config, FIELDS),
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
        mask="both",
    )
    mlp = Mlp(config["intermediate_size"], False, act, True)
    block = Block(mixer, mlp, norm, Sequential("post"))
    embedding = Embedding(
        config["vocab_size"],
        norm=norm,
        positions=Table(longest, offset, padding=padding),
        types=config["type_vocab_size"],
    )
    tree = common.tree(config, FIELDS, [block] * config["num_hidden_layers"], embedding)
    transform = Transform(head_activation or act, norm)
    head = replace(tree.head, bias=True, transform=transform, follows=follows)
    return replace(tree, final_norm=None, head=head, max_position_embeddings=longest)


def new(tree: Tree) -> dict[str, Any]:
    """The fields that both have."""
    mlp, table = common.mlp(tree), expect(tree.embedding.positions, Table, "positions")
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": common.attention(tree).heads,
        "intermediate_size": mlp.size,
        "hidden_act": activation_name(mlp.activation),
        "max_position_embeddings": table.length + table.offset,
        "type_vocab_size": tree.embedding.types,
    }


def follows(tree: Tree) -> bool:
    """See Head. Raises ValueError for another head."""
    return expect(tree.head, Head, "head").follows


def rules(prefix: str, head: Mapping[str, str], logits: Rename) -> list[Rule]:
    """Names of weights: of the body under `prefix`, of the `head`, and of its `logits`."""
    return [
        *(Rename(f"{prefix}.embeddings.{hf}", ours) for hf, ours in EMBEDDINGS.items()),
        *(
            Rename(f"{prefix}.encoder.layer.{{}}.{hf}", f"layers.{{}}.{ours}")
            for hf, ours in LAYER.items()
        ),
        *(Rename(hf, ours) for hf, ours in head.items()),
        logits,
    ]
