"""Command R7B and Command A (Cohere, 2504.00698): Command R of which three of four layers see a
window, and these alone turn by rope: the others know nothing of positions.
"""

from dataclasses import replace
from typing import Any

from dolmen.families import cohere, llama_like, windows
from dolmen.families.family import Family, knob
from dolmen.model.tree import Tree, runs_of

FIELDS = llama_like.without(
    (*cohere.FAMILY.fields, windows.SIZE, *windows.pattern(4)), "use_qk_norm", "head_dim"
)


def read(config: dict[str, Any]) -> Tree:
    """Raises ValueError where no layer slides: rope would turn nothing."""
    sizes = windows.of_pattern(config)
    if not any(sizes):
        raise ValueError(
            "layer_types has no layer of sliding_attention, which alone have rope: set "
            f"{knob('layer_types')} so that one slides"
        )
    tree = cohere.read({**config, "use_qk_norm": False, "head_dim": None})
    blocks = []
    for block, size in zip(tree.blocks, sizes, strict=True):
        positions = block.mixer.positions if size is not None else None
        mixer = replace(block.mixer, window=size, positions=positions)
        blocks.append(replace(block, mixer=mixer))
    return replace(tree, runs=runs_of(blocks))


def new(tree: Tree) -> dict[str, Any]:
    own = {field.name for field in FIELDS}
    fields = {**cohere.new(tree), **windows.new_types(tree)}
    return {name: value for name, value in fields.items() if name in own}


FAMILY = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    read=read,
    new=new,
    rules=cohere.rules,
    fields=llama_like.changed(FIELDS, sliding_window=4096, rope_theta=10000.0),
    only={"mlp_bias": (False, None)},
    # what transformers does not read, of the code that it was made with
    harmless=tuple(
        """
        model_max_length head_dim cache_implementation order_of_interleaved_layers
        position_embedding_type rotary_pct use_embedding_sharing use_gated_activation
        use_parallel_block use_parallel_embedding""".split()
    ),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
