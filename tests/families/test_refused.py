"""What cannot be computed is refused with the field, and with what it says."""

import pytest
from published import FALCON_7B, FALCON_40B, FALCON_CLASSIC, LLAMA_31

from dolmen.families import ModelConfig, find_family
from dolmen.model.spec import check_sharding


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("llama", "hidden_act", "relu2"),
        ("llama", "rope_scaling", {"type": "proportional", "factor": 2.0}),
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
        ("qwen", "kv_channels", 64),
        ("qwen", "intermediate_size", 22017),
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
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gemma3_text", "attn_logit_softcapping", 50.0),
        ("gemma3_text", "sliding_window_pattern", 0),
        ("gemma3_text", "rope_parameters", {"rope_type": "default", "rope_theta": 1e6}),
        ("gemma3_text", "rope_parameters", {"full_attention": {"rope_type": "longrope"}}),
        ("gemma3_text", "hidden_size", 2303),
        ("qwen2_moe", "mlp_bias", True),
        ("qwen2_moe", "num_experts_per_tok", 61),
        ("qwen2_moe", "shared_expert_intermediate_size", 0),
        ("qwen2_moe", "layer_types", ["full_attention"]),
        ("olmoe", "clip_qkv", 0),
        ("olmoe", "sliding_window", 128),
        ("olmoe", "num_experts", 0),
        ("gpt_oss", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt_oss", "hidden_act", "gelu"),
        ("gpt_oss", "swiglu_limit", 0),
        ("gpt_oss", "layer_types", ["chunked_attention"] * 36),
        ("gpt_oss", "attention_bias", None),
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("bert", "tie_word_embeddings", False),
        ("bert", "num_attention_heads", 7),
        ("roberta", "pad_token_id", None),
        ("roberta", "pad_token_id", -1),
        ("roberta", "max_position_embeddings", 2),
        ("bloom", "slow_but_exact", True),
        ("bloom", "n_inner", 128),
        ("bloom", "n_head", 7),
        ("bloom", "seq_length", 0),
        ("gpt_neo", "attention_types", [[["global", "local"], 11]]),
        ("gpt_neo", "attention_types", [[["banded"], 24]]),
        ("gpt_neo", "attention_layers", ["global"] * 23),
        ("gpt_neo", "window_size", 0),
        *(
            ("mpt", "attn_config", {name: value})
            for name, value in (
                ("alibi", False),
                ("alibi_bias_max", 16),
                ("attn_type", "multiquery_attention"),
                ("clip_qkv", 0),
                ("prefix_lm", True),
                ("qk_ln", True),
                ("softmax_scale", -1.0),
            )
        ),
        ("gptj", "rotary_dim", 63),
        ("gptj", "rotary_dim", 258),
        ("gptj", "rotary_dim", None),
        ("gptj", "rotary", False),
        ("codegen", "n_head", 2),
        ("codegen", "scale_attn_weights", False),
        ("starcoder2", "mlp_type", "gated"),
        ("starcoder2", "norm_type", "rms_norm"),
        ("starcoder2", "partial_rotary_factor", 0.5),
        ("starcoder2", "num_attention_heads", 25),
        ("mpt", "expansion_ratio", 0),
        ("mpt", "expansion_ratio", 1e-9),
        ("mpt", "expansion_ratio", 1e308),
        ("mpt", "logit_scale", "inv_sqrt_d_model"),
        ("mpt", "no_bias", False),
        ("mpt", "norm_type", "rmsnorm"),
        ("mpt", "auto_map", {"AutoConfig": "own.MPTConfig"}),
        ("gpt_bigcode", "scale_attn_weights", False),
        ("gpt_bigcode", "multi_query", None),
        ("opt", "word_embed_proj_dim", 0),
        ("opt", "scale_embeddings", True),
        ("opt", "learned_embeddings", False),
        ("opt", "activation_function", "relu2"),
        ("gpt_neox", "rotary_pct", 0.0),
        ("gpt_neox", "hidden_act", "relu2"),
        ("gpt_neox", "num_attention_heads", 65),
    ],
)
def test_refused_with_the_field(model_type, field, value):
    with pytest.raises(ValueError, match=field):
        ModelConfig({"model_type": model_type, field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("beta_slow", 1e-9), ("attention_factor", 0), ("rope_theta", 1.0), ("truncate", None)],
)
def test_a_yarn_that_cannot_be(field, value):
    yarn = {"rope_type": "yarn", "factor": 2.0, field: value}
    with pytest.raises(ValueError, match=field):
        ModelConfig({"model_type": "qwen2", "rope_parameters": yarn})


