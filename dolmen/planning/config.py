"""What may be asked of the planning room, as data. Without torch."""

from dataclasses import dataclass
from typing import Literal

from dolmen.core.paths import refuse_empty
from dolmen.training.config import RunConfig

Device = Literal["cpu", "v100", "a100", "h100", "h200", "b200", "gb200"]


@dataclass(frozen=True)
class DryrunConfig:
    """A dry run of a step."""

    ranks: str = "first,middle,last"
    """Which ranks of the world to run as: first, middle, last, or numbers, separated by commas."""
    device: Device = "h100"
    """Whose kernels are chosen. None need be here."""
    exact: bool = False
    """Run every microbatch of the step, and not the steady state of the pipeline once."""
    max_load: float = 1.0
    """Rows that the experts of each rank get, over those of a router that sends equally many to
    all.
    """
    json: str | None = None
    """File to write what was counted to."""

    def __post_init__(self):
        refuse_empty("json", self.json)
        if not 0 < self.max_load <= 1e6:
            raise ValueError(
                f"max-load is {self.max_load:g}: it must be above 0, and 1 where all experts get "
                "equally many rows"
            )


@dataclass(frozen=True)
class DryrunRequest:
    """A dry run of a run."""

    run: RunConfig
    asked: DryrunConfig


def ranks_of(text: str, world: int) -> list[int]:
    """The ranks of a world of so many that a list names, each once, in its order. Raises
    ValueError.
    """
    named = {"first": 0, "middle": world // 2, "last": world - 1}
    found: list[int] = []
    for word in (word.strip() for word in text.split(",")):
        if word not in named and not (word.isascii() and word.isdigit() and len(word) < 10):
            raise ValueError(
                f"--ranks has {word[:40]!r}: give first, middle, last or numbers, such as "
                "--ranks first,last or --ranks 0,8"
            )
        rank = named[word] if word in named else int(word)
        if rank >= world:
            raise ValueError(
                f"--ranks has {rank}, but the layout has {world} ranks: give numbers of 0 to "
                f"{world - 1}"
            )
        found += [rank] if rank not in found else []
    return found
