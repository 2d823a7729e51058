"""config.json: spellings of transformers 4 and 5, absent fields, what is refused, and models made
here.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from dolmen.families import FAMILIES, from_hf, to_hf, unknown_fields, weight_map
from dolmen.model.config import ModelConfig, RopeConfig

# As published by transformers 4: theta beside the scaling, torch_dtype, absent fields, fields
# without effect.
LLAMA_31 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_LINEAR = {
    "model_type": "llama",
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "head_dim": None,
    "pretraining_tp": 2,
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "hidden_act": "silu",
    "vocab_size": 32000,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN_25 = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_window_layers": 21,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_WINDOW = QWEN_25 | {"use_sliding_window": True, "sliding_window": 512}
QWEN_3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_window_layers": 28,
    "rope_scaling": None,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rope_theta": 1000000,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
GPT2_ALIASES = {
    "model_type": "gpt2",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}
QWEN_3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN_3_SPARSE_STEP = QWEN_3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
PUBLISHED = [
    MIXTRAL,
    QWEN_3_MOE,
    QWEN_3_SPARSE_STEP,
    LLAMA_31,
    LLAMA_LINEAR,
    MISTRAL,
    QWEN_25,
    QWEN_WINDOW,
    QWEN_3,
    GPT2,
    GPT2_ALIASES,
]


def structure(config):
    return replace(config, hf={})


def by_transformers(content):
    """The same config.json read by transformers and written out with nothing absent."""
    # it writes into what it is given
    return transformers.AutoConfig.for_model(**deepcopy(content)).to_dict()


@pytest.mark.parametrize(
    "content",
    PUBLISHED + [{"model_type": name} for name in FAMILIES],
    ids=lambda c: f"{c['model_type']}-{len(c)}",
)
def test_read_as_transformers_reads_it(content):
    config = from_hf(content)
    assert structure(config) == structure(from_hf(by_transformers(content)))
    assert to_hf(config) == content
    assert config.dropout == 0


def test_values_of_published_configs():
    assert from_hf(LLAMA_31).rope == RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)
    assert from_hf(LLAMA_LINEAR).rope == RopeConfig(10000.0, "linear", 4.0)
    assert from_hf(LLAMA_LINEAR).num_key_value_heads == 40 and from_hf(LLAMA_LINEAR).head_dim == 128
    assert (
        from_hf(QWEN_25).window(23) is None
        and from_hf(QWEN_25).attention_bias
        and not from_hf(QWEN_25).output_bias
    )
    assert [from_hf(QWEN_WINDOW).window(i) for i in (20, 21)] == [None, 512]
    assert from_hf(MISTRAL).window(0) == 4096 and from_hf(QWEN_3).head_dim == 128
    assert (
        from_hf(MIXTRAL).expert_size == 14336
        and from_hf(MIXTRAL).norm_topk_prob
        and from_hf(MIXTRAL).router_aux_loss_coef == 0.02
    )
    assert from_hf(QWEN_3_MOE).expert_size == 768 and from_hf(QWEN_3_MOE).num_experts_per_tok == 8
    assert [i for i in range(8) if from_hf(QWEN_3_SPARSE_STEP).sparse(i)] == [1, 5, 7]
    assert from_hf(GPT2).intermediate_size == 3072 and from_hf(GPT2).tie_word_embeddings


def test_a_change_keeps_the_spelling():
    longer = replace(from_hf(LLAMA_31), rope=RopeConfig(500000.0, "llama3", 16.0, 1.0, 4.0, 8192))
    assert to_hf(longer) == LLAMA_31 | {"rope_scaling": LLAMA_31["rope_scaling"] | {"factor": 16.0}}
    unscaled = to_hf(replace(from_hf(LLAMA_31), rope=RopeConfig(1000.0)))
    assert unscaled == LLAMA_31 | {"rope_theta": 1000.0, "rope_scaling": None}
    assert to_hf(replace(from_hf(GPT2_ALIASES), num_hidden_layers=3)) == GPT2_ALIASES | {
        "num_hidden_layers": 3
    }
    # n_inner is absent and would follow n_embd
    wider = replace(from_hf(GPT2), hidden_size=1536, head_dim=128)
    assert from_hf(to_hf(wider)).intermediate_size == 3072
    assert structure(from_hf(to_hf(wider))) == structure(wider)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "relu2"),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("llama", "rope_scaling", {"rope_type": "longrope"}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("llama", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("llama", "sliding_window", 128),
        ("llama", "rope_parameters", {"full_attention": {"rope_type": "default"}}),
        ("llama", "vocab_size", None),
        ("llama", "num_hidden_layers", "2"),
        ("llama", "num_attention_heads", 33),
        ("llama", "auto_map", {"AutoConfig": "x.Y"}),
        ("llama", "quantization_config", {"quant_method": "gptq"}),
        ("llama", "is_encoder_decoder", True),
        ("mistral", "attention_bias", True),
        ("mistral", "layer_types", ["full_attention"]),
        ("qwen2", "attention_bias", False),
        ("qwen2", "use_mrope", True),
        ("qwen2", "layer_types", ["chunked_attention"] * 32),
        ("qwen3", "layer_types", ["full_attention"]),
        ("qwen3", "layer_types", ["sliding_attention"] * 32),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "reorder_and_upcast_attn", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "activation_function", "quick_gelu"),
        ("gpt2", "n_head", 5),
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "num_local_experts", 0),
        ("qwen3_moe", "num_experts_per_tok", 129),
        ("qwen3_moe", "decoder_sparse_step", 0),
        ("gemma", "model_type", "gemma"),
    ],
)
def test_refused_with_the_field(model_type, field, value):
    with pytest.raises(ValueError, match=field):
        from_hf({"model_type": model_type, field: value})


def test_unknown_fields_are_kept_and_reported():
    content = LLAMA_31 | {"flux_capacitor": 1.21, "_commit": "abc"}
    content["rope_scaling"] = content["rope_scaling"] | {"mystery": 1}
    assert unknown_fields(content) == ["flux_capacitor", "rope_scaling.mystery"]
    assert to_hf(from_hf(content)) == content
    assert not any(unknown_fields(c) for c in PUBLISHED)
    assert not any(unknown_fields(by_transformers({"model_type": name})) for name in FAMILIES)


SMALL = dict(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
MADE = [
    ModelConfig(
        family="llama",
        **SMALL,
        tie_word_embeddings=True,
        rope=RopeConfig(500.0, "llama3", 8.0, 1.0, 4.0, 16),
    ),
    ModelConfig(
        family="llama",
        **SMALL,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
    ),
    ModelConfig(family="mistral", **SMALL, sliding_window=7),
    ModelConfig(family="mistral", **SMALL | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    ModelConfig(
        family="qwen2", **SMALL, attention_bias=True, sliding_window=7, sliding_layers=(0,)
    ),
    ModelConfig(family="qwen3", **SMALL, qk_norm=True, hf={"eos_token_id": 3}),
    ModelConfig(
        family="mixtral", **SMALL, num_experts=4, router_aux_loss_coef=0.02, rope=RopeConfig(1e6)
    ),
    ModelConfig(family="mixtral", **SMALL, num_experts=4, num_experts_per_tok=1, sliding_window=7),
    ModelConfig(
        family="qwen3_moe",
        **SMALL,
        qk_norm=True,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        dense_layers=(1,),
        norm_topk_prob=False,
    ),
    ModelConfig(
        family="gpt2",
        **SMALL | {"num_key_value_heads": 4, "head_dim": 8},
        position="learned",
        norm="layernorm",
        mlp="plain",
        activation="gelu_tanh",
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
    ),
]


@pytest.mark.parametrize("config", MADE, ids=lambda c: c.family)
def test_made_here_is_built_by_transformers(config):
    content = to_hf(config)
    assert structure(from_hf(content)) == structure(config)
    theirs = transformers.AutoConfig.for_model(**content)
    assert structure(from_hf(theirs.to_dict())) == structure(config)
    assert theirs.eos_token_id == config.hf.get("eos_token_id")
    assert theirs.architectures == [FAMILIES[config.family].architecture]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: entry.shape for name, entry in weight_map(config).entries.items()}
    # experts apart, as in files
    theirs = revert_weight_conversion(model, dict(model.named_parameters()))
    assert {name: tuple(p.shape) for name, p in theirs.items()} == shapes


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (ModelConfig(family="llama", norm="layernorm"), "norm"),
        (ModelConfig(family="llama", sliding_window=8), "sliding window"),
        (ModelConfig(family="llama", attention_bias=True), "output_bias"),
        (ModelConfig(family="qwen2"), "attention_bias"),
        (ModelConfig(family="mistral", qk_norm=True), "qk_norm"),
        (ModelConfig(family="gpt2"), "position"),
        (ModelConfig(family="mistral", sliding_window=8, sliding_layers=(1,)), "sliding window"),
        (ModelConfig(family="qwen3", qk_norm=True, num_experts=8), "num_experts"),
        (ModelConfig(family="mixtral"), "num_local_experts"),
        (ModelConfig(family="mixtral", num_experts=8, dense_layers=(1,)), "dense_layers"),
        (ModelConfig(family="mixtral", num_experts=8, norm_topk_prob=False), "norm_topk_prob"),
        (
            ModelConfig(family="qwen3_moe", qk_norm=True, num_experts=8, router_balance="bias"),
            "router_balance",
        ),
        (ModelConfig(family="bert"), "bert"),
    ],
)
def test_a_family_refuses_what_it_cannot_express(config, field):
    with pytest.raises(ValueError, match=field):
        to_hf(config)


def test_another_family_keeps_the_token_ids():
    moved = to_hf(replace(from_hf(LLAMA_31), family="mistral"))
    assert moved["model_type"] == "mistral" and "mlp_bias" not in moved
    assert moved["eos_token_id"] == LLAMA_31["eos_token_id"] and moved["dtype"] == "bfloat16"