@pytest.mark.parametrize("classes", [5, [None, 0.5], "GLMModel"])
def test_classes_that_are_no_list_of_names_choose_no_family(classes):
    assert ModelConfig({"model_type": "glm", "architectures": classes}).model_type == "glm"


def test_labels_that_are_no_mapping():
    classes = ["LlamaForSequenceClassification"]
    with pytest.raises(ValueError, match="id2label is 5"):
        ModelConfig({"model_type": "llama", "architectures": classes, "id2label": 5})


def test_two_forms_of_the_kinds_of_layers_that_disagree():
    content = {"attention_types": [[["global"], 24]], "attention_layers": ["local"] * 24}
    with pytest.raises(ValueError, match="attention_layers contradicts attention_types"):
        ModelConfig({"model_type": "gpt_neo", **content})


def test_a_part_of_heads_that_is_no_pairs():
    with pytest.raises(
        ValueError, match=r"partial_rotary_factor is 0.06, which is 5 of 96 elements"
    ):
        ModelConfig({"model_type": "gpt_neox", "rotary_pct": 0.06})


def test_a_temperature_is_of_yarn():
    linear = {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}
    with pytest.raises(ValueError, match="mscale_all_dim is 1.0"):
        ModelConfig({"model_type": "deepseek_v3", "rope_parameters": linear})
    unscaled = {"rope_type": "default", "mscale_all_dim": 1.0}
    mixer = (
        ModelConfig({"model_type": "deepseek_v3", "rope_parameters": unscaled}).spec.blocks[0].mixer
    )
    assert mixer.scale == pytest.approx(192**-0.5, rel=1e-15)


def test_falcon_refuses_what_no_class_computes():
    """The class in transformers has no norms for it either."""
    with pytest.raises(ValueError, match="parallel_attn is False, but new_decoder_architecture"):
        ModelConfig(FALCON_40B | {"parallel_attn": False})
    with pytest.raises(ValueError, match=r"num_kv_heads is 8, .* there are 32"):
        ModelConfig(FALCON_CLASSIC | {"num_kv_heads": 8})
    with pytest.raises(
        ValueError, match=r"num_attention_heads \(71\) is not divisible by tp \(2\)"
    ):
        check_sharding(ModelConfig(FALCON_7B).spec.params, {"tp": 2, "ep": 1})


def test_a_quantisation_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^quantization_config is 'a\\nb': only unquan"):
        ModelConfig(LLAMA_31 | {"quantization_config": "a\nb"})


@pytest.mark.parametrize(
    "model_type",
    "llama mistral qwen2 mixtral gpt2 bloom falcon gemma2 deepseek_v2".split(),
)
def test_heads_that_do_not_divide_the_width(model_type):
    """One sentence for all families, in the words of each."""
    names = find_family(model_type).names
    hidden, heads = names["hidden_size"], names["num_attention_heads"]
    said = (
        rf"^{hidden} \(64\) is not divisible by {heads} \(33\): set "
        rf"--model.{heads.replace('_', '-')} to a divisor, such as 32"
    )
    with pytest.raises(ValueError, match=said):
        ModelConfig({"model_type": model_type, hidden: 64, heads: 33})


def test_what_may_be_done_instead():
    fields = {"hidden_size": 4097, "head_dim": 128}
    with pytest.raises(ValueError, match=r"such as 17, or --model.model-type to mistral, .*"):
        ModelConfig({"model_type": "llama"} | fields)
    assert ModelConfig({"model_type": "mistral"} | fields).spec.hidden_size == 4097
    with pytest.raises(ValueError, match=r"such as 17, or --model.head-dim$"):
        ModelConfig({"model_type": "mistral", "hidden_size": 4097})


