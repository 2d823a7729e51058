"""Qwen2-MoE and Qwen1.5-MoE (2407.10671, section 2.2.2): Qwen2 whose feed-forward layers are many
small experts and a dense layer for every token, which each token weighs by a gate of its own.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, experts, llama_like, qwen2, windows
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag
from dolmen.model.tree import Experts, Mlp, Tree

NUMBER = "num_experts"


def windows_of(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer: where layer_types is None, of every other one of the first
    `max_window_layers`, the first among them.
    """
    used, before = config["use_sliding_window"], config["max_window_layers"]
    slides = used and config["sliding_window"] is not None
    by_number = [
        windows.SLIDING if slides and i < before and i % 2 == 0 else windows.FULL
        for i in range(config["num_hidden_layers"])
    ]
    return windows.of_types(config, by_number, used)


def read(config: dict[str, Any]) -> Tree:
    dense = llama_like.dense_mlp(config)
    sparse = replace(
        experts.read(config, config["moe_intermediate_size"], config["norm_topk_prob"], NUMBER),
        shared=replace(dense, size=config["shared_expert_intermediate_size"]),
        shared_gate=True,
    )
    return llama_like.read(
        config,
        mlp=experts.which(config, dense, sparse),
        windows=windows_of(config),
        qkv_bias=config["qkv_bias"],
    )


def new(tree: Tree) -> dict[str, Any]:
    """Of the first dense layer, where there is one, and of the first sparse one."""
    dense, sparse = common.dense(tree), common.sparse(tree)
    return {
        **llama_like.new(tree),
        **qwen2.new_windows(tree),
        **(_new_experts(sparse[0]) if sparse else {}),
        "intermediate_size": (dense or sparse)[0].size,
        **experts.new_which(tree),
        "qkv_bias": common.attention(tree).q_bias,
    }


def _new_experts(layer: Experts) -> dict[str, Any]:
    return {
        **experts.new(layer, NUMBER),
        "moe_intermediate_size": layer.size,
        "shared_expert_intermediate_size": expect(layer.shared, Mlp, "shared").size,
        "norm_topk_prob": layer.router.normalise,
    }


def rules(tree: Tree) -> list[Rule]:
    module, ours = f"{llama_like.LAYER}mlp", "layers.{}.mlp.shared"
    shared = {f"expert.{hf}": f".{name}" for hf, name in llama_like.MATRICES.items()}
    return [
        *llama_like.rules(tree),
        *experts.rules(tree, module, llama_like.MATRICES),
        *(Rename(f"{module}.shared_{hf}", ours + name) for hf, name in shared.items()),
        Rename(f"{module}.shared_expert_gate", f"{ours}_gate"),
    ]


FAMILY = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    scorer="Qwen2MoeForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    only={"mlp_bias": (False, None), "use_mrope": (False, None)},
    fields=llama_like.changed(
        (
            *qwen2.FIELDS,
            Field(NUMBER, kinds.EXPERTS, 60, experts.NUMBER, common=("num_local_experts",)),
            *experts.FIELDS[1:],
            *experts.WHICH,
        ),
        replace(experts.SIZE, default=1408),
        Field(
            "shared_expert_intermediate_size",
            kinds.WIDTH,
            5632,
            "Width of the dense layer that every token passes beside its experts.",
        ),
        Field("norm_topk_prob", Flag(), False, experts.NORMALISED),
        Field("qkv_bias", Flag(), True, "Biases on q, k and v."),
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts_per_tok=4,
    ),
    harmless=("output_router_logits",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
