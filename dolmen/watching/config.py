"""Options of `dolmen show`."""

from typing import Annotated

from pydantic import Field

from dolmen.core.config import Mark, Name, Port, config


@config()
class ShowConfig:
    """Runs as one page to look at, while they go on or afterwards: losses over each other, learning
    rate, gradients, speed, memory, experts, samples, options and how they differ, checkpoints,
    starts.

        dolmen show runs/one runs/two
    """

    runs: Annotated[tuple[str, ...], Mark.POSITIONAL] = ()
    """Folders of runs, as dolmen train wrote them."""
    out: Name = "show.html"
    """The page to write: one file that needs no other, and opens anywhere."""
    serve: bool = False
    """Serve the page in place of writing it, and keep it up to date while runs go on, until Ctrl-C.
    Its address has a secret in it: who does not know that sees nothing.
    """
    host: Name = "127.0.0.1"
    """Address to serve at. Default: this machine alone; 0.0.0.0 is every network that it is on,
    unencrypted.
    """
    port: Port = 0
    """Port to serve at. Default: any that is free."""
    every: Annotated[float, Field(ge=0.1)] = 5.0
    """Seconds between looks at the runs, while it is served."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name a run first: dolmen show runs/quickstart")
