"""The verb launch: job files of a run for SLURM, Kubeflow Trainer and SkyPilot.

dolmen launch slurm|kubeflow|skypilot RUN.yaml --nodes N

A module of its own, as it imports YAML, which `dolmen train --help` does not wait for.
"""

import shlex
import shutil
import subprocess
from pathlib import Path

import yaml

from dolmen.core.filesystem import is_url
from dolmen.core.messages import BadInput, as_bad_input, escape
from dolmen.files import gate, write
from dolmen.launch import jobs
from dolmen.launch.config import KubeflowConfig, SkypilotConfig, SlurmConfig
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
        run = read_run(Path(job.run))
        run.layout.resolve(job.nodes * job.nproc_per_node)
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
