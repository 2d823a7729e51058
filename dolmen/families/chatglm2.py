"""ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as code of their folders has them (2406.12793): GLM-4
(glm.py) under other names, q, k, v one tensor. Their model_type is that of ChatGLM-6B, another
model (chatglm.py).

[gMASK] and sop stand in front of a text. The `inv_freq` that files hold is not used by that code.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.families import common, glm_like, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, Real, optional
from dolmen.model.tree import Attention, Block, Mlp, Norm, Rope, Tree

THETA = 10000.0  # times rope_ratio
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
        "Times 10,000: base of the geometric series of wavelengths.",
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
        positions=Rope(size // 2, THETA * config["rope_ratio"], interleaved=True),
    )
    norm = Norm("rmsnorm", float(config["layernorm_epsilon"]))
    blocks = [Block(mixer, Mlp(config["ffn_hidden_size"]), norm)] * config["num_layers"]
    return common.tree(config, FIELDS, blocks)


def new(tree: Tree) -> dict[str, Any]:
    mixer = common.attention(tree)
    return {
        **common.new(tree, FIELDS),
        "ffn_hidden_size": common.mlp(tree).size,
        "num_attention_heads": mixer.heads,
        "multi_query_attention": mixer.kv_heads < mixer.heads,
        "multi_query_group_num": mixer.kv_heads,
        "kv_channels": mixer.head_size,
        "add_qkv_bias": mixer.q_bias,
        "rope_ratio": expect(mixer.positions, Rope, "positions").theta / THETA,
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
