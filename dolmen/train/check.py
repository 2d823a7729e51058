"""Rules across sections, on one screen: a run is refused here, with the numbers and the knob, before any process starts
and before anything is written.
"""

import os
from dataclasses import replace
from pathlib import Path

from dolmen.checkpoint.store import Checkpoints
from dolmen.convert import hf
from dolmen.core.config import differences, to_dict
from dolmen.core.mesh import SINGLE
from dolmen.data import loader
from dolmen.families import to_hf
from dolmen.train.config import RunConfig


def check(run: RunConfig, processes: int | None) -> RunConfig:
    """The run with its layout resolved for `processes` (None: as many as the layout says). Raises ValueError or KeyError."""
    if run.model is None:
        raise ValueError("there is no model: give --init a transformers directory or hub id, or choose a recipe that has one (dolmen recipes)")
    to_hf(run.model)                                       # or no export could ever be written
    if (run.finish.verify or run.finish.sample is not None) and not run.finish.export:
        raise ValueError("finish.verify and finish.sample read the exported model: set --finish.export too")
    run = replace(run, layout=run.layout.resolve(processes))
    if run.sequence_length > run.model.max_position_embeddings:
        raise ValueError(f"train.sequence-length ({run.sequence_length}) is over the model's max_position_embeddings "
                         f"({run.model.max_position_embeddings}): set --train.sequence-length {run.model.max_position_embeddings} or less")
    run.layout.check(run.model, run.sequence_length, run.train.global_batch_size, run.microbatch_size)
    if run.init is not None: hf.check(hf.resolve(run.init), run.model)
    loader.check(run.data, run.init, run.model.vocab_size, run.sequence_length)
    return run


def check_folder(out: Path, resume: bool, overwrite: bool) -> None:
    """Refuse to train into a folder that holds something, unless told what to do with it."""
    if resume and overwrite: raise ValueError("--resume and --overwrite exclude each other: go on with the run, or throw it away")
    ground = next(p for p in (out, *out.absolute().parents) if p.exists())
    if not ground.is_dir(): raise ValueError(f"--out {out}: {ground} is a file: give a folder")
    if not os.access(ground, os.W_OK): raise ValueError(f"--out {out}: {ground} cannot be written to: give another folder")
    if out.is_dir() and any(out.iterdir()) and not (resume or overwrite):
        raise ValueError(f"{out} already holds a run: use --resume to go on, --overwrite to start again, or another --out")
    if overwrite and out.is_dir() and any(out.iterdir()) and not (out / "config.yaml").exists():
        raise ValueError(f"--overwrite would delete {out}, which holds no config.yaml and so was not written by dolmen: remove it yourself")


def check_overwrite(run: RunConfig, out: Path, source: str) -> None:
    """Refuse to delete what the run reads; `source`, a recipe or YAML file, may be the config.yaml that it writes again."""
    read = [Path(name.split(":")[-1]).expanduser().resolve() for name in (run.init, run.data.tokenizer, run.data.validation, *run.data.path) if name]
    if Path(source).resolve() != out.resolve() / "config.yaml": read.append(Path(source).resolve())
    for path in read:
        if path.exists() and path.is_relative_to(out.resolve()):
            raise ValueError(f"--overwrite would delete {path}, which this run reads: give another --out")


def check_resume(run: RunConfig, out: Path) -> None:
    """Refuse to go on with another model than the newest whole checkpoint's."""
    saved = Checkpoints(out / "checkpoints", SINGLE, keep=0)
    step = saved.newest()
    if step is not None: check_same_model(saved.meta(step)["run"], run, step)


def check_same_model(saved: dict, run: RunConfig, step: int) -> None:
    """Raises ValueError with the fields that differ, if the run saved at `step` is of another model."""
    if changed := differences(_structure(saved), _structure(to_dict(run))):
        raise ValueError(f"the checkpoint of step {step} is of another model ({'; '.join(changed[:3])}): resume with the model it was "
                         "trained with, or give another --out")


def _structure(run: dict) -> dict:
    """What must not change on resume: the model, less what config.json carries along and what only training or its start uses."""
    return {"model": {k: v for k, v in run["model"].items() if k not in ("hf", "dropout", "initializer_range")}}
