"""ChatGLM-6B, and ChatGLM2, ChatGLM3 and GLM-4-9B as the code of their folders computes them."""

import math
from collections.abc import Mapping
from typing import Any, Literal, get_args

from dolmen.core.config import AboveZero
from dolmen.families import common, glm, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.model.spec import (
    AttentionSpec,
    BlankInfilling,
    BlankMask,
    BlockSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    RopeSpec,
    SequentialResidual,
)
from dolmen.model.spec.positions import LinearScaling

# ChatGLM-6B (2406.12793, section 2; 2210.02414): a GLM with DeepNorm and rope by two position
# streams, each for half of a head; prefix and positions follow from special tokens
# (spec/positions.py).
#
# - DeepNorm's number is that of 28 layers, however many there are: its code makes each block so.
# - The angles of rope are rounded to half precision, whatever it computes in.
# - The head is the embedding unless config.json unties it, and files hold both.
# - Until version 1.1 config.json did not say which token [gMASK] is. Code of then has the numbers
#   in it, takes [MASK] first, and lets <sop> behind [gMASK] keep its index.

ALPHA = math.sqrt(2 * 28)
BUILT_IN = {150528: {"mask": 150000, "gmask": 150001}, 130528: {"mask": 130000, "gmask": 130001}}
EPS = common.eps("layernorm_epsilon", 1e-5)
CHATGLM_FIELDS = (
    common.vocab_size(150528),
    *glm.sizes(4096, 28, 32),
    common.standard("intermediate_size", 16384, "inner_hidden_size"),
    glm.longest(2048),
    Field(
        "bos_token_id",
        kinds.SPECIAL_TOKENS["bos_token_id"],
        150004,
        "<sop>, start of the text that fills a blank.",
    ),
    Field("mask_token_id", kinds.TOKEN | None, None, "[MASK], a blank of some words."),
    Field(
        "gmask_token_id",
        kinds.TOKEN | None,
        None,
        "[gMASK], a blank at the end. None: positions of version 0.1.",
    ),
    *common.last_fields(EPS, tied=True),
    special_tokens.SPECIAL_TOKENS,
)


