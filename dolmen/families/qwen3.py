"""Qwen3, dense (2505.09388): Qwen2 with RMSNorm on every query and key head, no biases, and a head
size of its own.
"""

from typing import Any

from dolmen.families import llama_like, qwen2
from dolmen.families.family import Family
from dolmen.model.config import ModelConfig


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    return llama_like.read_config(
        hf,
        qk_norm=True,
        attention_bias=hf["attention_bias"],
        output_bias=hf["attention_bias"],
        **qwen2.read_windows(hf),
    )


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {
        **llama_like.write_config(c),
        **qwen2.write_windows(c),
        "attention_bias": c.attention_bias,
    }


FAMILY = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=read_config,
    write=write_config,
    rules=llama_like.rules,
    defaults={**qwen2.DEFAULTS, "head_dim": 128, "attention_bias": False},
    only={"mlp_bias": (False, None)},
    scratch=llama_like.SCRATCH,
    ignored=llama_like.IGNORED,
)
