"""GPT-J (Wang and Komatsuzaki, 2021): attention and feed-forward layer side by side after one
LayerNorm, rope over neighbours of a part of each head, biases of the feed-forward layer and of the
head alone.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import common, gpt_like, llama_like
from dolmen.families.family import Family, Field, expect, knob
from dolmen.families.gpt_like import LAYER, OURS
from dolmen.families.rules import Rename, Rule
from dolmen.files import kinds
from dolmen.model.tree import Attention, Block, Parallel, Rope, Tree

FIELDS = llama_like.changed(
    gpt_like.FIELDS,
    Field(
        "rotary_dim",
        kinds.WIDTH,
        64,
        "Leading numbers of each head that rope turns, neighbours together.",
    ),
    vocab_size=50400,
    n_positions=2048,
    n_embd=4096,
    n_layer=28,
    n_head=16,
    tie_word_embeddings=False,
)


def read(config: dict[str, Any]) -> Tree:
    """Raises ValueError where rope would turn more than a head, or no pairs."""
    heads, size = config["n_head"], common.head_size(config, FIELDS)
    turned = config["rotary_dim"]
    if turned > size or turned % 2:
        raise ValueError(
            f"rotary_dim is {turned}, of heads of {size}: rope turns pairs of a head, set "
            f"{knob('rotary_dim')} to an even number up to {size}"
        )
    mixer = Attention(heads, heads, size, positions=Rope(turned, interleaved=True))
    mlp, norm = common.plain(config, FIELDS), common.layer_norm(config)
    tree = common.tree(config, FIELDS, [Block(mixer, mlp, norm, Parallel(1))] * config["n_layer"])
    return replace(tree, head=replace(tree.head, bias=True))


def new(tree: Tree) -> dict[str, Any]:
    turned = expect(common.attention(tree).positions, Rope, "positions")
    return {**gpt_like.new(tree, FIELDS), "rotary_dim": turned.size}


MATRICES = (
    Rename(LAYER + "attn.out_proj", OURS + "attn.o"),
    Rename(LAYER + "mlp.fc_in", OURS + "mlp.up"),
    Rename(LAYER + "mlp.fc_out", OURS + "mlp.down"),
)


def rules(tree: Tree) -> list[Rule]:
    qkv = (Rename(f"{LAYER}attn.{part}_proj", f"{OURS}attn.{part}") for part in "qkv")
    return gpt_like.rules([*qkv, *MATRICES], first="norm")


FAMILY = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    scorer="GPTJForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=FIELDS,
    only={"rotary": (True,), "scale_attn_weights": (True,)},
    harmless=gpt_like.HARMLESS,
    beside=gpt_like.BESIDE,
    ignored=gpt_like.IGNORED,
    prefix="transformer.",
)
