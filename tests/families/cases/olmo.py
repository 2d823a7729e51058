"""OLMo."""

from cases import Case
from cases.olmo2 import SIZES

CASES = {
    "olmo": Case("olmo", SIZES, long=dict(max_position_embeddings=256)),
    # of queries and keys of size 1 some are clipped
    "olmo-clipped": Case(
        "olmo",
        SIZES | dict(num_key_value_heads=2, clip_qkv=0.7, attention_bias=True),
    ),
}
PUBLISHED = [
    # 7B (-hf), as its makers have it, and what 7B-Twin-2T says otherwise
    {
        "architectures": ["OlmoForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "clip_qkv": None,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 2048,
        "model_type": "olmo",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 1,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.40.0.dev0",
        "use_cache": True,
        "vocab_size": 50304,
    },
    {"model_type": "olmo", "clip_qkv": 8.0, "max_position_embeddings": 4096},
]
