"""dolmen train RECIPE|FILE.yaml"""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.store import NotSaved
from dolmen.cli import finish
from dolmen.cli.options import TrainOptions
from dolmen.core import allocator, determinism
from dolmen.core import device as devices
from dolmen.core import mesh as meshes
from dolmen.core.errors import BadInput, Failed, message
from dolmen.core.launched import Launch
from dolmen.core.log import console
from dolmen.data import loader
from dolmen.launch import launcher, process, rendezvous
from dolmen.launch.watch import Watch, network_limit
from dolmen.training.check import (
    check_folder,
    check_overwrite,
    check_resume,
    check_run,
    own_tokenizer,
)
from dolmen.training.config import RunConfig
from dolmen.training.folder import Unusable
from dolmen.training.loop import Stop
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


def run(
    asked: tuple[RunConfig, TrainOptions],
    argv: list[str],
    guarded: Callable[[Callable[[], int]], int] | None = None,
) -> int:
    """`argv` starts the other processes. `guarded` (default: process.guarded) calls what this
    process itself does of the run, and decides about its exceptions.
    """
    started = process.started()
    if started and process.one_store():
        started = replace(started, rendezvous=rendezvous.register())
    config, given = asked
    out = folder_of(config, given)
    processes = started.world_size if started else wanted(config, given.nproc)
    refusal, device = None, devices.CPU
    try:
        device = devices.choose_device(config.train.device, started, DEVICE)
    except ValueError as error:
        if started is None:
            raise BadInput(str(error)) from None
        refusal = str(error)  # the other hosts are waiting: tell them
    if process.launched_here():
        # the launcher has checked
        config = replace(config, layout=config.layout.resolve(processes))
    elif started is None:
        config = refuse(config, processes, out, given)
    elif refusal is None:
        try:
            # the folder is looked at when all have joined, by one
            config = refuse(config, processes, None, given, verify=started.local_rank == 0)
        except BadInput as error:
            refusal = str(error)
    if started is None and (config.layout.world > 1 or given.max_restarts):
        code = launcher.launch(config.layout.world, ["train", *argv], given.max_restarts)
        return code or finish.finish(config, out)
    return (guarded or process.guarded)(
        lambda: worker(config, out, given, started, device, refusal)
    )


def folder_of(config: RunConfig, given: TrainOptions) -> Path:
    """Where the run is kept: --out, else beside the config.yaml of a run, else runs/NAME."""
    file = Path(given.recipe)
    if file.name == "config.yaml" and (file.parent / "checkpoints").is_dir():
        return Path(given.out or file.parent)
    return Path(given.out or f"runs/{config.name}")


def wanted(config: RunConfig, nproc: int | None) -> int | None:
    """Processes to start: --nproc, else what the layout says, else the visible GPUs (a multiple of
    tp x cp x pp), else what those need.
    """
    if nproc is not None:
        return nproc
    if config.layout.dp is not None:
        return config.layout.world
    gpus = devices.visible_gpus(config.train.device)
    return max(1, gpus // config.layout.inner) * config.layout.inner if gpus else None


def refuse(
    config: RunConfig,
    processes: int | None,
    out: Path | None,
    given: TrainOptions,
    verify: bool = True,
) -> RunConfig:
    """The checked run, its data tokenised; `verify` tries the tokenizer's expressions and compares
    what the cache has with its digests. Raises BadInput for whatever can be refused before the
    first process.
    """
    try:
        if given.max_restarts < 0:
            raise ValueError(f"--max-restarts is {given.max_restarts}: it must not be negative")
        if out is not None:
            check_folder(out, given.resume, given.overwrite)
        if processes is not None and processes < 1:
            raise ValueError(f"--nproc is {processes}: it must be at least 1")
        config = check_run(config, processes, verify)
        if out is not None:  # the processes of this machine are started from here
            devices.require_gpus(config.train.device, config.layout.world, DEVICE)
        if out is not None and given.overwrite:
            check_overwrite(config, out, given.recipe)
        if out is not None and given.resume:
            check_resume(config, out)
        loader.prepare_loader(
            config.data,
            own_tokenizer(config.init),
            config.tree.vocab_size,
            config.sequence_length,
            config.train.global_batch_size,
            config.train.seed,
            verify=verify,
        )
        return config
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None


def worker(
    config: RunConfig,
    out: Path,
    given: TrainOptions,
    started: Launch | None,
    device: torch.device,
    refusal: str | None = None,
) -> int:
    """One process of the run. Raises BadInput for `refusal`, this rank's own, and for what only all
    ranks together can see; Failed for what ends a run without being a mistake in the program.
    """
    from dolmen.training.run import run_training, summary

    if device.type == "cpu":
        allocator.keep_freed_memory()
    stop, same = Stop(), config.train.deterministic
    limit = network_limit(config.train.hang_seconds)
    with (
        process.environment(determinism.ENVIRONMENT if same else {}),
        determinism.repeatable(same),  # NCCL asks when its groups are made
        process.on_stop(lambda got: setattr(stop, "signal", max(stop.signal, got))),
        meshes.joined(started, device, limit),
        explained(out),
    ):
        start = _start(config, out, given, started, device, refusal)
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
    return finish.finish(config, out) if mesh.first and not process.launched_here() else 0


def _start(
    config: RunConfig,
    out: Path,
    given: TrainOptions,
    started: Launch | None,
    device: torch.device,
    refusal: str | None,
) -> Start:
    """What all ranks agree to begin with, each on a device of its own. Raises BadInput."""
    try:
        start = settle(
            config,
            out,
            given.recipe,
            resume=given.resume,
            overwrite=given.overwrite,
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
