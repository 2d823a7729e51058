"""config.json: spellings of transformers 4 and 5, absent fields, what is refused, and models made
here.
"""

import math
from copy import deepcopy

import pytest
import torch
import transformers
from models import Flat, flat_model
from transformers.core_model_loading import revert_weight_conversion

from dolmen.core.config import from_dict
from dolmen.families import (
    Model,
    changed,
    edit,
    explicit,
    families,
    moved,
    new,
    unknown_fields,
    weight_map,
)
from dolmen.files.schema import Int, described
from dolmen.model import count
from dolmen.model.tree import (
    Alibi,
    Experts,
    Head,
    LatentAttention,
    Linear,
    Llama3,
    Mlp,
    Norm,
    Parallel,
    Pre,
    Rope,
    Router,
    Sandwich,
    Steps,
    Yarn,
    check_cuts,
)

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
FALCON_7B = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModelForCausalLM": "tiiuae/falcon-7b--modeling_falcon.FalconForCausalLM",
        "AutoTokenizer": [None, None],
    },
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.27.4",
    "use_cache": True,
    "vocab_size": 65024,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON_11B = FALCON_40B | {  # one norm, a tall feed-forward layer, theta beside the scaling
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_ln_in_parallel_attn": 1,
    "rope_scaling": None,
    "rope_theta": 500042,
    "tie_word_embeddings": False,
}
FALCON_CLASSIC = {
    "alibi": True,
    "bias": True,
    "model_type": "falcon",
    "multi_query": False,
    "n_embed": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
}
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA2_27B = GEMMA2_9B | {
    "head_dim": 128,
    "hidden_size": 4608,
    "intermediate_size": 36864,
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144,
}
BLOOM = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 14336,
    "n_inner": None,
    "n_layer": 70,
    "num_attention_heads": 112,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 4,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "transformers_version": "4.21.0",
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
BLOOM_ALIASES = {
    "model_type": "bloom",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "n_head": 16,
}
QWEN_3_SPARSE_STEP = QWEN_3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
QWEN_3_DENSE = QWEN_3_MOE | {"mlp_only_layers": list(range(48))}
DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2 = DEEPSEEK_V2_LITE | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "ep_size": 1,
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
QWEN_YARN = QWEN_25 | {
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
}
PUBLISHED = [
    QWEN_3_DENSE,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    QWEN_YARN,
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
    FALCON_7B,
    FALCON_40B,
    FALCON_11B,
    FALCON_CLASSIC,
    GEMMA_2B,
    GEMMA2_9B,
    GEMMA2_27B,
    BLOOM,
    BLOOM_ALIASES,
]


def by_transformers(content):
    """The same config.json read by transformers and written out with nothing absent."""
    # it writes into what it is given
    return transformers.AutoConfig.for_model(**deepcopy(content)).to_dict()


def rope(content) -> Rope:
    positions = Model(content).tree.blocks[0].mixer.positions
    assert isinstance(positions, Rope)
    return positions


@pytest.mark.parametrize(
    "content",
    PUBLISHED + [{"model_type": name} for name in families()],
    ids=lambda c: f"{c['model_type']}-{len(c)}",
)
def test_read_as_transformers_reads_it(content):
    model = Model(deepcopy(content))
    assert model.tree == Model(by_transformers(content)).tree
    assert model.config == content
    assert model.exported() == {n: v for n, v in content.items() if n != "auto_map"}


@pytest.mark.parametrize("content", PUBLISHED, ids=lambda c: f"{c['model_type']}-{len(c)}")
def test_a_new_config_says_the_same_tree(content):
    tree = Model(content).tree
    made = new(tree, content["model_type"])
    assert made.tree == tree and Model(by_transformers(made.config)).tree == tree
    assert made.family.read(explicit(Model(content))) == tree  # and nothing is left to follow


