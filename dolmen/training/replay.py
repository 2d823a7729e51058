"""`dolmen replay`: repeat a step of a run with exact numerics, at any layout, and say whether the
bits are those that the run recorded (receipt.py).

The steps after the checkpoint before it are repeated in a temporary folder, as a run that resumes
from a copy of that checkpoint; nothing of the run is written to. Only a machine whose operators
have the bits that were recorded can say anything, so another is refused.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dolmen.checkpoint import folders
from dolmen.checkpoint.folders import list_checkpoints
from dolmen.checkpoint.reader import Reader
from dolmen.checkpoint.remote import RemoteCheckpoints, pull_model
from dolmen.checkpoint.saved import read_saved
from dolmen.checkpoint.seal import read_sealed
from dolmen.core.filesystem import is_url
from dolmen.core.messages import BadInput, as_bad_input, escape
from dolmen.data.loader import changes
from dolmen.evaluation.config import DuringConfig
from dolmen.files import storage, write
from dolmen.model.layout import Layout
from dolmen.optim.optimizer import DTYPES
from dolmen.rl.rollout import FOLDER as ROLLOUTS
from dolmen.training import worker
from dolmen.training.config import FinishConfig, LogConfig, RunConfig
from dolmen.training.folder import claim
from dolmen.training.receipt import RECEIPTS, dump_receipts, read_receipts, total
from dolmen.training.request import (
    RUN_LAYOUT,
    LaunchOptions,
    ReplayConfig,
    TrainRequest,
    read_run,
)
from dolmen.training.self_test import digest_operators
from dolmen.training.worker import Guard

Receipt = Mapping[str, Any]


def replay(options: ReplayConfig, guarded: Guard) -> int:
    """Repeat a step of a run with exact numerics, from the checkpoint before it, in a temporary
    folder, and print whether all receipts have the bits that the run recorded. Return 0 if they do,
    1 if not, or the exit code of a repetition that failed. `guarded` calls the training and handles
    its exceptions. Raises BadInput for a run without receipts, a step without one, a machine with
    other bits, or a layout that exact numerics do not cover.
    """
    with as_bad_input(ValueError, OSError):
        options = replace(options, folder=options.folder.rstrip("/"))
        run = pull_inputs(options.folder)
        config = read_run(run / "config.yaml")
        recorded = {row["step"]: row for row in read_receipts(run / RECEIPTS)}
        check(config, recorded, options)
        before, checkpoint = find_checkpoint(options, run, config.checkpoint.to)
        data = recorded_data(options, run)
        config = without_outputs(config, options.layout)
    with tempfile.TemporaryDirectory(prefix="dolmen-replay-") as folder:
        out = Path(folder) / "run"
        if checkpoint is not None:
            shutil.copytree(checkpoint, out / "checkpoints" / checkpoint.name, copy_function=link)
            rows = [row for step, row in recorded.items() if step <= before]
            write.replace(out / RECEIPTS, dump_receipts(rows))
            claim(out, "checkpoints", RECEIPTS)
            if (run / ROLLOUTS).is_dir():  # steps of an iteration learn from what it has sampled
                shutil.copytree(run / ROLLOUTS, out / ROLLOUTS)  # rows are appended to one
                claim(out, ROLLOUTS)
        handling = LaunchOptions(out=str(out), resume=before > 0)
        try:
            code = worker.run(TrainRequest(config, handling, stop_after=options.step), guarded)
        except BadInput as error:
            raise BadInput(
                f"{error} (dolmen replay has the options of --layout; all others are those in "
                f"{options.folder}/config.yaml)"
            ) from None
        if code:
            return code
        repeated = {row["step"]: row for row in read_receipts(out / RECEIPTS)}
        changed = changes(data, read_data(list_checkpoints(out / "checkpoints")[options.step]))
    steps = range(before + 1, options.step + 1)
    with as_bad_input(ValueError):
        difference = first_difference(recorded, repeated, steps)
    if difference and data and changed:
        difference = f"the data are not those of the run: {'; '.join(changed)}"
    span = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    print(f"{span}: {escape(difference or 'the bits are those that were recorded')}")
    return 1 if difference else 0


def check(config: RunConfig, recorded: Mapping[int, Receipt], options: ReplayConfig) -> None:
    """Raise ValueError unless the run has exact numerics, there is a receipt of options.step among
    the `recorded` ones (step -> receipt), and the operators' digests in it are those of this
    machine.
    """
    if config.train.numerics != "exact":
        raise ValueError(
            f"{options.folder} was trained with train.numerics {config.train.numerics}, and only "
            "runs with exact numerics have receipts: train with --train.numerics exact"
        )
    if options.step not in recorded:
        last = f"its last one is of step {max(recorded)}" if recorded else "there are none"
        raise ValueError(
            f"{Path(options.folder, RECEIPTS)} has no receipt of step {options.step}; {last}: give "
            "another --step"
        )
    mine, theirs = digest_operators(DTYPES[config.train.dtype]), recorded[options.step]["operators"]
    differing = [name for name in mine if mine[name] != theirs.get(name)]
    if differing:
        raise ValueError(
            f"this machine gives other bits than the run's in {', '.join(differing)}: replay on a "
            "CPU of the run's kind, with its versions of torch, MKL and oneDNN"
        )


def pull_inputs(name: str) -> Path:
    """Return the local folder of the run `name`. For a URL: download the run's config.yaml,
    receipts.jsonl and rollouts, and return the folder of these copies. Raises ValueError or
    StorageError.
    """
    if not is_url(name):
        return Path(name)
    inputs = re.compile(rf"config\.yaml|{re.escape(RECEIPTS)}|{ROLLOUTS}/[^/]+")
    storage.pull_files(name, lambda names: list(filter(inputs.fullmatch, names)))
    return storage.local_copy(name)


def find_checkpoint(options: ReplayConfig, run: Path, to: str | None) -> tuple[int, Path | None]:
    """Return (step, local folder) of the run's newest complete checkpoint before options.step, from
    which the replay starts; (0, None) if there is none. `run`: local folder of the run; `to`: its
    URL, if it has one. Files of the checkpoint that are only at the URL are downloaded first.
    Raises ValueError or StorageError.
    """
    url = options.folder if is_url(options.folder) else None
    local = list_checkpoints(run / "checkpoints")
    steps = RemoteCheckpoints(f"{url}/checkpoints", run).list_complete() if url else local
    before = max((step for step in steps if step < options.step), default=0)
    if not before:
        return 0, None
    if url is not None:
        return before, pull_model(f"{url}/checkpoints/{folders.name(before)}")
    if to is not None:
        remote = RemoteCheckpoints(f"{to}/checkpoints", run / "checkpoints")
        Reader(local[before], remote.open_step(before)).fetch_all()
    return before, local[before]


def recorded_data(options: ReplayConfig, run: Path) -> dict[str, str]:
    """Return the fingerprint of the data with which the run made options.step: that in its first
    complete checkpoint from this step on, or else in its last one; {} if there is none. `run`:
    local folder of the run. Raises ValueError or StorageError.
    """
    folder, remote = run / "checkpoints", None
    if is_url(options.folder):
        remote = RemoteCheckpoints(f"{options.folder}/checkpoints", folder)
    steps = list_checkpoints(folder) if remote is None else remote.list_complete()
    if not steps:
        return {}
    step = min((step for step in steps if step >= options.step), default=max(steps))
    return read_data(folder / folders.name(step) if remote is None else remote.pull_step(step))


def read_data(checkpoint: Path) -> dict[str, str]:
    """Return the fingerprint of the data in the state.json of a checkpoint's local folder. Raises
    Damaged.
    """
    return read_saved(read_sealed(checkpoint)[1], checkpoint).data


def without_outputs(config: RunConfig, layout: Layout) -> RunConfig:
    """Return the run's configuration for a replay: without periodic checkpoints, snapshots,
    uploads, evaluation, trackers, export and the like, and in `layout` unless that is RUN_LAYOUT.
    """
    if layout is not RUN_LAYOUT:
        config = replace(config, layout=replace(layout, dp=layout.dp or 1, reduction="fixed"))
    if layout.cp > 1:  # then a microbatch is a sequence, and no microbatch size changes a bit
        config = replace(config, train=replace(config.train, microbatch_size=1))
    return replace(
        config,
        checkpoint=replace(config.checkpoint, to=None, every=0, snapshot_every=0),
        log=LogConfig(),
        evaluate=DuringConfig(),
        finish=FinishConfig(),
    )


def link(source: str, to: str) -> None:
    """Make a hard link `to` to the file `source`, or a copy where that is impossible, as on another
    file system.
    """
    try:
        os.link(source, to)
    except OSError:
        shutil.copy2(source, to)


def first_difference(
    recorded: Mapping[int, Receipt], repeated: Mapping[int, Receipt], steps: Sequence[int]
) -> str | None:
    """Compare the `recorded` with the `repeated` receipts (step -> receipt) of `steps`, and return
    a text about the first step in which they differ or one is missing: whether the loss, the
    gradient norm or a weight differs, and, if both runs sharded the weight alike, on which rank
    first. None if all are equal. Raises ValueError for a damaged digest.
    """
    for step in steps:
        if step not in recorded or step not in repeated:
            return f"step {step} has no receipt"
        a, b = recorded[step], repeated[step]
        numbers = [name for name in ("loss", "grad_norm") if a[name] != b[name]]
        weights = [
            name
            for name in a["weights"] | b["weights"]
            if total(a["weights"].get(name, {})) != total(b["weights"].get(name, {}))
        ]
        # equal receipts of other values: the recorded row was changed
        if a["receipt"] == b["receipt"] and not numbers and not weights:
            continue
        what = numbers[0] if numbers else None
        if weights:
            what = f"{what} and {weights[0]}" if what else weights[0]
            mine, theirs = (row["weights"].get(weights[0], {}) for row in (a, b))
            if mine.keys() == theirs.keys():
                rank = next(rank for rank, part in mine.items() if part != theirs[rank])
                what = f"{what}, first in the part of rank {rank},"
        return f"{what or 'the receipt'} differs first in step {step}, of {len(weights)} weights"
    return None
