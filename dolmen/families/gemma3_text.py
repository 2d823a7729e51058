"""Gemma 3, text (2503.19786): Gemma 2 without caps, with norms of queries and keys, five layers
with a sliding window to each without, and a rope for each of the two kinds.

transformers 5 states both ropes in `rope_parameters`, by the types of layers; older files the one
of full attention as all families do, and beside it `rope_local_base_freq`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dolmen.families import common, gemma, gemma2, llama_like, rope, windows
from dolmen.families.family import Family, Field, expect
from dolmen.families.larger import Larger
from dolmen.files.schema import Object, Real, optional
from dolmen.model.tree import Attention, Block, Rope, Tree, runs_of

FULL, SLIDING = windows.FULL, windows.SLIDING
LOCAL = "rope_local_base_freq"


def _one_rope(config: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config.json as one whose only rope is that of a type of layers."""
    stated, scaling = (config["rope_parameters"] or {}).get(kind) or {}, {}
    theta = config[LOCAL]
    if kind == FULL:
        scaling, theta = config["rope_scaling"] or {}, config["rope_theta"]
    one = {**stated, **scaling}
    return {**config, "rope_parameters": one, "rope_scaling": None, "rope_theta": theta}


def read(config: dict[str, Any]) -> Tree:
    """Raises ValueError for a cap on scores: Gemma 3 has the field, and computes without."""
    if config["attn_logit_softcapping"] is not None:
        raise ValueError(
            f"attn_logit_softcapping is {config['attn_logit_softcapping']}: the scores of Gemma 3 "
            "have no cap, and other programs leave this out; set it to null"
        )
    tree = gemma2.read_windowed(_one_rope(config, FULL), windows.of_pattern(config))
    local = rope.read(_one_rope(config, SLIDING), common.attention(tree).head_size)

    def with_rope(block: Block) -> Block:
        positions = block.mixer.positions if block.mixer.window is None else local
        return replace(block, mixer=replace(block.mixer, positions=positions, qk_norm=block.norm))

    return replace(tree, runs=runs_of([with_rope(block) for block in tree.blocks]))


def new(tree: Tree) -> dict[str, Any]:
    """Of the first layer of each type."""
    stated = {
        FULL if mixer.window is None else SLIDING: rope.new(_rope(mixer))
        for mixer in reversed(list(_mixers(tree)))
    }
    return {**gemma2.new(tree), "rope_parameters": stated}


def _rope(mixer: Attention) -> Rope:
    return expect(mixer.positions, Rope, "positions")


def _mixers(tree: Tree) -> Iterable[Attention]:
    return (expect(block.mixer, Attention, "mixer") for block in tree.blocks)


STATED = Object(optional={field.name: field.kind for field in (*rope.PARAMETERS, *rope.NEVER)})
OF_TYPES = tuple(Field(kind, optional(STATED)) for kind in (FULL, SLIDING))
# no options: of which of the two ropes one would be is not said
ROPES = (
    Field(
        "rope_parameters",
        optional(Object(optional={field.name: field.kind for field in OF_TYPES}, rest=None)),
        inside=OF_TYPES,
    ),
    *(field for field in rope.fields(theta=1000000.0) if field.name != "rope_parameters"),
    Field(LOCAL, Real(0, above=True), 10000.0),
)
OTHER = {*(field.name for field in ROPES), "layer_types"}

FAMILY = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    scorer="Gemma3TextForSequenceClassification",
    read=read,
    new=new,
    rules=gemma2.rules,
    fields=llama_like.changed(
        [field for field in gemma2.FAMILY.fields if field.name not in OTHER],
        *ROPES,
        *windows.pattern(6),
        vocab_size=262208,
        max_position_embeddings=131072,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    only=gemma.ONLY,
    harmless=("hidden_act", "cache_implementation"),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
    larger=Larger(
        "gemma3",
        "text_config",
        {"language_model.": "", "model.language_model.": "model."},
        tuple(
            f"{before}{part}."
            for before in ("", "model.")
            for part in ("vision_tower", "multi_modal_projector")
        ),
    ),
)
