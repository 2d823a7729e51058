"""What is said when ranks differ; two hosts that really do: tests/cli/test_two_hosts.py."""

from pathlib import Path

import pytest

from dolmen.core import consensus
from dolmen.core.config import flatten


@pytest.fixture
def world(monkeypatch):
    """check() of rank 0 in a world of ranks with these (host, facts)."""

    def world(*ranks: tuple[str, dict]):
        answers = iter([[str(facts) for _, facts in ranks], list(ranks)])
        monkeypatch.setattr(consensus, "gather_objects", lambda mine: next(answers))
        consensus.require_same(ranks[0][1])

    return world


def test_equal_ranks_pass(world):
    world(("a", {"lr": 1}), ("b", {"lr": 1}))


def test_ranks_that_differ_alike_are_told_together(world):
    with pytest.raises(ValueError) as raised:
        world(
            ("a", {"lr": 1}),
            ("a", {"lr": 1}),
            ("b", {"lr": 2}),
            ("b", {"lr": 2}),
            ("c", {"lr": 1, "code x.py": "f00"}),
        )
    lines = [line.strip() for line in str(raised.value).splitlines()]
    assert lines[0] == "the ranks do not agree on what to do; compared with rank 0 on a,"
    assert lines[1:3] == [
        "rank 2, 3 on b: lr 2, here 1",
        "rank 4 on c: code x.py f00, here absent",
    ] and lines[3].startswith("give every host the same")


def test_many_differences_are_cut(world):
    with pytest.raises(ValueError, match="and 4 more"):
        world(("a", {f"n{i}": 0 for i in range(10)}), ("b", {f"n{i}": 1 for i in range(10)}))


def test_what_one_rank_refuses_is_every_ranks(monkeypatch):
    """The first that has a reason gives it; and whoever else fails is not waited for."""
    heard = []

    def each(work, *others):
        def gathered(mine):
            heard.append(mine)
            return [mine, *others]

        monkeypatch.setattr(consensus, "gather_objects", gathered)
        return consensus.run_on_all_ranks(work)

    def refuse():
        raise ValueError("mine")

    def fail():
        raise KeyError("here")

    assert each(lambda: 3, None, None) == 3
    with pytest.raises(ValueError, match="^theirs$"):
        each(lambda: 3, None, "theirs", "last")
    with pytest.raises(ValueError, match="^mine$"):
        each(refuse, "theirs")
    monkeypatch.setattr(consensus.dist, "get_rank", lambda: 0)
    with pytest.raises(KeyError, match="here"):
        each(fail, None)
    assert heard == [None, None, "mine", "rank 0 failed: KeyError('here')"]


def test_code_changes_with_a_file(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.py").write_text("1")
    before = consensus.hash_sources(tmp_path)
    (tmp_path / "deep" / "a.py").write_text("2")
    assert list(before) == ["code deep/a.py"] and consensus.hash_sources(tmp_path) != before


def test_flat():
    assert flatten({"a": {"b": {"c": 1}}, "d": [1], "e": {}}) == {
        "a.b.c": 1,
        "d": [1],
        "e": {},
    }
