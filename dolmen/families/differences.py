"""Differences between two model specs, named as in a config.json of transformers where it has a
name.
"""

from dataclasses import fields, is_dataclass
from typing import Any

from dolmen.model.spec import ModelSpec

WORDS = {
    "mixer": "attention",
    "mixer.heads": "num_attention_heads",
    "mixer.kv_heads": "num_key_value_heads",
    "mixer.head_size": "head_dim",
    "mixer.q_bias": "the bias of q",
    "mixer.k_bias": "the bias of k",
    "mixer.v_bias": "the bias of v",
    "mixer.o_bias": "the bias of attention's output",
    "mixer.clip": "clip_qkv",
    "mixer.qk_norm": "qk_norm",
    "mixer.qk_norm_of": "the extent of the q and k norm",
    "mixer.positions": "positions in attention",
    "mixer.positions.size": "the part of a head with rope",
    "mixer.positions.theta": "rope_theta",
    "mixer.positions.scaling": "rope_scaling",
    "mixer.positions.interleaved": "rope pairs of adjacent elements",
    "mixer.scale": "the scale of scores",
    "mixer.window": "sliding_window",
    "mixer.soft_cap": "attn_logit_softcapping",
    "mixer.mask": "the mask of attention",
    "mixer.sinks": "attention sinks",
    "mlp": "mlp",
    "mlp.size": "intermediate_size",
    "mlp.gated": "a gate in the feed-forward layer",
    "mlp.activation": "hidden_act",
    "mlp.bias": "biases of the feed-forward layer",
    "mlp.number": "the number of experts",
    "mlp.per_token": "num_experts_per_tok",
    "mlp.shared": "shared experts",
    "mlp.shared_gate": "a gate of the shared expert",
    "norm.zero_centred": "a norm stored as weight - 1",
    "norm.affine": "a norm's weight",
    "arrangement": "the arrangement of attention and MLP",
    "arrangement.norms": "the norms of a block",
    "arrangement.residual": "what the residual is added to",
    "arrangement.residual_scale": "the scale of the residual",
    "arrangement.branch_scale": "residual_multiplier",
    "embedding.scale": "the scale of the embedding",
    "embedding.norm": "a norm of the embedding",
    "embedding.positions": "a position embedding",
    "embedding.positions.offset": "rows before the first position",
    "embedding.types": "token types",
    "head.tied": "tie_word_embeddings",
    "head.soft_cap": "final_logit_softcapping",
    "head.normalised": "a head with normalised rows",
    "head.scale": "the scale of logits",
    "head.bias": "the bias of logits",
}
KINDS = {
    "AlibiSpec": "ALiBi",
    "RopeSpec": "rope",
    "PositionTable": "learned",
    "LinearScaling": "linear",
    "Llama3Scaling": "llama3",
    "YarnScaling": "yarn",
    "DynamicScaling": "dynamic",
    "LongRopeScaling": "longrope",
    "NormSpec": "there",
    "MoESpec": "experts",
    "MLPSpec": "dense",
    "SequentialResidual": "attention, then MLP",
    "ParallelResidual": "in parallel",
}
"""Names of component classes for messages."""


def differences(first: ModelSpec, second: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Return (name, value of first, value of second) for each value in which two specs differ,
    named as in a config.json; a value is a list with one entry per layer if layers are not equal.
    Where components are of different kinds, the kinds are listed and the values inside are not.
    """
    if first == second:
        return []
    a, b = _flatten_spec(first), _flatten_spec(second)
    # a value that one spec lacks is None there
    unequal = {n: (a.get(n), b.get(n)) for n in {**a, **b} if a.get(n) != b.get(n)}
    return [
        (_display_name(name), *pair)
        for name, pair in unequal.items()
        if not _is_inside_difference(name, unequal)
    ]


def _is_inside_difference(name: str, differing: dict[str, tuple[Any, Any]]) -> bool:
    """Return whether the value at `name` lies in a component that is itself among the differences
    (`differing`).
    """
    parts = name.split(".")
    return any(".".join(parts[:n]) in differing for n in range(1, len(parts)))


def _display_name(name: str) -> str:
    """Return a spec value's name for messages, from its dotted path: the config.json name in WORDS,
    or that of the innermost component that has one followed by the rest of the path, such as
    "rope_scaling.factor"; else the path.
    """
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        if word := WORDS.get(".".join(parts[:n])):
            return ".".join([word, *parts[n:]])
    return name


def _flatten_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return dotted path -> value for every value of a spec. Blocks are merged: one value if all
    layers agree, otherwise a list with one entry per layer (None where a layer lacks it).
    """
    layers = [dict(_flatten("", block)) for block in spec.blocks]
    names = {name: None for layer in layers for name in layer}
    named: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for name in names:
        values = [layer.get(name) for layer in layers]
        # not a set: values need not be hashable
        equal = all(value == values[0] for value in values)
        named[name] = values[0] if equal else values
    return named | {name: v for name, v in _flatten("", spec) if not name.startswith("runs")}


def _flatten(path: str, value: Any) -> list[tuple[str, Any]]:
    """Return (dotted path, value) of every value inside a component, depth first, each component
    preceded by (its path, the display name of its class).
    """
    if not is_dataclass(value):
        return [(path, value)]
    name = type(value).__name__
    kind = [(path, KINDS.get(name, name))] if path else []
    return kind + [
        leaf
        for field in fields(value)
        for leaf in _flatten(
            f"{path}.{field.name}" if path else field.name, vars(value)[field.name]
        )
    ]
