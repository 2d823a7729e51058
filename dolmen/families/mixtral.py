"""Mixtral 8x7B and 8x22B (2401.04088): Mistral whose every feed-forward layer is experts, weights
of the chosen ones normalised.
"""

from typing import Any

from dolmen.families import experts, llama_like, windows
from dolmen.families.family import Family, expect
from dolmen.families.rules import Rule
from dolmen.model.tree import Experts, Tree


def read(config: dict[str, Any]) -> Tree:
    """`intermediate_size` is an expert's width."""
    layer = experts.read(config, config["intermediate_size"], normalise=True)
    return llama_like.read(config, mlp=lambda _: layer, windows=windows.of_all(config))


def new(tree: Tree) -> dict[str, Any]:
    layer = expect(tree.blocks[0].mlp, Experts, "mlp")
    return {**llama_like.new(tree), **experts.new(layer), **windows.new(tree)}


def rules(tree: Tree) -> list[Rule]:
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    module = f"{llama_like.LAYER}block_sparse_moe"
    return [*llama_like.rules(tree), *experts.rules(tree, module, names)]


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    scorer="MixtralForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        (*llama_like.FIELDS, windows.SIZE, *experts.FIELDS),
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
    only={**llama_like.NO_BIAS, **windows.NO_TYPES, "router_jitter_noise": (0.0, None)},
    harmless=("output_router_logits",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
