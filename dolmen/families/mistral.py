"""Mistral and Mixtral: Llama with a sliding window, Mixtral with experts."""

from dataclasses import replace
from typing import Any

from dolmen.families import experts, llama, windows
from dolmen.families.rules import Rule
from dolmen.model.spec import ModelSpec

# Mistral 7B, Nemo, Small (Jiang et al., 2310.06825): Llama without biases, with one sliding window
# for all layers.


def read_mistral(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Mistral config.json: Llama with one window for all layers."""
    return llama.read_llama_like(config, windows=windows.uniform_windows(config))


MISTRAL = replace(
    llama.LLAMA,
    model_type="mistral",
    title="Mistral 7B, Nemo, Small",
    architecture="MistralForCausalLM",
    read=read_mistral,
    fields=llama.change_fields(
        (*llama.FIELDS, windows.SIZE),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        sliding_window=4096,
    ),
    only={**llama.NO_BIAS, **windows.NO_TYPES},
)


# Mixtral 8x7B and 8x22B (2401.04088): Mistral with an MoE of 8 experts in every layer, 2 per token,
# whose weights are normalised.


def read_mixtral(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Mixtral config.json: every layer is MoE; `intermediate_size` is an
    expert's width.
    """
    layer = experts.read(config, config["intermediate_size"], normalise=True)
    return llama.read_llama_like(
        config, mlp=lambda _: layer, windows=windows.uniform_windows(config)
    )


def mixtral_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Mixtral: w1 is the gate, w3 up and w2 down of each expert."""
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    module = f"{llama.LAYER}block_sparse_moe"
    return [*llama.llama_like_rules(spec), *experts.rules(spec, module, names)]


MIXTRAL = replace(
    llama.LLAMA,
    model_type="mixtral",
    title="Mixtral 8x7B and 8x22B",
    architecture="MixtralForCausalLM",
    read=read_mixtral,
    rules=mixtral_rules,
    fields=llama.change_fields(
        (*llama.FIELDS, windows.SIZE, *experts.FIELDS),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
    only={**llama.NO_BIAS, **windows.NO_TYPES, "router_jitter_noise": (0.0, None)},
    harmless="output_router_logits",
)
