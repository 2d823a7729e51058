"""StarCoder, of the first generation."""

from cases import Case

SIZES = dict(
    vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)


def layer(model, x):
    """One key-value head's numbers stand behind those of all queries."""
    block = model.transformer.h[1]
    attention, made = block.attn, block.attn.c_attn(x)
    if attention.multi_query:
        parts = made.split((attention.embed_dim, attention.kv_dim, attention.kv_dim), -1)
    else:
        each = made.view(len(x), attention.num_heads, -1).split(3 * [attention.head_dim], -1)
        parts = [part.flatten(1) for part in each]
    return dict(zip("qkv", parts, strict=True)), block.mlp


CASES = {
    "gpt-bigcode": Case(
        "gpt_bigcode",
        SIZES,
        layer=layer,
        long=dict(n_positions=256, tie_word_embeddings=False),
    ),
    # a key-value head for each query's
    "gpt-bigcode-heads": Case(
        "gpt_bigcode",
        SIZES
        | dict(
            multi_query=False, n_inner=40, activation_function="gelu", tie_word_embeddings=False
        ),
        layer=layer,
    ),
}

STARCODER = {
    "activation_function": "gelu",
    "architectures": ["GPTBigCodeForCausalLM"],
    "attention_softmax_in_fp32": True,
    "attn_pdrop": 0.1,
    "bos_token_id": 0,
    "embd_pdrop": 0.1,
    "eos_token_id": 0,
    "inference_runner": 0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "max_batch_size": None,
    "max_sequence_length": None,
    "model_type": "gpt_bigcode",
    "multi_query": True,
    "n_embd": 6144,
    "n_head": 48,
    "n_inner": 24576,
    "n_layer": 40,
    "n_positions": 8192,
    "pad_key_length": True,
    "pre_allocate_kv_cache": False,
    "resid_pdrop": 0.1,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "validate_runner_input": True,
    "vocab_size": 49152,
}
PUBLISHED = [STARCODER]
