"""MPT."""

from torch import nn

from cases import Case

SIZES = dict(vocab_size=61, n_layers=3, max_seq_len=64, bos_token_id=1, eos_token_id=2)


def layer(model, x):
    """A feed-forward layer that adds the residual stream itself."""
    block = model.transformer.blocks[1]

    def mlp(x):
        return block.ffn(x, 0.0)

    mlp.act = block.ffn.act
    return dict(zip("qkv", block.attn.Wqkv(x).chunk(3, -1), strict=True)), mlp


def narrow(model):
    """Feed-forward layers as wide as MosaicML's code makes them: int(d_model * expansion_ratio)."""
    width = int(model.config.d_model * model.config.expansion_ratio)
    for block in model.transformer.blocks:
        block.ffn.up_proj = nn.Linear(model.config.d_model, width, bias=False)
        block.ffn.down_proj = nn.Linear(width, model.config.d_model, bias=False)
    return model


CASES = {
    "mpt": Case(
        "mpt",
        SIZES | dict(d_model=32, n_heads=4),
        layer=layer,
        long=dict(max_seq_len=256, tie_word_embeddings=False),
    ),
    # of the slopes of 12 heads 4 lie between those of 8; clips and a scale that are felt
    "mpt-uneven-heads": Case(
        "mpt",
        SIZES
        | dict(
            d_model=48,
            n_heads=12,
            layer_norm_epsilon=1e-3,
            tie_word_embeddings=False,
            attn_config=dict(clip_qkv=1.5, softmax_scale=0.3),
        ),
        layer=layer,
    ),
    "mpt-narrow": Case(
        "mpt", SIZES | dict(d_model=32, n_heads=4, expansion_ratio=3), alter=narrow, layer=layer
    ),
}

MPT_7B = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "auto_map": {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"emb_init_std": None, "fan_mode": "fan_in", "name": "kaiming_normal_"},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.28.1",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 50432,
}
# as StoryWriter is, but for its length
MPT_7B_CLIPPED = MPT_7B | {"attn_config": MPT_7B["attn_config"] | {"clip_qkv": 6.0}}
PUBLISHED = [MPT_7B, MPT_7B_CLIPPED]
