"""Phi-3, Phi-3.5 and Phi-4 (2404.14219, 2412.08905): Llama with q, k, v in one tensor and gate and
up in another, a window in some, and in some rope over a part of each head.
"""

from typing import Any

from dolmen.families import common, llama_like, rope, windows
from dolmen.families.family import Family, expect
from dolmen.families.rules import Rule, Split
from dolmen.model.tree import LongRope, Rope, Tree

FIELDS = (
    *llama_like.fields_with(turned=rope.fields(part=1.0)),
    windows.SIZE,
)


def read(config: dict[str, Any]) -> Tree:
    """Raises ValueError for a type of rope that transformers refuses too."""
    tree = llama_like.read(config, windows=windows.of_all(config))
    scaling = expect(common.attention(tree).positions, Rope, "positions").scaling
    if scaling is not None and not isinstance(scaling, LongRope):
        raise ValueError(f"rope is scaled by {scaling}: phi3 has rope_type default and longrope")
    return tree


def new(tree: Tree) -> dict[str, Any]:
    return {**llama_like.new(tree, FIELDS), **windows.new(tree)}


def rules(tree: Tree) -> list[Rule]:
    mixer, layer = common.attention(tree), llama_like.LAYER
    counts = (mixer.heads, mixer.kv_heads, mixer.kv_heads)
    both = tuple(f"layers.{{}}.mlp.{name}" for name in ("gate", "up"))
    fused = [
        Split(f"{layer}self_attn.qkv_proj", common.QKV, 1, counts),
        Split(f"{layer}mlp.gate_up_proj", both, 1, (1, 1)),
    ]
    return llama_like.rules(tree, instead=fused)


FAMILY = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    scorer="Phi3ForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        FIELDS,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        original_max_position_embeddings=4096,
    ),
    only={
        **windows.NO_TYPES,
        **llama_like.NO_BIAS,
        # stated by Phi-4-mini, for code of its own
        "lm_head_bias": (False, None),
        "full_attn_mod": (1, None),
        "interpolate_factor": (1, None),
    },
    harmless=("embd_pdrop", "resid_pdrop"),
    beside={**llama_like.BESIDE, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ignored=llama_like.IGNORED,
    code=("configuration_phi3", "modeling_phi3"),
)
