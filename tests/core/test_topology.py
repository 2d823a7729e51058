"""Who is in which group, against a grid of ranks that numpy cuts, and at the size of clusters."""

from itertools import product

import numpy
import pytest

from dolmen.core.topology import Topology

AXES = ("pp", "dp", "cp", "tp", "fsdp", "edp", "ep")


def lines(topology: Topology, axis: str) -> set[tuple[int, ...]]:
    """Every line along `axis` of the written-out grid."""
    grid = next(grid for grid in topology.grids if axis in grid)
    ranks = numpy.arange(topology.size).reshape(*grid.values())
    moved = numpy.moveaxis(ranks, list(grid).index(axis), -1)
    return {tuple(line) for line in moved.reshape(-1, grid[axis]).tolist()}


@pytest.mark.parametrize("axis", AXES)
def test_groups_are_the_lines_of_the_grid(axis):
    for pp, dp, cp, tp in product((1, 2, 3), repeat=4):
        for ep in (n for n in range(1, dp * cp + 1) if dp * cp % n == 0):
            topology = Topology(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
            groups = topology.groups(axis)
            assert {tuple(group) for group in groups} == lines(topology, axis)
            assert sorted(rank for group in groups for rank in group) == list(range(topology.size))
            for rank in range(topology.size):
                assert topology.group(axis, rank)[topology.index(axis, rank)] == rank


def test_the_order_of_ranks():
    """Tensor parallelism is innermost, pipeline stages are outermost."""
    topology = Topology(dp=2, tp=3, pp=2, cp=2, ep=2)
    assert topology.size == 24
    assert list(topology.group("tp", 7)) == [6, 7, 8]
    assert list(topology.group("cp", 7)) == [7, 10]
    assert list(topology.group("dp", 7)) == [1, 7]
    assert list(topology.group("pp", 7)) == [7, 19]
    assert list(topology.group("fsdp", 7)) == [1, 4, 7, 10]
    assert list(topology.group("ep", 7)) == [7, 10]
    assert list(topology.group("edp", 7)) == [1, 7]
    assert topology.stage(7) == range(12) and topology.stage(19) == range(12, 24)
    assert topology.ends(7) == topology.ends(19) == (7, 19)


@pytest.mark.parametrize("world", [3072, pytest.param(24576, marks=pytest.mark.full)])
def test_every_group_of_a_cluster(world):
    """A matter of arithmetic: 0.4 s for both."""
    topology = Topology(dp=world // 512, tp=8, pp=64, ep=world // 512)
    for axis in AXES:
        groups = topology.groups(axis)
        assert len(groups) * len(groups[0]) == world
        assert {len(group) for group in groups} == {len(groups[0])}


def test_what_does_not_divide_is_refused_with_the_knob():
    with pytest.raises(ValueError, match=r"layout.ep \(4\) does not divide dp x cp \(2 x 3\)"):
        Topology(dp=2, cp=3, ep=4)
    with pytest.raises(ValueError, match=r"= 12 processes, but 8 were started: set --layout.dp 1"):
        Topology(dp=2, cp=3, tp=2).require(8)
    Topology(dp=2, cp=3, tp=2).require(12)
