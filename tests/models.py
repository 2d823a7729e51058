"""Small models of the tests, by the flat fields that dolmen had before a model was its config.json:
what a test varies is one word, whatever component it belongs to.
"""

from dolmen.core.mesh import Mesh
from dolmen.families.flat import Flat
from dolmen.model import build as building
from dolmen.model.build import initialize, load
from dolmen.model.decoder import Decoder
from dolmen.model.layout import Layout
from dolmen.model.split import Split
from dolmen.parallel.actions import Schedule

__all__ = ["Flat", "build", "decoder", "initialize", "load"]


def build(
    flat: Flat,
    mesh: Mesh,
    layout: Layout | None = None,
    schedule: Schedule | None = None,
    **options,
) -> Decoder:
    """As model/build.py does, with the knobs of training among the fields."""
    return building.build(flat.tree, mesh, layout, schedule, training=flat.training, **options)


def decoder(flat: Flat, split: Split | None = None) -> Decoder:
    """Not placed: with values of torch.empty."""
    return Decoder(flat.tree, split, flat.training)
