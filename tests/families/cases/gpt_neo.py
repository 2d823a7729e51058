"""GPT-Neo."""

from cases import Case

SIZES = dict(
    vocab_size=61,
    hidden_size=32,
    num_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)


def layer(model, x):
    block = model.transformer.h[1]
    attention = block.attn.attention
    return {part: getattr(attention, f"{part}_proj")(x) for part in "qkv"}, block.mlp


CASES = {
    "gpt-neo": Case(
        "gpt_neo",
        SIZES
        | dict(
            num_layers=4,
            attention_types=[[["global", "local"], 2]],
            window_size=5,
            intermediate_size=40,
        ),
        layer=layer,
        long=dict(max_position_embeddings=256, tie_word_embeddings=False),
    ),
    # kinds in no pattern
    "gpt-neo-local": Case(
        "gpt_neo",
        SIZES
        | dict(
            num_layers=3,
            attention_types=[[["local"], 2], [["global"], 1]],
            window_size=9,
            tie_word_embeddings=False,
            activation_function="relu",
        ),
        layer=layer,
    ),
}

NEO_125M = {
    "activation_function": "gelu_new",
    "architectures": ["GPTNeoForCausalLM"],
    "attention_dropout": 0,
    "attention_layers": ["global", "local"] * 6,
    "attention_types": [[["global", "local"], 6]],
    "bos_token_id": 50256,
    "embed_dropout": 0,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neo",
    "num_heads": 12,
    "num_layers": 12,
    "resid_dropout": 0,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "transformers_version": "4.9.0.dev0",
    "use_cache": True,
    "vocab_size": 50257,
    "window_size": 256,
}
PUBLISHED = [NEO_125M]
