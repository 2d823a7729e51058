"""Reads the command line that a Megatron checkpoint keeps (`args`) as a model spec, and writes one.
It is interpreted as the code that saved it would, whose defaults and names have changed:

    absent                        before it was an option: the only behaviour there was
    layernorm_epsilon             norm_epsilon between core 0.4 and 0.15
    apply_layernorm_1p            later layernorm_zero_centered_gamma: weights are stored less 1
    num_query_groups              counts only with group_query_attention
    bias_gelu_fusion              decides which GELU: fused is the tanh form
    rotary_base                   the older classes rotate by 10000 whatever its value
    padded_vocab_size, vocab_size rows with padding; the true number of tokens is nowhere reliable

Latent attention (DeepSeek's) as Megatron-Core's options say it (MultiLatentAttention):

    scale of the scores    t(mscale_all_dim)^2 / sqrt(size of a query head)
                           before about core 0.13: t(mscale)^2, whatever rope_type is
    cos and sin            times t(mscale) / t(mscale_all_dim), under rope_type yarn
    t(m)                   0.1 m ln(rotary_scaling_factor) + 1, or 1 up to a factor of 1
    the first context      original_max_position_embeddings; before about core 0.13
                           max_position_embeddings, and between the two 4096, with no option

`args` do not say which version saved them. A combination that the versions compute differently is
refused. Its rope pairs are always neighbours; norms of latents exist with qk_layernorm only.
"""

from collections.abc import Mapping
from typing import Any

from dolmen.conversion.megatron.options import OF_CORE, OF_OLDER, ONLY, MegatronOptions
from dolmen.core.messages import brief
from dolmen.families.differences import differences
from dolmen.families.family import expect
from dolmen.model.spec import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    LatentAttentionSpec,
    LinearScaling,
    Llama3Scaling,
    LMHeadSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PositionTable,
    RopeSpec,
    RouterSpec,
    YarnScaling,
    group_repeats,
)
from dolmen.model.spec.layers import Activation


def read(args: Mapping[str, Any], legacy: bool, rows: int) -> ModelSpec:
    """Return the model spec that Megatron computes with the checkpoint's `args` (already checked
    against the schema) and a vocabulary of `rows`. `legacy`: saved by Megatron's classes from
    before Megatron-Core, which ignore some options. Raises ValueError, with option and value, for
    what dolmen does not compute.
    """
    options = MegatronOptions(args)
    # options with one supported value
    for name, allowed in ONLY.items():
        if options[name] not in allowed:
            raise ValueError(
                f"{name} is {brief(options[name])}: in a Megatron checkpoint it must be "
                f"{allowed[0]!r}"
            )
    # options that the code ignored have no say, whatever their value
    unread = OF_CORE if legacy else OF_OLDER
    options = MegatronOptions(
        {name: value for name, value in options.items() if name not in unread}
    )
    if legacy and options["num_experts"]:
        raise ValueError(
            "num_experts is set: experts are not supported in checkpoints from before Megatron-Core"
        )
    norm = _norm(options)
    of = read_latent if options["multi_latent_attention"] else _mixer
    mixer, mlp = of(options, norm, _has_biases(options)), _mlp(options)
    experts = _experts(options) if options["num_experts"] else mlp
    # attention is the same in all layers; only the MLP differs
    blocks = [
        BlockSpec(mixer, experts if sparse else mlp, norm) for sparse in _sparse_layers(options)
    ]
    learned = _positions(options) == "learned_absolute"
    table = PositionTable(options["max_position_embeddings"]) if learned else None
    return ModelSpec(
        hidden_size=options["hidden_size"],
        embedding=EmbeddingSpec(rows, positions=table),
        runs=group_repeats(blocks),
        final_norm=norm,
        head=LMHeadSpec(tied=not options["untie_embeddings_and_output_weights"]),
        max_position_embeddings=options["max_position_embeddings"],
        initializer_range=float(options.first("init_method_std", default=0.02)),
    )


def has_shifted_norms(args: Mapping[str, Any]) -> bool:
    """Return whether a Megatron checkpoint with these args stores norm weights less 1
    (zero-centered gamma).
    """
    return bool(MegatronOptions(args).first("layernorm_zero_centered_gamma", "apply_layernorm_1p"))


