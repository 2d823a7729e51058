"""Job files of `dolmen launch`: what is in them, against the schedulers' own models where these are
installed (tests/cli/test_slurm.py submits one), and what is refused.
"""

import os
import re
import stat
import subprocess

import pytest
import yaml
from tinyrun import dolmen
from torch.distributed.run import config_from_args, parse_args

from dolmen.launch import process
from dolmen.launch.jobs import job_name

RUN = {
    "name": "My run: 2",
    "data": {"path": ["/shared/it's $HOME"]},
    "layout": {"tp": 2},
    "train": {"device": "cuda"},
}


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file of a run, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    (tmp_path / "models").mkdir()
    two = {"data": {"path": ["0.5:texts/*.txt"]}, "layout": {"dp": 2}}
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(RUN | two))
    (tmp_path / "init.yaml").write_text(yaml.safe_dump(RUN | {"init": "models"}))
    exact = {"train": {"numerics": "exact"}, "layout": {"reduction": "fixed"}}
    (tmp_path / "exact.yaml").write_text(yaml.safe_dump(RUN | exact))
    return tmp_path / "run.yaml"


def launch(*words) -> str:
    """The job file that `dolmen launch WORDS --nodes 2` writes."""
    done = dolmen("launch", *words, "--nodes", 2)
    assert done.code == 0, done.err
    return open(done.out.splitlines()[0].removeprefix("wrote ")).read()


def torchrun(words: list[str], monkeypatch, **environment: str):
    """What torchrun makes of its arguments: its configuration and the command of a worker."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # as Kubernetes replaces $(NAME) and $$
    places = re.compile(r"\$\$|\$\((\w+)\)")
    words = [places.sub(lambda m: environment[m[1]] if m[1] else "$", word) for word in words]
    config, command, arguments = config_from_args(parse_args(words))
    return config, [command, *arguments]


def test_a_script_of_slurm(file):
    """bash parses it; a name of sbatch's is one line before the first command; paths are quoted."""
    text = launch("slurm", "run.yaml", "--sbatch", "time=1:00:00", "exclusive")
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = re.match(r"#!/bin/bash\n((?:#SBATCH --\S+\n)+)\n", text)
    assert options is not None
    assert {
        "--job-name=my-run-2",
        "--nodes=2",
        "--gpus-per-node=8",
        "--requeue",
        "--signal=B:USR1@120",
        "--time=1:00:00",
        "--exclusive",
    } < set(re.findall(r"--\S+", options[1]))
    assert f"dolmen train {file} --resume --out='{file.parent}/runs/My run: 2'" in text


def test_a_job_of_kubeflow(file, monkeypatch):
    """The run travels in a ConfigMap; torchrun, with what the runtime sets, is elastic c10d over
    all nodes; a restart of the JobSet is a restart.
    """
    words = ("--image", "x:1", "--out", "/shared/a$(b)")
    settings, job = yaml.safe_load_all(launch("kubeflow", "run.yaml", *words))
    assert yaml.safe_load(settings["data"]["run.yaml"])["data"]["path"] == RUN["data"]["path"]
    trainer = job["spec"]["trainer"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    config, worker = torchrun(
        trainer["args"],
        monkeypatch,
        PET_NNODES=str(trainer["numNodes"]),
        PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]),
        PET_NODE_RANK="1",
        PET_MASTER_ADDR="my-run-2-node-0-0.my-run-2",
        PET_MASTER_PORT="29400",
    )
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
    assert (config.rdzv_backend, config.run_id) == ("c10d", "my-run-2")
    assert config.rdzv_endpoint == "my-run-2-node-0-0.my-run-2:29400"
    wanted = "-m dolmen train /etc/dolmen/run.yaml --resume --out=/shared/a$(b)"
    assert " ".join(worker).endswith(wanted)
    (count,) = (each["name"] for each in trainer["env"] if "valueFrom" in each)
    assert count in process.RESTART_COUNTS.values()


def test_a_task_of_skypilot(file):
    words = ("--out", "/v/a b", "--volume", "v", "--mount", "/v")
    task = yaml.safe_load(launch("skypilot", "run.yaml", *words))
    assert task["resources"]["accelerators"] == "H100:8" and task["num_nodes"] == 2
    assert task["file_mounts"] == {"~/run.yaml": str(file)} and task["volumes"] == {"/v": "v"}
    assert subprocess.run(["bash", "-n"], input=task["run"], text=True).returncode == 0
    assert "dolmen train ~/run.yaml --resume --out='/v/a b'" in task["run"]
    assert f'--rdzv-id="${process.RECOVERED_JOBS["SkyPilot"]}"' in task["run"]


def test_a_run_at_a_url_needs_no_volume_and_s3fs(file):
    """Names of the hub and absolute paths are no relative paths."""
    file.write_text(yaml.safe_dump(RUN | {"init": "org/model"}))
    for words, mounted in (((), False), (("--volume", "v"), True)):
        words = ("--image", "x:1", "--out", "s3://b/run", "--file", f"{mounted}.yaml", *words)
        job = [*yaml.safe_load_all(launch("kubeflow", "run.yaml", *words))][1]
        assert ("persistentVolumeClaim" in str(job)) == ("'/shared'" in str(job)) == mounted
    task = yaml.safe_load(launch("skypilot", "run.yaml", "--out", "s3://b/run"))
    assert task["setup"] == "pip install 'dolmen[s3]'"