def test_values_of_published_configs():
    assert rope(LLAMA_31) == Rope(128, 500000.0, Llama3(8.0, 1.0, 4.0, 8192))
    assert rope(LLAMA_LINEAR) == Rope(128, 10000.0, Linear(4.0))
    mixer = Model(LLAMA_LINEAR).tree.blocks[0].mixer
    assert mixer.kv_heads == 40 and mixer.head_size == 128
    last = Model(QWEN_25).tree.blocks[23].mixer
    assert last.window is None and last.q_bias and last.k_bias and last.v_bias and not last.o_bias
    assert [Model(QWEN_WINDOW).tree.blocks[i].mixer.window for i in (20, 21)] == [None, 512]
    assert [run.repeat for run in Model(QWEN_WINDOW).tree.runs] == [21, 3]
    assert Model(MISTRAL).tree.blocks[0].mixer.window == 4096
    qwen = Model(QWEN_3).tree.blocks[0].mixer
    assert qwen.head_size == 128 and qwen.qk_norm == Norm("rmsnorm", 1e-6)
    mixtral = Model(MIXTRAL).tree.blocks[0].mlp
    assert isinstance(mixtral, Experts) and (mixtral.number, mixtral.size) == (8, 14336)
    assert mixtral.router.normalise and mixtral.router.aux_loss_coef == 0.02
    sparse = Model(QWEN_3_MOE).tree.blocks[0].mlp
    assert isinstance(sparse, Experts) and sparse.size == 768 and sparse.per_token == 8
    layers = Model(QWEN_3_SPARSE_STEP).tree.blocks
    assert [i for i in range(8) if isinstance(layers[i].mlp, Experts)] == [1, 5, 7]
    falcon = Model(FALCON_7B).tree.blocks[0]
    assert (falcon.mixer.heads, falcon.mixer.kv_heads, falcon.mixer.head_size) == (71, 1, 64)
    assert falcon.arrangement == Parallel(1) and falcon.mlp.size == 4 * 4544
    assert count.parameters(Model(FALCON_7B).tree) == 6_921_720_704
    falcon = Model(FALCON_40B).tree.blocks[0]
    assert falcon.mixer.kv_heads == 8 and falcon.arrangement == Parallel(2)
    falcon = Model(FALCON_11B).tree.blocks[0]
    assert falcon.arrangement == Parallel(1) and falcon.mixer.positions.theta == 500042
    falcon = Model(FALCON_CLASSIC).tree
    assert falcon.hidden_size == 2048 and falcon.blocks[0].arrangement == Pre()
    assert falcon.blocks[0].mixer.kv_heads == 32 and falcon.blocks[0].mlp.bias
    assert falcon.blocks[0].mixer.positions == Steps()
    gemma = Model(GEMMA_2B).tree
    assert gemma.blocks[0].mlp.activation == "gelu_tanh" and gemma.embedding.scale == 2048**0.5
    assert gemma.final_norm == gemma.blocks[0].norm == Norm("rmsnorm", 1e-6, zero_centred=True)
    assert gemma.head == Head(tied=True) and gemma.blocks[0].arrangement == Pre()
    assert count.parameters(gemma) == 2_506_172_416
    gemma = Model(GEMMA2_27B).tree
    first, second = gemma.blocks[0].mixer, gemma.blocks[1].mixer
    assert (first.window, second.window) == (4096, None) and gemma.blocks[
        0
    ].arrangement == Sandwich()
    assert first.soft_cap == 50 and first.scale == 1 / 12 and gemma.head == Head(True, 30.0)
    assert [run.repeat for run in gemma.runs] == [23]
    assert count.parameters(gemma) == 27_227_128_320
    gemma = Model(GEMMA2_9B).tree
    assert gemma.blocks[0].mixer.scale is None  # of heads of 256
    assert count.parameters(gemma) == 9_241_705_984
    # 6 per element; 12 per layer, head, its size and mean key of 8192 causal ones, or of a window
    norms, keys = (42 * 4 + 1) * 3584, (8193 / 2, (4096 * 4097 / 2 + 4096 * 4096) / 8192)
    assert count.training_flops_per_token(gemma, 8192) == pytest.approx(
        6 * (9_241_705_984 - norms) + 12 * 21 * 16 * 256 * sum(keys), rel=1e-12
    )
    bloom = Model(BLOOM).tree
    assert bloom.hidden_size == 14336 and bloom.embedding.norm == bloom.final_norm
    assert bloom.blocks[0].mixer.positions == Alibi() and bloom.blocks[0].mixer.heads == 112
    assert (bloom.layers, bloom.max_position_embeddings, bloom.head.tied) == (70, 2048, True)
    assert count.parameters(bloom) == 176_247_271_424
    assert Model(BLOOM_ALIASES).tree.layers == 24
    lite, v2, v3 = (Model(c).tree for c in (DEEPSEEK_V2_LITE, DEEPSEEK_V2, DEEPSEEK_V3))
    yarn = Yarn(40.0, 4096, attention_factor=1.0)  # of equal mscales
    latent = Norm("rmsnorm", 1e-6)
    turned = Rope(64, 10000.0, yarn, interleaved=True)
    assert lite.blocks[0].mixer == LatentAttention(16, None, 512, 128, 128, latent, turned, 0.707)
    assert v3.blocks[0].mixer == LatentAttention(128, 1536, 512, 128, 128, latent, turned, 1.0)
    # both as the original code has them: (0.1 ln 40 + 1)^2 / sqrt(192), with 0.707 in V2-Lite
    assert v3.blocks[0].mixer.scale == pytest.approx(1.3688879454113936**2 / 192**0.5, rel=1e-12)
    assert lite.blocks[0].mixer.scale == pytest.approx(1.2608037774**2 / 192**0.5, rel=1e-9)
    assert [run.repeat for run in v3.runs] == [3, 58] and lite.blocks[0].mlp == Mlp(10944)
    assert v2.blocks[1].mlp == Experts(
        160,
        6,
        1536,
        router=Router("softmax", False, 16.0, 8, 3, "max", aux_loss_coef=0.001),
        shared=Mlp(2 * 1536),
    )
    assert v3.blocks[3].mlp == Experts(
        256,
        8,
        2048,
        router=Router("sigmoid", True, 2.5, 8, 4, "top2", bias=True, aux_loss_coef=0.001),
        shared=Mlp(2048),
    )
    assert Model(QWEN_YARN).tree.blocks[0].mixer.positions.scaling == Yarn(
        4.0, 32768, attention_factor=0.1 * math.log(4) + 1
    )
    gpt2 = Model(GPT2).tree
    assert gpt2.blocks[0].mlp.size == 3072 and gpt2.head.tied
    assert gpt2.embedding.positions.length == 1024 and gpt2.final_norm.bias


