"""Mechanisms that a family brings (docs/how-to/new-family.md): its tiny model, as its config.json,
and the layouts on which it joins the golden table. A way to get it wrong joins controls.py.
"""

from dataclasses import replace
from typing import Literal

from table import FAMILIES, LENGTH, SIZES, VOCABULARY
from tiny_models import Flat, Tiny, tiny, with_mixer_fields
from variations import rows

from dolmen.families.adapters import ADAPTED
from dolmen.model.spec import LoraSpec, RopeSpec
from dolmen.model.training import RouterTraining, Training

FALCON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    ffn_hidden_size=48,
    initializer_range=0.1,
)
DEEPSEEK = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=8,
    kv_lora_rank=12,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
    n_routed_experts=8,
    num_experts_per_tok=2,
    first_k_dense_replace=1,
    initializer_range=0.1,
    # fifty times the usual, so that the auxiliary losses' gradients are felt
    aux_loss_alpha=0.05,
    rope_parameters=dict(
        rope_type="yarn",
        rope_theta=100.0,
        factor=4.0,
        original_max_position_embeddings=LENGTH // 2,
        beta_fast=2.0,
        mscale=0.7,
        mscale_all_dim=0.9,
    ),
)
GLM = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=3,
    num_attention_heads=8,
    initializer_range=0.1,
)
FELT = Training(router=RouterTraining(z_loss_coef=0.05))
CONFIGS = {
    # side by side with one norm; one key-value head, whole on every rank
    "falcon-7b": tiny("falcon", **FALCON),
    # with two, biased; two key-value heads, which tp 4 does not divide
    "falcon-40b": tiny(
        "falcon",
        **FALCON,
        new_decoder_architecture=True,
        num_kv_heads=2,
        bias=True,
        tie_word_embeddings=False,
    ),
    # norms less one, a scaled embedding; one key-value head, whole on every rank
    "gemma": tiny("gemma", **SIZES, num_key_value_heads=1),
    # norms after layers too, windows, a scale of its own; caps that scores and logits of this size
    # feel
    "gemma2": tiny(
        "gemma2",
        **SIZES,
        num_key_value_heads=4,
        query_pre_attn_scalar=5,
        sliding_window=3,
        attn_logit_softcapping=1.0,
        final_logit_softcapping=2.0,
    ),
    # keys carry what ALiBi adds; one after the other
    "falcon-rw": tiny(
        "falcon",
        **FALCON | dict(hidden_size=48, num_attention_heads=12),
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    # norms after layers alone, and of queries and keys over the width of all heads
    "olmo2": tiny("olmo2", **SIZES, num_key_value_heads=4),
    # a norm with weights of its own for each head, of keys whole on every rank of tp 4
    "cohere": tiny(
        "cohere",
        **SIZES,
        num_key_value_heads=2,
        use_qk_norm=True,
        logit_scale=2.0,
        tie_word_embeddings=False,
    ),
    # rows of the head at length 1; slopes of 10 heads
    "baichuan2": tiny(
        "baichuan",
        vocab_size=VOCABULARY,
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=10,
        initializer_range=0.1,
        dolmen={"head": "normalised", "positions": "alibi"},
    ),
    # a bias of the head, whose weight is the embedding's
    "phi": tiny(
        "phi",
        **{name: value for name, value in SIZES.items() if name != "head_dim"},
        partial_rotary_factor=0.5,
        qk_layernorm=True,
        tie_word_embeddings=True,
    ),
    # a norm of the embedding; slopes of 12 heads, which lie between those of 8 and of 16
    "bloom": tiny(
        "bloom",
        vocab_size=VOCABULARY,
        hidden_size=48,
        n_layer=3,
        n_head=12,
        initializer_range=0.1,
    ),
    # norms of the stream after each layer, none before the head; a matrix widens what is embedded,
    # and another narrows it again for a head that is tied; positions from the third row on
    "opt-350m": tiny(
        "opt",
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=12,
        ffn_dim=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        do_layer_norm_before=False,
        init_std=0.1,
    ),
    # values shorter than keys, the best of half the groups of experts; q is one matrix
    "deepseek-v2": tiny(
        "deepseek_v2",
        **DEEPSEEK,
        q_lora_rank=None,
        attention_bias=True,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek-v3": tiny("deepseek_v3", **DEEPSEEK, q_lora_rank=20, n_group=4, topk_group=2),
    # what experts share is weighed by each token
    "qwen2-moe": tiny(
        "qwen2_moe",
        **SIZES,
        num_key_value_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        router_aux_loss_coef=0.05,
    ),
    # biases of experts and of their logits; a limit that is felt
    "gpt-oss": tiny(
        "gpt_oss",
        **SIZES,
        num_key_value_heads=2,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=5,
        swiglu_limit=0.3,
        router_aux_loss_coef=0.05,
    ),
    # an encoder: it sees both ways, types of tokens, a head with a transform and one of pairs
    "bert": tiny(
        "bert",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=8,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        architectures=["BertForPreTraining"],
    ),
    # of each head a score that weighs no value
    "sinks": with_mixer_fields(FAMILIES["llama"], sinks=True),
    # the first tokens see one another
    "prefix": with_mixer_fields(FAMILIES["llama"], mask="prefix"),
    # and rope turns half of each head by a second stream of positions
    "two streams": with_mixer_fields(
        Flat(**SIZES, num_key_value_heads=4), mask="prefix", positions=RopeSpec(8, 100.0, streams=2)
    ),
    # the residual stream is what norms give, times a number
    "chatglm": tiny("chatglm", **GLM, inner_hidden_size=48),
    # two tables of positions
    "glm-10b": tiny("glm_10b", **GLM),
}
ROUTED = ("deepseek-v2", "deepseek-v3", "qwen2-moe", "gpt-oss")
CONFIGS |= {name: replace(CONFIGS[name], training=FELT) for name in ROUTED}


def adapted(
    config: Tiny,
    frozen: Literal["whole", "int8"] = "whole",
    kind: Literal["lora", "dora"] = "lora",
    **training,
) -> Tiny:
    """Frozen, with adapters on every matrix. Their products are felt: 4 times as large as they are,
    and as large again as rank 3 of 32 leaves them.
    """
    weights = (n for n, param in config.spec.params.items() if param.role in ADAPTED)
    adapter = LoraSpec(rank=3, alpha=12.0, targets=frozenset(weights), frozen=frozen, kind=kind)
    return replace(config, training=replace(config.training, adapter=adapter, **training))


BALANCED = replace(
    CONFIGS["deepseek-v3"], training=Training(router=RouterTraining("bias", bias_rate=0.05))
)
DROPPED = {name: replace(config, training=Training(0.2)) for name, config in CONFIGS.items()}

ADAPTED_CONFIGS = {
    "qwen3, adapters": adapted(Tiny(FAMILIES["qwen3"].spec)),
    "gpt2, adapters": adapted(Tiny(FAMILIES["gpt2"].spec)),
    "falcon-40b, adapters": adapted(CONFIGS["falcon-40b"]),
    "deepseek-v3, adapters": adapted(CONFIGS["deepseek-v3"]),
    "qwen3, int8 adapters": adapted(Tiny(FAMILIES["qwen3"].spec), "int8"),
    "deepseek-v3, dora int8": adapted(CONFIGS["deepseek-v3"], "int8", "dora"),
    "qwen3, dora": adapted(Tiny(FAMILIES["qwen3"].spec), kind="dora"),
    "deepseek-v3, int8 adapters": adapted(CONFIGS["deepseek-v3"], "int8"),
}

ROWS = [
    *rows(
        CONFIGS["falcon-7b"],
        "falcon-7b",
        """
        tp2                                 |
        tp2 sp zero1 acc4 zero-bubble
        tp4 sp zero1                        |
        dp2 tp2 sp zero3 full               |
        cp2 pp2 acc4 zero1                  |
        cp2 tp2 sp gather selective |
        pp2 acc4 interleaved v2 zero1  |
        dp4 zero2 acc4                 |
        cp4                            |
        pp2 dp2 tp2 sp acc4 zero3      |
        """,
    ),
    *rows(
        CONFIGS["falcon-40b"],
        "falcon-40b",
        """
        tp2 sp acc4                         |
        tp4
        dp2 tp2 zero2 acc4                  |
        cp2 pp2 acc4 gather full            |
        tp2 zero1 acc4 zero-bubble     |
        dp4 zero3                      |
        cp4 tp2 sp acc2                |
        """,
    ),
    *rows(
        CONFIGS["gemma"],
        "gemma",
        """
        dp2 tp2 sp zero3 acc4
        tp4                            |
        pp2 acc4 zero1 full            |
        cp2 pp2 acc4 gather            |
        """,
    ),
    *rows(
        CONFIGS["gemma2"],
        "gemma2",
        """
        tp2                                 |
        tp2 sp zero1 acc4 zero-bubble
        tp4 sp zero1                        |
        dp2 tp2 sp zero3 full |
        dp4 zero2 acc4                      |
        cp2 pp2 acc4 zero1                  |
        cp2 tp2 sp gather selective |
        cp4                                 |
        pp2 acc4 interleaved v2 zero1  |
        pp4 acc4                       |
        cp4 gather                     |
        tp4                            |
        pp2 dp2 tp2 sp acc4 zero3      |
        cp2 tp2 sp acc4 full           |
        """,
    ),
    *rows(
        CONFIGS["gemma2"],
        "gemma2, documents",
        "cp4 |\ncp2 tp2 sp gather",
        documents=True,
    ),
    *rows(DROPPED["gemma2"], "gemma2, dropout", "dp2 tp2 sp zero3 acc4 |\ncp2 full"),
    *rows(
        CONFIGS["falcon-rw"],
        "falcon-rw",
        """
        tp2 sp acc4                         |
        tp4 selective                  |
        cp2 pp2 acc4 zero1
        cp4 gather                     |
        cp2 tp2 sp full                     |
        """,
    ),
    *rows(
        CONFIGS["bloom"],
        "bloom",
        """
        tp2 sp zero1 acc4
        tp4                                 |
        cp2 pp2 acc4 zero1                  |
        cp4                                 |
        cp4 gather                          |
        cp2 tp2 sp selective |
        dp2 tp2 sp zero3 full          |
        pp4 acc8 zero-bubble           |
        tp2 sp acc4 zero-bubble        |
        cp2 dp2 zero2 acc4             |
        pp2 dp2 tp2 sp acc4 zero3      |
        """,
    ),
    *rows(
        CONFIGS["olmo2"],
        "olmo2",
        """
        tp2 sp zero1 acc4
        dp2 tp2 sp zero3 full   |
        tp4 selective           |
        cp2 tp2 sp gather       |
        """,
    ),
    *rows(CONFIGS["cohere"], "cohere", "tp4 sp zero1\ndp2 tp2 sp zero3 acc4 |"),
    *rows(
        CONFIGS["baichuan2"],
        "baichuan2",
        """
        dp2 tp2 sp zero3 acc4
        pp2 acc4 zero1          |
        cp2 tp2 sp              |
        """,
    ),
    *rows(CONFIGS["phi"], "phi", "pp2 dp2 zero1 acc4\ntp4 sp zero1 |"),
    *rows(CONFIGS["bloom"], "bloom, documents", "cp4 |\ncp2 tp2 sp gather", documents=True),
    *rows(DROPPED["bloom"], "bloom, dropout", "dp2 tp2 sp zero3 acc4\ncp4 |"),
    *rows(DROPPED["falcon-7b"], "falcon-7b, dropout", "dp2 tp2 sp zero3 acc4 |\ncp2 full"),
    *rows(
        CONFIGS["opt-350m"],
        "opt-350m",
        """
        tp2 sp zero1 acc4 zero-bubble
        dp2 tp2 sp zero3 full               |
        pp4 acc8 zero-bubble           |
        cp2 pp2 acc4 zero1             |
        cp2 tp2 sp gather selective    |
        tp4                            |
        dp4 zero2 acc4                 |
        pp2 dp2 tp2 sp acc4 zero3      |
        """,
    ),
    *rows(DROPPED["opt-350m"], "opt-350m, dropout", "dp2 tp2 sp zero3 acc4 |"),
    *rows(
        CONFIGS["deepseek-v3"],
        "deepseek-v3",
        """
        acc2 full |
        zero1 acc4 zero-bubble |
        zero3 acc4                          |
        tp2                                 |
        tp2 sp zero1 acc4                   |
        tp2 selective                       |
        tp2 sp zero1 full                   |
        tp2 sp acc4 zero-bubble
        cp2                                 |
        cp2 gather zero3 acc4 |
        pp2 acc4 interleaved v2 zero1       |
        pp2 acc4 zero-bubble-v v2 zero2
        dp2 ep2 zero1                       |
        cp2 ep2 zero2 acc2                  |
        tp4 sp zero1                        |
        cp4                                 |
        cp2 tp2 sp acc4                     |
        dp2 tp2 sp zero3                    |
        dp4 ep4 zero3 acc2                  |
        dp2 tp2 sp ep2 zero2
        pp2 tp2 sp acc4 interleaved v2      |
        pp2 dp2 ep2 acc4 zero-bubble zero1  |
        """,
    ),
    *rows(
        CONFIGS["deepseek-v2"],
        "deepseek-v2",
        """
        tp2                                 |
        tp2 sp acc4 zero-bubble |
        cp2                                 |
        tp4                                 |
        cp2 tp2 sp full                     |
        pp2 dp2 ep2 acc4 zero1
        """,
    ),
    *rows(
        CONFIGS["deepseek-v3"],
        "deepseek-v3, documents",
        "cp2 tp2 sp gather\ncp2 zero1 acc2 |",
        documents=True,
    ),
    *rows(
        DROPPED["deepseek-v3"],
        "deepseek-v3, dropout",
        "dp2 tp2 sp zero3 acc4 |\ncp2 tp2 selective |",
    ),
    *rows(
        CONFIGS["qwen2-moe"],
        "qwen2-moe",
        """
        dp2 tp2 sp ep2 zero2
        tp4 acc4 zero-bubble           |
        """,
    ),
    *rows(
        CONFIGS["gpt-oss"],
        "gpt-oss",
        """
        dp2 tp2 sp ep2 zero2
        dp4 ep2 zero3 acc2                  |
        tp2 acc4 zero-bubble           |
        cp2 tp2 ep2                    |
        """,
    ),
    *rows(BALANCED, "deepseek-v3, bias", "dp2 tp2 sp ep2 zero2"),
    # one key-value head, whole on every rank of tp; of pp 4 the first stage has no layer
    *rows(
        ADAPTED_CONFIGS["qwen3, adapters"],
        "qwen3, adapters",
        """
        acc4 zero-bubble |
        zero3 acc2 full |
        tp2 sp acc4 zero-bubble
        tp4                                 |
        pp2 dp2 acc4 zero1                  |
        dp2 tp2 sp zero3 acc4 |
        cp2 dp2 zero2 acc4                  |
        pp4 acc4 zero-bubble
        """,
    ),
    # a tied embedding, on two stages, is frozen on both
    *rows(
        ADAPTED_CONFIGS["gpt2, adapters"],
        "gpt2, adapters",
        "pp2 acc4 zero1\npp2 acc4 zero-bubble zero1",
    ),
    # side by side: two branches with one collective
    *rows(
        ADAPTED_CONFIGS["falcon-40b, adapters"],
        "falcon-40b, adapters",
        """
        tp2 sp acc4
        dp4 zero0                           |
        """,
    ),
    # of latents and of experts
    *rows(
        ADAPTED_CONFIGS["deepseek-v3, adapters"],
        "deepseek-v3, adapters",
        """
        tp2 sp zero1 acc4 |
        cp2 gather zero3 acc4               |
        dp2 tp2 sp ep2 zero2
        pp2 dp2 ep2 acc4 zero-bubble zero1  |
        dp2 tp2 ep2 zero3                   |
        """,
    ),
    # lengths of rows that tp cuts, of experts too
    *rows(
        ADAPTED_CONFIGS["qwen3, dora"],
        "qwen3, dora",
        """
        dp2 tp2 sp zero3 acc4
        tp4                           |
        pp2 dp2 acc4 zero1            |
        tp2 sp acc4 zero-bubble       |
        """,
    ),
    *rows(
        ADAPTED_CONFIGS["deepseek-v3, dora int8"],
        "deepseek-v3, dora int8",
        """
        dp2 tp2 sp ep2 zero2          |
        pp2 dp2 ep2 acc4 zero1        |
        """,
    ),
    # what is frozen in eight bits
    *rows(
        ADAPTED_CONFIGS["qwen3, int8 adapters"],
        "qwen3, int8 adapters",
        """
        dp2 tp2 sp zero3 acc4
        pp2 dp2 acc4 zero1 |
        tp4                           |
        tp2 sp acc4 zero-bubble       |
        dp2 zero0                     |
        """,
    ),
    *rows(
        ADAPTED_CONFIGS["deepseek-v3, int8 adapters"],
        "deepseek-v3, int8 adapters",
        """
        dp2 tp2 sp ep2 zero2
        pp2 dp2 ep2 acc4 zero-bubble zero1 |
        dp2 tp2 ep2 zero3                  |
        """,
    ),
    *rows(
        CONFIGS["sinks"],
        "sinks",
        """
        tp2 sp zero1 acc4 |
        cp2 pp2 acc4 zero1                  |
        cp2 tp2 sp gather selective
        dp2 tp2 sp zero3 full               |
        cp4                     |
        tp4                     |
        pp2 acc4 zero-bubble    |
        """,
    ),
    *rows(DROPPED["sinks"], "sinks, dropout", "dp2 tp2 zero2"),
    *rows(
        CONFIGS["prefix"],
        "prefix",
        """
        cp2 pp2 acc4 zero1                  |
        cp2 tp2 sp gather
        cp4                    |
        dp2 tp2 sp zero3 full  |
        cp4 gather selective   |
        """,
        prefixes=True,
    ),
    *rows(
        CONFIGS["prefix"],
        "prefix, documents",
        "cp4\ncp2 dp2 gather zero2 |",
        documents=True,
        prefixes=True,
    ),
    *rows(
        CONFIGS["two streams"],
        "two streams",
        """
        cp2 pp2 acc4 zero1
        tp2 sp zero1 acc4      |
        cp4                    |
        cp2 tp2 sp gather      |
        dp2 tp2 sp zero3 full  |
        """,
        documents=True,
        prefixes=True,
        streams=2,
    ),
    *rows(
        CONFIGS["chatglm"],
        "chatglm",
        """
        cp2 tp2 sp gather selective
        pp2 tp2 sp acc4 zero1       |
        dp2 tp2 sp zero3 full       |
        """,
        documents=True,
        prefixes=True,
        streams=2,
    ),
    *rows(
        CONFIGS["glm-10b"],
        "glm-10b",
        """
        cp2 pp2 acc4 zero1
        dp2 tp2 sp zero3 full  |
        """,
        documents=True,
        prefixes=True,
        streams=2,
    ),
    *rows(
        FAMILIES["gpt2"],
        "gpt2, positions of documents",
        "dp2 tp2 sp zero3\ncp2 pp2 acc4 zero1 |",
        documents=True,
        streams=1,
    ),
]
