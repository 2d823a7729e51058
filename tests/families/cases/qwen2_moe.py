"""Qwen2-MoE and Qwen1.5-MoE."""

from sizes import SIZES

from cases import Case

MOE = SIZES | dict(moe_intermediate_size=24, shared_expert_intermediate_size=28)

CASES = {
    "qwen2-moe": Case(
        "qwen2_moe",
        MOE | dict(num_experts=8, num_experts_per_tok=2),
        long=dict(max_position_embeddings=256),
    ),
    # sparse layers between dense ones; every other of the first layers has a window
    "qwen2-moe-steps": Case(
        "qwen2_moe",
        MOE
        | dict(
            num_hidden_layers=4,
            num_experts=4,
            num_experts_per_tok=3,
            decoder_sparse_step=2,
            norm_topk_prob=True,
            qkv_bias=False,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=3,
            tie_word_embeddings=True,
        ),
    ),
}
PUBLISHED = [
    {  # Qwen1.5-MoE-A2.7B
        "architectures": ["Qwen2MoeForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "model_type": "qwen2_moe",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.39.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632,
    },
    {
        "model_type": "qwen2_moe",
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 7,
        "mlp_only_layers": [0, 3],
        "decoder_sparse_step": 2,
    },
]
