"""OLMo 2."""

from cases import Case

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
CASES = {
    # two heads of keys and values, so that queries and keys have norms of different widths
    "olmo2": Case(
        "olmo2",
        SIZES | dict(num_key_value_heads=2, rms_norm_eps=1e-2),
        long=dict(max_position_embeddings=256),
    ),
}
PUBLISHED = [
    # 7B, as its makers have it
    {
        "architectures": ["Olmo2ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "eos_token_id": 100257,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "olmo2",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pad_token_id": 100277,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.47.0.dev0",
        "use_cache": False,
        "vocab_size": 100352,
    },
]
