"""What `dolmen show` may be told."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ShowConfig:
    """Runs, and what becomes of them."""

    runs: tuple[str, ...]
    """Folders of runs, as dolmen train wrote them."""
    out: str = "show.html"
    """The page to write: one file that needs no other, and opens anywhere."""
    serve: bool = False
    """Serve the page in place of writing it, and keep it up to date while runs go on, until Ctrl-C.
    Its address has a secret in it: who does not know that sees nothing.
    """
    host: str = "127.0.0.1"
    """Address to serve at. Default: this machine alone; 0.0.0.0 is every network that it is on,
    unencrypted.
    """
    port: int = 0
    """Port to serve at. Default: any that is free."""
    every: float = 5.0
    """Seconds between looks at the runs, while it is served."""

    def __post_init__(self):
        if not self.runs:
            raise ValueError("name a run first: dolmen show runs/quickstart")
        if not 0 <= self.port < 2**16:
            raise ValueError(f"--port is {self.port}: it must be from 0 to {2**16 - 1}")
        if not 0.1 <= self.every < math.inf:
            raise ValueError(f"--every is {self.every}: it must be at least 0.1 seconds")
        if not self.host.strip():
            raise ValueError("--host is empty: give an address, such as 127.0.0.1")
