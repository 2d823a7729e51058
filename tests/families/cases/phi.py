"""Phi."""

from cases import Case
from cases.stablelm import WIDE


def layer(model, x):
    """What layer 1 makes of x on the way into attention, and its feed-forward layer."""
    block = model.model.layers[1]
    block.mlp.act = block.mlp.activation_fn
    return {part: block.self_attn.get_submodule(f"{part}_proj")(x) for part in "qkv"}, block.mlp


CASES = {
    "phi": Case(
        "phi",
        WIDE | dict(layer_norm_eps=1e-2),
        layer=layer,
        long=dict(max_position_embeddings=256),
    ),
    # norms of heads, which tp's ranks share, as they do the one head of keys
    "phi-norms": Case(
        "phi",
        WIDE | dict(num_key_value_heads=1, qk_layernorm=True, tie_word_embeddings=True),
        layer=layer,
    ),
}
PUBLISHED = [
    # 2, as its makers have it
    {
        "architectures": ["PhiForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 50256,
        "embd_pdrop": 0.0,
        "eos_token_id": 50256,
        "hidden_act": "gelu_new",
        "hidden_size": 2560,
        "initializer_range": 0.02,
        "intermediate_size": 10240,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "phi",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4,
        "qk_layernorm": False,
        "resid_pdrop": 0.1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.37.0",
        "use_cache": True,
        "vocab_size": 51200,
    },
]
