"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward layer, biases
everywhere.

Linear weights are stored [in, out] (Conv1D) and q, k, v are one of them. Files in the wild come
with and without the leading "transformer.", and with the causal mask saved as a buffer.
"""

from typing import Any

from dolmen.families.family import Family, activation
from dolmen.families.rules import Rename, Rule, Split, Transpose
from dolmen.model.config import ModelConfig

DEFAULTS = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}


def read_config(hf: dict[str, Any]) -> ModelConfig:
    heads, hidden = hf["n_head"], hf["n_embd"]
    if hidden % heads:
        raise ValueError(f"n_embd ({hidden}) is not divisible by n_head ({heads})")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=hf["n_layer"],
        num_attention_heads=heads,
        intermediate_size=4 * hidden if hf["n_inner"] is None else hf["n_inner"],
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=hf["n_positions"],
        position="learned",
        norm="layernorm",
        norm_eps=float(hf["layer_norm_epsilon"]),
        mlp="plain",
        activation=activation(hf["activation_function"], "activation_function"),
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=hf["tie_word_embeddings"],
        initializer_range=hf["initializer_range"],
    )


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": c.vocab_size,
        "n_positions": c.max_position_embeddings,
        "n_embd": c.hidden_size,
        "n_layer": c.num_hidden_layers,
        "n_head": c.num_attention_heads,
        "n_inner": c.intermediate_size,
        "activation_function": "gelu_new" if c.activation == "gelu_tanh" else c.activation,
        "layer_norm_epsilon": c.norm_eps,
        "initializer_range": c.initializer_range,
        "tie_word_embeddings": c.tie_word_embeddings,
    }


def rules(c: ModelConfig) -> list[Rule]:
    layer, qkv = "transformer.h.{}.", tuple(f"layers.{{}}.attn.{part}" for part in "qkv")
    return [
        Rename("transformer.wte", "embed"),
        Rename("transformer.wpe", "positions"),
        Rename(layer + "ln_1", "layers.{}.attn_norm"),
        Transpose(Split(layer + "attn.c_attn", qkv, 1, (1, 1, 1))),
        Transpose(Rename(layer + "attn.c_proj", "layers.{}.attn.o")),
        Rename(layer + "ln_2", "layers.{}.mlp_norm"),
        Transpose(Rename(layer + "mlp.c_fc", "layers.{}.mlp.up")),
        Transpose(Rename(layer + "mlp.c_proj", "layers.{}.mlp.down")),
        Rename("transformer.ln_f", "final_norm"),
        Rename("lm_head", "head"),
    ]


FAMILY = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    read=read_config,
    write=write_config,
    rules=rules,
    defaults=DEFAULTS,
    only={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
    },
    harmless=(
        "n_ctx",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
    scratch={
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
)
