"""A checkpoint of SAT (SwissArmyTransformer), in which GLM-130B was published, as a source
(source.py). It is read and not written.

    FOLDER/config.json                                 the model, by SAT's names of its arguments
    FOLDER/latest                                      "49300"
    FOLDER/49300/mp_rank_00_model_states.pt            {"module": tensors of rank 0 of tp}
    FOLDER/49300/mp_rank_01_model_states.pt            ...

Ranks hold what ours would, names are those of the family's weight rules. Of x1 and x2, which the
feed-forward layer stores as one, a rank has its rows of each: [x1_r; x2_r].
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from dolmen.conversion import hf, sidecars
from dolmen.conversion.megatron.shares import Share
from dolmen.conversion.sidecars import Joined
from dolmen.conversion.weights import WeightsAlone, describe_mismatch
from dolmen.core.messages import plural
from dolmen.families import WeightMap, weight_map
from dolmen.families.rules import Split, StoredTensor
from dolmen.files import gate, torch_files
from dolmen.files.safetensors import Spec, Stored

RANK = re.compile(r"mp_rank_([0-9]{2,4})_model_states\.pt")
LATEST = "latest"
ITERATION = re.compile(r"[0-9]{1,12}")
FAMILY = "glm-130b"


def ranks(folder: Path) -> dict[int, Path]:
    """Return tensor-parallel rank -> its file, for the SAT rank files in a folder."""
    matches = {file: RANK.fullmatch(file.name) for file in folder.glob("mp_rank_*")}
    return {int(named[1]): file for file, named in sorted(matches.items()) if named is not None}


def is_sat(folder: Path) -> bool:
    """Return whether a folder has SAT's rank files, or a `latest` file next to a subfolder that
    has.
    """
    return bool(ranks(folder)) or (folder / LATEST).is_file() and bool(_iterations(folder))


def _iterations(folder: Path) -> list[Path]:
    """Return the subfolders named by an iteration that have rank files."""
    return [path for path in folder.iterdir() if ITERATION.fullmatch(path.name) and ranks(path)]


def newest(folder: Path) -> Path:
    """Return the folder itself if it has rank files, else the subfolder that `latest` names. Raises
    ValueError where that is not there.
    """
    if ranks(folder):
        return folder
    name = gate.read_text(folder / LATEST, 64).strip()
    if not ITERATION.fullmatch(name) or not ranks(folder / name):
        raise ValueError(
            f"{folder / LATEST} names {name!r}, but {folder} has "
            f"{', '.join(path.name for path in _iterations(folder))}"
        )
    return folder / name


@dataclass(frozen=True)
class Sat(WeightsAlone, Joined):
    """A SAT checkpoint of all ranks as a source; its weights are read as those of `model`."""

    folder: Path
    rank_tensors: tuple[Mapping[str, Stored], ...]
    """Tensors of each rank: name -> place."""

    @property
    def where(self) -> Path:
        """Folder of the rank files."""
        return self.folder

    @property
    def title(self) -> str:
        """Text with the folder and number of ranks."""
        return f"{self.where}, a checkpoint of SAT ({plural(len(self.rank_tensors), 'rank')})"

    @property
    def iteration(self) -> int | None:
        """Number of updates, which is the name of the checkpoint's folder; None if that is no
        number.
        """
        return int(self.where.name) if ITERATION.fullmatch(self.where.name) else None

    @property
    def specs(self) -> Mapping[str, Spec]:
        """Shape and stored dtype of each parameter. Raises KeyError or ValueError where stored
        tensors do not fit the model.
        """
        stored = self._checked
        return {
            name: Spec(param.shape, stored[self._holding[name].hf][0].spec.dtype)
            for name, param in self.spec.params.items()
        }

    @cached_property
    def _weights(self) -> WeightMap:
        """Map between SAT's tensor names and our parameters."""
        return weight_map(self.model)

    @cached_property
    def _entries(self) -> Mapping[str, StoredTensor]:
        """Name in SAT's files -> which of our parameters the tensor holds."""
        return self._weights.entries

    def _share(self, entry: StoredTensor) -> Share:
        """Return how ranks shard a stored tensor: as ours do; tensors that are stacked in one ([x1;
        x2]) each by itself.
        """
        param, rule = self.spec.params[entry.ours[0]], entry.rule
        cut = next((cut for cut in param.shards if cut.axis == "tp"), None)
        # [x1; x2]: each rank has rows of both
        stacked = isinstance(rule, Split) and rule.groups == 1
        return Share(None if cut is None else cut.dim, len(entry.ours) if stacked else 1)

    @cached_property
    def _checked(self) -> dict[str, list[Stored]]:
        """Stored name -> the tensor's part on each rank, after checking names, shapes and dtypes.
        Raises KeyError or ValueError where they do not fit the model, or ranks differ.
        """
        # rank 0 is the measure for names
        first, *other_ranks = [
            {name: stored for name, stored in rank.items() if not self._weights.ignores(name)}
            for rank in self.rank_tensors
        ]
        entries = self._entries
        extra = [name for name in first if name not in entries]
        missing = [name for name in entries if name not in first]
        if text := describe_mismatch(extra, missing):
            raise KeyError(f"{self.where} does not fit its config.json: {text}")
        for rank, other in enumerate(other_ranks, 1):
            if unlike := [name for name in first if name not in other] or [*other.keys() - first]:
                raise KeyError(f"{self.where}: rank {rank} and rank 0 differ in {unlike[0]}")
        by_name = {name: [first[name], *(other[name] for other in other_ranks)] for name in first}
        for name, shards in by_name.items():
            self._share(entries[name]).check(shards, entries[name].shape)
        return by_name

    def _tensor(self, name: str) -> Tensor:
        """Read the tensor with this stored name, joined from all ranks."""
        share, shards = self._share(self._entries[name]), self._checked[name]
        # replicated: rank 0's copy is that of all
        if share.dim is None:
            return shards[0].read()
        return share.join([shard.read() for shard in shards])


def open_sat(folder: Path) -> Sat:
    """Open the SAT checkpoint whose rank files lie in `folder` as a source; the model is that
    of the config.json next to it. Raises ValueError for another family than GLM-130B, a missing
    rank, or a file that SAT did not save.
    """
    place = sidecars.place(folder)
    model = hf.read_config(place)
    # SAT saved other models too, with other names
    if model.model_type != FAMILY:
        raise ValueError(
            f"{folder} has files of SAT, and {place / 'config.json'} is of {model.model_type}: "
            f"only {FAMILY} is supported in SAT's format"
        )
    files = ranks(folder)
    if missing := sorted({*range(max(files))} - files.keys()):
        raise ValueError(f"{folder} has rank {max(files)}, but rank {missing[0]} is missing")
    return Sat(
        model, place, folder, tuple(_read_tensors(files[rank]) for rank in range(len(files)))
    )


def _read_tensors(file: Path) -> dict[str, Stored]:
    """Return name -> place of the tensors in a rank's file, without reading them. Raises Refused
    for a file that SAT did not save.
    """
    values = torch_files.load(file)
    if not isinstance(values, Mapping) or not isinstance(values.get("module"), Mapping):
        raise gate.refuse(file, "has no `module` entry, which files of SAT have")
    return torch_files.tensors(values["module"], file)
