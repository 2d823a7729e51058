"""Who is in which group: the arithmetic of any world, without processes, devices or
torch. `Mesh` is a topology with groups made of it.

Who talks most is innermost: tp inside a machine, pp, which sends least, across them:

    rank = ((pp_rank * dp + dp_rank) * cp + cp_rank) * tp + tp_rank

    pp=1, dp=2, cp=1, tp=3:     tp ->   0  1  2
                                dp |    3  4  5

Three axes are derived and add no ranks. The dp x cp ranks of a stage share each parameter, so they
are one axis, `fsdp`; for experts the same ranks are cut again, `edp` x `ep` with ep inner: each of
ep holds other experts, which edp shares.

    pp   dp   cp   tp
    pp   fsdp      tp
    pp   edp  ep   tp

Along an axis the ranks of a group lie at equal distances, so a group is a `range`.
"""

import math
from dataclasses import dataclass

from dolmen.core.messages import plural


@dataclass(frozen=True)
class Topology:
    """A world of pp x dp x cp x tp ranks. Raises ValueError where ep does not divide dp x cp."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    def __post_init__(self):
        """Raise ValueError where ep does not divide dp x cp."""
        if self.dp * self.cp % self.ep:
            raise ValueError(
                f"layout.ep ({self.ep}) does not divide dp x cp ({self.dp} x {self.cp}): set "
                f"--layout.ep to a divisor"
            )

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.pp * self.dp * self.cp * self.tp

    def require(self, ranks: int) -> None:
        """Raise ValueError, with the dp that would fit, unless the world has exactly
        `ranks` ranks.
        """
        if self.size != ranks:
            model_ranks = self.pp * self.cp * self.tp
            raise ValueError(
                f"layout.pp ({self.pp}) x layout.dp ({self.dp}) x layout.cp ({self.cp}) x "
                f"layout.tp ({self.tp}) = {plural(self.size, 'process', 'processes')}, but "
                f"{ranks} were started: set --layout.dp {max(1, ranks // model_ranks)}"
            )

    @property
    def grids(self) -> tuple[dict[str, int], ...]:
        """The world as a grid of axes in three ways, each from axis to size, outermost first: pp x
        dp x cp x tp, pp x fsdp x tp and pp x edp x ep x tp.
        """
        fsdp = self.dp * self.cp
        return (
            {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp},
            {"pp": self.pp, "fsdp": fsdp, "tp": self.tp},
            {"pp": self.pp, "edp": fsdp // self.ep, "ep": self.ep, "tp": self.tp},
        )

    def _size_and_distance(self, axis: str) -> tuple[int, int]:
        """Return the size of an axis, and the distance in ranks between neighbours on it."""
        # pp and tp are in all three, at the same distance in each
        grid = next(grid for grid in self.grids if axis in grid)
        names = list(grid)
        inner = names[names.index(axis) + 1 :]
        return grid[axis], math.prod(grid[name] for name in inner)

    def index(self, axis: str, rank: int) -> int:
        """Return the coordinate of `rank` on `axis`."""
        size, distance = self._size_and_distance(axis)
        # the coordinate is a digit of the rank in mixed radix
        return rank // distance % size

    def group(self, axis: str, rank: int) -> range:
        """Return the ranks of the group along `axis` that contains `rank`, in order."""
        size, distance = self._size_and_distance(axis)
        # the rank with coordinate 0 and all others equal
        first = rank - rank // distance % size * distance
        return range(first, first + size * distance, distance)

    def groups(self, axis: str) -> list[range]:
        """Return every group along `axis`, as ranges of ranks; each rank is in one of them."""
        _, distance = self._size_and_distance(axis)
        return [self.group(axis, rank) for rank in range(self.size) if not self.index(axis, rank)]

    def stage(self, rank: int) -> range:
        """Return the ranks that hold the same pipeline stage as `rank`."""
        inner = self.size // self.pp
        return range(rank // inner * inner, (rank // inner + 1) * inner)

    def ends(self, rank: int) -> tuple[int, int]:
        """Return the ranks of the first and the last pipeline stage, with `rank`'s coordinates on
        all other axes.
        """
        line = self.group("pp", rank)
        return line[0], line[-1]