def test_a_change_keeps_the_spelling():
    longer = changed(Model(LLAMA_31), {"rope_parameters.factor": 16.0})
    assert longer.config == LLAMA_31 | {"rope_scaling": LLAMA_31["rope_scaling"] | {"factor": 16.0}}
    unscaled = changed(
        Model(LLAMA_31),
        {"rope_parameters.rope_type": "default", "rope_parameters.rope_theta": 1000.0},
    )
    assert unscaled.config == LLAMA_31 | {"rope_theta": 1000.0, "rope_scaling": None}
    five = LLAMA_LINEAR | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "own": 1}}
    del five["rope_scaling"]
    doubled = changed(Model(five), {"rope_parameters.factor": 8.0}).config["rope_parameters"]
    assert doubled == {"rope_type": "linear", "factor": 8.0, "own": 1, "rope_theta": 10000.0}
    assert changed(Model(GPT2_ALIASES), {"n_layer": 3}).config == GPT2_ALIASES | {
        "num_hidden_layers": 3
    }
    # n_inner is absent and follows n_embd
    assert changed(Model(GPT2), {"n_embd": 1536}).tree.blocks[0].mlp.size == 4 * 1536
    assert "factor" not in rope_of(changed(Model({"model_type": "llama"}), {"vocab_size": 7}))


def rope_of(model):
    return model.config.get("rope_parameters", {})


