"""Qwen2 and Qwen3, dense and with experts."""

from dataclasses import replace
from typing import Any

from dolmen.families import common, experts, llama
from dolmen.families.family import Field, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.spec import MLPSpec, ModelSpec

# Qwen2 and Qwen2.5 (2407.10671): Llama with biases on q, k, v and a sliding window in some layers.
# Layers with a window are stated by `layer_types` or, in older files, are those from
# `max_window_layers` on, if `use_sliding_window` is set.

FIELDS = llama.change_fields(
    (*llama.FIELDS, common.WINDOW_SIZE),
    common.USE_WINDOWS,
    Field(
        "max_window_layers",
        kinds.POSITION,
        28,
        "Number of layers without a sliding window at the start, if layer_types is None.",
    ),
    common.layer_types_field("by max_window_layers"),
    vocab_size=151936,
    intermediate_size=22016,
    num_key_value_heads=32,
    max_position_embeddings=32768,
    sliding_window=4096,
)


def qwen2_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer in tokens (None: full attention): by layer_types, or else on
    layers from max_window_layers on, if use_sliding_window is set. Raises ValueError naming the
    field that does not fit.
    """
    used, first = config["use_sliding_window"], config["max_window_layers"]
    slides = used and config["sliding_window"] is not None
    by_number = [
        common.SLIDING if slides and i >= first else common.FULL
        for i in range(config["num_hidden_layers"])
    ]
    return common.typed_windows(config, by_number, used)


def write_windows(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields use_sliding_window and max_window_layers for a spec: the index of the first
    layer with a window.
    """
    slides = [size is not None for size in common.window_sizes(spec)]
    return {
        "use_sliding_window": any(slides),
        # first layer with a window
        "max_window_layers": slides.index(True) if any(slides) else len(slides),
    }


