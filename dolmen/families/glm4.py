"""GLM-4-0414 (9B, 32B, Z1): GLM-4 with a norm after each layer too."""

from typing import Any

from dolmen.families import glm, llama_like
from dolmen.families.family import Family
from dolmen.families.rules import Rule
from dolmen.model.tree import Sequential, Tree

NORMS = {
    "input_layernorm": "attn_norm",
    "post_self_attn_layernorm": "attn_post_norm",
    "post_attention_layernorm": "mlp_norm",
    "post_mlp_layernorm": "mlp_post_norm",
}


def read(config: dict[str, Any]) -> Tree:
    return glm.arranged(config, Sequential("sandwich"))


def rules(tree: Tree) -> list[Rule]:
    return glm.rules(tree, NORMS)


FAMILY = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    scorer="Glm4ForSequenceClassification",
    read=read,
    new=glm.new,
    rules=rules,
    fields=glm.FIELDS,
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