def _norm(options: MegatronOptions) -> NormSpec:
    """Return the norm that Megatron's options state: RMSNorm, or LayerNorm with bias, with its
    epsilon, 1e-5 by default.
    """
    eps = float(options.first("layernorm_epsilon", "norm_epsilon", default=1e-5))
    if options["normalization"] == "RMSNorm":
        return NormSpec("rmsnorm", eps)
    return NormSpec("layernorm", eps, bias=True)


def _has_biases(options: MegatronOptions) -> bool:
    """Return whether linear layers have biases under Megatron's options."""
    if options["disable_bias_linear"] is not None:
        return not options["disable_bias_linear"]
    return options["add_bias_linear"] in (None, True)


def _positions(options: MegatronOptions) -> str:
    """Return the kind of positions that Megatron's options state: rope, learned_absolute (the
    default) or none.
    """
    rope = "rope" if options["use_rotary_position_embeddings"] else None
    return rope or options["position_embedding_type"] or "learned_absolute"


def _mixer(options: MegatronOptions, norm: NormSpec, bias: bool) -> AttentionSpec:
    """Return the attention spec of all layers, from Megatron's options. Raises ValueError where the
    hidden size is not divisible by the heads.
    """
    hidden, heads = options["hidden_size"], options["num_attention_heads"]
    if options["kv_channels"] is None and hidden % heads:
        raise ValueError(
            f"hidden_size ({hidden}) is not divisible by num_attention_heads ({heads})"
        )
    # head size
    size = options["kv_channels"] or hidden // heads
    groups = options["num_query_groups"] if options["group_query_attention"] else None
    qkv_bias = bias or bool(options["add_qkv_bias"])
    return AttentionSpec(
        heads,
        groups or heads,
        size,
        q_bias=qkv_bias,
        k_bias=qkv_bias,
        v_bias=qkv_bias,
        o_bias=bias,
        qk_norm=norm if options["qk_layernorm"] else None,
        positions=_rope(options, size) if _positions(options) == "rope" else None,
        window=_window(options),
    )


def _rope(options: MegatronOptions, size: int) -> RopeSpec:
    """Return rope over (a part of) heads of `size`, with its scaling, from Megatron's options.
    Raises ValueError where two kinds of scaling are set.
    """
    theta = float(options.first("rotary_base", default=10000))
    factor, scaling = options["rotary_seq_len_interpolation_factor"], None
    if factor not in (None, 1):
        scaling = LinearScaling(float(factor))
    if options["use_rope_scaling"]:
        if scaling is not None:
            raise ValueError(
                "use_rope_scaling and rotary_seq_len_interpolation_factor are both set, which is "
                "not supported"
            )
        scaling = Llama3Scaling(
            float(options.first("rope_scaling_factor", default=8.0)), 1.0, 4.0, 8192
        )
    # dims of a head that are rotated
    part = int(size * options.first("rotary_percent", default=1.0))
    return RopeSpec(part, theta, scaling, interleaved=bool(options["rotary_interleaved"]))


def _window(options: MegatronOptions) -> int | None:
    """Return the sliding window, from Megatron's (tokens before, tokens after), as the number of
    tokens that a query attends to, itself included; None without one. Raises ValueError for windows
    that look ahead.
    """
    window = options["window_size"]
    if window is None:
        return None
    before, behind = window if isinstance(window, (tuple, list)) else (window, 0)
    if behind not in (0, -1):
        raise ValueError(
            f"window_size is {brief(window)}: windows over later tokens are not supported"
        )
    # -1: unlimited; ours counts the query itself
    return None if before < 0 else before + 1


def _activation(options: MegatronOptions) -> Activation:
    """Return the GELU of an MLP that is not gated: the tanh approximation where the fused kernel
    (which needs biases) or openai_gelu is used, else the exact one, as under onnx_safe always.
    """
    # the fused kernel is bias + GELU(tanh); without biases Megatron does not use it
    fused = bool(options["bias_gelu_fusion"]) and _has_biases(options)
    if options["onnx_safe"]:
        return "gelu"
    return "gelu_tanh" if fused or options["openai_gelu"] else "gelu"


def _mlp(options: MegatronOptions, size: str = "ffn_hidden_size") -> MLPSpec:
    """Return the dense MLP, SwiGLU or plain, from Megatron's options; `size` names the option with
    its width, 4 x hidden size by default.
    """
    width = options[size] or 4 * options["hidden_size"]
    if options["swiglu"]:
        return MLPSpec(width, True, "silu", _has_biases(options))
    return MLPSpec(width, False, _activation(options), _has_biases(options))


