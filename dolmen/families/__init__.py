"""Model families: how the config.json and the stored tensors of each map to a `ModelSpec` and its
parameters. Imports no torch.

A family
    family.py          what a family declares: fields, read, write, rules
    model.py           `ModelConfig`: a config.json and the spec it parses to; edits, new ones
    start.py           a run's model, and options applied to it
    unknown.py         fields of a config.json that its family does not know
    differences.py     differences between two specs
    checked.py         measured differences of each family from its reference
Shared by families
    common.py          fields and spec parts that all families have; sliding windows
    rope.py            rotary embeddings
    experts.py         routers and experts
    special_tokens.py  ids of special tokens that determine positions or frame prompts
Weights
    rules.py           invertible weight rules, as data
    weights.py         stored tensor -> parameters it holds
    adapters.py        LoRA: options, and the weights that its targets name
One file per family or group of families
    baichuan.py, bert.py, bloom.py, chatglm.py, cohere.py, deepseek.py, falcon.py, gemma.py,
    glm.py, gpt2.py, gpt_neo.py, gpt_oss.py, llama.py, llama_variants.py, mpt.py, olmo.py,
    opt.py, phi.py, qwen.py, qwen2.py
"""

from dolmen.families.family import Family, Field, families, find_family
from dolmen.families.model import (
    ModelConfig,
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
