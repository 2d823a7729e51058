"""GPT-OSS."""

from types import SimpleNamespace

import torch
from sizes import SIZES

from cases import Case

YARN = dict(
    rope_type="yarn",
    factor=4.0,
    beta_fast=4.0,
    beta_slow=1.0,
    truncate=False,
    original_max_position_embeddings=16,
    rope_theta=100.0,
)


def layer(model, x):
    block = model.model.layers[1]
    products = {name: getattr(block.self_attn, f"{name}_proj")(x) for name in "qkv"}
    return products, SimpleNamespace(experts=block.mlp.experts, gate=block.mlp.router)


def gated(experts, gate, up):
    return experts._apply_gate(torch.stack((gate, up), -1).flatten(-2))


CASES = {
    # a limit that gates of this size feel
    "gpt-oss": Case(
        "gpt_oss",
        SIZES
        | dict(
            num_local_experts=6,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=5,
            swiglu_limit=0.8,
            rope_parameters=YARN,
        ),
        layer=layer,
        gated=gated,
        long=dict(max_position_embeddings=256),
    ),
}
PUBLISHED = [
    {  # 20B, but for how its weights are quantised
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
        "use_cache": True,
        "vocab_size": 201088,
    },
]