def _sparse_layers(options: MegatronOptions) -> list[bool]:
    """Return for each layer whether it has experts. moe_layer_freq is a period or a list of 0 and
    1. Raises ValueError for a list of another length than num_layers.
    """
    layers, often = options["num_layers"], options.first("moe_layer_freq", default=1)
    if not options["num_experts"]:
        return [False] * layers
    if isinstance(often, int):
        return [i % often == 0 for i in range(layers)]
    if len(often) != layers:
        raise ValueError(f"moe_layer_freq has {len(often)} layers, but num_layers is {layers}")
    return [bool(value) for value in often]


def _experts(options: MegatronOptions) -> MoESpec:
    """Return the MoE layer with its router and shared expert, from Megatron's options. Raises
    ValueError for experts that are not SwiGLU or have biases, and for group scores of more than 2
    experts.
    """
    if not options["swiglu"] or _has_biases(options):
        raise ValueError("experts without swiglu or with biases are not supported")
    top, groups = options["moe_router_topk"] or 2, options["moe_router_num_groups"] or 1
    # group-limited routing of DeepSeek-V3; all groups without it
    groups_per_token = options["moe_router_group_topk"] or groups
    sigmoid = options["moe_router_score_function"] == "sigmoid"
    # Megatron scores a group by the sum of its best topk / group_topk experts
    best = top // groups_per_token if groups > 1 else 1
    if best not in (1, 2):
        raise ValueError(
            f"the router scores a group by its best {best} experts: only 1 and 2 are supported"
        )
    shared, aux = (
        options["moe_shared_expert_intermediate_size"],
        options["moe_aux_loss_coeff"] or 0.0,
    )
    return MoESpec(
        number=options["num_experts"],
        per_token=top,
        size=options["moe_ffn_hidden_size"]
        or options["ffn_hidden_size"]
        or 4 * options["hidden_size"],
        activation="silu",
        router=RouterSpec(
            score="sigmoid" if sigmoid else "softmax",
            # softmax after the choice is that of all, divided by the sum of the chosen
            normalise=top > 1 if sigmoid else not options["moe_router_pre_softmax"],
            scale=float(options["moe_router_topk_scaling_factor"] or 1.0),
            groups=groups,
            groups_per_token=groups_per_token,
            group_score="top2" if best == 2 else "max",
            bias=bool(options["moe_router_enable_expert_bias"]),
            aux_loss_coef=float(aux if isinstance(aux, (int, float)) else sum(aux)),
        ),
        shared=MLPSpec(shared, True, "silu", False) if shared else None,
    )


def new(spec: ModelSpec, legacy: bool) -> dict[str, Any]:
    """Return Megatron's options (args) that make it compute `spec`, under today's and former names.
    They are read back as a check: raises ValueError naming what Megatron cannot compute. `legacy`:
    for Megatron's classes from before Megatron-Core.
    """
    options = _arguments(spec)
    # One inverse instead of a list of exceptions: what is lost on the way shows as a difference.
    again = read(options, legacy, spec.vocab_size)
    if lost := differences(spec, again):
        text = "; ".join(f"{n} = {a} (Megatron: {b})" for n, a, b in lost[:3])
        kind = "Megatron before Megatron-Core" if legacy else "Megatron-Core"
        raise ValueError(f"{kind} cannot compute {text}: choose another --to")
    return options


def _arguments(spec: ModelSpec) -> dict[str, Any]:
    """Return Megatron's options for `spec`, without checking that they express all of it (`new`
    does).
    """
    block = spec.blocks[0]
    mixer, norm = block.mixer, block.norm
    dense = [expect(b.mlp, MLPSpec, "mlp") for b in spec.blocks if not b.mlp.experts]
    sparse = [expect(b.mlp, MoESpec, "mlp") for b in spec.blocks if b.mlp.experts]
    bias, table = mixer.o_bias, spec.embedding.positions
    gated = dense[0].gated if dense else True
    return {
        "num_layers": spec.layers,
        # an alias that some versions read
        "encoder_num_layers": spec.layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": (dense or sparse)[0].size,
        "num_attention_heads": mixer.heads,
        "max_position_embeddings": spec.max_position_embeddings,
        "seq_length": spec.max_position_embeddings,
        "encoder_seq_length": spec.max_position_embeddings,
        "init_method_std": spec.initializer_range,
        "normalization": "RMSNorm" if norm.kind == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": norm.eps,
        "norm_epsilon": norm.eps,
        "apply_layernorm_1p": False,
        "layernorm_zero_centered_gamma": False,
        "add_bias_linear": bias,
        "swiglu": gated,
        "bias_gelu_fusion": not gated and dense[0].activation == "gelu_tanh",
        "bias_swiglu_fusion": True,
        "openai_gelu": False,
        "onnx_safe": None,
        "squared_relu": False,
        "untie_embeddings_and_output_weights": not spec.head.tied,
        "add_position_embedding": table is not None,
        **_attention_arguments(mixer, table, spec),
        **(_expert_arguments(sparse[0], spec) if sparse else {"num_experts": None}),
    }


