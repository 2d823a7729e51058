"""Which module computes which component of the tree (dolmen/model/tree): one line for each."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from dolmen.model import tree
from dolmen.model.attention import Attention
from dolmen.model.block import Block, ParallelBlock, SequentialBlock
from dolmen.model.component import Setting
from dolmen.model.head import Logits, Values
from dolmen.model.latent import LatentAttention
from dolmen.model.mlp import MLP, MoE
from dolmen.model.tree import Leaves, under
from dolmen.ops.attention import Attend

MIXERS = {tree.Attention: Attention, tree.LatentAttention: LatentAttention}
MLPS = {tree.Mlp: MLP, tree.Experts: MoE}
HEADS = {tree.Head: Logits, tree.Scalar: Values}
BLOCKS = {tree.Sequential: SequentialBlock, tree.Parallel: ParallelBlock}

# What a tree can say and no module computes: any other value is refused.
ONLY: dict[type, dict[str, Any]] = {}


def make(block: tree.Block, leaves: Leaves, setting: Setting) -> Block:
    """The module of a block, of whose parameters are `leaves`."""
    mixer = MIXERS[type(block.mixer)](block.mixer, under(leaves, "attn"), setting)
    mlp = MLPS[type(block.mlp)](block.mlp, under(leaves, "mlp"), setting)
    return BLOCKS[type(block.arrangement)](block, leaves, setting, mixer, mlp)


def attends(model: tree.Tree) -> list[Attend]:
    """What attention each layer is."""
    return [MIXERS[type(block.mixer)].attend(block.mixer) for block in model.blocks]


def check(model: tree.Tree) -> None:
    """Raises ValueError for a component, a value of one, or a block of some that nothing here
    computes.
    """
    for block in model.blocks:
        _check_arrangement(block)
    for component in _inside(model):
        kind = type(component)
        for name, computed in ONLY.get(kind, {}).items():
            value = getattr(component, name)
            if value != computed:
                raise ValueError(
                    f"{kind.__name__}.{name} is {value}: dolmen computes {computed} alone"
                )


def _check_arrangement(block: tree.Block) -> None:
    takes = BLOCKS[type(block.arrangement)].takes
    for component, module in (
        (block.mixer, MIXERS[type(block.mixer)]),
        (block.mlp, MLPS[type(block.mlp)]),
    ):
        if not issubclass(module, takes):
            raise ValueError(
                f"the arrangement {block.arrangement} with {component}: dolmen arranges "
                f"{type(component).__name__} otherwise alone"
            )


def _inside(value: Any) -> Iterator[Any]:
    """Every component under a value of the tree, itself included."""
    if isinstance(value, tuple):
        for one in value:
            yield from _inside(one)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from _inside(getattr(value, field.name))
