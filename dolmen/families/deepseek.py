"""DeepSeek-V2, V3 and R1: multi-head latent attention and many small experts."""

from dataclasses import replace
from typing import Any, Literal, get_args

from dolmen.core.config import AboveZero
from dolmen.families import common, experts, llama, rope
from dolmen.families.family import Family, Field, expect, flag
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.spec import (
    BlockSpec,
    LatentAttentionSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)

# What DeepSeek-V2 and V3 share: latent attention, and dense layers before those of many small
# experts and a shared one.
# The `n_shared_experts` of a config.json are one dense layer of that many times an expert's width.
# The norms of the latents have eps 1e-6, the default of transformers' class, whatever
# `rms_norm_eps` is.

LATENT_EPS = 1e-6
SIZES_OF_HEADS = ("num_key_value_heads", "head_dim")  # which here are others
FIELDS = (
    *(field for field in llama.FIELDS if field.name not in SIZES_OF_HEADS),
    Field(
        "num_key_value_heads",
        kinds.HEADS | None,
        None,
        "Key and value heads; must equal the number of query heads.",
    ),
    Field(
        "q_lora_rank",
        kinds.WIDTH | None,
        1536,
        "Rank of the query latent (LoRA rank of q). None: no latent.",
    ),
    Field("kv_lora_rank", kinds.WIDTH, 512, "Rank of the latent of keys and values."),
    Field(
        "qk_nope_head_dim",
        kinds.WIDTH,
        128,
        "Size of the part of a query or key head without rope.",
    ),
    Field(
        "qk_rope_head_dim", kinds.WIDTH, 64, "Size of the part of a query or key head with rope."
    ),
    Field("v_head_dim", kinds.WIDTH, 128, "Size of a value head."),
    Field(
        "attention_bias",
        bool,
        False,
        "Biases on the down-projections to the latents and on the attention output projection.",
    ),
    experts.SIZE,
    Field(
        "n_shared_experts", kinds.EXPERTS, 2, "Number of shared experts, which compute every token."
    ),
    Field("routed_scaling_factor", AboveZero, 1.0, "Factor of the routing weights."),
    Field("first_k_dense_replace", kinds.LAYER, 0, "Number of dense layers before the MoE layers."),
    replace(experts.AUX_LOSS, name="aux_loss_alpha", common=(experts.AUX_LOSS.name,)),
)
ONLY = {"mlp_bias": (False, None), "moe_layer_freq": (1, None)}
CODE = ("configuration_deepseek", "modeling_deepseek")
HARMLESS = "head_dim qk_head_dim ep_size seq_aux output_router_logits"


def read_deepseek(config: dict[str, Any], router: RouterSpec, interleaved: bool) -> ModelSpec:
    """Return the spec of a DeepSeek-V2 or V3 config.json: latent attention, dense layers first,
    then MoE layers with the given `router` and a shared expert. `interleaved`: rope's pairs are
    neighbours, not halves. Raises ValueError naming the field.
    """
    mixer, norm = _mixer(config, interleaved), llama.rms_norm(config)
    size, dense = config["moe_intermediate_size"], llama.dense_mlp(config)
    sparse = MoESpec(
        config["n_routed_experts"],
        config["num_experts_per_tok"],
        size,
        dense.activation,
        replace(
            router,
            scale=float(config["routed_scaling_factor"]),
            aux_loss_coef=float(config["aux_loss_alpha"]),
        ),
        # n experts that every token passes are one dense layer n times as wide
        shared=replace(dense, size=size * config["n_shared_experts"]),
    )
    first = config["first_k_dense_replace"]
    blocks = [
        # V3: 3 dense layers, then 58 of experts
        BlockSpec(mixer, dense if i < first else sparse, norm)
        for i in range(config["num_hidden_layers"])
    ]
    return common.make_spec(config, FIELDS, blocks)


def _mixer(config: dict[str, Any], interleaved: bool) -> LatentAttentionSpec:
    """Return the latent attention of a config.json. Raises ValueError for key-value heads other
    than query heads, an odd rope size, and mscale_all_dim with a scaling other than YaRN.
    """
    heads, stated = config["num_attention_heads"], config["num_key_value_heads"]
    if stated not in (None, heads):
        raise ValueError(
            f"num_key_value_heads ({stated}) differs from num_attention_heads ({heads}): latent "
            "attention has a key and value head per query head; set "
            f"{flag('num_key_value_heads')} to the same"
        )
    size = config["qk_rope_head_dim"]
    if size % 2:
        raise ValueError(
            f"qk_rope_head_dim ({size}) is odd, but rope rotates pairs: set "
            f"{flag('qk_rope_head_dim')} to an even size"
        )
    # rope acts on the rope part of the head alone, so that is its whole size here
    positions = rope.read(config, size)
    field, parameters = rope.stated_rope(config)
    mscale = float(parameters.get("mscale_all_dim") or 0.0)
    if mscale and rope.rope_type(parameters) not in ("yarn", "default"):
        raise ValueError(f"{field}.mscale_all_dim is {mscale}: it applies only to rope_type yarn")
    return LatentAttentionSpec(
        heads,
        config["q_lora_rank"],
        config["kv_lora_rank"],
        config["qk_nope_head_dim"],
        config["v_head_dim"],
        NormSpec("rmsnorm", LATENT_EPS),
        replace(positions, interleaved=interleaved),
        # without YaRN the temperature is 1 whatever mscale is
        mscale_all_dim=0.0 if positions.scaling is None else mscale,
        down_bias=config["attention_bias"],
        o_bias=config["attention_bias"],
    )


