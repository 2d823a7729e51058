"""What is asked of a run, in words or from Python, as data: its configuration, and what is done
with its folder and its processes. Without torch.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from dolmen.core.paths import refuse_empty
from dolmen.training.config import RunConfig


@dataclass(frozen=True)
class Handling:
    """What is done with a run, which its configuration does not say."""

    out: str | None = None
    """Folder of the run. Default: that of the config.yaml of a run, else runs/NAME."""
    resume: bool = False
    """Go on from the newest whole checkpoint in --out; at any other layout too."""
    overwrite: bool = False
    """Throw away the run that --out holds."""
    nproc: int | None = None
    """Processes to start on this machine. Default: as many as the layout needs; the GPUs that are
    visible.
    """
    max_restarts: int = 0
    """Times to start the processes again after a failure; the run goes on by itself from its newest
    whole checkpoint.
    """

    def __post_init__(self):
        refuse_empty("out", self.out)


@dataclass(frozen=True)
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
        file = Path(source or "")
        again = file.name == "config.yaml" and (file.parent / "checkpoints").is_dir()
        out = handling.out or str(file.parent if again else Path("runs", config.name))
        return cls(config, replace(handling, out=out), source)

    @property
    def out(self) -> Path:
        """The run's folder."""
        assert self.handling.out is not None
        return Path(self.handling.out)
