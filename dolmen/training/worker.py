"""One process of a run: it joins the others, agrees with them on what to do, trains, and says in a
line how that ended.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.store import NotSaved
from dolmen.core import determinism
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.device import keep_freed_memory
from dolmen.core.launched import Launch
from dolmen.core.log import console
from dolmen.core.messages import BadInput, Failed
from dolmen.launch import process
from dolmen.launch.watch import Watch, network_limit
from dolmen.training.finish import finish
from dolmen.training.folder import Unusable
from dolmen.training.loop import Stop
from dolmen.training.request import Request
from dolmen.training.run import run_training, summary
from dolmen.training.start import Start, settle

DEVICE = "train.device"
OUTSIDE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EFBIG,
    errno.ENOTDIR,
    errno.ELOOP,
)
"""Errors of files that are nobody's mistake here."""


def worker(
    request: Request, started: Launch | None, device: torch.device, refusal: str | None = None
) -> int:
    """Train on `device`; the exit code. Raises BadInput for `refusal`, this rank's own, and for
    what only all ranks together can see; Failed for what ends a run without being a mistake in the
    program.
    """
    config, out = request.config, request.out
    if device.type == "cpu":
        keep_freed_memory()
    stop, same = Stop(), config.train.deterministic
    limit = network_limit(config.train.hang_seconds)
    with (
        process.environment(determinism.ENVIRONMENT if same else {}),
        determinism.repeatable(same),  # NCCL asks when its groups are made
        process.on_stop(lambda got: setattr(stop, "signal", max(stop.signal, got))),
        meshes.joined(started, device, limit),
        explained(out),
    ):
        start = _start(request, started, device, refusal)
        mesh = config.layout.mesh(device, limit)
        watch = Watch(
            out / "hang",
            mesh.rank,
            mesh.size,
            config.train.hang_seconds,
            lambda text: process.end(text, hang=True),
        )
        with watch.watching():
            outcome = run_training(
                config, out, mesh, console(mesh.first), start=start, stop=stop, watch=watch
            )
        if mesh.first:
            summary(outcome, out)
        if mesh.first and outcome.signal:
            print(
                f"stopped by signal {outcome.signal} after step {outcome.steps}, saved; to go on: "
                f"dolmen train {out}/config.yaml --resume",
                flush=True,
            )
        dist.barrier()
    if outcome.signal:
        return 128 + outcome.signal
    return finish(config, out) if mesh.first and not process.launched_here() else 0


def _start(
    request: Request, started: Launch | None, device: torch.device, refusal: str | None
) -> Start:
    """What all ranks agree to begin with, each on a device of its own. Raises BadInput."""
    try:
        start = settle(
            request,
            restarts=process.restarts(),
            job=process.job(),
            checked=started is None or process.launched_here(),
            refusal=refusal,
        )
        devices.refuse_shared_gpus(device, DEVICE)
        return start
    except ValueError as error:
        raise BadInput(str(error)) from None


@contextmanager
def explained(out: Path) -> Iterator[None]:
    """Within, an error that is no mistake of ours (damage, a full disk, a loss that is no number)
    becomes one sentence that says what is saved. Mistakes of ours keep their traceback.
    """
    try:
        yield
    except (Damaged, Unusable) as error:
        raise BadInput(str(error)) from None
    except NotSaved as error:
        raise Failed(str(error)) from None
    except (FloatingPointError, determinism.NotRepeatable) as error:
        raise Failed(str(error), final=True) from None
    except OSError as error:
        if error.errno not in OUTSIDE:
            raise
        raise Failed(
            f"{error.filename or out}: {error.strerror}. "
            f"{folders.newest_told(out / 'checkpoints')}: make room or mend the folder, and go on "
            f"with dolmen train {out}/config.yaml --resume"
        ) from None
