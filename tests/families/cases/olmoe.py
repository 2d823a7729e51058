"""OLMoE."""

from sizes import SIZES

from cases import Case

CASES = {
    # a bound that queries, keys and values feel
    "olmoe": Case(
        "olmoe",
        SIZES
        | dict(
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            clip_qkv=0.9,
            rms_norm_eps=1e-2,
            pad_token_id=None,
        ),
        long=dict(max_position_embeddings=256),
    ),
}
PUBLISHED = [
    {  # 1B-7B-0924
        "architectures": ["OlmoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 1024,
        "max_position_embeddings": 4096,
        "model_type": "olmoe",
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "output_router_logits": False,
        "pad_token_id": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
]
