"""Folders of the ranks of a checkpoint of Megatron, and the check that all are there.

SAVE/latest_checkpointed_iteration.txt                 100, or: release
SAVE/iter_0000100/mp_rank_01_003/model_optim_rng.pt    tp 1, pp 3
SAVE/iter_0000100/mp_rank_01_003_002/...               and ep 2; mp_rank_01_002 where pp is 1
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from dolmen.core.messages import brief, plural
from dolmen.files import gate

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
WEIGHTS = ("model_optim_rng.pt", "model_rng.pt")
RANK = re.compile(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3,5}))?(?:_([0-9]{3,5}))?")


def is_megatron(folder: Path) -> bool:
    """Return whether a folder has rank folders (mp_rank_*), or a tracker that names one which has.
    Raises Refused as `newest`.
    """
    return bool(ranks(folder)) or (folder / TRACKER).is_file() and bool(ranks(newest(folder)))


def newest(folder: Path) -> Path:
    """Return the folder itself if it has rank folders or no tracker, else the checkpoint that its
    tracker names. Raises ValueError where that is not there.
    """
    if ranks(folder) or not (folder / TRACKER).is_file():
        return folder
    text = gate.read_text(folder / TRACKER, 64).strip()
    if text != RELEASE and not re.fullmatch(r"[0-9]{1,12}", text):
        raise gate.refuse(
            folder / TRACKER, f"contains {text!r}: it must be a step number or {RELEASE}"
        )
    named = folder / (text if text == RELEASE else f"iter_{int(text):07d}")
    if not named.is_dir():
        raise gate.refuse(folder / TRACKER, f"contains {text}, but there is no folder {named.name}")
    return named


def names(iteration: int | None) -> tuple[str, str]:
    """Return (folder name of a checkpoint, content of the tracker). Without updates it is
    "release", as Megatron reads no tracker of iteration 0.
    """
    if not iteration:
        return RELEASE, RELEASE
    return f"iter_{iteration:07d}", str(iteration)


def ranks(folder: Path) -> list[Path]:
    """Return the rank folders (mp_rank_*) in a checkpoint, sorted by name."""
    return sorted(p for p in folder.glob("mp_rank_*") if RANK.fullmatch(p.name))


@dataclass(frozen=True)
class Sizes:
    """Number of ranks along each parallel axis."""

    tp: int
    pp: int
    ep: int

    @property
    def words(self) -> str:
        """Sizes for a report, such as "tp 2, pp 4"; axes of size 1 are left out, except tp."""
        return ", ".join(f"{n} {size}" for n, size in vars(self).items() if n == "tp" or size > 1)

    def name(self, tp: int, pp: int, ep: int) -> str:
        """Return the folder name of the rank at (tp, pp, ep), such as mp_rank_01_003; pp and ep are
        left out where their size is 1.
        """
        name = f"mp_rank_{tp:02d}"
        name += f"_{pp:03d}" if self.pp > 1 else ""
        return name + (f"_{ep:03d}" if self.ep > 1 else "")


def sizes(folder: Path, args: Mapping[str, Any]) -> Sizes:
    """Return the parallel sizes of a checkpoint that its `args` state, or else as many as there are
    rank folders. Raises ValueError where a rank has no folder, or there are more folders than
    ranks.
    """
    names = {path.name for path in ranks(folder)}
    numbers = [
        [int(n) for n in match.groups() if n] for name in names if (match := RANK.match(name))
    ]
    # largest number per column of the names: tp, then pp and ep where they occur
    seen = [1 + max(column) for column in zip(*numbers, strict=False)] + [1, 1]
    stated = [
        args.get(name) for name in ("pipeline_model_parallel_size", "expert_model_parallel_size")
    ]
    pp, ep = stated[0] or seen[1], stated[1] or seen[2]
    # model_parallel_size: its older name
    tp = args.get("tensor_model_parallel_size") or args.get("model_parallel_size") or seen[0]
    counted = Sizes(tp, pp, ep)
    expected = (counted.name(*at) for at in product(range(tp), range(pp), range(ep)))
    if missing := [*islice((name for name in expected if name not in names), 4)]:
        raise ValueError(
            f"{folder} has {plural(len(names), 'rank')} of {tp * pp * ep} ({counted.words}): "
            f"{', '.join(missing[:3])}{' ...' * (len(missing) > 3)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    if len(names) > tp * pp * ep:
        raise ValueError(
            f"{folder} has {plural(len(names), 'rank')}, but its args have {counted.words}"
        )
    return counted


def weights_file(folder: Path) -> Path:
    """Return the file with the weights in a rank's folder. Raises ValueError where there is
    none.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    names = sorted(path.name for path in folder.iterdir())
    raise ValueError(f"{folder} has no {WEIGHTS[0]}, only {brief(names[:5])}")
