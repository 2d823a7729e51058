"""ChatGLM-6B (2406.12793, section 2; 2210.02414): a GLM whose heads rope turns by two streams of
positions, half each, in DeepNorm's arrangement; its prefix, and where its tokens stand, are known
by special tokens (tree/blanks.py).

- DeepNorm's number is that of 28 layers, however many there are: its code makes each block so.
- The angles of rope are rounded to half precision, whatever it computes in.
- The head is the embedding unless config.json says not, and files hold both.
- Until version 1.1 config.json did not say which token [gMASK] is. Code of then has the numbers
  in it, takes [MASK] first, and lets <sop> behind [gMASK] keep its index.
"""

import math
from typing import Any

from dolmen.families import common, glm_like, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.files import kinds
from dolmen.files.schema import optional
from dolmen.model.tree import (
    Blanks,
    Block,
    Mask,
    Mlp,
    Rope,
    Sequential,
    Tree,
)

ALPHA = math.sqrt(2 * 28)
BUILT_IN = {150528: {"mask": 150000, "gmask": 150001}, 130528: {"mask": 130000, "gmask": 130001}}
EPS = common.eps("layernorm_epsilon", 1e-5)
FIELDS = (
    common.vocab_size(150528),
    *glm_like.sizes(4096, 28, 32),
    Field(
        "inner_hidden_size",
        kinds.WIDTH,
        16384,
        "Width of the feed-forward layer.",
        common=("intermediate_size",),
    ),
    glm_like.longest(2048),
    Field(
        "bos_token_id",
        kinds.SPECIAL_TOKENS["bos_token_id"],
        150004,
        "<sop>, which begins what fills a blank.",
    ),
    Field("mask_token_id", optional(kinds.TOKEN), None, "[MASK], a blank of some words."),
    Field(
        "gmask_token_id",
        optional(kinds.TOKEN),
        None,
        "[gMASK], a blank at the end. None: positions are those of version 0.1.",
    ),
    *common.ends(EPS, tied=True),
    special_tokens.SPECIAL_TOKENS,
)


def read(config: dict[str, Any]) -> Tree:
    turned = Rope(common.head_size(config, FIELDS), streams=2, halved=True)
    mixer = glm_like.attention(config, FIELDS, turned)
    mlp = Mlp(config["inner_hidden_size"], gated=False, activation="gelu_tanh", bias=True)
    block = Block(
        mixer,
        mlp,
        common.layer_norm(config, EPS),
        Sequential.deepnorm(ALPHA),
    )
    blocks = [block] * config["num_layers"]
    return common.tree(config, FIELDS, blocks, blanks=_blanks(config))


def _blanks(config: dict[str, Any]) -> Blanks:
    ids = special_tokens.said(
        config, sop="bos_token_id", mask="mask_token_id", gmask="gmask_token_id"
    )
    if config["gmask_token_id"] is not None:
        return Blanks(ids["sop"], (Mask("gmask", ids["gmask"]), Mask("mask", ids["mask"])))
    for name, token in BUILT_IN.get(config["vocab_size"], {}).items():
        ids[name] = token if ids[name] is None else ids[name]
    of_gmask = Mask("gmask", ids["gmask"], "stays after <sop>")
    return Blanks(ids["sop"], (Mask("mask", ids["mask"]), of_gmask))


def new(tree: Tree) -> dict[str, Any]:
    blanks = expect(tree.blanks, Blanks, "blanks")
    ids = {mask.name: mask.token for mask in blanks.masks}
    stated = all(mask.behind == "stays" for mask in blanks.masks)
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": common.attention(tree).heads,
        "inner_hidden_size": common.mlp(tree).size,
        "bos_token_id": blanks.start,
        "mask_token_id": ids.get("mask") if stated else None,
        "gmask_token_id": ids.get("gmask") if stated else None,
        **special_tokens.stated({} if stated else ids),
    }


def framed(tokens: list[int], ids: Ids) -> list[int]:
    """The blank is at the end, where the text has none."""
    if ids["sop"] in tokens:
        return tokens
    masked = {ids["gmask"], ids.get("mask")} & {*tokens}
    return [*tokens, *([] if masked else [ids["gmask"]]), ids["sop"]]


FAMILY = Family(
    model_type="chatglm",
    architecture="ChatGLMForConditionalGeneration",
    native=False,
    read=read,
    new=new,
    rules=glm_like.rules,
    fields=FIELDS,
    framed=framed,
    head_beside=True,
    only={
        "position_encoding_2d": (True,),
        "quantization_bit": (0, None),
        "quantization_embeddings": (False, None),
        "pre_seq_len": (None,),
    },
    harmless=("prefix_projection",),
    beside={**BESIDE, "position_encoding_2d": True},
    ignored=(r"transformer\.layers\.\d+\.attention\.rotary_emb\.inv_freq",),
    code=("configuration_chatglm", "modeling_chatglm", "tokenization_chatglm"),
)
