"""Mixtral 8x7B and 8x22B (2401.04088): Mistral whose every feed-forward layer is experts, weights
of the chosen ones normalised.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.families.rules import Rename, Rule, Stack
from dolmen.model.config import ModelConfig

MOE = llama_like.LAYER + "block_sparse_moe."


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """`intermediate_size` is an expert's width."""
    return llama_like.read_config(
        hf,
        sliding_window=hf["sliding_window"],
        num_experts=hf["num_local_experts"],
        num_experts_per_tok=hf["num_experts_per_tok"],
        norm_topk_prob=True,
        router_aux_loss_coef=hf["router_aux_loss_coef"],
    )


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {
        **llama_like.write_config(c),
        "sliding_window": c.sliding_window,
        "intermediate_size": c.expert_size,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "router_aux_loss_coef": c.router_aux_loss_coef,
    }


def rules(c: ModelConfig) -> list[Rule]:
    ours, names = "layers.{}.mlp.", {"w1": "gate", "w3": "up", "w2": "down"}
    return [
        *llama_like.rules(c),
        Rename(MOE + "gate", ours + "router"),
        *(
            Stack(MOE + "experts.{}." + hf, ours + f"experts.{name}", c.num_experts)
            for hf, name in names.items()
        ),
    ]


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=read_config,
    write=write_config,
    rules=rules,
    only={**llama_like.NO_BIAS, **llama_like.NO_WINDOW, "router_jitter_noise": (0.0, None)},
    defaults={
        **llama_like.DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    harmless=("output_router_logits",),
    scratch=llama_like.SCRATCH,
    ignored=llama_like.IGNORED,
    aliases={"num_experts": "num_local_experts"},
)
