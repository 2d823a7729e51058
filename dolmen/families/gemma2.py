"""Gemma 2 (2408.00118): Gemma with a norm after each layer too, soft caps of scores and of logits,
a sliding window on every other layer, and a scale of scores that its config.json states.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dolmen.families import common, gemma, llama_like, windows
from dolmen.families.family import Family, Field
from dolmen.families.rules import Rule
from dolmen.files.schema import Int, Real, optional
from dolmen.model.tree import Sequential, Tree, runs_of

WINDOW = 4096
NORMS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}


def windows_of(config: dict[str, Any]) -> list[int | None]:
    """The window of each layer: of the first, the third and so on, where layer_types is None."""
    layers = range(config["num_hidden_layers"])
    return windows.of_types(config, [windows.FULL if i % 2 else windows.SLIDING for i in layers])


def read(config: dict[str, Any]) -> Tree:
    return read_windowed(config, windows_of(config))


def read_windowed(config: dict[str, Any], sizes: Sequence[int | None]) -> Tree:
    """As Gemma 3 has it too, given the window of each layer. transformers refuses heads that do not
    divide the width, whatever head_dim says.
    """
    common.head_size(config, llama_like.FIELDS)
    tree = gemma.read_stated({**config, "hidden_act": config["hidden_activation"]})
    scalar = config["query_pre_attn_scalar"]
    cap, logits_cap = (_number(config[f"{of}_logit_softcapping"]) for of in ("attn", "final"))
    blocks = [
        replace(
            block,
            mixer=replace(
                block.mixer,
                scale=None if scalar == block.mixer.head_size else scalar**-0.5,
                window=window,
                soft_cap=cap,
            ),
            arrangement=Sequential("sandwich"),
        )
        for block, window in zip(tree.blocks, sizes, strict=True)
    ]
    return replace(tree, runs=runs_of(blocks), head=replace(tree.head, soft_cap=logits_cap))


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def new(tree: Tree) -> dict[str, Any]:
    """A window that no layer has is written all the same: transformers makes masks of it."""
    fields, mixer, of_layers = gemma.new(tree), common.attention(tree), windows.new_types(tree)
    return {
        **{name: value for name, value in fields.items() if name != "hidden_act"},
        **of_layers,
        "sliding_window": of_layers["sliding_window"] or WINDOW,
        "hidden_activation": fields["hidden_act"],
        "query_pre_attn_scalar": (
            mixer.head_size if mixer.scale is None else round(mixer.scale**-2)
        ),
        "attn_logit_softcapping": mixer.soft_cap,
        "final_logit_softcapping": tree.head.soft_cap,
    }


def rules(tree: Tree) -> list[Rule]:
    return llama_like.rules(tree, NORMS)


FIELDS = tuple(
    replace(field, name="hidden_activation", common=("hidden_act",))
    if field.name == "hidden_act"
    else field
    for field in llama_like.FIELDS
)

FAMILY = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    scorer="Gemma2ForSequenceClassification",
    read=read,
    new=new,
    rules=rules,
    fields=llama_like.changed(
        (*FIELDS, windows.SIZE),
        llama_like.ATTENTION_BIAS,
        windows.types("every other layer slides, the first does"),
        Field(
            "query_pre_attn_scalar",
            Int(1, 1 << 20),
            256,
            "Scores are products of queries and keys divided by its square root.",
        ),
        Field(
            "attn_logit_softcapping",
            optional(Real(0, above=True)),
            50.0,
            "Scores become cap * tanh(score / cap); None: they stay.",
        ),
        Field(
            "final_logit_softcapping",
            optional(Real(0, above=True)),
            30.0,
            "Logits become cap * tanh(logit / cap); None: they stay.",
        ),
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        hidden_activation=gemma.TANH,
        sliding_window=WINDOW,
        **gemma.DEFAULTS,
    ),
    only={**gemma.ONLY, "sliding_window_pattern": (2, None)},
    harmless=("hidden_act", "sliding_window_size", "cache_implementation"),
    beside=llama_like.BESIDE,
    ignored=llama_like.IGNORED,
)
