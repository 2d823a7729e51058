"""In what two trees differ, by name."""

from dataclasses import fields, is_dataclass
from typing import Any

from dolmen.model.tree import Tree


def differences(one: Tree, other: Tree) -> list[tuple[str, Any, Any]]:
    """(name, value, other value) of each value that differs; of layers, a list of them where they
    are not all alike.
    """
    if one == other:
        return []
    a, b = _named(one), _named(other)
    return [(n, a.get(n), b.get(n)) for n in {**a, **b} if a.get(n) != b.get(n)]


def _named(tree: Tree) -> dict[str, Any]:
    layers = [dict(_leaves("", block)) for block in tree.blocks]
    names = {name: None for layer in layers for name in layer}
    named: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for name in names:
        values = [layer.get(name) for layer in layers]
        alike = all(value == values[0] for value in values)
        named[name] = values[0] if alike else values
    return named | {name: v for name, v in _leaves("", tree) if not name.startswith("runs")}


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    """(path, value) of everything in a component; of a choice between components, which it is."""
    if not is_dataclass(value):
        return [(path, value)]
    kind = [(path, type(value).__name__)] if path else []
    return kind + [
        leaf
        for field in fields(value)
        for leaf in _leaves(f"{path}.{field.name}" if path else field.name, vars(value)[field.name])
    ]
