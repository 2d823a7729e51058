"""Llama 1 to 3.3 and everything saved as `model_type: llama` (Touvron et al., 2302.13971; Dubey et
al., 2407.21783).
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.model.config import ModelConfig


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    return llama_like.read_config(
        hf,
        attention_bias=hf["attention_bias"],
        output_bias=hf["attention_bias"],
        mlp_bias=hf["mlp_bias"],
    )


def write_config(c: ModelConfig) -> dict[str, Any]:
    """transformers refuses a Llama whose heads do not divide its width, whatever head_dim says."""
    if c.hidden_size % c.num_attention_heads:
        raise ValueError(
            f"hidden_size ({c.hidden_size}) is not divisible by num_attention_heads "
            f"({c.num_attention_heads}): set model.family to mistral, which writes the same decoder"
        )
    return {
        **llama_like.write_config(c),
        "attention_bias": c.attention_bias,
        "mlp_bias": c.mlp_bias,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=read_config,
    write=write_config,
    rules=llama_like.rules,
    defaults={**llama_like.DEFAULTS, "attention_bias": False, "mlp_bias": False},
    only={**llama_like.NO_WINDOW, "sliding_window": (None,)},
    scratch=llama_like.SCRATCH,
    ignored=llama_like.IGNORED,
)