def _attention_arguments(
    mixer: AttentionSpec | LatentAttentionSpec, table: PositionTable | None, spec: ModelSpec
) -> dict[str, Any]:
    """Return Megatron's arguments for the attention of all layers, positions included."""
    if isinstance(mixer, LatentAttentionSpec):
        return {"kv_channels": spec.hidden_size // mixer.heads, **latent_arguments(mixer)}
    rope = mixer.positions if isinstance(mixer.positions, RopeSpec) else None
    return {
        "kv_channels": mixer.head_size,
        "multi_latent_attention": False,
        "group_query_attention": mixer.kv_heads != mixer.heads,
        "num_query_groups": mixer.kv_heads if mixer.kv_heads != mixer.heads else 1,
        "add_qkv_bias": mixer.q_bias and not mixer.o_bias,
        "qk_layernorm": mixer.qk_norm is not None,
        "window_size": None if mixer.window is None else (mixer.window - 1, 0),
        **_position_arguments(rope, table, mixer),
    }


def _position_arguments(
    rope: RopeSpec | None, table: PositionTable | None, mixer: AttentionSpec
) -> dict[str, Any]:
    """Return Megatron's options for rope and its scaling, or for a table of positions."""
    kind = "rope" if rope else ("learned_absolute" if table else "none")
    rope = rope or RopeSpec(mixer.head_size + mixer.head_size % 2)
    scaling = rope.scaling
    theta = int(rope.theta) if rope.theta == int(rope.theta) else rope.theta
    return {
        "position_embedding_type": kind,
        "use_rotary_position_embeddings": kind == "rope",
        "rotary_base": theta,
        "rotary_percent": rope.size / mixer.head_size,
        "rotary_interleaved": rope.interleaved,
        "rotary_seq_len_interpolation_factor": scaling.factor
        if isinstance(scaling, LinearScaling)
        else None,
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
        "rope_scaling_factor": scaling.factor if isinstance(scaling, Llama3Scaling) else 8.0,
    }


def _expert_arguments(layer: MoESpec, spec: ModelSpec) -> dict[str, Any]:
    """Return Megatron's options for the mixture of experts and its router."""
    router = layer.router
    return {
        "num_experts": layer.number,
        "moe_router_topk": layer.per_token,
        "moe_ffn_hidden_size": layer.size,
        "moe_shared_expert_intermediate_size": layer.shared.size if layer.shared else None,
        "moe_layer_freq": [int(bool(block.mlp.experts)) for block in spec.blocks],
        "moe_router_score_function": router.score,
        "moe_router_pre_softmax": not router.normalise and router.score == "softmax",
        "moe_router_topk_scaling_factor": router.scale if router.scale != 1 else None,
        "moe_router_num_groups": router.groups if router.groups > 1 else None,
        "moe_router_group_topk": router.groups_per_token if router.groups > 1 else None,
        "moe_router_enable_expert_bias": router.bias,
        "moe_router_load_balancing_type": "aux_loss" if router.aux_loss_coef else "none",
        "moe_aux_loss_coeff": router.aux_loss_coef,
    }


FIRST_CONTEXT = 4096
"""Default of MLATransformerConfig."""


SIZES = {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}
"""Defaults of Megatron's command line."""


def read_latent(options: MegatronOptions, norm: NormSpec, bias: bool) -> LatentAttentionSpec:
    """Return multi-head latent attention from Megatron's options. Raises ValueError, with option
    and value, for what dolmen does not compute, and for combinations that versions of Megatron-Core
    compute differently.
    """
    if not options["qk_layernorm"]:
        raise ValueError(
            "multi_latent_attention without qk_layernorm is not supported: the latents need norms"
        )
    if options["rotary_interleaved"]:
        raise ValueError(
            "rotary_interleaved is True with multi_latent_attention, whose rope pairs are "
            "adjacent already: only False is supported"
        )
    if options["rotary_percent"] not in (None, 1):
        raise ValueError(
            f"rotary_percent is {options['rotary_percent']} with multi_latent_attention: only 1 is "
            "supported (rope on all of qk_pos_emb_head_dim)"
        )
    sizes = {name: options.first(name, default=default) for name, default in SIZES.items()}
    scaling = _scaling(options)
    return LatentAttentionSpec(
        options["num_attention_heads"],
        options["q_lora_rank"],
        sizes["kv_lora_rank"],
        sizes["qk_head_dim"],
        sizes["v_head_dim"],
        norm,
        RopeSpec(
            sizes["qk_pos_emb_head_dim"],
            float(options.first("rotary_base", default=10000)),
            scaling,
            interleaved=True,
        ),
        # mscale equals mscale_all_dim here, so cos and sin have factor 1
        mscale_all_dim=float(options["mscale"]) if scaling else 0.0,
        o_bias=bias,
    )


def _scaling(options: MegatronOptions) -> YarnScaling | None:
    """Return the YaRN scaling of latent attention; None where positions and scores are not scaled.
    Raises ValueError for combinations that versions of Megatron-Core compute differently.
    """
    factor = float(options.first("rotary_scaling_factor", default=1.0))
    if factor <= 1:
        if factor < 1 and options["rope_type"] != "rope":
            raise ValueError(f"rotary_scaling_factor is {factor}: it must be at least 1")
        return None
    mscale, all_dim = options["mscale"], options["mscale_all_dim"]
    # the versions agree where both are equal: t(mscale) / t(mscale_all_dim) = 1
    if mscale is None or mscale != all_dim:
        raise ValueError(
            f"mscale is {mscale}, mscale_all_dim {all_dim}: older versions of Megatron-Core scale "
            "scores by the first, newer ones by the second, and args do not record the version; "
            "only checkpoints where both are equal are supported"
        )
    if options["rope_type"] == "rope":
        if mscale:
            raise ValueError(
                f"rotary_scaling_factor is {factor} and mscale {mscale} with rope_type rope, "
                "where they scale scores and not positions: this is not supported"
            )
        return None
    return YarnScaling(
        factor,
        _first_context(options),
        float(options.first("beta_fast", default=32)),
        float(options.first("beta_slow", default=1)),
    )


def _first_context(options: MegatronOptions) -> int:
    """Return the context length before YaRN's extension, in tokens. Raises ValueError where it is
    not stated and versions of Megatron-Core differ in its default.
    """
    stated, longest = (
        options["original_max_position_embeddings"],
        options["max_position_embeddings"],
    )
    if stated is None and longest != FIRST_CONTEXT:
        raise ValueError(
            "original_max_position_embeddings is missing: older versions of Megatron-Core use "
            f"max_position_embeddings ({longest}), others {FIRST_CONTEXT}, and args do not record "
            "the version"
        )
    return stated or FIRST_CONTEXT


def latent_arguments(mixer: LatentAttentionSpec) -> dict[str, Any]:
    """Return Megatron's options for multi-head latent attention, as far as it can express it."""
    rope = mixer.positions
    yarn = rope.scaling if isinstance(rope.scaling, YarnScaling) else None
    theta = int(rope.theta) if rope.theta == int(rope.theta) else rope.theta
    return {
        "multi_latent_attention": True,
        "group_query_attention": False,
        "num_query_groups": 1,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_head_dim": mixer.nope_size,
        "qk_pos_emb_head_dim": rope.size,
        "v_head_dim": mixer.value_size,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "mla_down_proj_fusion": False,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "rope_type": "yarn" if yarn else "rope",
        "rotary_base": theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": None,
        "use_rope_scaling": False,
        "rotary_scaling_factor": yarn.factor if yarn else 1.0,
        "mscale": mixer.mscale_all_dim if yarn else 1.0,
        "mscale_all_dim": mixer.mscale_all_dim if yarn else 1.0,
        **_yarn_arguments(yarn),
        "window_size": None,
    }


def _yarn_arguments(yarn: YarnScaling | None) -> dict[str, Any]:
    """Return Megatron's options for YaRN, empty without it."""
    if yarn is None:
        return {}
    return {
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
    }
