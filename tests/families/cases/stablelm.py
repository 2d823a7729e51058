"""StableLM."""

from cases import Case
from cases.olmo2 import SIZES

WIDE = SIZES | dict(hidden_size=64)  # heads of 16, of which rope turns a quarter
CASES = {
    "stablelm": Case(
        "stablelm",
        WIDE | dict(num_key_value_heads=2, use_qkv_bias=True, layer_norm_eps=1e-2),
        long=dict(max_position_embeddings=256),
    ),
    # as 2-12B is: side by side, norms of each head; one head of keys, whole on every rank of tp
    "stablelm-parallel": Case(
        "stablelm",
        WIDE
        | dict(
            num_key_value_heads=1,
            use_parallel_residual=True,
            qk_layernorm=True,
            rope_parameters=dict(
                rope_type="default", rope_theta=100.0, partial_rotary_factor=0.625
            ),
        ),
    ),
}
PUBLISHED = [
    # 2-12B, as its makers have it, and what 3B-4e1t says otherwise
    {
        "architectures": ["StableLmForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 100257,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_dropout": 0.0,
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 13824,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096,
        "model_type": "stablelm",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.25,
        "qk_layernorm": True,
        "rope_theta": 10000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0",
        "use_cache": True,
        "use_parallel_residual": True,
        "use_qkv_bias": False,
        "vocab_size": 100352,
    },
    {"model_type": "stablelm", "num_key_value_heads": 32, "tie_word_embeddings": False},
]
