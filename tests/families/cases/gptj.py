"""GPT-J."""

from cases import Case

SIZES = dict(
    vocab_size=61,
    n_embd=32,
    n_layer=3,
    n_head=4,
    n_positions=64,
    rotary_dim=4,
    bos_token_id=1,
    eos_token_id=2,
)


def layer(model, x):
    block = model.transformer.h[1]
    return {part: getattr(block.attn, f"{part}_proj")(x) for part in "qkv"}, block.mlp


CASES = {
    "gptj": Case("gptj", SIZES, layer=layer, long=dict(n_positions=256)),
    # a bias of its own beside the embedding's weight; whole heads are turned
    "gptj-tied": Case(
        "gptj",
        SIZES
        | dict(rotary_dim=8, n_inner=40, activation_function="gelu", tie_word_embeddings=True),
        layer=layer,
    ),
}

GPTJ_6B = {
    "activation_function": "gelu_new",
    "architectures": ["GPTJForCausalLM"],
    "attn_pdrop": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "gradient_checkpointing": False,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gptj",
    "n_embd": 4096,
    "n_head": 16,
    "n_inner": None,
    "n_layer": 28,
    "n_positions": 2048,
    "resid_pdrop": 0.0,
    "rotary": True,
    "rotary_dim": 64,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {
        "text-generation": {"do_sample": True, "max_length": 50, "temperature": 1.0}
    },
    "tie_word_embeddings": False,
    "tokenizer_class": "GPT2Tokenizer",
    "transformers_version": "4.18.0.dev0",
    "use_cache": True,
    "vocab_size": 50400,
}
PUBLISHED = [GPTJ_6B]
