"""GPT-OSS 20B and 120B (2508.10925): experts in every layer, with biases and a clamped SwiGLU;
attention with sinks and biases, in a window on every other layer.

Experts are stored stacked, [experts, in, out], gate and up as one matrix in whose columns they take
turns. The published files store them in MXFP4, which is refused as all quantised weights are.
"""

from dataclasses import replace
from typing import Any

from dolmen.core.config import AboveZero
from dolmen.families import common, experts, llama
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import BareParameter, Each, Rename, Rule, Split, Transpose
from dolmen.model.spec import ClampedSwiGLU, ModelSpec, MoESpec

WINDOW = 128
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
PLAIN = {"hidden_act": "silu"}  # of what ClampedSwiGLU is not
SHARED = tuple(field for field in llama.FIELDS if field.name not in PLAIN)


def read(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a GPT-OSS config.json: MoE with biases and a clamped SwiGLU, and attention
    sinks. `attention_bias` puts biases on q, k, v and o. A token's weights are a softmax over its
    chosen experts' logits, which equals the softmax over all, normalised.
    """
    # YaRN is the default of its config class
    full = {**config, **PLAIN, "rope_parameters": config["rope_parameters"] or ROPE}
    sparse = experts.read(full, config["intermediate_size"], normalise=True)
    sparse = replace(
        sparse,
        # instead of the silu that FIELDS would give
        activation=ClampedSwiGLU(float(config["swiglu_alpha"]), float(config["swiglu_limit"])),
        router=replace(sparse.router, logit_bias=True),
        bias=True,
    )
    bias = config["attention_bias"]
    spec = llama.read_llama_like(
        full,
        mlp=lambda _: sparse,
        windows=common.alternating_windows(config),
        qkv_bias=bias,
        o_bias=bias,
    )
    return common.map_blocks(spec, lambda b: replace(b, mixer=replace(b.mixer, sinks=True)))


def write(spec: ModelSpec) -> dict[str, Any]:
    """Return GPT-OSS's swiglu_alpha and swiglu_limit, from the first block's MoE, and
    sliding_window: WINDOW if no layer has one, because transformers builds its masks from it.
    """
    sparse = expect(spec.blocks[0].mlp, MoESpec, "mlp")
    clamped = expect(sparse.activation, ClampedSwiGLU, "activation")
    return {
        "sliding_window": common.first_window(spec) or WINDOW,
        "swiglu_alpha": clamped.alpha,
        "swiglu_limit": clamped.limit,
    }


def rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of GPT-OSS: experts stacked and transposed, the columns of gate and
    up alternating, sinks without a module.
    """
    layer, mlp = llama.LAYER, "layers.{}.mlp."
    stored, ours = f"{layer}mlp.experts.", f"{mlp}experts."
    # columns alternate, gate 0, up 0, gate 1, up 1, ...: as many groups as the width, of one unit
    # each
    both = Split(
        f"{stored}gate_up_proj", (f"{ours}gate", f"{ours}up"), spec.blocks[0].mlp.size, (1, 1)
    )
    return [
        *llama.llama_like_rules(spec),
        BareParameter(Rename(f"{layer}self_attn.sinks", "layers.{}.attn.sinks")),
        Rename(f"{layer}mlp.router", f"{mlp}router"),
        # one module on disk: its weight is ours "router", its bias "router.logits"
        Rename(f"{layer}mlp.router", f"{mlp}router.logits"),
        BareParameter(Each(Transpose(both))),
        BareParameter(Each(Transpose(Rename(f"{stored}down_proj", f"{ours}down")))),
    ]


GPT_OSS = Family(
    model_type="gpt_oss",
    title="GPT-OSS 20B and 120B",
    architecture="GptOssForCausalLM",
    read=read,
    write=write,
    rules=rules,
    fields=llama.change_fields(
        (*SHARED, common.WINDOW_SIZE, *experts.FIELDS),
        common.layer_types_field(
            "every other layer, starting with the first, is sliding_attention"
        ),
        replace(llama.ATTENTION_BIAS, kind=bool, default=True),
        Field(
            "swiglu_alpha",
            AboveZero,
            1.702,
            "Factor alpha in the experts' SwiGLU: sigmoid(alpha x).",
        ),
        Field(
            "swiglu_limit",
            AboveZero,
            7.0,
            (
                "Limit of the experts' SwiGLU: the gate is clamped from above, the up projection "
                "on both sides."
            ),
        ),
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=36,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=150000.0,
        rope_parameters=ROPE,
        sliding_window=WINDOW,
        num_local_experts=128,
        num_experts_per_tok=4,
    ),
    only={"mlp_bias": (False, None), "hidden_act": ("silu", None)},
    harmless="output_router_logits experts_per_token initial_context_length",
    extra_fields={**llama.BESIDE, **PLAIN},
    ignored=llama.IGNORED,
)
