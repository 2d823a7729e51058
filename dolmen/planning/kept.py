"""What a layer of any kind keeps of a microbatch until backward, ours or another program's."""

from dataclasses import replace
from typing import Any

from dolmen.model.count import activation_bytes_per_layer
from dolmen.model.tree import Attention, Block, Experts, Mlp, Run, Tree


def layer_bytes(
    tree: Tree,
    block: Block,
    batch: int,
    length: int,
    *,
    cp: int,
    recompute: str,
    element_bytes: int,
    **more: Any,
) -> float:
    """Bytes that a layer keeps of a microbatch, as `activation_bytes_per_layer` says, of any block:
    of experts those of the dense layer that a token passes, with what is sent to them and comes
    back; latents beside the heads that are made of them.
    """
    tokens, beside, e = batch * length / cp, 0.0, element_bytes
    if isinstance(block.mlp, Experts):
        experts = block.mlp
        beside += tokens * 2 * e * experts.per_token * tree.hidden_size
        beside += tokens * 8 * experts.number  # the router's, in fp32
        block = replace(block, mlp=Mlp(experts.per_token * experts.size))
    if not isinstance(block.mixer, Attention):
        mixer = block.mixer
        beside += tokens * e * 2 * ((mixer.q_rank or 0) + mixer.kv_rank)
        block = replace(block, mixer=Attention(mixer.heads, mixer.heads, mixer.head_size))
    one = replace(tree, runs=(Run((block,), 1),))
    how = {"cp": cp, "recompute": recompute, "element_bytes": e, **more}
    kept = activation_bytes_per_layer(one, batch, length, **how)
    return kept + (0.0 if recompute == "full" else beside)
