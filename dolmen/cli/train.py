"""dolmen train RECIPE|FILE.yaml"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dolmen.cli import finish, launch, options
from dolmen.cli.errors import BadInput
from dolmen.core import mesh as meshes
from dolmen.core.log import console
from dolmen.data import loader
from dolmen.train.check import check, check_folder, check_overwrite, check_resume
from dolmen.train.config import RunConfig
from dolmen.train.loop import Stop


def run(argv: list[str], guarded: Callable[[Callable[[], int]], int] | None = None) -> int:
    """`guarded` (default: launch.guarded) calls what this process itself does of the run, and decides about its exceptions."""
    started = meshes.Launch.read()
    config, given = options.parse_train(argv)
    out = folder_of(config, given)
    processes = started.world_size if started else wanted(config, given.nproc)
    if launch.launched_here(): config = replace(config, layout=config.layout.resolve(processes))      # the launcher has checked
    else: config = refuse(config, processes, out, given)
    if started is None and config.layout.world > 1:
        code = launch.launch(config.layout.world, ["train", *argv])
        return code or finish.finish(config, out)
    return (guarded or launch.guarded)(lambda: worker(config, out, given, started))


def folder_of(config: RunConfig, given: options.TrainOptions) -> Path:
    """Where the run is kept: --out, else beside the config.yaml of a run, else runs/NAME."""
    file = Path(given.recipe)
    if file.name == "config.yaml" and (file.parent / "checkpoints").is_dir(): return Path(given.out or file.parent)
    return Path(given.out or f"runs/{config.name}")


def wanted(config: RunConfig, nproc: int | None) -> int | None:
    """Processes to start: --nproc, else what the layout says, else the visible GPUs (a multiple of tp), else what tp needs."""
    if nproc is not None: return nproc
    if config.layout.dp is not None: return config.layout.tp * config.layout.dp
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return max(1, gpus // config.layout.tp) * config.layout.tp if gpus else None


def refuse(config: RunConfig, processes: int | None, out: Path, given: options.TrainOptions) -> RunConfig:
    """The checked run, its data tokenised. Raises BadInput for whatever can be refused before the first process."""
    try:
        check_folder(out, given.resume, given.overwrite)
        if processes is not None and processes < 1: raise ValueError(f"--nproc is {processes}: it must be at least 1")
        config = check(config, processes)
        if given.overwrite: check_overwrite(config, out, given.recipe)
        if given.resume: check_resume(config, out)
        loader.prepare(config.data, config.init, config.model.vocab_size, config.sequence_length, config.train.global_batch_size, config.train.seed)
        return config
    except (ValueError, KeyError, OSError) as error: raise BadInput(options.message(error)) from None


def worker(config: RunConfig, out: Path, given: options.TrainOptions, started: meshes.Launch | None) -> int:
    """One process of the run."""
    from dolmen.train.run import run_training, summary
    device = meshes.device_for(started)
    stop = Stop()
    with launch.on_stop(lambda got: setattr(stop, "signal", max(stop.signal, got))), meshes.joined(started, device):
        mesh = meshes.grid(config.layout.dp, config.layout.tp, device)
        outcome = run_training(config, out, mesh, console(mesh.first), resumed=given.resume, overwrite=given.overwrite, stop=stop)
        if mesh.first: summary(outcome, out)
        if mesh.first and outcome.signal:
            print(f"stopped by signal {outcome.signal} after step {outcome.steps}, saved; to go on: "
                  f"dolmen train {out}/config.yaml --resume", flush=True)
        dist.barrier()
    if outcome.signal: return 128 + outcome.signal
    return finish.finish(config, out) if mesh.first and not launch.launched_here() else 0


