"""Options of `dolmen show`."""

from typing import Annotated

from pydantic import Field

from dolmen.core.config import Mark, Name, Port, config


@config()
class ShowConfig:
    """Write one HTML page of several runs, during or after training: losses in one figure, learning
    rate, gradient norm, speed, memory, expert load, samples, options and their differences,
    checkpoints, starts.

        dolmen show runs/one runs/two
    """

    runs: Annotated[tuple[str, ...], Mark.POSITIONAL] = ()
    """Folders of runs."""
    out: Name = "show.html"
    """HTML file to write; it is self-contained."""
    serve: bool = False
    """Serve the page in place of writing it, and update it during training, until Ctrl-C. Its
    address contains a secret token, without which nothing is served.
    """
    host: Name = "127.0.0.1"
    """Address to serve at. Default: reachable from this machine only. 0.0.0.0: from all its
    networks, unencrypted.
    """
    port: Port = 0
    """Port to serve at. Default: a free one."""
    every: Annotated[float, Field(ge=0.1)] = 5.0
    """Seconds between updates of the served page."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name a run first: dolmen show runs/quickstart")
