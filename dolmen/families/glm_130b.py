"""GLM-130B (Zeng et al., 2210.02414): a GLM with rope, in DeepNorm's arrangement, whose
feed-forward layer is gated by the second half of what it stores, x1 * gelu(x2). Its prefix, and
where its tokens stand, are known by special tokens (tree/blanks.py).

Its config.json has the names of arguments of SAT, the program that it was trained by. The angles of
rope are rounded to half precision. Behind [gMASK] positions count on, behind [MASK] they stay.
"""

import math
from typing import Any

from dolmen.families import common, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rename, Rule, Split
from dolmen.files import kinds
from dolmen.files.schema import optional
from dolmen.model.tree import Attention, Blanks, Block, Deepnorm, Mask, Mlp, Rope, Tree

EPS = common.eps("layernorm_epsilon", 1e-5)
FIELDS = (
    common.vocab_size(150528),
    Field("hidden_size", kinds.WIDTH, 12288, "Width of the residual stream."),
    Field("num_layers", kinds.LAYERS, 70, "Decoder blocks.", common=("num_hidden_layers",)),
    Field("num_attention_heads", kinds.HEADS, 96, "Heads."),
    Field(
        "inner_hidden_size",
        optional(kinds.WIDTH),
        None,
        "Width of the feed-forward layer; None: 8 / 3 of hidden_size, rounded down.",
        common=("intermediate_size",),
    ),
    Field(
        "max_sequence_length",
        kinds.POSITIONS,
        2048,
        "Longest sequence, tokens.",
        common=("max_position_embeddings",),
    ),
    *common.ends(EPS, tied=True),
    special_tokens.SPECIAL_TOKENS,
)


def read(config: dict[str, Any]) -> Tree:
    heads, size = config["num_attention_heads"], common.head_size(config, FIELDS)
    layers, inner = config["num_layers"], config["inner_hidden_size"]
    mixer = Attention(
        heads,
        heads,
        size,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
        positions=Rope(size, halved=True),
        mask="prefix",
    )
    width = 4 * config["hidden_size"] * 2 // 3 if inner is None else inner
    mlp = Mlp(width, activation="gelu", bias=True)
    norm, around = common.layer_norm(config, EPS), Deepnorm(math.sqrt(2 * layers))
    ids = special_tokens.said(config)
    masks = (Mask("mask", ids["mask"]), Mask("gmask", ids["gmask"], "counts"))
    blocks = [Block(mixer, mlp, norm, around)] * layers
    return common.tree(config, FIELDS, blocks, blanks=Blanks(ids["sop"], masks))


def new(tree: Tree) -> dict[str, Any]:
    blanks = expect(tree.blanks, Blanks, "blanks")
    ids = {"sop": blanks.start, **{mask.name: mask.token for mask in blanks.masks}}
    return {
        **common.new(tree, FIELDS),
        "num_attention_heads": common.attention(tree).heads,
        "inner_hidden_size": common.mlp(tree).size,
        **special_tokens.stated(ids),
    }


def rules(tree: Tree) -> list[Rule]:
    """Of a file of whole tensors."""
    layer, ours = "transformer.layers.{}.", "layers.{}."
    halves, heads = (ours + "mlp.up", ours + "mlp.gate"), common.attention(tree).heads
    return [
        Rename("transformer.word_embeddings", "embed"),
        Rename(layer + "input_layernorm", ours + "attn_norm"),
        Split(layer + "attention.query_key_value", common.QKV, heads, (1, 1, 1)),
        Rename(layer + "attention.dense", ours + "attn.o"),
        Rename(layer + "post_attention_layernorm", ours + "mlp_norm"),
        Split(layer + "mlp.dense_h_to_4h", halves, 1, (1, 1)),
        Rename(layer + "mlp.dense_4h_to_h", ours + "mlp.down"),
        Rename("transformer.final_layernorm", "final_norm"),
        Rename("lm_head", "head"),
    ]


def framed(tokens: list[int], ids: Ids) -> list[int]:
    """The blank is at the end, where the text has none, and the end behind one that is not."""
    if ids["sop"] in tokens:
        return tokens
    masks = {ids[name] for name in ("mask", "gmask") if name in ids}
    blank = [] if masks & {*tokens} else [ids["gmask"]]
    inner = [*tokens, *blank]
    return [*inner, *([] if inner[-1] in masks else [ids["eos"]]), ids["sop"]]


FAMILY = Family(
    model_type="glm-130b",
    architecture="GLM130B",
    native=False,
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    framed=framed,
    beside=BESIDE,
    ignored=(r"transformer\.layers\.\d+\.attention\.rotary_emb\.inv_freq",),
)
