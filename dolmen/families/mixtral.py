"""Mixtral 8x7B and 8x22B (2401.04088): Mistral whose every feed-forward layer is experts, weights
of the chosen ones normalised.
"""

from typing import Any

from dolmen.families import llama_like
from dolmen.families.family import Family, Field, expect
from dolmen.families.rules import Rule
from dolmen.files import kinds
from dolmen.model.tree import Experts, Tree


def read(c: dict[str, Any]) -> Tree:
    """`intermediate_size` is an expert's width."""
    layer = llama_like.experts(c, c["intermediate_size"], normalise=True)
    windows = [c["sliding_window"]] * c["num_hidden_layers"]
    return llama_like.read(c, mlp=lambda _: layer, windows=windows)


def new(tree: Tree) -> dict[str, Any]:
    return {
        **llama_like.new(tree),
        **llama_like.new_experts(expect(tree.blocks[0].mlp, Experts, "mlp")),
        "sliding_window": llama_like.mixer(tree).window,
    }


def rules(tree: Tree) -> list[Rule]:
    names = {"w1": "gate", "w3": "up", "w2": "down"}
    return [*llama_like.rules(tree), *llama_like.expert_rules(tree, "block_sparse_moe", names)]


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        (*llama_like.FIELDS, llama_like.SLIDING_WINDOW),
        Field(
            "num_local_experts",
            kinds.EXPERTS,
            8,
            "Experts of a feed-forward layer.",
            ("num_experts",),
        ),
        llama_like.EXPERTS_PER_TOKEN,
        llama_like.AUX_LOSS,
        intermediate_size=14336,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=1000000.0,
    ),
    only={**llama_like.NO_BIAS, **llama_like.NO_WINDOW, "router_jitter_noise": (0.0, None)},
    harmless=("output_router_logits",),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
