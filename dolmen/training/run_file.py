"""A run in a YAML file: of the user's, or the config.yaml that a run has written."""

from pathlib import Path

from dolmen.core.config import from_dict
from dolmen.files import gate, kinds
from dolmen.training.config import RunConfig


def read_run(file: Path) -> RunConfig:
    """What it leaves out is the default. Raises Refused."""
    values = gate.read_yaml(file, kinds.RUN)
    if values is None and (file.parent / "checkpoints").is_dir():
        raise gate.refuse(file, f"is empty, and {file.parent} holds a run: it is damaged")
    name = file.parent.name if file.name == "config.yaml" else file.stem
    try:
        return from_dict(RunConfig, values or {}, RunConfig(name=name))
    except ValueError as error:
        raise gate.refuse(file, error) from error