@pytest.mark.full
def test_kubeflow_takes_the_job(file):
    """Its models know every field, and none changes."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    documents = yaml.safe_load_all(launch("kubeflow", "run.yaml", "--image", "x:1"))
    kinds = (models.IoK8sApiCoreV1ConfigMap, models.TrainerV1alpha1TrainJob)
    for kind, document in zip(kinds, documents, strict=True):
        assert kind.from_dict(document).to_dict() == document


@pytest.mark.full
def test_skypilot_takes_the_task(file):
    sky = pytest.importorskip("sky")
    launch("skypilot", "run.yaml", "--volume", "v", "--file", "task.yaml")
    task = sky.Task.from_yaml("task.yaml")
    assert (task.name, task.num_nodes, task.volumes) == ("my-run-2", 2, {"/shared": "v"})
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}


def test_processes_of_a_cpu_ask_for_no_gpu(file):
    file.write_text(yaml.safe_dump(RUN | {"train": {"device": "cpu"}}))
    assert "gpu" not in launch("slurm", "run.yaml")
    job = yaml.safe_load_all(launch("kubeflow", "run.yaml", "--image", "x:1"))
    assert "resourcesPerNode" not in [*job][1]["spec"]["trainer"]
    task = yaml.safe_load(launch("skypilot", "run.yaml", "--out", "/v/run"))
    assert "accelerators" not in task["resources"] and "volumes" not in task


@pytest.mark.parametrize(
    "words, said",
    [
        (("slurm", "none.yaml"), "none.yaml"),
        (
            ("slurm", "run.yaml", "--nproc-per-node", 3),
            "run.yaml with --nodes 1 and --nproc-per-node 3: layout.tp (2) is not a divisor of the "
            "3 processes: set layout.tp 1, or use",
        ),
        (("slurm", "two.yaml"), "set layout.tp and layout.dp so that their product is 8"),
        (("slurm", "quickstart"), "quickstart is a recipe, and a job needs a YAML file"),
        (
            ("kubeflow", "two.yaml", "--image", "x", "--nproc-per-node", 2),
            "data.path is 0.5:texts/*.txt, relative to a folder that nodes of the cluster lack",
        ),
        (("skypilot", "init.yaml", "--volume", "v"), "init is models, relative to a folder"),
        (("kubeflow", "run.yaml", "--image", "x", "--out", "x"), "--out is x, relative to"),
        (("slurm", "run.yaml", "--sbatch", "a=b\n#SBATCH --x"), "write options of sbatch without"),
        (("slurm", "run.yaml", "--sbatch", "--x"), "sbatch"),
        (("slurm", "run.yaml", "--sbatch", "nodes=4"), "torchrun is told --nodes"),
        (
            ("slurm", "run.yaml", "--nodes", 5, "--nproc-per-node", 2),
            "train.global-batch-size (8) is not divisible by dp (5): set train.global-batch-size",
        ),
        (("slurm", "exact.yaml"), "exact, which needs CPUs, and train.device auto"),
        (
            ("kubeflow", "run.yaml", "--image", "x", "--out", "/other/run"),
            "--out is /other/run, outside the job's volume: give a path below --mount (/shared)",
        ),
        (("skypilot", "run.yaml", "--out", "memory://x"), "which is on one machine"),
        (("slurm", "run.yaml", "--file", "run.yaml"), "--file run.yaml exists: give another name"),
        (("kubeflow", "run.yaml"), "missing --image"),
        (("kubeflow", "run.yaml", "--image", "x", "--volume", "A_b"), "--volume is 'A_b': it must"),
        (("skypilot", "run.yaml"), "nodes of SkyPilot share no folder"),
        (
            ("skypilot", "run.yaml", "--out", "/x", "--accelerator", "H100:4"),
            "it must be the type alone",
        ),
        (("skypilot", "run.yaml", "--out", "/x", "--submit"), "--submit needs sky, which is not"),
    ],
)
def test_what_is_refused_writes_nothing(file, monkeypatch, words, said):
    monkeypatch.setenv("PATH", "/nowhere")
    before = sorted(os.listdir())
    result = dolmen("launch", *words)
    assert result.code == 2 and said in result.err and sorted(os.listdir()) == before


@pytest.mark.parametrize("code", (0, 3))
def test_a_job_is_submitted(file, monkeypatch, code, tmp_path_factory):
    """The scheduler's own command gets the file; the second time the file is its own."""
    place = tmp_path_factory.mktemp("bin")
    command = place / "sbatch"
    command.write_text(f'#!/bin/sh\necho "$@" >> {place}/told\nexit {code}\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    assert dolmen("launch", "slurm", "run.yaml").code == 0
    assert dolmen("launch", "slurm", "run.yaml", "--submit").code == int(code != 0)
    assert (place / "told").read_text() == "my-run-2.slurm.sbatch\n"


def test_names_of_jobs():
    """Kubernetes takes at most 63 characters and a letter first, and adds its own to the end."""
    names = [job_name(name) for name in ("a", "A b_c", "8B", "--", "x" * 99)]
    assert names == ["a", "a-b-c", "run-8b", "run", "x" * 40]


@pytest.mark.parametrize("name", process.RESTART_COUNTS.values())
def test_restarts_are_counted_by_each_engine(name, monkeypatch):
    for other in process.RESTART_COUNTS.values():
        monkeypatch.delenv(other, raising=False)
    assert process.restarts() == 0
    monkeypatch.setenv(name, "2")
    assert process.restarts() == 2
