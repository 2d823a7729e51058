"""Pipeline schedules: bubbles and memory against the papers' closed forms, lists that must be
refused, and files.
"""

import graphlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from dolmen.parallel import simulation as module
from dolmen.parallel.schedule import Action, Schedule, format_schedule, parse_schedule
from dolmen.parallel.simulation import (
    SCHEDULES,
    Cost,
    check_schedule,
    closed_form,
    make_schedule,
    read_schedule,
    simulate,
    simulate_stages,
)

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 8, 12, 16, 24)]
COSTS = (Cost(), Cost(1, 2.2, 1.3, 0.9), Cost(3, 5, 3, 2), Cost(1, 1, 0.5, 0.5))
CHUNKS = {"interleaved": (2, 3, 4), "zero-bubble-v": (2,)}


def every():
    """All named schedules of all sizes that they take."""
    for name in SCHEDULES:
        for p, m in SIZES:
            for v in CHUNKS.get(name, (1,)):
                if name != "interleaved" or m % p == 0:
                    yield make_schedule(name, p, m, v)


def idle(name: str, p: int, m: int, v: int, f: float, b: float, i: float, w: float) -> float:
    """2104.04473 2.2 and 2401.10241 (ZB-H1, for m >= p), written down a second time."""
    return {
        "gpipe": (p - 1) * (f + b),
        "1f1b": (p - 1) * (f + b),
        "interleaved": (p - 1) * (f + b) / v,
        "zero-bubble": (p - 1) * (f + i - w),
    }[name]


def peaks(s: Schedule) -> list[float]:
    """Microbatches held at most by each rank, where the pattern has room to show (m >= 2 p)."""
    p, m, v = s.ranks, s.micros, s.chunks
    return [
        {
            "gpipe": m,
            "1f1b": p - r,
            "interleaved": min(2 * (p - r - 1) + (v - 1) * p + 1, m * v) / v,
            "zero-bubble": p,
            "zero-bubble-v": p,
        }[s.name]
        for r in range(p)
    ]


def test_all_are_whole_and_run_to_their_end():
    for schedule in every():
        check_schedule(schedule)
        assert schedule.splits_backward == schedule.name.startswith("zero")
        assert [
            schedule.stage_of(schedule.rank_of(s), schedule.chunk_of(s))
            for s in range(schedule.stages)
        ] == list(range(schedule.stages))


def test_bubbles_are_the_closed_forms():
    seen = set()
    for schedule in every():
        for cost in COSTS:
            found, want = simulate(schedule, cost), closed_form(schedule, cost)
            if want is None:
                continue
            seen.add((schedule.name, cost))
            assert [found.span - busy for busy in found.busy] == pytest.approx(
                [want] * schedule.ranks
            ), (schedule.name, schedule.ranks, schedule.micros, cost)
            assert found.ratio == pytest.approx(
                want / found.busy[0]
            ) and found.bubble == pytest.approx(want / found.span)
            if schedule.name != "zero-bubble-v" and schedule.micros >= schedule.ranks:
                assert want == pytest.approx(
                    idle(schedule.name, schedule.ranks, schedule.micros, schedule.chunks, *cost[:4])
                )
    # zero-bubble-v: only where F, I and W take the same time
    assert len(seen) == 4 * len(COSTS) + 1


def test_ratios_of_the_paper():
    """(p - 1) / m, (p - 1) / (v m) of working time."""
    for p, m, v in ((4, 8, 2), (8, 32, 4), (2, 6, 3)):
        assert (
            simulate(make_schedule("gpipe", p, m)).ratio
            == pytest.approx((p - 1) / m)
            == simulate(make_schedule("1f1b", p, m)).ratio
        )
        assert simulate(make_schedule("interleaved", p, m, v)).ratio == pytest.approx(
            (p - 1) / m / v
        )
        assert simulate(make_schedule("zero-bubble", p, m)).ratio == pytest.approx((p - 1) / m / 3)


