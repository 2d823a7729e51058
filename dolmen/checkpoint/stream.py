"""A checkpoint as a stream of whole tensors, one in memory at a time, in one process without a
process group: what export, verification and serving read.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Shaped
from torch import Tensor

from dolmen.checkpoint import folders
from dolmen.checkpoint.safe import Reader
from dolmen.files.safetensors import Spec


class Checkpoint:
    """An open checkpoint: `meta` as it was saved, `specs` of all tensors (`model/NAME`,
    `exp_avg/NAME`, ...).
    """

    def __init__(self, folder: Path):
        self._reader = Reader(folder)
        self._reader.check_files()
        self.folder, self.meta = folder, self._reader.state
        self.specs = {
            name: Spec(tuple(t.size), t.properties.dtype) for name, t in self._reader.stored.items()
        }

    def read(self, name: str) -> Shaped[Tensor, "*whole"]:
        """The whole tensor on the CPU. Raises KeyError for a name that is not there, Damaged for a
        damaged file.
        """
        if name not in self.specs:
            raise KeyError(
                f"{self.folder} has no {name}, but {len(self.specs)} others, e.g. "
                f"{list(self.specs)[:3]}"
            )
        tensor = torch.empty(self.specs[name].shape, dtype=self.specs[name].dtype)
        self._reader.fill({name: tensor})
        return tensor

    def stream(self, kind: str = "model") -> Iterator[tuple[str, Tensor]]:
        """(NAME, whole tensor, as in `specs`) of every `kind/NAME`; shapes, errors as `read`'s."""
        for name in self.specs:
            if name.startswith(f"{kind}/"):
                yield name.removeprefix(f"{kind}/"), self.read(name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in the step folder `folder` (see `locate`). Raises Damaged where it is
    damaged or unsafe.
    """
    return Checkpoint(Path(folder))


def locate(path: Path) -> Path:
    """The step folder that `path` stands for: itself, or the newest whole one of a checkpoints
    folder or of a run's.

    Raises ValueError where there is none.
    """
    path = Path(path)
    partial = path.name.endswith(folders.PARTIAL)
    if folders.is_whole(path) or ((path / folders.STATE).is_file() and not partial):
        return path
    for folder in (path / "checkpoints", path):
        if found := folders.list_checkpoints(folder):
            return found[max(found)]
    if (path / "checkpoints").is_dir():
        lies = [entry.name for entry in sorted((path / "checkpoints").iterdir())]
        what = f"in checkpoints/ is only {', '.join(lies[:3])}" if lies else "nothing is saved yet"
        raise ValueError(f"{path} holds no whole checkpoint: {what}")
    raise ValueError(
        f"{path} holds no whole checkpoint: give a run's folder (with checkpoints/ in it), its "
        "folder of checkpoints (with step-NNNNNNNN/ in it) or one of those"
    )