def read_qwen2(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen2 config.json: Llama with biases on q, k, v and a sliding window in
    some layers.
    """
    return llama.read_llama_like(config, windows=qwen2_windows(config), qkv_bias=True)


QWEN2 = replace(
    llama.LLAMA,
    model_type="qwen2",
    title="Qwen2 and Qwen2.5",
    architecture="Qwen2ForCausalLM",
    read=read_qwen2,
    write=write_windows,
    fields=FIELDS,
    only={"attention_bias": (True, None), "mlp_bias": (False, None), "use_mrope": (False, None)},
)


# Qwen2-MoE and Qwen1.5-MoE (2407.10671, section 2.2.2): Qwen2 with an MoE of 60 small experts, 4
# per token, and a shared expert that is weighted by a sigmoid gate per token.

NUMBER = "num_experts"


def qwen2_moe_windows(config: dict[str, Any]) -> list[int | None]:
    """Return the window of each layer in tokens (None: full attention): by layer_types, or else on
    layers 0, 2, 4, ... below max_window_layers, if use_sliding_window is set.
    """
    used, before = config["use_sliding_window"], config["max_window_layers"]
    slides = used and config["sliding_window"] is not None
    by_number = [
        common.SLIDING if slides and i < before and i % 2 == 0 else common.FULL
        for i in range(config["num_hidden_layers"])
    ]
    return common.typed_windows(config, by_number, used)


def read_qwen2_moe(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen2-MoE config.json: MoE layers with a gated shared expert, and dense
    layers where decoder_sparse_step and mlp_only_layers say so.
    """
    dense = llama.dense_mlp(config)
    sparse = replace(
        experts.read(config, config["moe_intermediate_size"], config["norm_topk_prob"], NUMBER),
        shared=replace(dense, size=config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    return llama.read_llama_like(
        config,
        mlp=experts.sparse_or_dense(config, dense, sparse),
        windows=qwen2_moe_windows(config),
        qkv_bias=config["qkv_bias"],
    )


def write_qwen2_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return the fields of a Qwen2-MoE config.json that `common.write` does not state: windows, the
    shared expert's width and qkv_bias. Raises ValueError if an MoE layer has no shared expert.
    """
    shared = [expect(layer.shared, MLPSpec, "shared") for layer in common.sparse_layers(spec)]
    sizes = {"shared_expert_intermediate_size": shared[0].size} if shared else {}
    return {**write_windows(spec), **sizes, "qkv_bias": common.attention(spec).q_bias}


def qwen2_moe_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Qwen2-MoE: Qwen2's, and those of router, experts, shared expert
    and its gate.
    """
    module, ours = f"{llama.LAYER}mlp", "layers.{}.mlp.shared"
    shared = {f"expert.{hf}": f".{name}" for hf, name in llama.MLP_NAMES.items()}
    return [
        *llama.llama_like_rules(spec),
        *experts.rules(spec, module, llama.MLP_NAMES),
        *(Rename(f"{module}.shared_{hf}", ours + name) for hf, name in shared.items()),
        # [1, hidden]
        Rename(f"{module}.shared_expert_gate", f"{ours}_gate"),
    ]


QWEN2_MOE = replace(
    llama.LLAMA,
    model_type="qwen2_moe",
    title="Qwen2-MoE and Qwen1.5-MoE",
    architecture="Qwen2MoeForCausalLM",
    read=read_qwen2_moe,
    write=write_qwen2_moe,
    rules=qwen2_moe_rules,
    only={"mlp_bias": (False, None), "use_mrope": (False, None)},
    fields=llama.change_fields(
        (
            *FIELDS,
            Field(NUMBER, kinds.EXPERTS, 60, experts.NUMBER, common=("num_local_experts",)),
            *experts.FIELDS[1:],
            *experts.WHICH,
        ),
        replace(experts.SIZE, default=1408),
        Field(
            "shared_expert_intermediate_size",
            kinds.WIDTH,
            5632,
            "Width of the shared expert, which computes every token.",
        ),
        Field("norm_topk_prob", bool, False, experts.NORMALISED),
        Field("qkv_bias", bool, True, "Biases on q, k and v."),
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts_per_tok=4,
    ),
    harmless="output_router_logits",
)


# Qwen3, dense (2505.09388): Qwen2 with RMSNorm on every query and key head, no biases, and a head
# size of its own.


def read_qwen3(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen3 config.json: Llama with an RMSNorm of every query and key head and
    a sliding window in some layers. `attention_bias` puts biases on q, k, v and o.
    """
    bias, sizes = bool(config["attention_bias"]), qwen2_windows(config)
    return llama.read_llama_like(config, windows=sizes, qkv_bias=bias, o_bias=bias, qk_norm=True)


QWEN3 = replace(
    llama.LLAMA,
    model_type="qwen3",
    title="Qwen3, dense",
    architecture="Qwen3ForCausalLM",
    read=read_qwen3,
    write=write_windows,
    fields=llama.change_fields(FIELDS, llama.ATTENTION_BIAS, head_dim=128),
    only={"mlp_bias": (False, None)},
)


# Qwen3-MoE (2505.09388): Qwen3 with an MoE of 128 small experts, 8 per token, in every layer that
# is not stated to be dense.


def read_qwen3_moe(config: dict[str, Any]) -> ModelSpec:
    """Return the spec of a Qwen3-MoE config.json: Qwen3 with MoE layers, dense where
    decoder_sparse_step and mlp_only_layers say so, and one window for all layers. `attention_bias`
    puts biases on q, k, v and o.
    """
    size, normalise = config["moe_intermediate_size"], config["norm_topk_prob"]
    dense, sparse = llama.dense_mlp(config), experts.read(config, size, normalise)
    bias = bool(config["attention_bias"])
    return llama.read_llama_like(
        config,
        mlp=experts.sparse_or_dense(config, dense, sparse),
        # transformers' Qwen3-MoE ignores max_window_layers
        windows=common.uniform_windows(config, config["use_sliding_window"]),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def qwen3_moe_rules(spec: ModelSpec) -> list[Rule]:
    """Return the weight rules of Qwen3-MoE: Qwen3's, and those of router and experts."""
    module = f"{llama.LAYER}mlp"
    return [*llama.llama_like_rules(spec), *experts.rules(spec, module, llama.MLP_NAMES)]


QWEN3_MOE = replace(
    llama.LLAMA,
    model_type="qwen3_moe",
    title="Qwen3 with experts",
    architecture="Qwen3MoeForCausalLM",
    read=read_qwen3_moe,
    write=lambda spec: {"use_sliding_window": common.first_window(spec) is not None},
    rules=qwen3_moe_rules,
    only={"mlp_bias": (False, None), **common.NO_LAYER_TYPES},
    fields=llama.change_fields(
        (*llama.FIELDS, common.WINDOW_SIZE, *experts.FIELDS),
        llama.ATTENTION_BIAS,
        common.USE_WINDOWS,
        experts.SIZE,
        Field("norm_topk_prob", bool, False, experts.NORMALISED),
        *experts.WHICH,
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        sliding_window=4096,
        num_local_experts=128,
        num_experts_per_tok=8,
    ),
    harmless="output_router_logits max_window_layers",
)