def test_peaks_are_the_closed_forms():
    for schedule in every():
        if schedule.micros >= 2 * schedule.ranks:
            assert simulate(schedule).peak == pytest.approx(peaks(schedule))
        assert max(simulate(schedule).peak) <= schedule.micros
    assert simulate(make_schedule("1f1b", 8, 3)).peak == (3, 3, 3, 3, 3, 3, 2, 1)


def test_zero_bubble_v_idles_only_at_its_two_ends():
    for p in (2, 4, 8):
        s = make_schedule("zero-bubble-v", p, 2 * p, 2)
        assert all(
            times[-1][1] - times[0][0] == pytest.approx(busy)
            for times, busy in zip(simulate(s).times, simulate(s).busy, strict=True)
        )
        assert (
            s.rank_of(0) == s.rank_of(2 * p - 1) == 0 and s.rank_of(p - 1) == s.rank_of(p) == p - 1
        )


def test_an_action_starts_when_it_may_and_not_later():
    """At the latest of: the end of the rank's action before, the arrivals of what it waits for. The
    dependencies are written down a second time.
    """
    for name, v in (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble-v", 2)):
        s, cost = make_schedule(name, 4, 8, v), Cost(1, 2, 1.2, 0.7, 0.25)
        out = simulate(s, cost)
        at = {
            (a.kind.replace("B", "I"), a.micro, s.stage_of(r, a.chunk)): t
            for r in range(4)
            for a, t in zip(s.actions[r], out.times[r], strict=True)
        }
        for rank, actions in enumerate(s.actions):
            free = 0.0
            for action, (start, end) in zip(actions, out.times[rank], strict=True):
                kind = action.kind.replace("B", "I")
                micro = action.micro
                stage = s.stage_of(rank, action.chunk)
                before = {
                    "F": [("F", micro, stage - 1)],
                    "I": [("F", micro, stage), ("I", micro, stage + 1)],
                    "W": [("I", micro, stage)],
                }[kind]
                arrived = [
                    at[b][1] + (0.25 if s.rank_of(b[2]) != rank else 0)
                    for b in before
                    if 0 <= b[2] < s.stages
                ]
                assert start == pytest.approx(max([free, *arrived])), (name, rank, action)
                assert end - start == pytest.approx(
                    {"F": 1, "B": 2, "I": 1.2, "W": 0.7}[action.kind] / v
                )
                free = end


def test_stages_take_their_own_times():
    """By hand: F0 ends at 1 and arrives at 1.5; rank 1 is busy until 11.5, and what it
    sends takes a quarter.
    """
    costs = (Cost(1, 2, send=0.5), Cost(2, 3, send=0.25))
    found = simulate_stages(make_schedule("1f1b", 2, 2), costs)
    assert found.times == (
        ((0, 1), (1, 2), (6.75, 8.75), (11.75, 13.75)),
        ((1.5, 3.5), (3.5, 6.5), (6.5, 8.5), (8.5, 11.5)),
    )
    assert found.span == 13.75 and found.busy == (6, 10)


def bad(edit, name: str = "1f1b", p: int = 2, m: int = 2) -> str:
    """What `check_schedule` says of a schedule after `edit` of its lists."""
    s = make_schedule(name, p, m)
    lists = [list(actions) for actions in s.actions]
    edit(lists)
    with pytest.raises(ValueError) as error:
        check_schedule(replace(s, actions=tuple(map(tuple, lists))))
    return str(error.value)


def test_bad_lists_are_refused():
    assert "rank 1 has F0 twice" in bad(lambda a: a[1].append(Action("F", 0)))
    assert "rank 1 is missing B1" in bad(lambda a: a[1].remove(Action("B", 1)))
    assert "rank 0 is missing F0" in bad(lambda a: a[0].remove(Action("F", 0)))
    assert "rank 0 is missing W1" in bad(lambda a: a[0].remove(Action("W", 1)), "zero-bubble")
    assert "rank 0 is missing I1" in bad(lambda a: a[0].remove(Action("I", 1)), "zero-bubble")
    assert "rank 0 has B1 both as a whole and in parts" in bad(
        lambda a: a[0].append(Action("W", 1))
    )
    assert "rank 0 has F2, which is outside of 2 microbatches and 1 chunks" in bad(
        lambda a: a[0].append(Action("F", 2))
    )
    assert "rank 0 has F0.1" in bad(lambda a: a[0].append(Action("F", 0, 1)))
    assert "rank 0 has X0" in bad(lambda a: a[0].append(Action("X", 0)))
    assert "1 lists of actions for 2 ranks" in bad(lambda a: a.pop())
    with pytest.raises(ValueError, match="placement 'v' and 1 chunks"):
        check_schedule(replace(make_schedule("1f1b", 2, 2), placement="v"))


def test_deadlocks_are_refused_by_name():
    assert bad(lambda a: a[1].reverse()) == (
        "1f1b deadlocks: rank 0 is blocked at B0, waiting for B0 of rank 1; rank 1 is blocked at "
        "B1, waiting for F1 of rank 1"
    )
    assert "rank 0 is blocked at W0, waiting for I0 of rank 0" in bad(
        lambda a: (a[0].remove(Action("W", 0)), a[0].insert(0, Action("W", 0))), "zero-bubble"
    )
    crossed = "F0 B0 F1 B1\nF1 F0 B0 B1\n"
    with pytest.raises(
        ValueError,
        match="rank 0 is blocked at B0, waiting for B0 of rank 1; rank 1 is blocked at F1, "
        "waiting for F1 of rank 0",
    ):
        check_schedule(parse_schedule(crossed, "crossed"))


def runs(s: Schedule) -> bool:
    """Whether lists and dependencies together make no circle: what `check_schedule` must find, by
    another way.
    """
    graph = graphlib.TopologicalSorter()
    for rank, actions in enumerate(s.actions):
        nodes = [(a.kind, a.micro, s.stage_of(rank, a.chunk)) for a in actions]
        for one, two in zip(nodes, nodes[1:], strict=False):
            graph.add(two, one)
        for kind, micro, stage in nodes:
            before = {
                "F": [("F", micro, stage - 1)],
                "I": [("F", micro, stage), ("I", micro, stage + 1)],
                "W": [("I", micro, stage)],
            }[kind]
            graph.add((kind, micro, stage), *(b for b in before if 0 <= b[2] < s.stages))
    try:
        graph.prepare()
    except graphlib.CycleError:
        return False
    return True


@pytest.mark.parametrize("name, v", (("zero-bubble", 1), ("zero-bubble-v", 2)))
def test_deadlocks_are_exactly_the_circles(name, v):
    """Lists with some neighbours exchanged at random: many run, many do not."""
    chance, found = random.Random(0), []
    for _ in range(300):
        s = make_schedule(name, 3, 4, v)
        lists = [list(actions) for actions in s.actions]
        for _ in range(chance.randint(1, 8)):
            one = chance.choice(lists)
            at = chance.randrange(len(one) - 1)
            one[at], one[at + 1] = one[at + 1], one[at]
        s = replace(s, actions=tuple(map(tuple, lists)))
        found.append(runs(s))
        if found[-1]:
            check_schedule(s)
        else:
            with pytest.raises(ValueError, match="deadlocks: rank"):
                check_schedule(s)
    assert 30 < sum(found) < 270


@pytest.mark.parametrize(
    "words, want",
    (
        (
            ("interleaved", 4, 6, 2),
            r"groups of pp \(4\), but 6 .*--train.global-batch-size, --train.microbatch-size or "
            r"--layout.pp",
        ),
        (("interleaved", 4, 8, 1), "--layout.virtual-stages 2"),
        (("zero-bubble-v", 4, 8, 3), "--layout.virtual-stages 2"),
        (("1f1b", 4, 8, 2), "--layout.virtual-stages 1"),
        (("gpipe", 4, 8, 2), "--layout.virtual-stages 1"),
        (("zero-bubble", 4, 8, 2), "--layout.virtual-stages 1"),
        (("2f2b", 4, 8, 1), "gpipe, 1f1b, interleaved, zero-bubble, zero-bubble-v"),
    ),
)
def test_what_cannot_be_made(words, want):
    with pytest.raises(ValueError, match=want):
        make_schedule(*words)


def test_a_file_goes_round(tmp_path):
    for number, s in enumerate(every()):
        assert parse_schedule(format_schedule(s), s.name) == s
        if number % 20:
            continue
        file = tmp_path / f"{number}.txt"
        file.write_text("# mine\n\n" + format_schedule(s))
        assert make_schedule(str(file), s.ranks, s.micros, s.chunks) == replace(s, name=str(file))


def test_a_file_may_be_yaml(tmp_path):
    text = "placement: v     # down and up\nactions:\n" + "".join(
        f"- {line}\n"
        for line in format_schedule(make_schedule("zero-bubble-v", 2, 4, 2)).splitlines()[1:]
    )
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert (
        make_schedule(str(file), 2, 4, 2).actions == make_schedule("zero-bubble-v", 2, 4, 2).actions
    )
    file.write_text(yaml.safe_dump(yaml.safe_load(text), default_flow_style=True))
    assert (
        make_schedule(str(file), 2, 4, 2).actions == make_schedule("zero-bubble-v", 2, 4, 2).actions
    )


@pytest.mark.parametrize(
    "text",
    (
        "actions: [F0 B0, 3]",
        "actions: F0 B0",
        "- F0 B0",
        "actions: [F0 B0]\nplace: v",
        "",
        "{",
        "&a [*a]",
    ),
)
def test_yaml_of_another_shape_is_refused(tmp_path, text):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match="mine.yaml: .*(actions|a field|a mapping|not valid YAML)"):
        make_schedule(str(tmp_path / "mine.yaml"), 1, 1)


