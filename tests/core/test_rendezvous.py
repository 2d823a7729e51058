"""Ranks that meet in a store where the dead have left their names."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dolmen.launch.rendezvous import meet


def together(store: dist.Store, size: int) -> list[dist.Store]:
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: meet(store, rank, size, 20), range(size)))


def test_each_start_has_its_own_part():
    store = dist.HashStore()
    for _ in range(3):
        parts = together(store, 3)
        assert not parts[0].check(["left"])
        parts[1].set("left", "by this start")
        assert parts[2].get("left") == b"by this start"


def test_names_of_the_dead_are_not_taken_for_the_living():
    store = dist.HashStore()
    for rank in (1, 2):
        store.set(f"here/{rank}", "a process that died before it was answered")
    first, second, third = together(store, 3)
    first.set("key", "value")
    assert second.get("key") == third.get("key") == b"value"


def test_who_does_not_come_is_named():
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks have not joined, e.g. \[1\]"):
        meet(dist.HashStore(), 0, 2, 0.1)
