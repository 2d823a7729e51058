"""Gemma 3, text."""

from sizes import SIZES

from cases import Case

# pad_token_id: transformers gives its row no gradient
SMALL = SIZES | dict(sliding_window=5, pad_token_id=None)
CASES = {
    # the sixth of seven layers sees all
    "gemma3": Case(
        "gemma3_text",
        SMALL | dict(num_hidden_layers=7, head_dim=16, query_pre_attn_scalar=24),
        long=dict(max_position_embeddings=256, tie_word_embeddings=False),
    ),
    "gemma3-stretched": Case(
        "gemma3_text",
        SMALL
        | dict(
            head_dim=8,
            query_pre_attn_scalar=8,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            tie_word_embeddings=False,
            attention_bias=True,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
                sliding_attention=dict(rope_type="default", rope_theta=50.0),
            ),
        ),
    ),
}
PUBLISHED = [
    {  # 1B
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
        "use_cache": True,
        "vocab_size": 262144,
    },
    {  # the text of 27B
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "model_type": "gemma3_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
]
