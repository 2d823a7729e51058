"""Small decoders, one for each way that keys and positions reach attention, with weights large
enough to matter.
"""

import torch
from tiny_models import Flat, build, initialize, tiny, with_mixer_fields

from dolmen.core.mesh import SINGLE, Mesh
from dolmen.model.layout import Layout

VOCABULARY, MOST = 71, 32  # 71 is prime: no tp divides it
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    max_position_embeddings=MOST,
    initializer_range=0.3,
)
DECODERS = {
    "grouped": Flat(**SIZES, num_key_value_heads=2),
    "one-kv-qk-norm": Flat(**SIZES, num_key_value_heads=1, qk_norm=True, tie_word_embeddings=True),
    "uneven-kv": Flat(**SIZES | dict(num_attention_heads=6), num_key_value_heads=3),
    "learned": Flat(
        **SIZES,
        num_key_value_heads=4,
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
    "window": Flat(**SIZES, num_key_value_heads=2, sliding_window=5),
    "window-in-one-layer": Flat(
        **SIZES, num_key_value_heads=2, sliding_window=5, sliding_layers=(1,)
    ),
}
DECODERS |= {
    "sinks": with_mixer_fields(DECODERS["uneven-kv"], sinks=True),
    "sinks-and-window": with_mixer_fields(DECODERS["window"], sinks=True),
}
FALCON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=MOST,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
DECODERS |= {
    "alibi": tiny(
        "bloom",
        vocab_size=VOCABULARY,
        hidden_size=48,
        n_layer=2,
        n_head=6,
        seq_length=MOST,
        initializer_range=0.3,
        tie_word_embeddings=False,
    ),
    "alibi-in-keys": tiny(
        "falcon",
        **FALCON | dict(hidden_size=48, num_attention_heads=6),
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "side-by-side": tiny("falcon", **FALCON),
    "side-by-side-two-norms": tiny(
        "falcon", **FALCON, new_decoder_architecture=True, num_kv_heads=2, bias=True
    ),
}
DEEPSEEK = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    max_position_embeddings=MOST,
    initializer_range=0.3,
)
DECODERS |= {
    "latent": tiny("deepseek_v2", **DEEPSEEK, q_lora_rank=None, attention_bias=True),
    "latent-queries": tiny(
        "deepseek_v3", **DEEPSEEK, q_lora_rank=20, n_group=2, topk_group=1, rope_interleave=False
    ),
}
DECODERS["soft-capped"] = tiny(
    "gemma2",
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=MOST,
    initializer_range=0.3,
    tie_word_embeddings=False,  # tied, it repeats a token
    query_pre_attn_scalar=8,
    sliding_window=5,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
)
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17], [70, 0, 70], [3], [*range(40, 60)]]


def decoder(name: str, mesh: Mesh = SINGLE, **layout):
    model = build(DECODERS[name], mesh, Layout(**layout) if layout else None)
    initialize(model, seed=0)
    return model


def tokens(rows: int = 2, length: int = MOST) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