def write_deepseek(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields that V2 and V3 share, for a spec: sizes from the first dense layer (if any)
    and the first MoE layer. Raises ValueError if the mixer is not latent attention.
    """
    mixer = expect(spec.blocks[0].mixer, LatentAttentionSpec, "mixer")
    dense, sparse = common.dense_layers(spec), common.sparse_layers(spec)
    return {
        "num_attention_heads": mixer.heads,
        "num_key_value_heads": mixer.heads,
        "q_lora_rank": mixer.q_rank,
        "kv_lora_rank": mixer.kv_rank,
        "qk_nope_head_dim": mixer.nope_size,
        "qk_rope_head_dim": mixer.positions.size,
        "v_head_dim": mixer.value_size,
        "attention_bias": mixer.o_bias,
        "rope_parameters": _rope(mixer),
        "first_k_dense_replace": len(dense),
        **(_write_deepseek_experts(sparse[0]) if sparse else {}),
    }


def _rope(mixer: LatentAttentionSpec) -> dict[str, Any]:
    """Return `rope_parameters`, with YaRN's mscale_all_dim if the softmax scale uses it; an
    attention factor of 1 is then stated by an equal mscale, as in DeepSeek's files.
    """
    stated, mscale = rope.write(mixer.positions), mixer.mscale_all_dim
    if not mscale:
        return stated
    if stated.get("attention_factor") == 1.0:
        del stated["attention_factor"]
        stated["mscale"] = mscale
    return {**stated, "mscale_all_dim": mscale}


def _write_deepseek_experts(sparse: MoESpec) -> dict[str, Any]:
    """Return the fields of an MoE layer; the shared expert's width is stated as a number of
    experts. Raises ValueError if there is no shared expert.
    """
    shared = expect(sparse.shared, MLPSpec, "shared")
    return {
        "n_routed_experts": sparse.number,
        "n_shared_experts": shared.size // sparse.size,
        "routed_scaling_factor": sparse.router.scale,
    }


def deepseek_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of DeepSeek-V2 and V3; q_proj exists in models whose queries have no
    latent (V2-Lite).
    """
    attention = {
        "q_proj": "q",
        "q_a_proj": "q_a",
        "q_a_layernorm": "q_a_norm",
        "q_b_proj": "q_b",
        "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm",
        "kv_b_proj": "kv_b",
        "o_proj": "o",
    }
    matrices = llama.MLP_NAMES
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        **{f"self_attn.{hf}": f"attn.{ours}" for hf, ours in attention.items()},
        **{f"mlp.{hf}": f"mlp.{ours}" for hf, ours in matrices.items()},
        **{f"mlp.shared_experts.{hf}": f"mlp.shared.{ours}" for hf, ours in matrices.items()},
    }
    return [
        Rename("model.embed_tokens", "embed"),
        *(Rename(llama.LAYER + hf, "layers.{}." + ours) for hf, ours in names.items()),
        # V3's balance bias
        *experts.rules(spec, f"{llama.LAYER}mlp", matrices, bias="e_score_correction_bias"),
        Rename("model.norm", "final_norm"),
        Rename("lm_head", "head"),
    ]


# DeepSeek-V2 and V2-Lite (2405.04434): a softmax router, over all experts or over the groups with
# the best experts (V2: 3 of 8).
# transformers never normalises the weights of a token's experts; the published code does with
# `norm_topk_prob`, and then ignores `routed_scaling_factor`. No published file sets it.

PER_TOKEN = 6  # of both models; transformers computes nothing where none is stated
Method = Literal["greedy", "group_limited_greedy"]
METHODS = get_args(Method)


