"""Small random models of transformers, one per structure that a family can take: the oracle of the
family tests.
"""

import contextlib
import io

import pytest
import torch
import transformers
from cases import Case, collected
from sizes import SIZES

DEEPSEEK = SIZES | dict(
    num_key_value_heads=4,
    q_lora_rank=12,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    moe_intermediate_size=24,
    n_shared_experts=2,
    n_routed_experts=8,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    rms_norm_eps=1e-2,  # the latents have another
)
YARN = dict(
    rope_type="yarn",
    rope_theta=100.0,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    mscale=0.7,
    mscale_all_dim=0.9,
)
GPT2 = dict(
    vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
FALCON = dict(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
)
BLOOM = dict(vocab_size=61, hidden_size=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)

OWN = {
    "llama": ("llama", SIZES),
    "llama-mha": (
        "llama",
        SIZES | dict(num_key_value_heads=4, rms_norm_eps=1e-5, hidden_act="gelu_new"),
    ),
    "llama-biased": (
        "llama",
        SIZES
        | dict(
            attention_bias=True,
            mlp_bias=True,
            head_dim=16,
            tie_word_embeddings=True,
            rope_parameters=LLAMA3,
        ),
    ),
    "llama-linear": (
        "llama",
        SIZES | dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1000.0)),
    ),
    "mistral": ("mistral", SIZES | dict(sliding_window=None)),
    "mistral-window": (
        "mistral",
        SIZES | dict(sliding_window=5, head_dim=16, tie_word_embeddings=True),
    ),
    "qwen2": ("qwen2", SIZES),
    "qwen2-window": (
        "qwen2",
        SIZES
        | dict(
            use_sliding_window=True, sliding_window=5, max_window_layers=1, tie_word_embeddings=True
        ),
    ),
    "qwen3": ("qwen3", SIZES | dict(head_dim=16, tie_word_embeddings=True)),
    "qwen3-window": (
        "qwen3",
        SIZES
        | dict(
            head_dim=12,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mixtral": ("mixtral", SIZES | dict(num_local_experts=4)),
    "mixtral-window": (
        "mixtral",
        SIZES | dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=5, head_dim=16),
    ),
    "qwen3-moe": (
        "qwen3_moe",
        SIZES
        | dict(
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            head_dim=16,
        ),
    ),
    "qwen3-moe-dense": (
        "qwen3_moe",
        SIZES
        | dict(
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=24,
            attention_bias=True,
            mlp_only_layers=[0],
            tie_word_embeddings=True,
        ),
    ),
    "llama-yarn": (
        "llama",
        SIZES
        | dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=100.0,
                factor=4.0,
                original_max_position_embeddings=16,
                truncate=False,
            )
        ),
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK),
    "deepseek-v2-groups": (
        "deepseek_v2",
        DEEPSEEK
        | dict(
            q_lora_rank=None,
            attention_bias=True,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            rope_parameters=YARN,
        ),
    ),
    "deepseek-v3": ("deepseek_v3", DEEPSEEK | dict(n_group=4, topk_group=2, rope_parameters=YARN)),
    "deepseek-v3-halves": (
        "deepseek_v3",
        DEEPSEEK
        | dict(
            q_lora_rank=None,
            attention_bias=True,
            n_group=2,
            topk_group=1,
            rope_interleave=False,
            norm_topk_prob=False,
            n_shared_experts=1,
            tie_word_embeddings=True,
        ),
    ),
    # pad_token_id: transformers gives its row no gradient
    "gemma": ("gemma", SIZES | dict(num_key_value_heads=1, head_dim=16, pad_token_id=None)),
    "gemma-biased": (
        "gemma",
        SIZES | dict(head_dim=8, attention_bias=True, tie_word_embeddings=False, pad_token_id=None),
    ),
    # caps that scores and logits of this size feel
    "gemma2": (
        "gemma2",
        SIZES
        | dict(
            head_dim=16,
            sliding_window=5,
            query_pre_attn_scalar=24,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            pad_token_id=None,
        ),
    ),
    "gemma2-uncapped": (
        "gemma2",
        SIZES
        | dict(
            head_dim=16,
            sliding_window=5,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
            query_pre_attn_scalar=16,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            attention_bias=True,
            pad_token_id=None,
        ),
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2-untied": (
        "gpt2",
        GPT2 | dict(tie_word_embeddings=False, n_inner=40, activation_function="gelu"),
    ),
    "bloom": ("bloom", BLOOM),
    "bloom-post": ("bloom", BLOOM | dict(apply_residual_connection_post_layernorm=True)),
    # of the slopes of 12 heads 4 are no powers of two
    "bloom-uneven-heads": (
        "bloom",
        BLOOM | dict(hidden_size=48, n_head=12, tie_word_embeddings=False, layer_norm_epsilon=1e-3),
    ),
    "falcon": ("falcon", FALCON),  # as 7B is
    "falcon-grouped": (  # as 40B is
        "falcon",
        FALCON | dict(new_decoder_architecture=True, num_kv_heads=2),
    ),
    "falcon-grouped-one-norm": (
        "falcon",
        FALCON
        | dict(
            new_decoder_architecture=True,
            num_kv_heads=2,
            num_ln_in_parallel_attn=1,
            bias=True,
            ffn_hidden_size=40,
            activation="gelu_new",
            tie_word_embeddings=False,
            rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1000.0),
        ),
    ),
    "falcon-classic": ("falcon", FALCON | dict(multi_query=False, parallel_attn=False, bias=True)),
    "falcon-classic-parallel": ("falcon", FALCON | dict(multi_query=False)),
    # as RW is; of the slopes of 12 heads 4 are no powers of two, and rounded
    "falcon-alibi": (
        "falcon",
        FALCON
        | dict(
            alibi=True,
            multi_query=False,
            parallel_attn=False,
            bias=True,
            hidden_size=48,
            num_attention_heads=12,
        ),
    ),
    "falcon-one-after-the-other": ("falcon", FALCON | dict(parallel_attn=False)),
}
CASES = {name: Case(*case) for name, case in OWN.items()} | collected()
REPEATED = set(
    """
    bloom-post bloom-uneven-heads chatglm-untied falcon-classic-parallel gemma-biased
    gemma2-uncapped gpt-bigcode-heads gpt-neo-local gpt2-untied gptj-tied granite-tied llama-mha
    llama-yarn mistral-window mixtral-window mpt-narrow mpt-uneven-heads olmo-clipped
    opt-without-last-norm phi-norms qwen2-moe-steps qwen2-window qwen3-moe-dense qwen3-window
    starcoder2-plain
    """.split()
)
"""Cases that execute no line of dolmen which the others do not. Their configs, weights and logits
are tested as all are; gradients, texts and layouts with --full.
"""
TIERED = [
    pytest.param(case, marks=pytest.mark.full) if case in REPEATED else case for case in CASES
]


def build(case, **changed):
    """A model with everything stored random: norm weights away from 1, biases away from 0."""
    torch.manual_seed(0)
    made = CASES[case]
    if made.plain:
        model = made.plain({"model_type": made.model_type, **made.fields, **changed}).eval()
    else:
        config = transformers.AutoConfig.for_model(made.model_type, **made.fields | changed)
        model = getattr(transformers, made.made).from_config(config).eval()
        if made.alter:
            model = made.alter(model)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (p.ndim == 1))
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.copy_(torch.randn(buffer.shape) * 0.2)
    return model


def config_of(case):
    """Its config.json, with nothing absent that transformers knows."""
    made = CASES[case]
    if made.plain:
        return {"model_type": made.model_type, **made.fields}
    return transformers.AutoConfig.for_model(made.model_type, **made.fields).to_dict()


def save(model, folder, **options):
    """save_pretrained without its progress bar; the folder."""
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder, **options)
    return folder
