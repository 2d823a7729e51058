"""What Llama and its descendants share: rope and sizes from config.json and back, and the names of
the weights.

Rope is the rotate-half layout in transformers and here: q and k rows are never permuted.
"""

from typing import Any

from dolmen.families.family import activation
from dolmen.families.rules import Rename, Rule
from dolmen.model.config import ModelConfig, RopeConfig

LAYER = "model.layers.{}."
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None)}
NO_WINDOW = {"layer_types": (None,)}
SCRATCH = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": True,
    "attention_dropout": 0.0,
}
DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": None,
}
ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def read_config(hf: dict[str, Any], **structure) -> ModelConfig:
    """Sizes, rope and activation; `structure` adds what the family decides. Raises ValueError
    naming the field.
    """
    heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
    if hf["head_dim"] is None and hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads}): give "
            f"head_dim"
        )
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads
        if hf["num_key_value_heads"] is None
        else hf["num_key_value_heads"],
        head_dim=hidden // heads if hf["head_dim"] is None else hf["head_dim"],
        max_position_embeddings=hf["max_position_embeddings"],
        position="rope",
        rope=read_rope(hf),
        norm="rmsnorm",
        norm_eps=float(hf["rms_norm_eps"]),
        mlp="gated",
        activation=activation(hf["hidden_act"], "hidden_act"),
        tie_word_embeddings=hf["tie_word_embeddings"],
        initializer_range=hf["initializer_range"],
        **structure,
    )


def read_rope(hf: dict[str, Any]) -> RopeConfig:
    """Rope from the spelling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters); a
    theta inside wins. Raises ValueError for a type that is not implemented, and for a part of the
    head left unrotated.
    """
    knob = "rope_scaling" if hf["rope_scaling"] else "rope_parameters"
    given = hf[knob] or {}
    kind = given.get("rope_type", given.get("type", "default"))
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(f"{knob} is {given}: dolmen supports one rope for all layers")
    if kind not in ROPE_FIELDS:
        raise ValueError(f"{knob}.rope_type is {kind!r}: dolmen supports {', '.join(ROPE_FIELDS)}")
    if given.get("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ValueError(
            f"{knob}.partial_rotary_factor is {given['partial_rotary_factor']}: dolmen supports "
            f"only 1.0"
        )
    original = hf["original_max_position_embeddings"] or given.get(
        "original_max_position_embeddings"
    )
    values = {
        **given,
        "original_max_position_embeddings": original or hf["max_position_embeddings"],
    }
    if missing := [name for name in ROPE_FIELDS[kind] if values.get(name) is None]:
        raise ValueError(f"{knob} is {given}: rope_type {kind} needs {', '.join(missing)}")
    return RopeConfig(
        theta=float(given.get("rope_theta", hf["rope_theta"])),
        scaling=kind,
        **{name: values[name] for name in ROPE_FIELDS[kind]},
    )


def write_rope(rope: RopeConfig) -> dict[str, Any]:
    """`rope_parameters` as transformers 5 writes it: only what the type uses."""
    values = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    return {
        "rope_type": rope.scaling,
        "rope_theta": rope.theta,
        **{name: values[name] for name in ROPE_FIELDS[rope.scaling]},
    }


def write_config(c: ModelConfig) -> dict[str, Any]:
    """The structure fields that all llama-like families have."""
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "gelu_pytorch_tanh" if c.activation == "gelu_tanh" else c.activation,
        "max_position_embeddings": c.max_position_embeddings,
        "initializer_range": c.initializer_range,
        "tie_word_embeddings": c.tie_word_embeddings,
        "rope_parameters": write_rope(c.rope),
    }


def rules(c: ModelConfig) -> list[Rule]:
    """Weight names of Llama, Mistral, Qwen2 and Qwen3; q and k norms and biases exist where the
    config has them.
    """
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.o_proj": "attn.o",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    return [
        Rename("model.embed_tokens", "embed"),
        *(Rename(LAYER + hf, "layers.{}." + ours) for hf, ours in names.items()),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]
