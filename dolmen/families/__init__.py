"""Model families: a config.json is a model, and every stored tensor has a rule. Without torch.

A family
    family.py          what a family declares: fields, read, write, rules
    known.py           all families: every file here that has a FAMILY
    model.py           `Model`: a config.json and the spec that it says; edits and new ones
    start.py           a run's model, and what options change of it
    unknown.py         fields of a config.json that its family does not know
    differences.py     in what two specs differ
    checked.py         how close each family is to its reference, as measured
Shared by families
    common.py          fields and parts that all have
    windows.py         sliding windows
    rope.py            rotary embeddings
    experts.py         routers and experts
    special_tokens.py  which ids stand for what
Weights
    rules.py           invertible weight rules, as data
    weights.py         which parameters each stored tensor holds
    adapters.py        LoRA: options, and the weights that its targets name
One file per family or group of families
    baichuan.py, bert.py, bloom.py, chatglm.py, cohere.py, deepseek.py, falcon.py, gemma.py,
    glm.py, gpt2.py, gpt_neo.py, gpt_oss.py, gptj.py, granite.py, internlm2.py, llama.py,
    mistral.py, mpt.py, olmo.py, opt.py, phi.py, qwen.py, qwen2.py, stablelm.py,
    starcoder2.py
"""

from dolmen.families.family import Family, Field
from dolmen.families.known import families, find_family
from dolmen.families.model import (
    Model,
    add_standard_fields,
    compare_fields,
    convert_family,
    edit,
    explicit_fields,
    model_from_fields,
    model_from_spec,
    replace_fields,
    set_fields,
    training_fields,
    with_lm_head,
    with_scalar_head,
)
from dolmen.families.unknown import unknown_fields
from dolmen.families.weights import WeightMap, weight_map

__all__ = [
    "Family",
    "Field",
    "Model",
    "WeightMap",
    "add_standard_fields",
    "compare_fields",
    "convert_family",
    "edit",
    "explicit_fields",
    "families",
    "find_family",
    "model_from_fields",
    "model_from_spec",
    "replace_fields",
    "set_fields",
    "training_fields",
    "unknown_fields",
    "weight_map",
    "with_lm_head",
    "with_scalar_head",
]
