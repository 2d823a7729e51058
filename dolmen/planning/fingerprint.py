"""What a dry run depends on: the program, torch, and of a run all that its step is made of. What is
counted once is kept on disk under a hash of it. Without torch.
"""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

from dolmen.training.config import RunConfig


@cache
def program() -> str:
    """A hash of the code, and the version of torch."""
    root, found = Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(file.read_bytes())
    return f"{found.hexdigest()} {version('torch')}"


def of_step(run: RunConfig, *more: object) -> str:
    """A hash of the program, of what a step of `run` depends on beside its model, and of `more`."""
    asked = (run.adapter, run.layout, run.objective, run.optimizer, run.train)
    text = repr((program(), asked, run.sequence_length, run.data.document_mask, more))
    return hashlib.sha256(text.encode()).hexdigest()
