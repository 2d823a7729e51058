"""Seeds are told apart by all of their names, and by where one ends and the next begins."""

from itertools import permutations

from dolmen.core.determinism import seed_of


def test_names_of_a_seed_are_told_apart():
    names = [(1, 11), (11, 1), (1, 1, 1), (111,), (1, "a"), ("1a",), (0, "a", 0), ("a",), (0,)]
    names += permutations((1, "window", 2, 3))
    seeds = {seed_of(*n) for n in names}
    assert len(seeds) == len(names)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_of(1, "a") == seed_of("1", "a")  # a number is its digits
