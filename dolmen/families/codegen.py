"""CodeGen (Nijkamp et al., 2203.13474): GPT-J with q, k, v in one tensor, in four blocks of rows,
one for each of the cores that it was trained on, and in each block a quarter of the queries, of the
values, then of the keys.
"""

from typing import Any

from dolmen.families import common, gpt_like, gptj
from dolmen.families.family import Family, knob
from dolmen.families.gpt_like import LAYER, OURS
from dolmen.families.rules import Rule, Split
from dolmen.model.tree import Tree

BLOCKS = 4
PARTS = tuple(f"{OURS}attn.{part}" for part in "qvk")


def read(config: dict[str, Any]) -> Tree:
    """Raises ValueError for heads that do not fill the blocks."""
    common.head_size(config, gptj.FIELDS)
    if (heads := config["n_head"]) % BLOCKS:
        raise ValueError(
            f"n_head ({heads}) is not divisible by {BLOCKS}, the blocks that CodeGen stores q, k "
            f"and v in: set {knob('n_head')}, or {knob('model_type')} to gptj"
        )
    return gptj.read(config)


def rules(tree: Tree) -> list[Rule]:
    qkv = Split(LAYER + "attn.qkv_proj", PARTS, BLOCKS, (1, 1, 1))
    return gpt_like.rules([qkv, *gptj.MATRICES], first="norm")


FAMILY = Family(
    model_type="codegen",
    architecture="CodeGenForCausalLM",
    read=read,
    new=gptj.new,
    rules=rules,
    fields=gptj.FIELDS,
    only=gptj.FAMILY.only,
    harmless=gpt_like.HARMLESS,
    beside=gpt_like.BESIDE,
    ignored=(*gpt_like.IGNORED, r"transformer\.h\.\d+\.attn\.causal_mask"),
    prefix="transformer.",
)
