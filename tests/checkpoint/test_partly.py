"""A stored part of which every rank reads a part is verified all the same: a number changed on disk
is never trained on.
"""

from spawning import run_spawned
from worlds import Layout, Run

from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import SINGLE

NAME = "layers.0.mlp.gate.weight"


def damage(folder) -> None:
    """Change one number of NAME in the only file of a checkpoint, in the first rows of 48."""
    saved = Run(Layout(), SINGLE)
    numbers = saved.tensors()[f"model/{NAME}"].detach()
    file = folder / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    at = content.find(numbers.numpy().tobytes())
    assert at > 0
    content[at + 4] ^= 1
    file.write_bytes(content)


def _load(folder, wholes) -> list[str]:
    """What loading at layouts whose ranks hold parts says."""
    said = []
    for layout in (Layout(tp=2, zero=0), Layout(dp=2, zero=1)):
        for part in wholes:
            try:
                Run(layout, layout.mesh()).load(Checkpoints(folder / part, layout.mesh(), 0), 1)
            except ValueError as error:
                said.append(str(error))
            else:
                said.append("loaded")
    return said


def test_a_changed_number_is_seen_at_any_layout(tmp_path):
    parts = ("sound", "damaged")
    for part in parts:
        Checkpoints(tmp_path / part, SINGLE, 0).save(
            1, Run(Layout(), SINGLE).tensors(), {}, wait=True
        )
    damage(Checkpoints(tmp_path / "damaged", SINGLE, 0).path(1))
    said = run_spawned(2, _load, tmp_path, parts)
    assert said[::2] == ["loaded"] * 2 and all(
        f"the checksum of model/{NAME} is wrong" in text for text in said[1::2]
    ), said
