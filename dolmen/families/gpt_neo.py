"""GPT-Neo (Black et al., 2021): GPT-2 whose layers see all tokens before or a window of them, by
turns, whose scores are not scaled, and whose q, k, v have no biases.

The kinds of layers are stated twice, as patterns with a number of times (`attention_types`) and
layer by layer (`attention_layers`).
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dolmen.core.messages import counted
from dolmen.families import common, gpt_like, windows
from dolmen.families.family import ACTIVATION, BESIDE, Family, Field, activation_name, knob
from dolmen.families.gpt_like import LAYER, OURS
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Int, List, Row, Text, optional
from dolmen.model.tree import Attention, Block, Embedding, Table, Tree

GLOBAL, LOCAL = "global", "local"
KINDS = List(Text((GLOBAL, LOCAL)), 1, kinds.LAYERS.high)
LAYERS, TYPES = "attention_layers", "attention_types"


def _spell(config: Mapping[str, Any], wanted: Any) -> dict[str, Any]:
    """Kinds layer by layer are said in both forms."""
    return {LAYERS: wanted, TYPES: None if wanted is None else [[list(wanted), 1]]}


FIELDS = (
    common.vocab_size(50257),
    Field(
        "max_position_embeddings",
        kinds.POSITIONS,
        2048,
        "Longest sequence, tokens: rows of the table of positions.",
    ),
    Field("hidden_size", kinds.WIDTH, 2048, "Width of the residual stream."),
    Field("num_layers", kinds.LAYERS, 24, "Decoder blocks.", ("num_hidden_layers",)),
    Field("num_heads", kinds.HEADS, 16, "Heads.", ("num_attention_heads",)),
    Field(TYPES, optional(List(Row((KINDS, kinds.LAYERS)), 1, kinds.LAYERS.high))),
    Field(
        LAYERS,
        optional(KINDS),
        None,
        f"{GLOBAL} or {LOCAL}, per layer; None: by turns, {GLOBAL} first.",
        spell=_spell,
    ),
    Field(
        "window_size",
        Int(1, kinds.POSITIONS.high),
        256,
        f"Tokens a query sees in {LOCAL} layers, itself included.",
        common=("sliding_window",),
    ),
    Field(
        "intermediate_size",
        optional(kinds.WIDTH),
        None,
        "Width of the feed-forward layer; None: 4 hidden_size.",
    ),
    Field(
        "activation_function",
        ACTIVATION,
        "gelu_new",
        "Activation of the feed-forward layer: gelu_new, gelu (the exact erf form), silu, relu.",
        common=("hidden_act",),
    ),
    *common.ends(common.LAYER_NORM_EPS, tied=True),
)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Of each layer. Raises ValueError for another number of them, and where both forms differ."""
    layers, types, each = config["num_layers"], config[TYPES], config[LAYERS]
    if types is None:
        types = [[each or [(GLOBAL, LOCAL)[i % 2] for i in range(layers)], 1]]
    if (number := sum(len(pattern) * times for pattern, times in types)) != layers:
        raise ValueError(
            f"{TYPES} and {LAYERS} say {counted(number, 'layer')}, num_layers is {layers}: set "
            f"{knob(LAYERS)} to one per layer"
        )
    found = [kind for pattern, times in types for _ in range(times) for kind in pattern]
    if each not in (None, found):
        raise ValueError(f"{LAYERS} is not what {TYPES} says of each layer: state one of them")
    return found


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["num_heads"], common.head_size(config, FIELDS)
    mixer = Attention(heads, heads, size, o_bias=True, scale=1.0)
    block = Block(mixer, common.plain(config, FIELDS), common.layer_norm(config))
    blocks = [
        replace(
            block,
            mixer=replace(mixer, window=config["window_size"] if kind == LOCAL else None),
        )
        for kind in _kinds(config)
    ]
    table = Table(config["max_position_embeddings"])
    return common.tree(config, FIELDS, blocks, Embedding(config["vocab_size"], positions=table))


def new(tree: Tree) -> dict[str, Any]:
    mlp, sizes = common.mlp(tree), windows.sizes(tree)
    each = [GLOBAL if size is None else LOCAL for size in sizes]
    length, times = len(tree.runs[0].blocks), tree.runs[0].repeat
    types = [[each[:length], times]] if len(tree.runs) == 1 else [[each, 1]]
    return {
        **common.new(tree, FIELDS),
        "num_heads": common.attention(tree).heads,
        TYPES: types,
        LAYERS: each,
        "window_size": next((size for size in sizes if size is not None), 256),
        "intermediate_size": mlp.size,
        "activation_function": activation_name(mlp.activation),
    }


def rules(tree: Tree) -> list[Rule]:
    attention = LAYER + "attn.attention."
    return gpt_like.rules(
        [
            *(Rename(f"{attention}{part}_proj", f"{OURS}attn.{part}") for part in "qkv"),
            Rename(attention + "out_proj", OURS + "attn.o"),
            Rename(LAYER + "mlp.c_fc", OURS + "mlp.up"),
            Rename(LAYER + "mlp.c_proj", OURS + "mlp.down"),
        ]
    )


DROPOUT = ("resid_dropout", "embed_dropout", "attention_dropout")
FAMILY = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    scorer="GPTNeoForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    harmless=(*gpt_like.HARMLESS, *DROPOUT[:2], "classifier_dropout"),
    beside={**BESIDE, **dict.fromkeys(DROPOUT, 0.0)},
    ignored=(r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    prefix="transformer.",
)
