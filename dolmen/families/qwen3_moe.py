"""Qwen3 with experts (2505.09388): Qwen3 whose feed-forward layers are many small experts, but for
those named dense.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family
from dolmen.families.rules import Rename, Rule, Stack
from dolmen.model.config import ModelConfig

MLP = llama_like.LAYER + "mlp."


def read_config(hf: dict[str, Any]) -> ModelConfig:
    """A layer is sparse if its number, from 1, is a multiple of `decoder_sparse_step` and
    `mlp_only_layers` does not name it.
    """
    step, only = hf["decoder_sparse_step"], hf["mlp_only_layers"] or []
    dense = tuple(i for i in range(hf["num_hidden_layers"]) if i in only or (i + 1) % step)
    return llama_like.read_config(
        hf,
        qk_norm=True,
        attention_bias=hf["attention_bias"],
        output_bias=hf["attention_bias"],
        sliding_window=hf["sliding_window"] if hf["use_sliding_window"] else None,
        num_experts=hf["num_local_experts"],
        num_experts_per_tok=hf["num_experts_per_tok"],
        moe_intermediate_size=hf["moe_intermediate_size"],
        norm_topk_prob=hf["norm_topk_prob"],
        dense_layers=dense,
        router_aux_loss_coef=hf["router_aux_loss_coef"],
    )


def write_config(c: ModelConfig) -> dict[str, Any]:
    return {
        **llama_like.write_config(c),
        "attention_bias": c.attention_bias,
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
        "num_local_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "moe_intermediate_size": c.expert_size,
        "norm_topk_prob": c.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(c.dense_layers),
        "router_aux_loss_coef": c.router_aux_loss_coef,
    }


def rules(c: ModelConfig) -> list[Rule]:
    ours = "layers.{}.mlp."
    return [
        *llama_like.rules(c),
        Rename(MLP + "gate", ours + "router"),
        *(
            Stack(MLP + "experts.{}." + f"{name}_proj", ours + f"experts.{name}", c.num_experts)
            for name in ("gate", "up", "down")
        ),
    ]


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=read_config,
    write=write_config,
    rules=rules,
    only={"mlp_bias": (False, None), **llama_like.NO_WINDOW},
    defaults={
        **llama_like.DEFAULTS,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_local_experts": 128,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    harmless=("output_router_logits", "max_window_layers"),
    scratch=llama_like.SCRATCH,
    ignored=llama_like.IGNORED,
    aliases={"num_experts": "num_local_experts"},
)
