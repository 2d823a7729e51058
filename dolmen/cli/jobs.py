"""The verb launch: job files of a run for SLURM, Kubeflow Trainer and SkyPilot.

dolmen launch slurm|kubeflow|skypilot RUN.yaml --nodes N

A module of its own, as it imports YAML, which `dolmen train --help` does not wait for.
"""

import glob
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import yaml

from dolmen.core.config import flatten, to_dict
from dolmen.core.filesystem import is_url, may_be_hub_id
from dolmen.core.messages import BadInput, as_bad_input, escape
from dolmen.data.sources import STANDARD_LIBRARY, parse_weight
from dolmen.files import gate, write
from dolmen.launch import jobs
from dolmen.launch.config import KubeflowConfig, SkypilotConfig, SlurmConfig
from dolmen.recipes import RECIPES
from dolmen.training.config import RunConfig
from dolmen.training.request import LaunchOptions, TrainRequest, acting_options, read_run

Job = SlurmConfig | KubeflowConfig | SkypilotConfig


def run_launch(job: Job) -> int:
    """Run `dolmen launch`: write the job file of a run for SLURM, Kubeflow or SkyPilot, and with
    --submit submit it, else print the command that does. Returns 0, or 1 if the submission failed.
    Raises BadInput, with nothing written.
    """
    command = jobs.SUBMIT[type(job)]
    with as_bad_input():
        if job.run in RECIPES and not Path(job.run).exists():
            raise BadInput(
                f"{job.run} is a recipe, and a job needs a YAML file with the run's options: give "
                f"the config.yaml that dolmen train {job.run} writes, or one of your own"
            )
        run = read_run(Path(job.run))
        _check_layout(job, run)
        if not isinstance(job, SlurmConfig):
            _check_paths(job, run)
        if job.submit and shutil.which(command[0]) is None:
            raise BadInput(
                f"--submit needs {command[0]}, which is not installed here: leave --submit out, "
                f"and run {shlex.join(command)} FILE where it is"
            )
        file = _write_job_file(job, run)
    print(f"wrote {escape(file)}", flush=True)
    if not job.submit:
        print(f"submit it with {escape(shlex.join((*command, str(file))))}")
        return 0
    return int(subprocess.run([*command, str(file)]).returncode != 0)


def _check_layout(job: Job, run: RunConfig) -> None:
    """Raise ValueError where the layout does not fit the processes of the job, or its dp the batch,
    and for exact numerics on GPUs.
    """
    if run.train.numerics == "exact" and run.train.device != "cpu":
        raise ValueError(
            f"{job.run} has train.numerics exact, which needs CPUs, and train.device "
            f"{run.train.device}, for which the job has GPUs: set train.device cpu"
        )
    try:
        layout = run.layout.resolve(job.nodes * job.nproc_per_node)
        layout.check_batch(run.train.global_batch_size, run.train.microbatch_size or 1)
    except ValueError as error:
        # these options are in the file: this command has none of them
        reason = re.sub(r"--(?=layout\.|train\.)", "", str(error))
        raise ValueError(
            f"{job.run} with --nodes {job.nodes} and --nproc-per-node {job.nproc_per_node}: "
            f"{reason}"
        ) from None


PATHS = (
    *("init", "critic.init", "objective.reference", "ppo.pretraining_path"),
    *("data.path", "data.validation", "data.tokenizer", "data.template"),
    *("evaluate.samples", "evaluate.tasks_path"),
)
"""Options that may name local files or folders which a run reads."""


def _check_paths(job: KubeflowConfig | SkypilotConfig, run: RunConfig) -> None:
    """Raise ValueError for a path in the run, or as --out, that nodes of the cluster lack: a
    relative one, and a URL of this machine; and for an --out outside the volume that the job
    mounts, which ends with the node.
    """
    mounts = job.volume is not None or isinstance(job, KubeflowConfig) and not is_url(job.out or "")
    options = flatten(to_dict(run))
    named = {name: options[name] for name in PATHS if options.get(name)} | {"--out": job.out}
    for name, value in named.items():
        for entry in [value] if isinstance(value, str) else value or ():
            path = parse_weight(entry, name)[0]
            is_local = Path(path).exists() or glob.has_magic(path) or not may_be_hub_id(path)
            known = (STANDARD_LIBRARY, *(["bpe:"] if name == "data.tokenizer" else []))
            if path.startswith(("file://", "local://", "memory://")):
                raise ValueError(f"{name} is {entry}, which is on one machine: give another URL")
            outside = path.startswith("/") and not Path(path).is_relative_to(job.mount)
            if name == "--out" and mounts and outside:
                raise ValueError(
                    f"--out is {entry}, outside the job's volume: give a path below --mount "
                    f"({job.mount}), or a URL"
                )
            if is_url(path) or path.startswith(("/", "~", *known)):
                continue
            if is_local or name == "--out":
                raise ValueError(
                    f"{name} is {entry}, relative to a folder that nodes of the cluster lack: give "
                    f"a path below --mount ({job.mount}), or a URL"
                )


def _write_job_file(job: Job, run: RunConfig) -> Path:
    """Write the job file that trains `run` and return its path; a file with the same content is
    left as it is. Raises ValueError if a file with other content exists.
    """
    name = jobs.job_name(run.name)
    out = job.out or str(TrainRequest.from_config(run, LaunchOptions(), job.run).out)
    if not isinstance(job, SlurmConfig):
        out = job.out or f"{job.mount.rstrip('/')}/runs/{name}"
    elif not is_url(out):  # the job may be submitted from another folder
        out = str(Path(out).absolute())
    text = yaml.safe_dump(acting_options(run), sort_keys=False)
    content = jobs.job_file(job, name, out, text, gpus=run.train.device != "cpu")
    file = Path(job.file or f"{name}.{jobs.FILES[type(job)]}")
    # the same command again, now with --submit, finds its own file
    if not file.exists() or gate.read_text(file, 2**20) != content:
        write.replace(write.check_new("--file", file), content)
    return file