def read_chatglm(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a ChatGLM-6B config.json: two position streams, DeepNorm with the alpha of
    28 layers, a plain mlp.
    """
    positions = RopeSpec(common.head_size(config, CHATGLM_FIELDS), streams=2, halved=True)
    mixer = glm.attention(config, CHATGLM_FIELDS, positions)
    mlp = MLPSpec(config["inner_hidden_size"], gated=False, activation="gelu_tanh", bias=True)
    block = BlockSpec(
        mixer, mlp, common.layer_norm(config, EPS), SequentialResidual.deepnorm(ALPHA)
    )
    blocks = [block] * config["num_layers"]
    return common.make_spec(config, CHATGLM_FIELDS, blocks, blanks=_blanks(config))


def _blanks(config: dict[str, Any]) -> BlankInfilling:
    """Return the special tokens that mark blanks. Without gmask_token_id (before version 1.1) ids
    are those built into its code for the vocabulary size, [MASK] has priority, and <sop> keeps its
    index.
    """
    ids = special_tokens.special_ids(
        config, sop="bos_token_id", mask="mask_token_id", gmask="gmask_token_id"
    )
    if config["gmask_token_id"] is not None:
        return BlankInfilling(
            ids["sop"], (BlankMask("gmask", ids["gmask"]), BlankMask("mask", ids["mask"]))
        )
    # ids in the code of versions before 1.1, by vocabulary size
    for name, token in BUILT_IN.get(config["vocab_size"], {}).items():
        ids[name] = token if ids[name] is None else ids[name]
    # version 0.1
    of_gmask = BlankMask("gmask", ids["gmask"], "stays after <sop>")
    return BlankInfilling(ids["sop"], (BlankMask("mask", ids["mask"]), of_gmask))


def write_chatglm(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a ChatGLM-6B config.json that `common.write` does not state, the ids of
    special tokens; those of version 0.1 go to the field special_tokens.
    """
    blanks = expect(spec.blanks, BlankInfilling, "blanks")
    ids = {mask.name: mask.token for mask in blanks.masks}
    # versions from 1.1 on: ids are fields of config.json
    stated = all(mask.behind == "stays" for mask in blanks.masks)
    return {
        "bos_token_id": blanks.start,
        "mask_token_id": ids.get("mask") if stated else None,
        "gmask_token_id": ids.get("gmask") if stated else None,
        **special_tokens.special_tokens_field({} if stated else ids),
    }


def frame_chatglm(tokens: list[int], ids: Ids) -> list[int]:
    """Return prompt tokens followed by [gMASK] (if they have no mask token) and <sop>; unchanged if
    they contain <sop>.
    """
    if ids["sop"] in tokens:
        return tokens
    masked = {ids["gmask"], ids.get("mask")} & {*tokens}
    return [*tokens, *([] if masked else [ids["gmask"]]), ids["sop"]]


CHATGLM = Family(
    model_type="chatglm",
    title="ChatGLM-6B",
    architecture="ChatGLMForConditionalGeneration",
    in_transformers=False,
    read=read_chatglm,
    write=write_chatglm,
    rules=glm.glm_like_rules,
    fields=CHATGLM_FIELDS,
    frame=frame_chatglm,
    stores_tied_head=True,
    only={
        "position_encoding_2d": (True,),
        "quantization_bit": (0, None),
        "quantization_embeddings": (False, None),
        "pre_seq_len": (None,),
    },
    harmless="prefix_projection",
    extra_fields={**BESIDE, "position_encoding_2d": True},
    ignored=(r"transformer\.layers\.[0-9]+\.attention\.rotary_emb\.inv_freq",),
    remote_code=("configuration_chatglm", "modeling_chatglm", "tokenization_chatglm"),
)


# ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as their published code has them (2406.12793): GLM-4
# (glm.py) under other names, with q, k, v fused. Their model_type is "chatglm", as ChatGLM-6B's.
# A prompt starts with [gMASK] sop. The `inv_freq` stored in files is not used by that code.
# What a `rope_ratio` other than 1 does is known only from the code of each checkpoint:
#
#     positions   ChatGLM2-6B-32K divides them by it
#     base        ChatGLM3-6B-32K and -128K, GLM-4-9B: the base is 10,000 times as much
# `_name_or_path` identifies it. Without it "base" is assumed, with a warning; it can be stated
# as `"dolmen": {"rope_ratio_of": "positions"}`.

THETA = 10000.0
RatioOf = Literal["base", "positions"]
RATIO_OF = get_args(RatioOf)
NAMED = {"chatglm2": "positions", "chatglm3": "base", "glm-4": "base"}
"""Substring of `_name_or_path` -> what that checkpoint's code applies rope_ratio to."""
CHATGLM2_FIELDS = (
    Field(
        "padded_vocab_size",
        kinds.VOCABULARY,
        65024,
        "Rows of the embedding and of the head, tokens.",
        ("vocab_size",),
    ),
    common.standard("hidden_size", 4096),
    common.standard("intermediate_size", 13696, "ffn_hidden_size"),
    common.standard("num_hidden_layers", 28, "num_layers", aliased=True),
    common.standard("num_attention_heads", 32),
    Field("multi_query_attention", bool, False, "Multi-query (grouped-query) attention."),
    Field(
        "multi_query_group_num",
        kinds.HEADS,
        1,
        "Key and value heads, with multi_query_attention.",
        common=("num_key_value_heads",),
    ),
    Field(
        "kv_channels",
        kinds.WIDTH | None,
        128,
        "Size of one head. None: hidden_size / num_attention_heads.",
        common=("head_dim",),
    ),
    Field("add_qkv_bias", bool, False, "Biases on q, k and v."),
    common.standard("max_position_embeddings", 2048, "seq_length"),
    Field("rope_ratio", AboveZero, 1.0, "Context extension factor; see rope_ratio_of."),
    Field(
        "rope_ratio_of",
        RatioOf | None,
        None,
        "base: rope's base is 10,000 x rope_ratio (ChatGLM3, GLM-4). positions: positions are "
        "divided by rope_ratio (ChatGLM2-6B-32K).",
        ours=True,
    ),
    *common.last_fields(common.eps("layernorm_epsilon", 1e-5), tied=False),
    special_tokens.SPECIAL_TOKENS,
)


def read_chatglm2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a ChatGLM2, ChatGLM3 or GLM-4-9B config.json: RMSNorm, gated mlp, and rope
    over neighbours of the first half of each head.
    """
    heads, size = config["num_attention_heads"], config["kv_channels"]
    size = common.head_size(config, CHATGLM2_FIELDS) if size is None else size
    bias = config["add_qkv_bias"]
    mixer = AttentionSpec(
        heads,
        config["multi_query_group_num"] if config["multi_query_attention"] else heads,
        size,
        q_bias=bias,
        k_bias=bias,
        v_bias=bias,
        # rope acts on the first half of each head
        positions=_rope(size // 2, config["rope_ratio"], _ratio_of(config) or RATIO_OF[0]),
    )
    norm = NormSpec("rmsnorm", float(config["layernorm_epsilon"]))
    blocks = [BlockSpec(mixer, MLPSpec(config["ffn_hidden_size"]), norm)] * config["num_layers"]
    return common.make_spec(config, CHATGLM2_FIELDS, blocks)


def _rope(size: int, ratio: float, ratio_of: str) -> RopeSpec:
    """Return rope over `size` elements of a head, pairs of neighbours, where the config's
    rope_ratio divides the positions or multiplies the base, by `ratio_of`.
    """
    if ratio_of == "positions":
        return RopeSpec(size, THETA, LinearScaling(ratio), interleaved=True)
    return RopeSpec(size, THETA * ratio, interleaved=True)


def _ratio_of(config: Mapping[str, Any]) -> str | None:
    """Return what rope_ratio applies to, "base" or "positions": from the config, else from the name
    of the checkpoint; None if neither says. "base" for a ratio of 1, which changes nothing.
    """
    if config["rope_ratio"] == 1:
        return RATIO_OF[0]
    name = str(config.get("_name_or_path")).lower()
    known = next((of for part, of in NAMED.items() if part in name), None)
    return config["rope_ratio_of"] or known


def assume_chatglm2(config: Mapping[str, Any]) -> dict[str, str]:
    """Return {"rope_ratio_of": "base"} if neither the config nor the checkpoint's name gives what
    rope_ratio applies to; otherwise {}.
    """
    return {} if _ratio_of(config) else {"rope_ratio_of": RATIO_OF[0]}


def write_chatglm2(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a ChatGLM2 config.json that `common.write` does not state: grouped
    queries, biases and rope_ratio.
    """
    mixer = common.attention(spec)
    rope = expect(mixer.positions, RopeSpec, "positions")
    divided = rope.scaling.factor if isinstance(rope.scaling, LinearScaling) else None
    return {
        "multi_query_attention": mixer.kv_heads < mixer.heads,
        "add_qkv_bias": mixer.q_bias,
        "rope_ratio": divided or rope.theta / THETA,
        "rope_ratio_of": RATIO_OF[divided is not None],
    }


def chatglm2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of ChatGLM2: q, k, v fused one after the other, gate and up fused."""
    mixer = common.attention(spec)
    return glm.glm_like_rules(
        spec,
        "transformer.embedding.word_embeddings",
        "transformer.encoder.",
        "self_attention.",
        "transformer.output_layer",
        packed=(1, (mixer.heads // mixer.kv_heads, 1, 1)),
        first=("gate", "up"),
    )


def is_chatglm2_config(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json of model_type "chatglm" is of ChatGLM2 or later: it has fields
    that ChatGLM-6B lacks.
    """
    chatglm_fields = {
        "padded_vocab_size",
        "ffn_hidden_size",
        "kv_channels",
        "multi_query_attention",
    }
    return bool(
        {*chatglm_fields, "multi_query_group_num", "add_qkv_bias", "seq_length"} & config.keys()
    )


def frame_chatglm2(tokens: list[int], ids: Ids) -> list[int]:
    """Return a prompt's token ids with [gMASK] sop in front; unchanged if they contain [gMASK]."""
    return tokens if ids["gmask"] in tokens else [ids["gmask"], ids["sop"], *tokens]


CHATGLM2 = Family(
    model_type="chatglm",
    registry_name="chatglm2",
    matches=is_chatglm2_config,
    title="ChatGLM2-6B, ChatGLM3-6B and GLM-4-9B as code of their folders has them",
    architecture="ChatGLMForConditionalGeneration",
    in_transformers=False,
    read=read_chatglm2,
    write=write_chatglm2,
    rules=chatglm2_rules,
    fields=CHATGLM2_FIELDS,
    assume=assume_chatglm2,
    frame=frame_chatglm2,
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
        "apply_query_key_layer_scaling attention_softmax_in_fp32 bias_dropout_fusion "
        "classifier_dropout fp32_residual_connection hidden_dropout interleaved_qkv "
        "prefix_projection"
    ),
    extra_fields={**BESIDE, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ignored=(r"transformer\.rotary_pos_emb\.inv_freq",),
    remote_code=("configuration_chatglm", "modeling_chatglm", "tokenization_chatglm"),
)
