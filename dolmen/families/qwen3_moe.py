"""Qwen3 with experts (2505.09388): Qwen3 whose feed-forward layers are many small experts, but for
those named dense.
"""

from typing import Any

from dolmen.families import common, experts, llama_like, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rule
from dolmen.files.schema import Flag
from dolmen.model.tree import Experts, Tree


def read(config: dict[str, Any]) -> Tree:
    """`attention_bias` puts biases on q, k, v and on the output projection."""
    size, normalise = config["moe_intermediate_size"], config["norm_topk_prob"]
    dense, sparse = llama_like.dense_mlp(config), experts.read(config, size, normalise)
    bias = bool(config["attention_bias"])
    return llama_like.read(
        config,
        mlp=experts.which(config, dense, sparse),
        windows=windows.of_all(config, config["use_sliding_window"]),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def new(tree: Tree) -> dict[str, Any]:
    """Of the first dense layer, where there is one, and of the first sparse one."""
    window, mixer = windows.new(tree), common.attention(tree)
    dense, sparse = common.dense(tree), common.sparse(tree)
    return {
        **llama_like.new(tree),
        **window,
        **(_new_experts(sparse[0]) if sparse else {}),
        "intermediate_size": (dense or sparse)[0].size,
        **experts.new_which(tree),
        "attention_bias": mixer.q_bias,
        "use_sliding_window": window[windows.SIZE.name] is not None,
    }


def _new_experts(layer: Experts) -> dict[str, Any]:
    return {
        **experts.new(layer),
        "moe_intermediate_size": layer.size,
        "norm_topk_prob": layer.router.normalise,
    }


def rules(tree: Tree) -> list[Rule]:
    module = f"{llama_like.LAYER}mlp"
    return [*llama_like.rules(tree), *experts.rules(tree, module, llama_like.MATRICES)]


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    scorer="Qwen3MoeForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    only={"mlp_bias": (False, None), **windows.NO_TYPES},
    fields=llama_like.changed(
        (*llama_like.FIELDS, windows.SIZE, *experts.FIELDS),
        llama_like.ATTENTION_BIAS,
        windows.USED,
        experts.SIZE,
        Field("norm_topk_prob", Flag(), False, experts.NORMALISED),
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
    harmless=("output_router_logits", "max_window_layers"),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
