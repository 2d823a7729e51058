"""Qwen3 with experts (2505.09388): Qwen3 whose feed-forward layers are many small experts, but for
those named dense.
"""

from typing import Any

from dolmen.families import llama_like, qwen2
from dolmen.families.family import Family, Field, activation, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.files.schema import Flag, Int, List, optional
from dolmen.model.tree import Experts, Mlp, Tree


def read(c: dict[str, Any]) -> Tree:
    """A layer is sparse if its number, from 1, is a multiple of `decoder_sparse_step` and
    `mlp_only_layers` does not name it.
    """
    step, only = c["decoder_sparse_step"], set(c["mlp_only_layers"] or ())
    sparse = llama_like.experts(c, c["moe_intermediate_size"], normalise=c["norm_topk_prob"])
    dense = Mlp(c["intermediate_size"], True, activation(c["hidden_act"], "hidden_act"))
    window = c["sliding_window"] if c["use_sliding_window"] else None
    bias = bool(c["attention_bias"])
    return llama_like.read(
        c,
        mlp=lambda i: dense if i in only or (i + 1) % step else sparse,
        windows=[window] * c["num_hidden_layers"],
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )


def new(tree: Tree) -> dict[str, Any]:
    """Of the first dense layer, where there is one, and of the first sparse one."""
    layers = [block.mlp for block in tree.blocks]
    dense = [i for i, mlp in enumerate(layers) if not mlp.experts]
    sparse = [expect(mlp, Experts, "mlp") for mlp in layers if mlp.experts]
    mixer = llama_like.mixer(tree)
    return {
        **llama_like.new(tree),
        **(_new_experts(sparse[0]) if sparse else {}),
        "intermediate_size": layers[dense[0]].size if dense else sparse[0].size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "attention_bias": mixer.q_bias,
        "use_sliding_window": mixer.window is not None,
        "sliding_window": mixer.window,
    }


def _new_experts(layer: Experts) -> dict[str, Any]:
    return {
        **llama_like.new_experts(layer),
        "moe_intermediate_size": layer.size,
        "norm_topk_prob": layer.router.normalise,
    }


def rules(tree: Tree) -> list[Rule]:
    names = {f"{name}_proj": name for name in ("gate", "up", "down")}
    return [*llama_like.rules(tree), *llama_like.expert_rules(tree, "mlp", names)]


FAMILY = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=read,
    new=new,
    rules=rules,
    only={"mlp_bias": (False, None), **llama_like.NO_WINDOW},
    fields=llama_like.changed(
        (
            *llama_like.FIELDS,
            llama_like.SLIDING_WINDOW,
            llama_like.EXPERTS_PER_TOKEN,
            llama_like.AUX_LOSS,
        ),
        llama_like.ATTENTION_BIAS,
        qwen2.USE_WINDOW,
        Field(
            "num_local_experts",
            kinds.EXPERTS,
            128,
            "Experts of a sparse feed-forward layer.",
            ("num_experts",),
        ),
        Field("moe_intermediate_size", kinds.WIDTH, 768, "Width of an expert."),
        Field(
            "norm_topk_prob",
            Flag(),
            False,
            "The weights of a token's experts are divided by their sum.",
        ),
        Field(
            "decoder_sparse_step",
            kinds.LAYERS,
            1,
            "Every so many layers one is sparse, the others are dense.",
        ),
        Field(
            "mlp_only_layers",
            optional(List(Int(0, kinds.LAYERS.high), longest=kinds.LAYERS.high)),
            None,
            "Layers that stay dense, counted from 0.",
            common=("dense_layers",),
        ),
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_key_value_heads=4,
        max_position_embeddings=32768,
        sliding_window=4096,
        num_experts_per_tok=8,
    ),
    harmless=("output_router_logits", "max_window_layers"),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
