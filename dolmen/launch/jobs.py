"""Job files of SLURM, Kubeflow Trainer and SkyPilot, and how they are submitted.

A job file is a template (templates/) in which each {{name}} is replaced by a value. In a YAML
template this happens after parsing: a value cannot change the structure, one that is alone keeps
its type, and a field whose value is None is left out.
"""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dolmen.core.filesystem import is_url
from dolmen.files import gate
from dolmen.launch.config import JobConfig, KubeflowConfig, SkypilotConfig, SlurmConfig

TEMPLATES = Path(__file__).parent / "templates"
FILES: dict[type, str] = {
    SlurmConfig: "slurm.sbatch",
    KubeflowConfig: "kubeflow.yaml",
    SkypilotConfig: "skypilot.yaml",
}
SUBMIT: dict[type, tuple[str, ...]] = {
    SlurmConfig: ("sbatch",),
    KubeflowConfig: ("kubectl", "apply", "-f"),
    SkypilotConfig: ("sky", "jobs", "launch", "--yes"),
}
"""Commands that submit a job file, which is their last argument."""
PLACE = re.compile(r"\{\{(\w+)\}\}")


def job_name(run: str) -> str:
    """Return the name of a run's job, which every scheduler accepts: the run's name in lower case,
    with dashes for all but letters and digits, cut to 40 characters; after "run-" unless it begins
    with a letter.
    """
    name = re.sub(r"[^a-z0-9]+", "-", run.lower())[:40].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".rstrip("-")


def job_file(job: JobConfig, name: str, out: str, text: str, gpus: bool) -> str:
    """Return the content of the job file, a batch script for SLURM, YAML for Kubeflow and SkyPilot.
    `name`: of the job; `out`: folder of the run; `text`: options of the run as YAML, which the file
    of Kubeflow contains; `gpus`: whether each process needs a GPU.
    """
    values = {
        "name": name,
        "nodes": job.nodes,
        "nproc": job.nproc_per_node,
        "max_restarts": job.max_restarts,
        "grace": job.grace_seconds,
    }
    template = gate.read_text(TEMPLATES / FILES[type(job)], 2**16)
    match job:
        case SlurmConfig():
            options = [*([f"gpus-per-node={job.nproc_per_node}"] if gpus else []), *job.sbatch]
            lines = "".join(f"#SBATCH --{option}\n" for option in options)
            paths = {"run": shlex.quote(str(Path(job.run).absolute())), "out": shlex.quote(out)}
            return _replace(template, values | paths | {"options": lines})
        case KubeflowConfig():
            # a run at a URL needs no volume
            volume = job.volume or (None if is_url(out) else "shared")
            values |= {
                "namespace": job.namespace,
                "runtime": job.runtime,
                "image": job.image,
                "volume": volume
                and {"name": "shared", "persistentVolumeClaim": {"claimName": volume}},
                "mount": volume and {"name": "shared", "mountPath": job.mount},
                "text": text,
                "out": out.replace("$", "$$"),  # Kubernetes would replace $(NAME)
                "grace_text": str(job.grace_seconds),
                "resources": {"limits": {"nvidia.com/gpu": job.nproc_per_node}} if gpus else None,
            }
        case SkypilotConfig():
            package = "'dolmen[s3]'" if "s3://" in text + out else "dolmen"
            values |= {
                "accelerators": f"{job.accelerator}:{job.nproc_per_node}" if gpus else None,
                "run": str(Path(job.run).absolute()),
                "volumes": {job.mount: job.volume} if job.volume else None,
                "setup": job.setup or f"pip install {package}",
                "out": shlex.quote(out),
            }
    documents = [_fill(document, values) for document in yaml.safe_load_all(template)]
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=100)


def _replace(text: str, values: Mapping[str, Any]) -> str:
    """Return the text with each {{name}} replaced by the value of that name."""
    return PLACE.sub(lambda place: str(values[place[1]]), text)


def _fill(node: Any, values: Mapping[str, Any]) -> Any:
    """Return a parsed YAML document with each {{name}} in its strings replaced by the value of that
    name. A string that is nothing but {{name}} becomes the value itself, of any type. Fields of a
    mapping and items of a list whose value is None are left out.
    """
    match node:
        case dict():
            filled = {key: _fill(value, values) for key, value in node.items()}
            return {key: value for key, value in filled.items() if value is not None}
        case list():
            items = [_fill(item, values) for item in node]
            return [item for item in items if item is not None]
        case str():
            place = PLACE.fullmatch(node)
            return values[place[1]] if place else _replace(node, values)
    return node


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are read, `|` and lines."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    """Return the YAML node of a string: in block style (`|`) if it has several lines."""
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)
