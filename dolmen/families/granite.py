"""Granite 3 (IBM, 2024): Llama with four multipliers in the manner of muP (2203.03466): of the
embedding, of the branches' outputs, of attention scores, and a divisor of the logits.
"""

from dataclasses import replace
from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common, llama
from dolmen.families.family import Field, expect
from dolmen.model.spec import ModelSpec, SequentialResidual


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Granite config.json: Llama with muP-like multipliers of embedding,
    scores, branches and logits. `attention_bias` puts biases on q, k, v and o.
    """
    bias, mlp_bias = bool(config["attention_bias"]), bool(config["mlp_bias"])
    spec = llama.read_llama_like(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    scale = float(config["attention_multiplier"])
    # the default scale is None, so that equal models have equal specs
    multiplier = None if scale == common.attention(spec).head_size ** -0.5 else scale
    added = SequentialResidual(branch_scale=float(config["residual_multiplier"]))
    spec = common.map_blocks(
        spec, lambda b: replace(b, mixer=replace(b.mixer, scale=multiplier), arrangement=added)
    )
    return replace(
        spec,
        embedding=replace(spec.embedding, scale=float(config["embedding_multiplier"])),
        # logits are divided by it
        head=replace(spec.head, scale=1 / config["logits_scaling"]),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Granite config.json for a spec; logits_scaling is rounded to 15
    digits.
    """
    mixer = common.attention(spec)
    arrangement = expect(spec.blocks[0].arrangement, SequentialResidual, "arrangement")
    return {
        "embedding_multiplier": spec.embedding.scale,
        "attention_multiplier": mixer.head_size**-0.5 if mixer.scale is None else mixer.scale,
        "residual_multiplier": arrangement.branch_scale,
        # 49, and not 49.00000000000001
        "logits_scaling": float(f"{1 / spec.head.scale:.15g}"),
    }


POSITIVE = AboveZero

GRANITE = replace(
    llama.LLAMA,
    model_type="granite",
    title="Granite 3",
    architecture="GraniteForCausalLM",
    scorer=None,
    read=read,
    write=write,
    fields=(
        *llama.LLAMA.fields,
        Field("embedding_multiplier", POSITIVE, 1.0, "Factor of embeddings."),
        Field("attention_multiplier", POSITIVE, 1.0, "Factor of attention scores."),
        Field(
            "residual_multiplier", POSITIVE, 1.0, "Factor of layer outputs on the residual stream."
        ),
        Field("logits_scaling", POSITIVE, 1.0, "Divisor of logits."),
    ),
)
