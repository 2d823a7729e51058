"""Granite."""

from cases import Case
from cases.olmo2 import SIZES

FOUR = dict(
    embedding_multiplier=3.0,
    attention_multiplier=0.25,
    residual_multiplier=0.4,
    logits_scaling=0.7,
)
CASES = {
    "granite": Case(
        "granite",
        SIZES | FOUR | dict(num_key_value_heads=2, rms_norm_eps=1e-3),
        long=dict(max_position_embeddings=256),
    ),
    # the head has the embedding's rows as they are
    "granite-tied": Case(
        "granite",
        SIZES | FOUR | dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
}
PUBLISHED = [
    # 3.0-8b-base, as its makers have it
    {
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.1,
        "attention_multiplier": 0.0078125,
        "bos_token_id": 0,
        "embedding_multiplier": 12.0,
        "eos_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 12800,
        "logits_scaling": 16.0,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
        "model_type": "granite",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.46.0.dev0",
        "use_cache": True,
        "vocab_size": 49155,
    },
]
