"""GPT-NeoX and Pythia."""

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
)


def layer(model, x):
    block = model.gpt_neox.layers[1]
    attention = block.attention
    each = attention.query_key_value(x).view(len(x), -1, 3 * attention.head_size).chunk(3, -1)
    block.mlp.act_fn = block.mlp.act
    return {name: t.flatten(1) for name, t in zip("qkv", each, strict=True)}, block.mlp


CASES = {
    # a quarter of each head is turned, one pair
    "gpt-neox": Case("gpt_neox", SIZES, layer=layer, long=dict(max_position_embeddings=256)),
    # as the models of StabilityAI of then: one after the other, all but biases of attention
    "gpt-neox-sequential": Case(
        "gpt_neox",
        SIZES
        | dict(
            use_parallel_residual=False,
            attention_bias=False,
            hidden_act="gelu_new",
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="linear", factor=4.0, rope_theta=500.0, partial_rotary_factor=0.75
            ),
        ),
        layer=layer,
    ),
}

PYTHIA_160M = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
NEOX_20B = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0,
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50432,
}
# as later versions of transformers 4 wrote it: both names of a field; and a longer context
PYTHIA_RESAVED = PYTHIA_160M | {
    "attention_bias": True,
    "partial_rotary_factor": 0.25,
    "rope_scaling": {"type": "linear", "factor": 2.0},
    "rope_theta": 10000,
}
PUBLISHED = [PYTHIA_160M, NEOX_20B, PYTHIA_RESAVED]
