"""How a run starts, settled by all ranks together: that they agree on what to do, and whether this
is a first start or one more of the same run, after a failure.

    first start    as --resume and --overwrite say; what is in the way is refused
    a restart      by any rank's launcher (its count is > 0): from the newest whole checkpoint, or
                   an older one if that is damaged; --overwrite was obeyed by the first start: the
                   folder says by whom, for a kill may have come before
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from dolmen import __version__
from dolmen.core import agree
from dolmen.core.config import flatten, to_dict
from dolmen.core.mesh import Mesh
from dolmen.data.batches import Loader
from dolmen.files import gate
from dolmen.training.check_out import check_folder, check_overwrite, check_resume
from dolmen.training.config import RunConfig
from dolmen.training.folder import OWNER, Unusable
from dolmen.training.request import Request

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """What a run does with what its folder holds. `owner` is written there when it is emptied."""

    resumed: bool = False
    overwrite: bool = False
    restarted: bool = False
    owner: str = ""

    @property
    def how(self) -> str:
        """In a word, of history.jsonl."""
        if self.restarted:
            return "restarted"
        return "resumed" if self.resumed else "new"


def facts(run: RunConfig, out: Path, refusal: str | None, **more: object) -> dict[str, object]:
    """What must be the same on every rank: options, code, versions. Where the cache lies and who
    fills it may differ.
    """
    options = flatten({k: v for k, v in to_dict(run).items() if v is not None})
    for name in ("data.cache", "data.workers"):
        options.pop(name, None)
    code = agree.code(Path(__file__).parents[1])
    return {
        "refuses": refusal,
        **options,
        **more,
        "out": str(out.absolute()),
        "dolmen": __version__,
        "torch": torch.__version__,
        **code,
    }


def settle(
    request: Request, *, restarts: int, job: str, checked: bool, refusal: str | None = None
) -> Start:
    """Called by all ranks right after joining. `restarts`, `job`: as the launcher of this rank
    tells; `checked`: it has checked the folder before the first start. Raises ValueError on every
    rank, with the same words, if the ranks differ, if one refuses (`refusal`), or if the folder
    does.
    """
    out, resume, overwrite = request.out, request.handling.resume, request.handling.overwrite
    agree.require_same(facts(request.config, out, refusal, resume=resume, overwrite=overwrite))
    if refusal:
        raise ValueError(refusal)
    # after a failure on one host only its count is sure to rise
    counts, jobs = zip(*agree.gather_objects((restarts, job)), strict=True)
    owner, restarted = "\n".join(sorted({j for j in jobs if j})), max(counts) > 0
    if not restarted:
        if not checked:
            agree.once(lambda: _check(request))
        return Start(resume, overwrite, False, owner)
    goes_on = not overwrite or agree.once(lambda: bool(set(jobs) & _owners(out)))
    return Start(resumed=goes_on, overwrite=not goes_on, restarted=True, owner=owner)


def first_does(mesh: Mesh, work: Callable[[], T]) -> T:
    """work(), done by the first rank alone; its value is everyone's. Raises Unusable on every rank
    where it raises a ValueError.
    """
    if mesh.size == 1:
        return work()
    try:
        return agree.once(work)
    except ValueError as error:
        raise Unusable(str(error)) from None


def same_data(loader: Loader, mesh: Mesh) -> None:
    """Raises Unusable on every rank, with what differs, unless all ranks train on the same text:
    one path may lead to other files on another host.
    """
    if mesh.size == 1:
        return
    try:
        agree.require_same(
            loader.fingerprint(),
            what="have the same training data",
            mend="give every host the same files under --data.path, --data.validation and "
            "--data.tokenizer",
        )
    except ValueError as error:
        raise Unusable(str(error)) from None


def _check(request: Request) -> None:
    handling = request.handling
    check_folder(request.out, handling.resume, handling.overwrite)
    if handling.overwrite:
        check_overwrite(request.config, request.out, request.source)
    if handling.resume:
        check_resume(request.config, request.out)


def _owners(out: Path) -> set[str]:
    """The jobs that have emptied the folder; none if it was never emptied."""
    return set(gate.read_text(out / OWNER, 2**20).splitlines()) if (out / OWNER).exists() else set()
