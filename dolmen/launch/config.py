"""Options of `dolmen launch`. Imports no torch."""

import re
from typing import Annotated

from dolmen.core.config import Count, LocalName, Mark, Name, Positive, config, require

Label = Annotated[
    str,
    require(
        re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?").fullmatch,
        "at most 63 lower-case letters, digits and dashes between them",
    ),
]
"""A name that Kubernetes takes (RFC 1123)."""
SBATCH = re.compile(r"[a-z][a-z-]*(=[^\s#\"'\\]+)?")
"""An option of sbatch without its dashes, and its value."""


@config(kw_only=True)
class JobConfig:
    """Options of a job of any scheduler."""

    run: Annotated[Name, Mark.POSITIONAL]
    """YAML file of the run, with all its options."""
    nodes: Positive = 1
    """Nodes of the job."""
    nproc_per_node: Positive = 8
    """Processes per node, each with a GPU; with train.device cpu in the file, without."""
    out: Name | None = None
    """Folder of the run, which all nodes must share. Default: runs/NAME, in the mounted volume if
    there is one.
    """
    file: LocalName | None = None
    """Job file to write. Default: the name of the run, in the current folder."""
    submit: bool = False
    """Submit the job file after writing it."""
    max_restarts: Count = 20
    """Restarts of the processes after a failure, within the job."""
    grace_seconds: Positive = 120
    """Seconds that the run has to save in when it is told to end. Choose more than a step and a
    save take.
    """


@config(kw_only=True)
class SlurmConfig(JobConfig):
    """Write a batch script for SLURM that trains the run: torchrun on every node; before the time
    limit the run is saved and the job requeued, and it resumes by itself.

        dolmen launch slurm run.yaml --nodes 2 --sbatch time=24:00:00 partition=gpu
    """

    sbatch: tuple[str, ...] = ()
    """More options of sbatch, such as time=24:00:00 partition=gpu."""

    def __post_init__(self):
        """Raise ValueError for an entry of `sbatch` that is not written as name or name=value, or
        that says how many nodes or tasks there are.
        """
        for option in self.sbatch:
            if option.partition("=")[0] in ("nodes", "ntasks", "ntasks-per-node"):
                raise ValueError(
                    f"--sbatch has {option}, but torchrun is told --nodes ({self.nodes}), and "
                    "starts the processes of a node itself: set --nodes and --nproc-per-node"
                )
            if not SBATCH.fullmatch(option):
                raise ValueError(
                    f"--sbatch has {option[:40]!r}: write options of sbatch without dashes, such "
                    "as time=24:00:00 exclusive"
                )


@config(kw_only=True)
class KubeflowConfig(JobConfig):
    """Write a TrainJob of Kubeflow Trainer v2 that trains the run, and a ConfigMap with the run's
    file: torchrun in every pod, a volume that all pods share.

        dolmen launch kubeflow run.yaml --nodes 2 --image registry.example.com/dolmen:0.1.0
    """

    image: Name
    """Container image with dolmen and torchrun."""
    namespace: Label = "default"
    """Namespace of the job."""
    runtime: Label = "torch-distributed"
    """ClusterTrainingRuntime that the job refers to."""
    volume: Label | None = None
    """PersistentVolumeClaim (ReadWriteMany) that every pod mounts. Default: shared, or none if
    --out is a URL.
    """
    mount: Name = "/shared"
    """Folder of the pods where the volume is mounted."""


TYPE_ALONE = "the type alone; the number of a node is --nproc-per-node"


@config(kw_only=True)
class SkypilotConfig(JobConfig):
    """Write a task of SkyPilot that trains the run: torchrun on every node. --submit starts it as a
    managed job, which SkyPilot recovers when nodes are lost.

        dolmen launch skypilot run.yaml --nodes 2 --accelerator H100 --volume shared
    """

    accelerator: Annotated[Name, require(lambda name: ":" not in name, TYPE_ALONE)] = "H100"
    """GPU type, as SkyPilot names it."""
    volume: Name | None = None
    """Volume of SkyPilot (sky volumes ls) that every node mounts."""
    mount: Name = "/shared"
    """Folder of the nodes where the volume is mounted."""
    setup: Name | None = None
    """Shell command that installs dolmen on a node. Default: pip install dolmen, or 'dolmen[s3]' if
    the run uses s3://.
    """

    def __post_init__(self):
        """Raise ValueError without a folder that all nodes share (`out` or `volume`)."""
        if self.out is None and self.volume is None:
            raise ValueError(
                "nodes of SkyPilot share no folder, and lose theirs when they are recovered: give "
                "--volume, or --out with a folder that all nodes share"
            )
