"""Command R."""

from cases import Case
from cases.olmo2 import SIZES

CASES = {
    "cohere": Case(
        "cohere",
        SIZES | dict(num_key_value_heads=2, logit_scale=0.3, layer_norm_eps=1e-2),
    ),
    # as Command R+ is: each head has a norm of its own; one head of keys, whole on every rank of tp
    "cohere-norms": Case(
        "cohere",
        SIZES
        | dict(
            num_key_value_heads=1,
            use_qk_norm=True,
            attention_bias=True,
            tie_word_embeddings=False,
            logit_scale=2.0,
        ),
        long=dict(max_position_embeddings=256),
    ),
}
PUBLISHED = [
    # v01, as its makers have it, and what Command R+ says otherwise
    {
        "architectures": ["CohereForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 22528,
        "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "model_max_length": 131072,
        "model_type": "cohere",
        "num_attention_heads": 64,
        "num_hidden_layers": 40,
        "num_key_value_heads": 64,
        "pad_token_id": 0,
        "rope_theta": 8000000.0,
        "torch_dtype": "float16",
        "transformers_version": "4.38.2",
        "use_cache": True,
        "vocab_size": 256000,
    },
    {
        "model_type": "cohere",
        "hidden_size": 12288,
        "intermediate_size": 33792,
        "logit_scale": 0.8333333333333334,
        "num_attention_heads": 96,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "rope_theta": 75000000.0,
        "use_qk_norm": True,
    },
]
