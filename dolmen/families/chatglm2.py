"""ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as code of their folders has them (2406.12793): GLM-4
(glm.py) under other names, q, k, v one tensor. Their model_type is that of ChatGLM-6B, another
model (chatglm.py).

[gMASK] and sop stand in front of a text. The `inv_freq` that files hold is not used by that code.

What `rope_ratio` does is said by that code alone, where it is not 1:

    positions   ChatGLM2-6B-32K divides them by it
    base        ChatGLM3-6B-32K and -128K, GLM-4-9B: the base is 10,000 times as much

`_name_or_path` tells them; without it the base is taken, aloud, and better stated:
`"dolmen": {"rope_ratio_of": "positions"}`.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.families import common, glm_like, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, Real, Text, optional
from dolmen.model.tree import Attention, Block, Mlp, Norm, Rope, Tree
from dolmen.model.tree.positions import Linear

THETA = 10000.0
RATIO_OF = ("base", "positions")
NAMED = {"chatglm2": "positions", "chatglm3": "base", "glm-4": "base"}
"""What is in `_name_or_path` of a checkpoint -> what its code does with rope_ratio."""
FIELDS = (
    Field(
        "padded_vocab_size",
        kinds.VOCABULARY,
        65024,
        "Rows of the embedding and of the head, tokens.",
        ("vocab_size",),
    ),
    Field("hidden_size", kinds.WIDTH, 4096, "Width of the residual stream."),
    Field(
        "ffn_hidden_size",
        kinds.WIDTH,
        13696,
        "Width of the feed-forward layer.",
        common=("intermediate_size",),
    ),
    Field("num_layers", kinds.LAYERS, 28, "Decoder blocks.", ("num_hidden_layers",)),
    Field("num_attention_heads", kinds.HEADS, 32, "Query heads."),
    Field("multi_query_attention", Flag(), False, "There are fewer key and value heads."),
    Field(
        "multi_query_group_num",
        kinds.HEADS,
        1,
        "Key and value heads, with multi_query_attention.",
        common=("num_key_value_heads",),
    ),
    Field(
        "kv_channels",
        optional(kinds.WIDTH),
        128,
        "Size of one head. None: hidden_size / num_attention_heads.",
        common=("head_dim",),
    ),
    Field("add_qkv_bias", Flag(), False, "Biases on q, k and v."),
    Field(
        "seq_length",
        kinds.POSITIONS,
        2048,
        "Longest sequence, tokens.",
        common=("max_position_embeddings",),
    ),
    Field(
        "rope_ratio",
        Real(0, above=True),
        1.0,
        "How the context is extended; see rope_ratio_of.",
    ),
    Field(
        "rope_ratio_of",
        optional(Text(RATIO_OF)),
        None,
        "base: rope's is 10,000 x rope_ratio (ChatGLM3, GLM-4), or positions: they are divided by "
        "it (ChatGLM2-6B-32K).",
        ours=True,
    ),
    *common.ends(common.eps("layernorm_epsilon", 1e-5), tied=False),
    special_tokens.SPECIAL_TOKENS,
)


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["num_attention_heads"], config["kv_channels"]
    size = common.head_size(config, FIELDS) if size is None else size
    bias = config["add_qkv_bias"]
    mixer = Attention(
        heads,
        config["multi_query_group_num"] if config["multi_query_attention"] else heads,
        size,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        positions=_rope(size // 2, config["rope_ratio"], _ratio_of(config) or RATIO_OF[0]),
    )
    norm = Norm("rmsnorm", float(config["layernorm_epsilon"]))
    blocks = [Block(mixer, Mlp(config["ffn_hidden_size"]), norm)] * config["num_layers"]
    return common.tree(config, FIELDS, blocks)


def _rope(size: int, ratio: float, ratio_of: str) -> Rope:
    if ratio_of == "positions":
        return Rope(size, THETA, Linear(ratio), interleaved=True)
    return Rope(size, THETA * ratio, interleaved=True)


def _ratio_of(config: Mapping[str, Any]) -> str | None:
    """What is stated, or said by a checkpoint's name; None where nothing says it. Of 1 it is all
    one.
    """
    if config["rope_ratio"] == 1:
        return RATIO_OF[0]
    name = str(config.get("_name_or_path")).lower()
    known = next((of for part, of in NAMED.items() if part in name), None)
    return config["rope_ratio_of"] or known


def taken(config: Mapping[str, Any]) -> dict[str, str]:
    """What rope_ratio does, where nothing says it."""
    return {} if _ratio_of(config) else {"rope_ratio_of": RATIO_OF[0]}


def new(tree: Tree) -> dict[str, Any]:
    mixer = common.attention(tree)
    rope = expect(mixer.positions, Rope, "positions")
    divided = rope.scaling.factor if isinstance(rope.scaling, Linear) else None
    return {
        **common.new(tree, FIELDS),
        "ffn_hidden_size": common.mlp(tree).size,
        "num_attention_heads": mixer.heads,
        "multi_query_attention": mixer.kv_heads < mixer.heads,
        "multi_query_group_num": mixer.kv_heads,
        "kv_channels": mixer.head_size,
        "add_qkv_bias": mixer.q_bias,
        "rope_ratio": divided or rope.theta / THETA,
        "rope_ratio_of": RATIO_OF[divided is not None],
    }


def rules(tree: Tree) -> list[Rule]:
    mixer = common.attention(tree)
    return glm_like.rules(
        tree,
        "transformer.embedding.word_embeddings",
        "transformer.encoder.",
        "self_attention.",
        "transformer.output_layer",
        packed=(1, (mixer.heads // mixer.kv_heads, 1, 1)),
        first=("gate", "up"),
    )


def tells(config: Mapping[str, Any]) -> bool:
    """By fields that ChatGLM-6B has not."""
    own = {"padded_vocab_size", "ffn_hidden_size", "kv_channels", "multi_query_attention"}
    return bool({*own, "multi_query_group_num", "add_qkv_bias", "seq_length"} & config.keys())


def framed(tokens: list[int], ids: Ids) -> list[int]:
    return tokens if ids["gmask"] in tokens else [ids["gmask"], ids["sop"], *tokens]


FAMILY = Family(
    model_type="chatglm",
    called="chatglm2",
    tells=tells,
    architecture="ChatGLMForConditionalGeneration",
    native=False,
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    taken=taken,
    framed=framed,
    only={
        "rmsnorm": (True,),
        "add_bias_linear": (False,),
        "post_layer_norm": (True,),
        "original_rope": (True,),
        "apply_residual_connection_post_layernorm": (False,),
        "quantization_bit": (0, None),
        "pre_seq_len": (None,),
    },
    harmless=(
        "apply_query_key_layer_scaling",
        "attention_softmax_in_fp32",
        "bias_dropout_fusion",
        "classifier_dropout",
        "fp32_residual_connection",
        "hidden_dropout",
        "interleaved_qkv",
        "prefix_projection",
    ),
    beside={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
    code=("configuration_chatglm", "modeling_chatglm", "tokenization_chatglm"),
)
