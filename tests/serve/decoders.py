"""Small decoders, one for each way that keys and positions reach attention, with weights large
enough to matter.
"""

import torch
from models import Flat, build, initialize, tiny

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
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [15, 16, 17], [70, 0, 70]]


def decoder(name: str, mesh: Mesh = SINGLE, **layout):
    model = build(DECODERS[name], mesh, Layout(**layout) if layout else None)
    initialize(model, seed=0)
    return model


def tokens(rows: int = 2, length: int = MOST) -> torch.Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))
