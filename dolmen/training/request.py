"""A request to train, from the command line or Python: the run's options, its folder and processes;
and runs as YAML files. Imports no torch.
"""

from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from dolmen.core.config import Count, Mark, Name, Positive, config, from_dict, to_dict
from dolmen.core.filesystem import expand, is_url
from dolmen.files import gate, kinds, storage, write
from dolmen.model.layout import Layout
from dolmen.training.config import RunConfig


@config()
class LaunchOptions:
    """Folder and processes of a run: options that do not change what is trained."""

    out: Name | None = None
    """Folder of the run, or its URL; unset, runs/NAME. With a URL such as s3://bucket/run, the run
    works in a folder in ~/.cache/dolmen/runs, and is uploaded as --checkpoint.to says. Of a given
    config.yaml the default is its folder.
    """
    resume: bool = False
    """Resume from the newest complete checkpoint in --out. Without --layout.*, the layout is
    that of the recipe or file; a run's config.yaml has the one it was started with.
    """
    overwrite: bool = False
    """Delete the run in --out and start again."""
    nproc: Positive | None = None
    """Processes to start on this machine. Default: the layout's size; without --layout.dp, the
    visible GPUs.
    """
    max_restarts: Count = 0
    """Restarts after a failure; the run resumes by itself from its newest complete checkpoint."""
    launch: Literal["local", "ray"] = "local"
    """Engine that starts the processes: this machine, or Ray Train on the cluster of RAY_ADDRESS.
    """
    spares: bool = False
    """Train with the largest number of processes that works, where torchrun or another launcher
    has started more; the others wait, and take part after the next restart.
    """


RUN_LAYOUT = Layout()
"""Default of --layout in `dolmen replay`: that of the run. Compared by identity, as --layout.tp 1
gives an equal object.
"""


@config()
class ReplayConfig:
    """Repeat a step of a run with exact numerics from the checkpoint before it, at any layout, and
    compare the bits with those that the run recorded in receipts.jsonl. Exit code 1 if they
    differ. Without --layout options the layout is that of the run.
    """

    folder: Annotated[str, Mark.POSITIONAL]
    """Folder or URL of the run, trained with --train.numerics exact."""
    step: Positive
    """Step to repeat; its receipt, and those since the checkpoint before it, are compared."""
    layout: Layout = RUN_LAYOUT
    """Layout of the repetition; unset, the run's. --layout.dp 1 is a single process."""


@config()
class TrainRequest:
    """A request to train a run. The launcher hands it to its workers as a file."""

    config: RunConfig
    handling: LaunchOptions
    """Launch options, with the folder filled in."""
    source: str | None = None
    """The recipe or YAML file that it comes from; None: a RunConfig of Python's."""
    stop_after: Positive | None = None
    """End after this step (replay); the learning rate follows the steps of the run."""
    opened: Any = field(default=None, repr=False, compare=False)
    """The model of --init (a ModelSource), if it was opened to make this request; not in the file
    that workers get.
    """

    @classmethod
    def from_config(
        cls, config: RunConfig, handling: LaunchOptions, source: str | None
    ) -> "TrainRequest":
        """Return the request to train the run, with its folder (handling.out) filled in: --out,
        else the folder of `source` if that is the config.yaml of a run, else runs/NAME. If it is a
        URL, the folder becomes a local working folder and --checkpoint.to the URL. Raises
        ValueError where --checkpoint.to already names another URL.
        """
        default_out = (
            (source or "").rpartition("/")[0] or "."
            if _is_run_config(source)
            else str(Path("runs", config.name))
        )
        out = (handling.out or default_out).rstrip("/") or "/"
        if is_url(out):
            if config.checkpoint.to not in (None, out):
                raise ValueError(
                    f"--out {out} is a URL, and --checkpoint.to {config.checkpoint.to} another: "
                    "give one of the two, or a local --out"
                )
            config = replace(config, checkpoint=replace(config.checkpoint, to=out))
            out = str(storage.working_folder(out))
        # a shell leaves the ~ of --out=~/run to the program
        out = str(expand(out))
        return cls(config, replace(handling, out=out), source)

    @property
    def out(self) -> Path:
        """The run's local folder."""
        assert self.handling.out is not None
        return Path(self.handling.out)


def _is_run_config(source: str | None) -> bool:
    """Return whether `source` is the config.yaml of a run: its folder has checkpoints, or it is at
    a URL.
    """
    file = Path(source or "")
    has_checkpoints = is_url(source or "") or (file.parent / "checkpoints").is_dir()
    return file.name == "config.yaml" and has_checkpoints


def read_run(file: Path) -> RunConfig:
    """Return the run described by a YAML file, a user's or the config.yaml of a run's folder;
    options that it leaves out have their defaults. Raises Refused for an invalid file.
    """
    values = gate.read_yaml(file, kinds.RUN)
    if values is None and (file.parent / "checkpoints").is_dir():
        raise gate.refuse(file, f"is empty, but {file.parent} contains a run: the file is damaged")
    name = file.parent.name if file.name == "config.yaml" else file.stem
    try:
        return from_dict(RunConfig, values or {}, RunConfig(name=name))
    except ValueError as error:
        raise gate.refuse(file, error) from error


NOT_ACTING = (
    *("adapter", "objective", "reward", "rollout", "ppo", "critic", "evaluate", "finish"),
    *("train.exact", "train.fp8", "train.router", "train.new_rows", "optimizer.muon"),
)
"""Sections that do nothing where all of them is as by default."""


def acting_options(config: RunConfig) -> dict[str, Any]:
    """Return the run's options as nested plain values, as config.yaml has them, without those that
    have no effect: options that are None, by default and here, and optional sections (adapter,
    rollout, ...) in which nothing differs from the defaults.
    """
    values, default = to_dict(config), to_dict(RunConfig())
    # a section that differs from its default in one option is kept as a whole
    for path in NOT_ACTING:
        section, _, name = path.rpartition(".")
        options, default_options = (
            each[section] if section else each for each in (values, default)
        )
        if options[name] == default_options[name]:
            del options[name]
    # a None that overrides another default must stay: it means something
    sections = [(values, default)]
    sections += [(section, default[name]) for name, section in values.items() if name != "model"]
    for section, default_options in sections:
        if isinstance(section, dict):
            for name in [name for name, value in section.items() if value is None]:
                if default_options[name] is None:
                    del section[name]
    return values


def write_config(out: Path, config: RunConfig) -> None:
    """Write config.yaml into the folder `out`, which is created: the resolved options, which
    `dolmen train` can run again. Its last line shows readers that the file is complete.
    """
    import yaml  # 15 ms, which no help owes

    out.mkdir(parents=True, exist_ok=True)
    text = gate.seal_yaml(yaml.safe_dump(acting_options(config), sort_keys=False))
    write.replace(out / "config.yaml", text)
