"""Options of Megatron's command line (`args`) that decide what a model computes, their values, and
who reads them.
"""

from typing import Annotated, Any, Literal

from annotated_types import Interval, MaxLen

from dolmen.core.config import NonNegative
from dolmen.files import kinds
from dolmen.files.schema import typed_dict

SIZE = Annotated[int, Interval(ge=1, le=2**16)] | None  # of an axis
COUNT = Annotated[int, Interval(ge=0, le=2**31)] | None
EVERY, HAS = Annotated[int, Interval(ge=1, le=2**12)], Annotated[int, Interval(ge=0, le=1)]
MOE_LAYERS = Annotated[
    EVERY | Annotated[list[HAS], MaxLen(2**12)] | None,
    "one layer in so many has experts; or for each layer whether it has",
]
WIDTHS = """ffn_hidden_size kv_channels moe_ffn_hidden_size moe_shared_expert_intermediate_size
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim""".split()
SIZES = """tensor_model_parallel_size model_parallel_size pipeline_model_parallel_size
    expert_model_parallel_size expert_tensor_parallel_size
    virtual_pipeline_model_parallel_size""".split()
COUNTS = "moe_router_topk moe_router_num_groups moe_router_group_topk".split()
FLAGS = """group_query_attention swiglu bias_gelu_fusion openai_gelu onnx_safe add_bias_linear
    disable_bias_linear add_qkv_bias qk_layernorm multi_latent_attention apply_layernorm_1p
    layernorm_zero_centered_gamma untie_embeddings_and_output_weights use_rotary_position_embeddings
    rotary_interleaved use_rope_scaling moe_router_pre_softmax
    moe_router_enable_expert_bias""".split()
REALS = """layernorm_epsilon norm_epsilon rotary_percent rotary_base
    rotary_seq_len_interpolation_factor rope_scaling_factor init_method_std
    moe_router_topk_scaling_factor rotary_scaling_factor mscale mscale_all_dim beta_fast
    beta_slow""".split()
SCHEMA = typed_dict(
    {
        "num_layers": kinds.LAYERS,
        "hidden_size": kinds.WIDTH,
        "num_attention_heads": kinds.HEADS,
        "max_position_embeddings": kinds.POSITIONS,
    },
    {
        **dict.fromkeys(WIDTHS, kinds.WIDTH | None),
        **dict.fromkeys(SIZES, SIZE),
        **dict.fromkeys(COUNTS, COUNT),
        **dict.fromkeys(FLAGS, bool | None),
        **dict.fromkeys(REALS, NonNegative | None),
        "num_query_groups": kinds.HEADS | None,
        "original_max_position_embeddings": kinds.POSITIONS | None,
        "num_experts": kinds.EXPERTS | None,
        "moe_aux_loss_coeff": float | list[float] | None,
        "normalization": Literal["LayerNorm", "RMSNorm"] | None,
        "position_embedding_type": Literal["learned_absolute", "rope", "none"] | None,
        "rope_type": Literal["rope", "yarn"] | None,
        "moe_router_score_function": Literal["softmax", "sigmoid"] | None,
        "moe_layer_freq": MOE_LAYERS,
        "window_size": int | tuple[int, int] | None,
    },
)
# Fields whose other values change the function: only these are computed.
ONLY: dict[str, tuple] = {
    "squared_relu": (False, None),
    "quick_geglu": (False, None),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0, None),
    "qk_l2_norm": (False, None),
    "moe_apply_probs_on_input": (False, None),
    "moe_latent_size": (None,),
    "apply_residual_connection_post_layernorm": (False, None),
    "mla_down_proj_fusion": (False, None),
    "attention_output_gate": (False, None),
    "experimental_attention_variant": (None,),
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "hybrid_override_pattern": (None,),
    "hybrid_layer_pattern": (None,),
    "is_hybrid_model": (False, None),
    "no_rope_freq": (None,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla", None),
    "window_attn_skip_freq": (None,),
    "mtp_num_layers": (None, 0),
    "moe_shared_expert_gate": (False, None),
    "mrope_section": (None,),
    "retro_add_retriever": (False, None),
    "embedding_init_method_std": (None,),
    "use_mup": (False, None),
}


# What the classes from before Megatron-Core do not look at, whatever its value.
OF_CORE = frozenset(
    (
        "rotary_base",
        "use_rope_scaling",
        "rope_scaling_factor",
        "qk_layernorm",
        "multi_latent_attention",
        "window_size",
    )
)

# And what those of the core do not look at.
OF_OLDER = frozenset(("openai_gelu", "onnx_safe"))


class MegatronOptions(dict[str, Any]):
    """Options by name; options that were not given are None."""

    def __missing__(self, name: str) -> None:
        """Return None for an option that was not given."""
        return None

    def first(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of the options `names` that is given, else `default`."""
        return next((self[name] for name in names if self[name] is not None), default)
