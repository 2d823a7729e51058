"""GLM-130B (Zeng et al., 2210.02414): a GLM with rope, in DeepNorm's arrangement, whose
feed-forward layer is gated by the second half of what it stores, x1 * gelu(x2). Its prefix, and
where its tokens stand, are known by special tokens (tree/blanks.py).

Its config.json has the names of arguments of SAT, the program that it was trained by. The angles of
rope are rounded to half precision. Behind [gMASK] positions count on, behind [MASK] they stay.
"""

import math
from typing import Any

from dolmen.families import common, glm_like, special_tokens
from dolmen.families.family import BESIDE, Family, Field, Ids, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import optional
from dolmen.model.tree import Blanks, Block, Mask, Mlp, Rope, Sequential, Tree

EPS = common.eps("layernorm_epsilon", 1e-5)
FIELDS = (
    common.vocab_size(150528),
    *glm_like.sizes(12288, 70, 96),
    Field(
        "inner_hidden_size",
        optional(kinds.WIDTH),
        None,
        "Width of the feed-forward layer; None: 8 / 3 of hidden_size, rounded down.",
        common=("intermediate_size",),
    ),
    glm_like.longest(2048),
    *common.ends(EPS, tied=True),
    special_tokens.SPECIAL_TOKENS,
)


def read(config: dict[str, Any]) -> Tree:
    layers, inner = config["num_layers"], config["inner_hidden_size"]
    turned = Rope(common.head_size(config, FIELDS), halved=True)
    mixer = glm_like.attention(config, FIELDS, turned)
    width = 4 * config["hidden_size"] * 2 // 3 if inner is None else inner
    mlp = Mlp(width, activation="gelu", bias=True)
    norm, around = (
        common.layer_norm(config, EPS),
        Sequential.deepnorm(math.sqrt(2 * layers)),
    )
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
    return glm_like.rules(tree, first=("up", "gate"))


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
    # of the checkpoint's two layouts: SAT's own mixins, and those of its port
    ignored=(
        r"transformer\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
        r"mixins\.rotary-embedding\.rotary_emb\.inv_freq",
    ),
)