@pytest.mark.parametrize(
    ("model_type", "fields", "said"),
    [
        ("gpt2", {"n_embd": 96, "hidden_size": 192}, "^n_embd is 96 and hidden_size is 192: they"),
        ("bloom", {"num_attention_heads": 4, "n_head": 8}, "n_head is 8 and num_attention_heads"),
        ("qwen3_moe", {"num_local_experts": 128, "num_experts": 64}, "is 128 and num_experts is"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
            "rope_type is 'default' and type is 'linear'",
        ),
    ],
)
def test_two_names_of_one_field_that_disagree(model_type, fields, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig({"model_type": model_type} | fields)
    (value, *_) = fields.values()
    same = (
        dict.fromkeys(fields, value) if len(fields) > 1 else {"rope_scaling": {"type": "default"}}
    )
    assert ModelConfig({"model_type": model_type} | same).spec


@pytest.mark.parametrize(
    "content",
    [
        FALCON_40B,  # num_kv_heads with multi_query
        {"model_type": "gemma", "hidden_act": "gelu", "hidden_activation": None},
        {"model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"},
        {"model_type": "gpt2", "n_inner": 128, "intermediate_size": 256},
        {"model_type": "gpt2", "n_positions": 64, "n_ctx": 1024},
        {"model_type": "llama", "torch_dtype": "float16", "dtype": "bfloat16"},
        {"model_type": "llama", "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}},
    ],
    ids=lambda content: f"{content['model_type']}-{len(content)}",
)
def test_what_transformers_does_not_take_for_one_field_is_two(content):
    """Or it says which of two it reads: `dtype`, and a theta inside."""
    assert ModelConfig(content).spec


def test_a_window_is_used_where_it_is_said_so():
    for model_type in ("qwen2", "qwen3", "qwen3_moe"):
        content = {"model_type": model_type, "sliding_window": 7, "num_hidden_layers": 1}
        content |= {"max_window_layers": 0}
        for used, window in ((False, None), (True, 7)):
            spec = ModelConfig(content | {"use_sliding_window": used}).spec
            assert spec.blocks[0].mixer.window == window


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "1 layer of sliding_attention, but use_sliding_window is False: set --model.use-sl"),
        (
            {"use_sliding_window": True, "sliding_window": None},
            "but sliding_window is None: set --model.sliding-window, or other types",
        ),
        (
            {"num_hidden_layers": 2},
            "layer_types has 1 entry, but num_hidden_layers is 2: set --model",
        ),
    ],
)
def test_a_layer_that_slides_has_a_window(fields, said):
    content = {"model_type": "qwen2", "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    with pytest.raises(ValueError, match=said):
        ModelConfig(content | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"n_group": 7},
            r"num_experts \(256\) is not divisible by n_group \(7\): set --model.n-gr",
        ),
        (
            {"topk_group": 9},
            r"topk_group \(9\) must lie in 1 to n_group \(8\): set --model.topk-gr",
        ),
        (
            {"n_group": 256},
            r"its best 2 experts, but n_group \(256\) leaves 1 of 256 in each: set a smaller --mod",
        ),
        (
            {"n_group": 128, "topk_group": 1},
            r"topk_group \(1\) x 2 experts of a group are fewer than num_experts_per_tok \(8\)",
        ),
    ],
)
def test_groups_of_experts_that_cannot_be(fields, said):
    with pytest.raises(ValueError, match=said):
        ModelConfig({"model_type": "deepseek_v3"} | fields)


def test_groups_that_are_not_stated():
    content = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}
    with pytest.raises(ValueError, match="but n_group is None: set --model.n-group$"):
        ModelConfig(content)
    with pytest.raises(ValueError, match="but topk_group is None: set --model.topk-group$"):
        ModelConfig(content | {"n_group": 8})


def test_a_large_integer_is_refused_with_its_bound():
    config = {"model_type": "llama", "rms_norm_eps": 2**63}
    with pytest.raises(ValueError, match=r"rms_norm_eps is 922\d+: it must be less than 2\^63, or"):
        ModelConfig(config)