@pytest.mark.parametrize("content", PUBLISHED, ids=lambda c: f"{c['model_type']}-{len(c)}")
def test_edit(content):
    """Of every family: vocabulary, tie, dtype, context, special tokens, and nothing else."""
    model = Model(content)
    tied = not model.tree.head.tied
    edited = edit(model, vocab_size=77, tie=tied, dtype="float16", context=48, eos_token_id=[3, 4])
    tree, before = edited.tree, model.tree
    assert tree.vocab_size == 77 and tree.head.tied == tied and tree.max_position_embeddings == 48
    assert edited.dtype == "float16" and edited.config["eos_token_id"] == [3, 4]
    assert tree.runs == before.runs and tree.hidden_size == before.hidden_size
    assert (tree.longest is None) == (before.longest is None) and tree.longest in (None, 48)
    names = {n for n in {**content, **edited.config} if content.get(n) != edited.config.get(n)}
    length = model.family.names["max_position_embeddings"]
    assert names <= {
        "vocab_size",
        "tie_word_embeddings",
        "dtype",
        "torch_dtype",
        length,
        "eos_token_id",
    }
    assert edit(model) == model


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "relu2"),
        ("llama", "rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "yarn"}),
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
        ("falcon", "auto_map", {"AutoModelForCausalLM": "modeling_own.FalconForCausalLM"}),
        ("falcon", "auto_map", "modeling_falcon.FalconForCausalLM"),
        ("deepseek_v2", "num_key_value_heads", 1),
        ("deepseek_v2", "num_attention_heads", 33),
        ("deepseek_v2", "mlp_bias", True),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "moe_layer_freq", 2),
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "topk_method", "group_limited_greedy"),
        ("deepseek_v2", "n_shared_experts", 0),
        ("deepseek_v2", "num_experts_per_tok", 65),
        ("deepseek_v2", "qk_rope_head_dim", 63),
        ("deepseek_v2", "auto_map", {"AutoConfig": "modeling_other.DeepseekV2Config"}),
        ("deepseek_v2", "auto_map", "modeling_deepseek.DeepseekV2Config"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "n_group", None),
        ("deepseek_v3", "n_group", 7),
        ("deepseek_v3", "n_group", 256),
        ("deepseek_v3", "topk_group", 9),
        ("deepseek_v3", "topk_group", 0),
        ("deepseek_v3", "num_experts_per_tok", 129),
        ("deepseek_v3", "quantization_config", {"quant_method": "fp8"}),
        ("falcon", "alibi", True),
        ("falcon", "apply_residual_connection_post_layernorm", True),
        ("falcon", "num_kv_heads", 8),
        ("falcon", "num_ln_in_parallel_attn", 2),
        ("falcon", "num_ln_in_parallel_attn", 3),
        ("falcon", "hidden_size", 4545),
        ("falcon", "activation", "relu2"),
        ("gemma", "use_bidirectional_attention", True),
        ("gemma", "sliding_window", 128),
        ("gemma", "layer_types", ["full_attention"] * 28),
        ("gemma", "hidden_act", "relu2"),
        ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "attn_logit_softcapping", 0.0),
        ("gemma2", "final_logit_softcapping", -30.0),
        ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "sliding_window", None),
        ("gemma2", "sliding_window_pattern", 6),
        ("gemma2", "layer_types", ["chunked_attention"] * 26),
        ("gemma2", "layer_types", ["full_attention"]),
        ("gemma2", "hidden_activation", "relu2"),
        ("gemma2", "hidden_size", 2303),
        ("gemma3", "model_type", "gemma3"),
        ("bloom", "apply_residual_connection_post_layernorm", True),
        ("bloom", "slow_but_exact", True),
        ("bloom", "n_inner", 128),
        ("bloom", "n_head", 7),
        ("bloom", "seq_length", 0),
    ],
)
def test_refused_with_the_field(model_type, field, value):
    with pytest.raises(ValueError, match=field):
        Model({"model_type": model_type, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("beta_slow", 1e-9), ("attention_factor", 0), ("rope_theta", 1.0), ("truncate", None)],
)
def test_a_yarn_that_cannot_be(field, value):
    yarn = {"rope_type": "yarn", "factor": 2.0, field: value}
    with pytest.raises(ValueError, match=field):
        Model({"model_type": "qwen2", "rope_parameters": yarn})


