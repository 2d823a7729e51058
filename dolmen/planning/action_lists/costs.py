"""Times of a pipeline's actions, as a file has them:

    {"forward": [1.0, 1.2, 1.2, 1.6], "input": 1.1, "weight": 0.8, "send": 0.05}

A number is of all layers of a rank, as on the command line, and a list as long as there are ranks
has that of each; one as long as there are stages has the time of each stage by itself, from the
first to the last. Without `input` and `weight` a backward is only done whole, and without
`backward` only in parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dolmen.core.messages import counted
from dolmen.files import gate, kinds
from dolmen.parallel.actions import Schedule
from dolmen.parallel.schedule import Cost

Times = float | list[float]
HOW = {True: ("input", "weight"), False: ("backward",)}


@dataclass(frozen=True)
class Costs:
    name: str
    """Whence they are, for messages."""
    times: Mapping[str, Times]

    @property
    def ways(self) -> list[bool]:
        """Whether a backward may be split, and whether it may be whole."""
        return [splits for splits, names in HOW.items() if set(names) <= set(self.times)]

    def of_stages(self, shape: Schedule) -> tuple[Cost, ...]:
        """Of each stage by itself; what is not said of a backward is the sum of its parts, or the
        half of it. Raises ValueError for a list of another length.
        """
        found = {name: self._stages(name, times, shape) for name, times in self.times.items()}
        if True not in self.ways:
            found |= {part: [time / 2 for time in found["backward"]] for part in HOW[True]}
        if False not in self.ways:
            pairs = zip(found["input"], found["weight"], strict=True)
            found["backward"] = [input_ + weight for input_, weight in pairs]
        found.setdefault("send", [0.0] * shape.stages)
        return tuple(
            Cost(**{name: times[stage] for name, times in found.items()})
            for stage in range(shape.stages)
        )

    def _stages(self, name: str, times: Times, shape: Schedule) -> list[float]:
        share = 1 if name == "send" else shape.chunks  # a send is as long from any chunk
        match times:
            case list() if len(times) == shape.stages:
                return times
            case list() if len(times) == shape.ranks:
                return [times[shape.rank_of(stage)] / share for stage in range(shape.stages)]
            case list():
                lengths = sorted({shape.ranks, shape.stages})
                raise gate.refuse(
                    self.name,
                    f"{name} has {counted(len(times), 'time')}, and there are "
                    f"{counted(shape.ranks, 'rank')} and {counted(shape.stages, 'stage')}: give "
                    f"one number, or {' or '.join(map(str, lengths))}",
                )
            case _:
                return [times / share] * shape.stages


def from_file(path: str) -> Costs:
    """The times of a JSON file. Raises Refused."""
    times = gate.read_json(path, kinds.COSTS)
    if not {"backward", "input"} & set(times):
        raise gate.refuse(
            path, "has no time of a backward: give backward, or input and weight, or all three"
        )
    return Costs(path, times)
