"""Mistral 7B, Nemo, Small (Jiang et al., 2310.06825): Llama without biases, with one sliding window
for all layers.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.model.config import ModelConfig


def read_config(hf: dict[str, Any]) -> ModelConfig:
    return llama_like.read_config(hf, sliding_window=hf["sliding_window"])


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {**llama_like.write_config(c), "sliding_window": c.sliding_window}


FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=read_config,
    write=write_config,
    rules=llama_like.rules,
    only={**llama_like.NO_BIAS, **llama_like.NO_WINDOW},
    defaults={
        **llama_like.DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    scratch=llama_like.SCRATCH,
    ignored=llama_like.IGNORED,
)
