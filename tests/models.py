"""Small models of the tests: by the flat fields that dolmen had before a model was its config.json,
where what a test varies is one word, whatever component it belongs to; or as a config.json.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

from dolmen.core.config import from_dict
from dolmen.core.mesh import Mesh
from dolmen.families import Model, families
from dolmen.families.flat import Flat
from dolmen.model import build as building
from dolmen.model.build import initialize, load
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.split import Split
from dolmen.model.training import Training
from dolmen.model.tree import Tree
from dolmen.parallel.actions import Schedule

__all__ = [
    "Flat",
    "Tiny",
    "build",
    "decoder",
    "flat_model",
    "initialize",
    "load",
    "mixing",
    "of_layers",
    "tiny",
]


@dataclass(frozen=True)
class Tiny:
    """A model and the knobs of training inside it."""

    tree: Tree
    training: Training = Training()


def of_layers(model: Flat | Tiny, number: int) -> Tiny:
    """The same with so many layers, of a model whose layers are alike."""
    (run,) = model.tree.runs
    return Tiny(replace(model.tree, runs=(replace(run, repeat=number),)), model.training)


def mixing(model: Flat | Tiny, **fields) -> Tiny:
    """The same with other fields of the mixer of every layer: what no family says yet."""
    runs = tuple(
        replace(run, blocks=tuple(replace(b, mixer=replace(b.mixer, **fields)) for b in run.blocks))
        for run in model.tree.runs
    )
    return Tiny(replace(model.tree, runs=runs), model.training)


def tiny(model_type: str, dropout: float = 0.0, **fields) -> Tiny:
    """Of a config.json."""
    return Tiny(Model({"model_type": model_type, **fields}).tree, Training(dropout))


def flat_model(**fields) -> Model:
    """Of flat fields; where they name no family, the first that can express them."""
    if "family" not in fields:
        for name in ("llama", *families()):
            with suppress(ValueError):
                return from_dict(Flat, {**fields, "family": name}).model
    return from_dict(Flat, fields, path="model").model


def build(
    flat: Flat | Tiny,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    **options,
) -> Decoder:
    """As model/build.py does, with the knobs of training among the fields."""
    return building.build(flat.tree, mesh, layout, schedule, training=flat.training, **options)


def decoder(flat: Flat | Tiny, split: Split | None = None) -> Decoder:
    """Not placed: with values of torch.empty."""
    return Decoder(flat.tree, split, flat.training)