def test_a_temperature_is_of_yarn():
    linear = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match="mscale_all_dim is 1.0"):
        Model({"model_type": "deepseek_v3", "rope_parameters": linear})
    unscaled = {"rope_type": "default", "mscale_all_dim": 1.0}
    mixer = Model({"model_type": "deepseek_v3", "rope_parameters": unscaled}).tree.blocks[0].mixer
    assert mixer.scale == pytest.approx(192**-0.5, rel=1e-15)


def test_an_attention_factor_follows_a_changed_factor():
    """Where none was stated."""
    longer = changed(Model(QWEN_YARN), {"rope_parameters.factor": 8.0})
    scaling = longer.tree.blocks[0].mixer.positions.scaling
    assert scaling == Yarn(8.0, 32768, attention_factor=0.1 * math.log(8) + 1)
    stated = QWEN_YARN["rope_scaling"] | {"attention_factor": 1.5}
    kept = changed(Model(QWEN_YARN | {"rope_scaling": stated}), {"rope_parameters.factor": 8.0})
    assert kept.tree.blocks[0].mixer.positions.scaling.attention_factor == 1.5
    deep = changed(Model(DEEPSEEK_V3), {"rope_parameters.factor": 80.0}).tree.blocks[0].mixer
    assert deep.positions.scaling.attention_factor == 1.0  # of equal mscales
    assert deep.scale == pytest.approx((0.1 * math.log(80) + 1) ** 2 / 192**0.5, rel=1e-12)


def test_falcon_refuses_what_no_class_computes():
    """The class in transformers has no norms for it either."""
    with pytest.raises(ValueError, match="parallel_attn is False, but new_decoder_architecture"):
        Model(FALCON_40B | {"parallel_attn": False})
    with pytest.raises(ValueError, match=r"num_kv_heads is 8, .* there are 32"):
        Model(FALCON_CLASSIC | {"num_kv_heads": 8})
    with pytest.raises(
        ValueError, match=r"num_attention_heads \(71\) is not divisible by tp \(2\)"
    ):
        check_cuts(Model(FALCON_7B).tree.leaves, {"tp": 2, "ep": 1})


def test_a_quantisation_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^quantization_config is 'a\\nb': dolmen reads unquan"):
        Model(LLAMA_31 | {"quantization_config": "a\nb"})


def test_unknown_fields_are_kept_and_reported():
    content = LLAMA_31 | {"flux_capacitor": 1.21, "_commit": "abc"}
    content["rope_scaling"] = content["rope_scaling"] | {"mystery": 1}
    model = Model(content)
    assert unknown_fields(model) == ["flux_capacitor", "rope_scaling.mystery"]
    assert model.exported() == content
    assert edit(model, vocab_size=7).config == content | {"vocab_size": 7}
    assert not any(unknown_fields(Model(c)) for c in PUBLISHED)
    assert not any(unknown_fields(Model(by_transformers({"model_type": n}))) for n in families())


