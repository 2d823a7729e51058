"""OLMo, OLMo 2 and OLMoE."""

from dataclasses import replace
from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common, experts, llama
from dolmen.families.family import Field
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.model.spec import ModelSpec, NormSpec, SequentialResidual

# OLMo (2402.00838): Llama with LayerNorms without parameters, whose epsilon (1e-5) no field states;
# q, k and v may be clipped.

NORM = NormSpec("layernorm", 1e-5, affine=False)
CLIP = Field(
    "clip_qkv",
    AboveZero | None,
    None,
    "Clip queries, keys and values to this absolute value. None: no clipping.",
)


def read_olmo(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an OLMo config.json: LayerNorms without parameters, q, k, v clipped if
    stated. `attention_bias` puts biases on q, k, v and o.
    """
    bias = bool(config["attention_bias"])
    return clip_qkv(config, llama.read_llama_like(config, norm=NORM, qkv_bias=bias, o_bias=bias))


def clip_qkv(config: dict[str, Any], spec: ModelSpec) -> ModelSpec:
    """Return the spec with q, k and v of all layers clipped at the config's clip_qkv (None: not
    clipped).
    """
    clip = None if config[CLIP.name] is None else float(config[CLIP.name])
    return common.map_blocks(spec, lambda b: replace(b, mixer=replace(b.mixer, clip=clip)))


FIELDS = llama.fields_with(None)

OLMO = replace(
    llama.LLAMA,
    model_type="olmo",
    title="OLMo",
    architecture="OlmoForCausalLM",
    read=read_olmo,
    fields=llama.change_fields(FIELDS, llama.ATTENTION_BIAS, CLIP, vocab_size=50304),
    only={**common.NO_WINDOWS, "mlp_bias": (False, None)},
)


# OLMo 2 (2501.00656): Llama with norms after each branch instead of before it, and q and k norms
# over the width of all heads.

NORMS = {
    "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def read_olmo2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an OLMo 2 config.json: norms after each branch, and q and k norms over the
    width of all heads. `attention_bias` puts biases on q, k, v and o.
    """
    bias = bool(config["attention_bias"])
    spec = llama.read_llama_like(
        config, qkv_bias=bias, o_bias=bias, qk_norm=True, qk_norm_of="width"
    )
    return common.map_blocks(
        spec, lambda block: replace(block, arrangement=SequentialResidual("output"))
    )


def olmo2_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of OLMo 2: Llama's with its two norms after the branches."""
    return llama.llama_like_rules(spec, NORMS)


OLMO2 = replace(
    llama.LLAMA,
    model_type="olmo2",
    title="OLMo 2",
    architecture="Olmo2ForCausalLM",
    read=read_olmo2,
    rules=olmo2_rules,
    fields=llama.change_fields(
        llama.FIELDS, llama.ATTENTION_BIAS, vocab_size=50304, rms_norm_eps=1e-5
    ),
    only={**common.NO_WINDOWS, "mlp_bias": (False, None), "clip_qkv": (None,)},
)


# OLMoE (2409.02060): Llama with OLMo 2's q and k norms and an MoE of 64 small experts, 8 per token,
# in every layer; q, k and v may be clipped.

NUMBER = "num_experts"


def read_olmoe(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of an OLMoE config.json: every layer is MoE, q and k norms are over the width
    of all heads, q, k, v are clipped if stated. `intermediate_size` is an expert's width;
    `attention_bias` puts biases on q, k, v and o.
    """
    size, bias = config["intermediate_size"], bool(config["attention_bias"])
    sparse = experts.read(config, size, config["norm_topk_prob"], NUMBER)
    spec = llama.read_llama_like(
        config,
        # all layers are MoE
        mlp=lambda _: sparse,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        qk_norm_of="width",
    )
    return clip_qkv(config, spec)


def olmoe_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of OLMoE: Llama's, and those of router and experts."""
    module = f"{llama.LAYER}mlp"
    return [*llama.llama_like_rules(spec), *experts.rules(spec, module, llama.MLP_NAMES)]


OLMOE = replace(
    llama.LLAMA,
    model_type="olmoe",
    title="OLMoE",
    architecture="OlmoeForCausalLM",
    scorer=None,
    read=read_olmoe,
    rules=olmoe_rules,
    fields=llama.change_fields(
        (
            *llama.FIELDS,
            Field(NUMBER, kinds.EXPERTS, 64, experts.NUMBER, ("num_local_experts",)),
            *experts.FIELDS[1:],
        ),
        llama.ATTENTION_BIAS,
        CLIP,
        Field("norm_topk_prob", bool, False, experts.NORMALISED),
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=2048,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        num_experts_per_tok=8,
        router_aux_loss_coef=0.01,
    ),
    only={**common.NO_WINDOWS, "mlp_bias": (False, None)},
    harmless="output_router_logits",
)