@pytest.mark.parametrize(
    "text, want",
    (
        ("F0 B0\nF0 B0 G1\n", "line 2: 'G1' is not an action"),
        ("F0 F1 B0 B1\nF0 B0\n", "rank 1 is missing F1"),
        ("F0 F999999999 B0", "is missing B999999999|is missing F1"),
        ("# nothing\n", "no line of actions"),
        ("placement: w\nF0 B0\n", "placement 'w'"),
        ("F0 B0.1", "is missing B0|is missing F0.1"),
        ("F0x B0", "'F0x' is not an action"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ),
)
def test_a_wrong_file_is_refused(tmp_path, text, want):
    file = tmp_path / "mine.txt"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=want):
        read_schedule(str(file))


def test_a_file_of_other_sizes_or_none_is_refused(tmp_path):
    """Sizes are looked at first: to check a huge file takes long."""
    file = tmp_path / "mine.txt"
    file.write_text("F0 F1 B0 B1\n")
    with pytest.raises(
        ValueError,
        match="is for pp 1, 2 microbatches and 1 virtual stage, but the run has 2, 2 and 1",
    ):
        make_schedule(str(file), 2, 2)
    with pytest.raises(ValueError, match="no schedule file"):
        make_schedule(str(tmp_path / "other.txt"), 2, 2)
    os.mkfifo(tmp_path / "pipe.txt")  # to open it would wait for ever
    with pytest.raises(ValueError, match="no schedule file"):
        make_schedule(str(tmp_path / "pipe.txt"), 2, 2)


def test_actions_in_words():
    assert [str(a) for a in (Action("F", 3), Action("W", 12, 1))] == ["F3", "W12.1"]
    assert parse_schedule("F0.0 F0.1 B0.1 B0", "x").actions == (
        (Action("F", 0), Action("F", 0, 1), Action("B", 0, 1), Action("B", 0)),
    )


def test_knows_nothing_of_torch():
    assert "import torch" not in Path(module.__file__).read_text()
