"""Which matrices are multiplied in eight bits: all of attention, mlps and experts inside layers. By
rule the embedding, the head, norms, routers and adapters are not, nor are the layers at either end
that a run leaves out.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from dolmen.model.tree.leaf import Leaf, Leaves
from dolmen.ops.recipe import Fp8

LAYER = re.compile(r"layers\.(\d+)\.(?:attn|mlp)\..*weight")


def rounded(leaves: Leaves, layers: int, recipe: Fp8) -> Leaves:
    """The parameters of a model of so many layers, with what `recipe` rounds."""
    inner = range(recipe.config.first_layers, layers - recipe.config.last_layers)
    return {
        name: replace(leaf, fp8=recipe) if _inside(name, leaf, inner) else leaf
        for name, leaf in leaves.items()
    }


def _inside(name: str, leaf: Leaf, layers: range) -> bool:
    found = LAYER.fullmatch(name)
    return found is not None and leaf.role in ("matrix", "expert") and int(found[1]) in layers


def check_rounding(leaves: Leaves, sizes: Mapping[str, int]) -> None:
    """Raises ValueError, with the numbers and the knob, where tp would cut a block that shares a
    scale, or a part of what is rounded as one.
    """
    tp = sizes["tp"]
    for name, leaf in leaves.items():
        if leaf.fp8 is None or tp == 1:
            continue
        for cut in (cut for cut in leaf.cuts if cut.axis == "tp"):
            if not cut.splits(tp):
                raise ValueError(
                    f"{cut.knob} ({cut.units}) is not divisible by tp ({tp}), so ranks would round "
                    f"parts of one gradient of {name}: set --layout.tp to a divisor, or leave out "
                    "--train.precision"
                )
            size, block = leaf.shape[cut.dim] // tp, leaf.fp8.block
            if size % block:
                raise ValueError(
                    f"{leaf.fp8.precision} shares a scale among {block} neighbours, and tp ({tp}) "
                    f"cuts the {leaf.shape[cut.dim]} of {name} into parts of {size}: set a smaller "
                    "--layout.tp, or --train.precision fp8-rowwise"
                )


def check_tokens(recipe: Fp8, tokens: Mapping[str, int]) -> None:
    """Raises ValueError where a rank's part of the tokens, by what cuts them, ends inside a block
    that shares a scale of the weight gradient.
    """
    if not recipe.rounds("weight-gradient"):
        return
    for cuts, size in tokens.items():
        if size % recipe.block:
            raise ValueError(
                f"{recipe.precision} shares a scale among {recipe.block} neighbouring tokens, and "
                f"{cuts} leaves parts of {size}: set --train.sequence-length to a multiple, or "
                "--train.fp8.unrounded weight-gradient"
            )
