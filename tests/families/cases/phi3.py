"""Phi-3 and Phi-4."""

from cases import Case
from cases.olmo2 import SIZES


def layer(model, x):
    """What layer 1 makes of x on the way into attention, and its feed-forward layer."""
    block = model.model.layers[1]
    heads, kv = model.config.num_attention_heads, model.config.num_key_value_heads
    size = model.config.hidden_size // heads
    parts = block.self_attn.qkv_proj(x).split([heads * size, kv * size, kv * size], -1)
    block.mlp.act_fn = block.mlp.activation_fn
    return dict(zip("qkv", parts, strict=True)), block.mlp


CASES = {
    # a window, as 4k has, and rope over three quarters, as Phi-4-mini has
    "phi3": Case(
        "phi3",
        SIZES
        | dict(
            num_key_value_heads=2,
            sliding_window=7,
            rope_parameters=dict(
                rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75
            ),
        ),
        layer=layer,
        long=dict(max_position_embeddings=256),
    ),
    # as 128k has: what is beyond the first context is turned by other factors, all of it; a text
    # that comes there from a prompt of 7 tokens too
    "phi3-long": Case(
        "phi3",
        SIZES
        | dict(
            num_key_value_heads=2,
            max_position_embeddings=64,
            original_max_position_embeddings=16,
            rope_parameters=dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0, 1.1, 1.2, 1.5],
                long_factor=[1.0, 2.0, 3.0, 9.0],
            ),
        ),
        layer=layer,
    ),
}
PUBLISHED = [
    # mini-4k, as its makers have it, and Phi-4 of what it says otherwise
    {
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "bos_token_id": 1,
        "embd_pdrop": 0.0,
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "hidden_size": 3072,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "model_type": "phi3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096,
        "pad_token_id": 32000,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.40.2",
        "use_cache": True,
        "vocab_size": 32064,
    },
    {
        "model_type": "phi3",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "partial_rotary_factor": 1.0,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "vocab_size": 100352,
    },
]
