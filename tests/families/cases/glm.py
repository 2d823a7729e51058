"""GLM-4, with and without a norm after each layer."""

from cases import Case

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,  # transformers gives its row no gradient
    rope_parameters=dict(rope_type="default", rope_theta=100.0, partial_rotary_factor=0.5),
)


def layer(model, x):
    block = model.model.layers[1]
    block.mlp.act_fn = block.mlp.activation_fn
    return {name: getattr(block.self_attn, f"{name}_proj")(x) for name in "qkv"}, block.mlp


CASES = {
    "glm": Case("glm", SIZES, layer=layer, long=dict(max_position_embeddings=256)),
    "glm4": Case("glm4", SIZES | dict(attention_bias=False, tie_word_embeddings=True), layer=layer),
}

GLM_4_9B = {
    "architectures": ["GlmForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 13696,
    "max_position_embeddings": 131072,
    "model_type": "glm",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "pad_token_id": 151329,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 5000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151552,
}
GLM_4_32B = GLM_4_9B | {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 48,
    "num_hidden_layers": 61,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
}
PUBLISHED = [GLM_4_9B, GLM_4_32B]