def read_deepseek_v2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a DeepSeek-V2 config.json: latent attention, a softmax router, 6 experts
    per token if not stated. Raises ValueError if heads do not divide the width, as transformers
    does, though nothing depends on it.
    """
    common.head_size(config, FIELDS)
    stated = config["num_experts_per_tok"]
    filled = {**config, "num_experts_per_tok": PER_TOKEN if stated is None else stated}
    return read_deepseek(filled, _router(config), interleaved=True)


def _router(config: dict[str, Any]) -> RouterSpec:
    """Return V2's router: softmax over all experts (topk_method "greedy" or null), or limited to
    groups of experts. Raises ValueError if the groups are not stated.
    """
    # over all experts; V2-Lite
    if config["topk_method"] in ("greedy", None):
        return RouterSpec(normalise=False)
    for name in ("n_group", "topk_group"):
        if config[name] is None:
            raise ValueError(
                f"topk_method is {config['topk_method']}, which selects groups of experts, but "
                f"{name} is None: set {flag(name)}"
            )
    groups, groups_per_token = config["n_group"], config["topk_group"]
    return RouterSpec(normalise=False, groups=groups, groups_per_token=groups_per_token)


def write_deepseek_v2(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a DeepSeek-V2 config.json that `common.write` does not state: those
    shared with V3, and the router's.
    """
    sparse = common.sparse_layers(spec)
    router = sparse[0].router if sparse else RouterSpec()
    grouped = router.groups > 1
    return {
        **write_deepseek(spec),
        "topk_method": METHODS[grouped],
        "n_group": router.groups if grouped else None,
        "topk_group": router.groups_per_token if grouped else None,
    }


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    title="DeepSeek-V2 and V2-Lite",
    architecture="DeepseekV2ForCausalLM",
    read=read_deepseek_v2,
    write=write_deepseek_v2,
    rules=deepseek_rules,
    fields=llama.change_fields(
        FIELDS,
        Field("n_routed_experts", kinds.EXPERTS, 64, experts.NUMBER, ("num_experts",)),
        Field(
            "num_experts_per_tok",
            kinds.EXPERTS | None,
            None,
            f"{experts.PER_TOKEN} None: {PER_TOKEN}.",
        ),
        Field(
            "topk_method",
            Method | None,
            "greedy",
            "Selection of a token's experts: greedy, or group_limited_greedy (from the groups "
            "with the best experts).",
        ),
        Field("n_group", kinds.EXPERTS | None, None, "Number of expert groups."),
        Field(
            "topk_group",
            kinds.EXPERTS | None,
            None,
            "Number of groups from which a token's experts are selected.",
        ),
        vocab_size=102400,
        moe_intermediate_size=1407,
    ),
    only={**ONLY, "norm_topk_prob": (False, None), "scoring_func": ("softmax", None)},
    harmless=HARMLESS,
    extra_fields=llama.BESIDE,
    ignored=llama.IGNORED,
    remote_code=CODE,
)


# DeepSeek-V3 and R1 (2412.19437): a sigmoid router with a balance bias, limited to the groups whose
# best two experts have the highest sum of scores.
# Files also store layers of multi-token prediction after the last (`num_nextn_predict_layers`).
# They are no part of the decoder: like transformers, dolmen drops them, with a warning.


def read_deepseek_v3(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a DeepSeek-V3 config.json: a sigmoid router over groups scored by their
    best two experts, with a balance bias.
    """
    router = RouterSpec(
        score="sigmoid",
        normalise=bool(config["norm_topk_prob"]),
        groups=config["n_group"],
        groups_per_token=config["topk_group"],
        group_score="top2",
        bias=True,
    )
    return read_deepseek(config, router, interleaved=bool(config["rope_interleave"]))


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a DeepSeek-V3 config.json that `common.write` does not state: those
    shared with V2, rope_interleave, and the expert groups if it has MoE layers.
    """
    positions = expect(spec.blocks[0].mixer.positions, RopeSpec, "positions")
    groups = {}
    for layer in common.sparse_layers(spec)[:1]:
        groups = {"n_group": layer.router.groups, "topk_group": layer.router.groups_per_token}
    return {**write_deepseek(spec), "rope_interleave": positions.interleaved, **groups}


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    title="DeepSeek-V3 and R1",
    architecture="DeepseekV3ForCausalLM",
    read=read_deepseek_v3,
    write=write_deepseek_v3,
    rules=deepseek_rules,
    fields=llama.change_fields(
        FIELDS,
        Field(
            "n_routed_experts",
            kinds.EXPERTS,
            256,
            experts.NUMBER,
            ("num_local_experts",),
            ("num_experts",),
        ),
        Field("num_experts_per_tok", kinds.EXPERTS, 8, experts.PER_TOKEN),
        Field("n_group", kinds.EXPERTS, 8, "Number of expert groups."),
        Field(
            "topk_group",
            kinds.EXPERTS,
            4,
            "Number of groups from which a token's experts are selected.",
        ),
        Field("norm_topk_prob", bool | None, True, experts.NORMALISED),
        Field(
            "rope_interleave",
            bool | None,
            True,
            "Rope rotates pairs of adjacent elements, not of the two halves.",
        ),
        Field(
            "num_nextn_predict_layers",
            kinds.LAYER,
            1,
            "Multi-token-prediction layers in the files, which are skipped.",
            ("num_mtp_layers",),
        ),
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=128,
        max_position_embeddings=4096,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
        first_k_dense_replace=3,
    ),
    only={**ONLY, "scoring_func": ("sigmoid", None), "topk_method": ("noaux_tc", None)},
    harmless=HARMLESS,
    extra_fields={**llama.BESIDE, "num_nextn_predict_layers": 0},
    dropped_layers_field="num_nextn_predict_layers",
    ignored=llama.IGNORED,
    remote_code=CODE,
)
