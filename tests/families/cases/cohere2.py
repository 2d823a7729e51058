"""Command R7B."""

from cases import Case
from cases.olmo2 import SIZES

CASES = {
    # the second of three layers sees all, and has no positions
    "cohere2": Case(
        "cohere2",
        SIZES
        | dict(
            num_key_value_heads=2,
            logit_scale=0.3,
            sliding_window=7,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        long=dict(max_position_embeddings=256, tie_word_embeddings=False),
    ),
}
PUBLISHED = [
    # R7B-12-2024, as its makers have it
    {
        "architectures": ["Cohere2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 5,
        "cache_implementation": "hybrid",
        "eos_token_id": 255001,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.25,
        "max_position_embeddings": 8192,
        "model_type": "cohere2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "order_of_interleaved_layers": "local_attn_first",
        "pad_token_id": 0,
        "position_embedding_type": "rope_gptj",
        "rope_scaling": None,
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.48.0.dev0",
        "use_cache": True,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "use_parallel_embedding": True,
        "vocab_size": 256000,
    },
]
