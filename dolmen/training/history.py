"""history.jsonl: what of a run is no number per step. When it began and began again, from which
step, on how many processes, and how each of that ended; what each rank held and how busy each
expert was, some ten times; and the saves. `dolmen show` draws it.

    {"step": 0, "time": 1.7e9, "begun": "new", "steps": 500, "processes": 4, ...}
    {"step": 50, "time": 1.7e9, "memory_gib": [1.2, 1.3, 1.2, 1.2], "router_load": {"3": [...]}}
    {"step": 50, "time": 1.7e9, "saved": true}
    {"step": 500, "time": 1.7e9, "ended": "done"}

Nothing is taken back: of a run that goes on from step 40 the rows of later steps, which it does
again, stay, and the row that says so comes after them.
"""

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dolmen.core import collectives, device
from dolmen.core.mesh import Mesh
from dolmen.files import kinds, write
from dolmen.files.rows import Tail

NAME = "history.jsonl"


class History:
    """The file, opened to add rows; without one, of a rank that is not the first, nothing is
    written.
    """

    def __init__(self, file: Path | None):
        self.handle = None if file is None else write.append(file)
        if self.handle is not None and file is not None and _is_cut(file):
            self.handle.write("\n")  # a crash has cut the last row short: it ends here

    def add(self, step: int, row: Mapping[str, Any]) -> None:
        """A row of `step`, of values that JSON has words for."""
        if self.handle is not None:
            whole = {"step": step, "time": time.time(), **row}
            self.handle.write(json.dumps(whole, allow_nan=False) + "\n")

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()


def _is_cut(file: Path) -> bool:
    """Whether the last line has no end."""
    with open(file, "rb") as stream:
        if stream.seek(0, os.SEEK_END) == 0:
            return False
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"


def run_id(file: Path, step: int) -> str:
    """By which programs of others know the run that goes on from `step`: made at its first start,
    and kept in its history.
    """
    rows = list(Tail(file, kinds.HISTORY_ROW).read()) if step else []
    known = [row["run_id"] for row in rows if "run_id" in row]
    return known[-1] if known else secrets.token_hex(8)


def of_ranks(value: float, mesh: Mesh) -> list[float]:
    """What each rank brings, by rank; all ranks call it."""
    mine = torch.zeros(mesh.size, dtype=torch.float64, device=mesh.device)
    mine[mesh.rank] = value
    return device.read_back(collectives.reduce_scalar(mine, mesh.world))