def test_what_stands_under_the_reserved_key_is_not_exported():
    assert Model({"model_type": "llama", "dolmen": {}}).exported() == {"model_type": "llama"}
    with pytest.raises(ValueError, match="dolmen has a field 'mystery'"):
        Model({"model_type": "llama", "dolmen": {"mystery": 1}})


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
LLAMA3 = dict(
    theta=500.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
MADE = [
    dict(
        family="llama",
        **SMALL,
        tie_word_embeddings=True,
        rope=LLAMA3,
    ),
    dict(
        family="llama",
        **SMALL,
        attention_bias=True,
        output_bias=True,
        mlp_bias=True,
        activation="gelu_tanh",
    ),
    dict(family="mistral", **SMALL, sliding_window=7),
    dict(family="mistral", **SMALL | {"num_attention_heads": 6, "num_key_value_heads": 3}),
    dict(family="qwen2", **SMALL, attention_bias=True, sliding_window=7, sliding_layers=(0,)),
    dict(family="qwen3", **SMALL, qk_norm=True, hf={"eos_token_id": 3}),
    dict(family="mixtral", **SMALL, num_experts=4, router_aux_loss_coef=0.02, rope={"theta": 1e6}),
    dict(family="mixtral", **SMALL, num_experts=4, num_experts_per_tok=1, sliding_window=7),
    dict(
        family="qwen3_moe",
        **SMALL,
        qk_norm=True,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        dense_layers=(1,),
        norm_topk_prob=False,
    ),
    dict(
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


@pytest.mark.parametrize("fields", MADE, ids=lambda fields: fields["family"])
def test_made_here_is_built_by_transformers(fields):
    model = flat_model(**fields)
    assert model.tree == from_dict(Flat, fields).tree
    theirs = transformers.AutoConfig.for_model(**model.exported())
    assert Model(theirs.to_dict()).tree == model.tree
    assert theirs.eos_token_id == fields.get("hf", {}).get("eos_token_id")
    assert theirs.architectures == [model.family.architecture]
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(theirs)
    shapes = {name: entry.shape for name, entry in weight_map(model).entries.items()}
    # experts apart, as in files
    theirs = revert_weight_conversion(built, dict(built.named_parameters()))
    assert {name: tuple(p.shape) for name, p in theirs.items()} == shapes


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (dict(family="llama", norm="layernorm"), "final_norm.kind = layernorm"),
        (dict(family="llama", sliding_window=8), "mixer.window = 8"),
        (dict(family="llama", attention_bias=True), "mixer.o_bias = False"),
        (dict(family="qwen2"), "mixer.q_bias"),
        (dict(family="mistral", qk_norm=True), "mixer.qk_norm"),
        (dict(family="gpt2"), "positions"),
        (dict(family="mistral", sliding_window=8, sliding_layers=(1,)), r"window = \[None, 8, N"),
        (dict(family="qwen3", qk_norm=True, num_experts=8), "mlp = Experts"),
        (dict(family="mixtral"), "it has Experts alone"),
        (dict(family="mixtral", num_experts=8, dense_layers=(1,)), r"mlp = \['Experts', 'Mlp'"),
        (dict(family="mixtral", num_experts=8, norm_topk_prob=False), "router.normalise"),
        (dict(family="bert"), "bert"),
    ],
)
def test_a_family_refuses_what_it_cannot_express(fields, name):
    with pytest.raises(ValueError, match=name):
        flat_model(**fields)


def test_another_family_keeps_the_token_ids():
    other = moved(Model(LLAMA_31), "mistral")
    assert other.model_type == "mistral" and "mlp_bias" not in other.config
    assert other.config["eos_token_id"] == LLAMA_31["eos_token_id"] and other.dtype == "bfloat16"
    assert other.tree == Model(LLAMA_31).tree
    with pytest.raises(ValueError, match="family gpt2 cannot express"):
        moved(Model(LLAMA_31), "gpt2")


@pytest.mark.parametrize("name", families())
def test_a_family_declares_its_fields(name):
    """Each field once, its default within its limits; what a tree says is among them; an option has
    a help, and no two options have one name.
    """
    family = families()[name]
    names = [field.name for field in family.fields]
    assert len(set(names)) == len(names) and not {*names} & {*family.only, *family.harmless}
    Model({"model_type": name, **{f.name: f.default for f in family.fields}})
    assert set(family.new(Model({"model_type": name}).tree)) <= set(names)
    for field in family.fields:
        assert (
            field.help
            or field.inside
            or field.name in {"rope_theta", "rope_scaling"} | {"original_max_position_embeddings"}
        )
    every = [n for f in family.fields for n in (f.name, *f.aliases, *f.common)]
    assert len(set(every)) == len(every)
    for common in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        assert family.names[common] in names  # of any family


def test_limits_are_told_with_the_field():
    assert described(Int(1, 2**22)) == "an integer from 1 to 4,194,304"
    with pytest.raises(ValueError, match="hidden_size is 0: it must be an integer from 1 to"):
        changed(Model({"model_type": "llama"}), {"hidden_size": 0})
