"""The request for a run, from the command line or Python: its configuration, and what is done with
its folder and its processes; and runs as YAML files. Without torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from dolmen.core.config import Count, Name, Positive, config, from_dict, to_dict
from dolmen.files import gate, kinds, write
from dolmen.training.config import RunConfig


@config()
class Handling:
    """What is done with a run, which its configuration does not say."""

    out: Name | None = None
    """Folder of the run. Default: that of the config.yaml of a run, else runs/NAME."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out; at any other layout too."""
    overwrite: bool = False
    """Throw away the run that --out holds."""
    nproc: Positive | None = None
    """Processes to start on this machine. Default: as many as the layout needs; the GPUs that are
    visible.
    """
    max_restarts: Count = 0
    """Times to start the processes again after a failure; the run goes on by itself from its newest
    whole checkpoint.
    """


@config()
class Request:
    """A run that is to be made. The launcher hands it to its workers as a file."""

    config: RunConfig
    handling: Handling
    """With the folder filled in."""
    source: str | None = None
    """The recipe or YAML file that it comes from; None: a RunConfig of Python's."""

    @classmethod
    def of(cls, config: RunConfig, handling: Handling, source: str | None) -> "Request":
        """Kept where `handling` says, else beside the config.yaml of a run that `source` is, else
        in runs/NAME.
        """
        own = Path(source or "").parent if _is_of_run(source) else Path("runs", config.name)
        return cls(config, replace(handling, out=handling.out or str(own)), source)

    @property
    def out(self) -> Path:
        """The run's folder."""
        assert self.handling.out is not None
        return Path(self.handling.out)


def _is_of_run(source: str | None) -> bool:
    """Whether a YAML file is the config.yaml of a run's folder."""
    file = Path(source or "")
    return file.name == "config.yaml" and (file.parent / "checkpoints").is_dir()


def read_run(file: Path) -> RunConfig:
    """Return the run of a YAML file, a user's or the config.yaml of a run's folder; what it leaves
    out is the default. Raises Refused.
    """
    values = gate.read_yaml(file, kinds.RUN)
    if values is None and (file.parent / "checkpoints").is_dir():
        raise gate.refuse(file, f"is empty, and {file.parent} holds a run: it is damaged")
    name = file.parent.name if file.name == "config.yaml" else file.stem
    try:
        return from_dict(RunConfig, values or {}, RunConfig(name=name))
    except ValueError as error:
        raise gate.refuse(file, error) from error


NOT_ACTING = (
    *("adapter", "objective", "reward", "rollout", "ppo", "critic", "evaluate", "finish"),
    *("train.fp8", "train.router", "train.new_rows", "optimizer.muon"),
)
"""Sections that do nothing where all of them is as by default."""


def acting(config: RunConfig) -> dict[str, Any]:
    """Return the options that act, as plain values: neither those that are None by default and so,
    nor sections of what the run does not do. What is left out is the default.
    """
    values, default = to_dict(config), to_dict(RunConfig())
    for path in NOT_ACTING:
        section, _, name = path.rpartition(".")
        there, before = (each[section] if section else each for each in (values, default))
        if there[name] == before[name]:
            del there[name]
    sections = [(values, default)]
    sections += [(one, default[name]) for name, one in values.items() if name != "model"]
    for section, before in sections:
        if isinstance(section, dict):
            for name in [name for name, value in section.items() if value is None]:
                if before[name] is None:
                    del section[name]
    return values


def write_config(out: Path, config: RunConfig) -> None:
    """Write config.yaml, the resolved run, which can be run again."""
    import yaml  # 15 ms, which no help owes

    out.mkdir(parents=True, exist_ok=True)
    text = gate.seal_yaml(yaml.safe_dump(acting(config), sort_keys=False))
    write.replace(out / "config.yaml", text)
