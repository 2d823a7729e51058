"""The five schedules that have a name, each for any number of ranks and microbatches.
docs/pipeline.md draws them, and says which is for what.

GPipe is 1811.06965, 1F1B and its interleaved form 2104.04473, the split of B into I and W and both
zero-bubble schedules 2401.10241.
"""

from collections.abc import Iterator

from dolmen.parallel.actions import Action, Schedule


def gpipe(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards: every microbatch is held at once."""
    _single("gpipe", chunks)
    one = tuple(Action(kind, micro) for kind in "FB" for micro in range(micros))
    return Schedule("gpipe", ranks, micros, 1, (one,) * ranks)


def one_f_one_b(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """As many forwards as it takes for the first to come back, then one forward, one backward: rank
    r holds ranks - r microbatches.
    """
    _single("1f1b", chunks)
    return Schedule(
        "1f1b",
        ranks,
        micros,
        1,
        tuple(
            tuple(
                _alternate(
                    [Action("F", m) for m in range(micros)],
                    [Action("B", m) for m in range(micros)],
                    ranks - r - 1,
                )
            )
            for r in range(ranks)
        ),
    )


def interleaved(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` thin stages per rank: filling and draining take 1 / chunks of the time,
    sends are `chunks` times as many. Units go in groups of `ranks` microbatches through chunk 0,
    then chunk 1, ..., so `micros` must be a multiple of `ranks`. Raises ValueError where it is not,
    and for one chunk.
    """
    if chunks < 2:
        raise ValueError(
            f"interleaved has several virtual stages per rank, not {chunks}: use "
            f"--layout.virtual-stages 2, or 1f1b"
        )
    if micros % ranks:
        raise ValueError(
            f"interleaved takes microbatches in groups of pp ({ranks}), and {micros} is not a "
            "multiple: change --train.global-batch-size, --train.microbatch-size or --layout.pp"
        )
    order = [
        (group + m, c)
        for group in range(0, micros, ranks)
        for c in range(chunks)
        for m in range(ranks)
    ]
    forward = [Action("F", m, c) for m, c in order]
    backward = [Action("B", m, chunks - 1 - c) for m, c in order]
    return Schedule(
        "interleaved",
        ranks,
        micros,
        chunks,
        tuple(
            tuple(_alternate(forward, backward, 2 * (ranks - r - 1) + (chunks - 1) * ranks))
            for r in range(ranks)
        ),
    )


def zero_bubble(ranks: int, micros: int, chunks: int = 1) -> Schedule:
    """ZB-H1: 1F1B whose backward is split. Earlier stages get I a W sooner, and rank r is r weights
    behind, which it does while it drains: so every rank holds `ranks` microbatches until their W,
    what the first rank of 1F1B holds.
    """
    _single("zero-bubble", chunks)

    # 1F1B's list, its B replaced by I, and the W of the microbatch `rank` places behind after it.
    # While a rank drains it has as many W left as it has places to fill: r of them.
    lists = one_f_one_b(ranks, micros).actions

    def one(rank: int) -> Iterator[Action]:
        for action in lists[rank]:
            if action.kind == "F":
                yield action
            else:
                yield Action("I", action.micro)
                if action.micro >= rank:
                    yield Action("W", action.micro - rank)
        for micro in range(max(0, micros - rank), micros):
            yield Action("W", micro)

    return Schedule("zero-bubble", ranks, micros, 1, tuple(tuple(one(r)) for r in range(ranks)))


def zero_bubble_v(ranks: int, micros: int, chunks: int = 2) -> Schedule:
    """ZB-V: two chunks per rank, down the ranks and up again, so the loss is on rank 0 and no rank
    waits for its first backward longer than another. No bubble but the skewed start when F, I and W
    take the same time; every rank holds at most `ranks` microbatches. Raises ValueError for other
    `chunks`.
    """
    if chunks != 2:
        raise ValueError(
            f"zero-bubble-v has 2 virtual stages per rank, not {chunks}: use "
            f"--layout.virtual-stages 2"
        )
    # the pattern needs that many; leaving some out of it breaks no dependency
    whole = max(micros, 2 * ranks - 1)
    return Schedule(
        "zero-bubble-v",
        ranks,
        micros,
        2,
        tuple(
            tuple(a for a in _v_shape(rank, ranks, whole) if a.micro < micros)
            for rank in range(ranks)
        ),
        "v",
    )


def _v_shape(rank: int, ranks: int, micros: int) -> list[Action]:
    """The list of one rank. Chunk 0 goes down the p ranks, chunk 1 up again: microbatch 0 is back
    at rank r after 2 (p - r) - 1 forwards, and so many of chunk 0 fill the time until then. With
    p = 2, and one unit of time for each of F, I and W:

        rank 0 | F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3 I0 W0 ...
        rank 1 |    F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 ...

    From then on a rank does as many backwards as forwards, so it holds p microbatches at most.
    """
    out, next_ = [], {kind + chunk: 0 for kind in "FIW" for chunk in "01"}

    def do(*what: str) -> None:
        for name in what:
            out.append(Action(name[0], next_[name], int(name[1])))
            next_[name] += 1

    # filling: until microbatch 0 has gone down to the last rank and come up again
    for _ in range(2 * (ranks - rank) - 1):
        do("F0")
    # both ways in turn, until its gradient has come back from rank 0
    for _ in range(rank):
        do("F1", "F0")
    # nothing new comes in, for p microbatches are held: W at once, to let one go
    for _ in range(ranks - rank):
        do("F1", "I1", "W1")
    # steady: each of the six once per microbatch; F0 ends first
    while next_["F1"] < micros:
        do(*["F0"] * (next_["F0"] < micros), "I0", "W0", "F1", "I1", "W1")
    # draining: input gradients first, as other ranks wait for them, and weights into the gaps
    for _ in range(rank):
        do("I0", "I1")
    for _ in range(ranks - rank):
        do("I0", "W0")
    for chunk in "10":
        do(*["W" + chunk] * (micros - next_["W" + chunk]))
    return out


def _alternate(forward: list[Action], backward: list[Action], warm: int) -> Iterator[Action]:
    """`warm` forwards, then a forward and a backward in turn, then what is left of the
    backwards.
    """
    warm = min(warm, len(forward))
    yield from forward[:warm]
    for pair in zip(forward[warm:], backward, strict=False):
        yield from pair
    yield from backward[len(forward) - warm :]


def _single(name: str, chunks: int) -> None:
    if chunks != 1:
        raise ValueError(
            f"{name} has one stage per rank, not {chunks}: use --layout.virtual-stages 1, or "
            f"interleaved"
        )


SCHEDULES = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
    "zero-bubble-v": zero_bubble_v,
}
