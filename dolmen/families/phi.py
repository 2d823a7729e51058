"""Phi-1, 1.5 and 2, and the Llama-like Phi-3, 3.5 and 4."""

from dataclasses import replace
from typing import Any

from dolmen.families import common, llama, rope
from dolmen.families.family import Family, Field, activation, expect
from dolmen.families.rules import Rename, Rule, Split
from dolmen.model.spec import (
    LongRopeScaling,
    MLPSpec,
    ModelSpec,
    NormSpec,
    ParallelResidual,
    RopeSpec,
)

# Phi-1, 1.5 and 2 (2306.11644, 2309.05463): parallel attention and plain mlp after one LayerNorm,
# rope over a part of each head, biases on everything, the LM head too.

EPS = "layer_norm_eps"
PHI_FIELDS = llama.drop_fields(
    llama.fields_with(common.eps(EPS, 1e-5), rope.fields(part=0.5)), "head_dim"
)


def read_phi(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Phi-1, 1.5 or 2 config.json: parallel blocks after one LayerNorm, a
    plain mlp, and a biased head.
    """
    norm = NormSpec("layernorm", float(config[EPS]), bias=True)
    plain = MLPSpec(config["intermediate_size"], False, activation(config, "hidden_act"), bias=True)
    spec = llama.read_llama_like(
        {**config, "head_dim": None},
        mlp=lambda layer: plain,
        norm=norm,
        qkv_bias=True,
        o_bias=True,
        qk_norm=config["qk_layernorm"],
    )
    spec = common.map_blocks(spec, lambda block: replace(block, arrangement=ParallelResidual(1)))
    return replace(spec, head=replace(spec.head, bias=True))


def write_phi(spec: ModelSpec) -> dict[str, Any]:
    """Return the field of a Phi-1, 1.5 or 2 config.json that `common.write` does not state:
    qk_layernorm.
    """
    return {"qk_layernorm": common.attention(spec).qk_norm is not None}


def phi_rules(spec: ModelSpec) -> list[Rule]:
    """Return the rules that map the stored tensors of Phi-1, 1.5 and 2 to our parameters."""
    names = {
        "self_attn.dense": "attn.o",
        "self_attn.q_layernorm": "attn.q_norm",
        "self_attn.k_layernorm": "attn.k_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
    renames = [Rename(llama.LAYER + hf, f"layers.{{}}.{ours}") for hf, ours in names.items()]
    renames.append(Rename("model.final_layernorm", "final_norm"))
    return llama.llama_like_rules(spec, {"input_layernorm": "norm"}, instead=renames)


PHI = Family(
    model_type="phi",
    title="Phi-1, 1.5 and 2",
    architecture="PhiForCausalLM",
    read=read_phi,
    write=write_phi,
    rules=phi_rules,
    fields=llama.change_fields(
        PHI_FIELDS,
        Field("qk_layernorm", bool, False, "LayerNorm on every query and key head."),
        vocab_size=51200,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=24,
        hidden_act="gelu_new",
    ),
    only={**common.NO_WINDOWS, **llama.NO_BIAS},
    harmless="resid_pdrop embd_pdrop",
    extra_fields={**llama.BESIDE, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    ignored=llama.IGNORED,
)


# Phi-3, Phi-3.5 and Phi-4 (2404.14219, 2412.08905): Llama with q, k, v fused and gate, up fused;
# some have a sliding window, some rope over a part of each head.

PHI3_FIELDS = (*llama.fields_with(rope_fields=rope.fields(part=1.0)), common.WINDOW_SIZE)


def read_phi3(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Phi-3 config.json: Llama with one sliding window, if stated, for all
    layers. Raises ValueError for a rope type other than default and longrope, as transformers does.
    """
    spec = llama.read_llama_like(config, windows=common.uniform_windows(config))
    scaling = expect(common.attention(spec).positions, RopeSpec, "positions").scaling
    if scaling is not None and not isinstance(scaling, LongRopeScaling):
        raise ValueError(f"rope_type {scaling} is not supported by phi3: use default or longrope")
    return spec


def phi3_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Phi-3: q, k, v fused one after the other, gate and up fused."""
    mixer, layer = common.attention(spec), llama.LAYER
    # units of a head's size: rows of all queries, all keys, all values
    counts = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
    fused = [
        Split(f"{layer}self_attn.qkv_proj", common.QKV, 1, counts),
        Split(f"{layer}mlp.gate_up_proj", common.GATE_UP, 1, (1, 1)),
    ]
    return llama.llama_like_rules(spec, instead=fused)


PHI3 = Family(
    model_type="phi3",
    title="Phi-3, Phi-3.5 and Phi-4",
    architecture="Phi3ForCausalLM",
    read=read_phi3,
    rules=phi3_rules,
    fields=llama.change_fields(
        PHI3_FIELDS,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
    ),
    only={
        **common.NO_LAYER_TYPES,
        **llama.NO_BIAS,
        # stated by Phi-4-mini, for code of its own
        "lm_head_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
    },
    harmless="embd_pdrop resid_pdrop",
    extra_fields={**llama.BESIDE, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ignored=llama.IGNORED,
    remote_code=("configuration_phi3", "modeling_phi3"),
)
