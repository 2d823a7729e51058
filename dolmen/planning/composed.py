"""A ledger put together of what was run once: every action of a rank's schedule is one that a small
run has done, on stages whose like neighbours stand for as many more.

    blocks of a stage     A A A A A A A A B B     of more than 3 equal neighbours 3 are run, and
    those that are run    A A A           B B     the second stands for those that are left out

An action is known by what it does and by what is held when it comes (`Context`); the smallest
pipeline whose one rank has all contexts of ours is run in place of ours. Bytes are kept as
differences, of a row to the one before, so that they add up in any order of actions. What follows
the last action knows of no layer: of it, and of what is held at rest, one layer more is run, and
the difference multiplied.

Pieces are kept on disk under a hash of the code and of all that they depend on. Whole stages are
run in fp8, where layers differ by their number. All is run where that is not yet known to be exact:
where backward is split, with experts, in a pipeline of ZeRO 3, and on a CPU, over whose gloo what
is sent is held until its receiver has sent something back.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dolmen.model.layout import balance
from dolmen.model.tree import Block, Tree, runs_of
from dolmen.ops.kernels import H100, KNOWN, Hardware
from dolmen.parallel.actions import Schedule
from dolmen.planning.config import DryrunRequest, ranks_of
from dolmen.planning.contexts import contexts, smallest, text_of
from dolmen.planning.dry_report import Report
from dolmen.planning.dryrun import dryrun, of_ranks
from dolmen.planning.hardware import measured_at
from dolmen.planning.ledger import Ledger, Live
from dolmen.planning.pieces import UPDATE, Part, Small, Step, plus
from dolmen.planning.steady import shortened
from dolmen.training.config import RunConfig

MOST = 3
"""Equal neighbours that are run: the middle one has one like it on both sides, as far as FSDP
gathers ahead and frees behind."""


class Kept(NamedTuple):
    """The layers of a stage of the whole model, and those that are run in its place."""

    layers: range
    blocks: tuple[Block, ...]
    """Those that are run."""
    stands: tuple[int, ...]
    """Of each layer, which of `blocks` does what it does."""
    recomputed: int
    """How many of `blocks` compute again."""
    more: tuple[tuple[int, int], ...]
    """(where another block would be put, how many are left out), of each run that is shortened."""


def kept(tree: Tree, layers: range, recomputed: int, shorten: bool) -> Kept:
    """Those of a stage."""
    blocks: list[Block] = []
    stands: list[int] = []
    more: list[tuple[int, int]] = []
    again = 0
    for (block, computed), same in groupby(
        (tree.blocks[layer], i < recomputed) for i, layer in enumerate(layers)
    ):
        number, at = len(list(same)), len(blocks)
        few = min(number, MOST) if shorten else number
        middle = few // 2
        for i in range(number):
            from_end = i - number + few
            stands.append(at + (i if i < middle else max(from_end, middle)))
        if number > few:
            more.append((at + middle, number - few))
        blocks += [block] * few
        again += few * computed
    return Kept(layers, tuple(blocks), tuple(stands), again, tuple(more))


def report(request: DryrunRequest, progress: bool = False) -> Report:
    """`of_ranks`, put together of pieces where that is asked."""
    one = partial(composed, folder=measured_at() / "pieces") if request.asked.composed else dryrun
    return of_ranks(request, progress, one)


def blocks_run(request: DryrunRequest) -> int:
    """How often the dry run of a request runs a block, forward or backward: of what is put together
    of pieces never.
    """
    run, hardware = request.run, KNOWN[request.asked.device]
    if request.asked.composed and can_be_composed(run, hardware):
        return 0
    found = 0
    for rank in ranks_of(request.asked.ranks, run.layout.world):
        schedule = shortened(run, rank, request.asked.exact).schedule
        layers, me = (
            balance(run.tree.layers, schedule.stages),
            rank // (run.layout.world // run.layout.pp),
        )
        found += sum(len(layers[schedule.stage_of(me, a.chunk)]) for a in schedule.actions[me])
    return found


def can_be_composed(run: RunConfig, hardware: Hardware) -> bool:
    """Whether a ledger of pieces is known to be that of the whole step."""
    layout = run.layout
    split = layout.make_schedule(run.train.global_batch_size, run.microbatch_size).splits_backward
    deep = layout.zero == 3 and layout.pp > 1
    return not (hardware.kind == "cpu" or run.tree.experts or split or deep)


def composed(
    run: RunConfig,
    rank: int,
    *,
    folder: Path,
    hardware: Hardware = H100,
    exact: bool = False,
    max_load: float = 1.0,
    observe: Callable[[], None] = lambda: None,
) -> Ledger:
    """The ledger that `dryrun` gives, of pieces that are kept in `folder`. Raises as it does, and
    OSError where nothing can be kept.
    """
    whole = partial(dryrun, run, rank, hardware=hardware, exact=exact, max_load=max_load)
    if not can_be_composed(run, hardware):
        return whole(observe=observe)
    steps = shortened(run, rank, exact)
    schedule, me = steps.schedule, rank // (run.layout.world // run.layout.pp)
    chunks = stages_kept(run, schedule, me)
    base, others = small_runs(run, rank, schedule, chunks, hardware, max_load)
    try:
        piece = base.piece(folder)
        longer = [(other.piece(folder), number) for other, number in others]
    except ValueError:  # a step that would crash: the whole one says where, by its own numbers
        return whole()
    done: list[tuple[str, int, Part]] = []
    for action, context in zip(schedule.actions[me], contexts(schedule, me), strict=True):
        name, start = text_of(context), base.start(context.chunk)
        end = piece.parts[name].end
        for other, number in longer:
            # what is known of a gradient when its action has ended is of every layer
            end = plus(end, plus(other.parts[name].end, piece.parts[name].end, -1), number)
        part = Part(grown(piece.parts[name].steps, chunks[context.chunk], start), end)
        done.append((str(action), steps.times.get(action, 1), part))
        observe()
    rest = piece.rest
    for other, number in longer:
        rest = plus(rest, plus(other.rest, piece.rest, -1), number)
    ends = [(other.parts[UPDATE], number) for other, number in longer]
    done.append((UPDATE, 1, extended(piece.parts[UPDATE], ends)))
    return added_up(rank, rest, done)


def stages_kept(run: RunConfig, schedule: Schedule, rank: int) -> list[Kept]:
    """Of each chunk of a rank of pp."""
    shorten = run.tree.fp8 is None
    stages, again = balance(run.tree.layers, schedule.stages), run.layout.recompute_layers
    found = []
    for chunk in range(schedule.chunks):
        layers = stages[schedule.stage_of(rank, chunk)]
        found.append(kept(run.tree, layers, len(layers) if again is None else again, shorten))
    return found


def small_runs(
    run: RunConfig,
    rank: int,
    schedule: Schedule,
    chunks: Sequence[Kept],
    hardware: Hardware,
    max_load: float,
) -> tuple[Small, list[tuple[Small, int]]]:
    """What is run in place of a rank's step; and with one layer more, of each kind that layers are
    left out of, and of how many.
    """
    per = run.layout.world // run.layout.pp
    pipeline, its_schedule, at = smallest(run, schedule, rank // per)

    def small(chunks: Sequence[Kept]) -> Small:
        tree, stages = _model(run.tree, its_schedule, at, chunks)
        layout = pipeline.layout
        if layout.recompute_layers is not None:
            layout = replace(layout, recompute_layers=max(one.recomputed for one in chunks))
        its = replace(pipeline, layout=layout)
        place = at * per + rank % per
        return Small(its, place, its_schedule, tree, stages, hardware, max_load)

    return small(chunks), [(small(changed), number) for changed, number in one_more(chunks)]


def one_more(chunks: Sequence[Kept]) -> Iterator[tuple[list[Kept], int]]:
    """The stages with one block more of a run that is shortened, and how many are left out of it;
    of each such run.
    """
    for i, one in enumerate(chunks):
        for where, number in one.more:
            blocks = (*one.blocks[:where], one.blocks[where], *one.blocks[where:])
            recomputed = one.recomputed + (where < one.recomputed)
            changed = one._replace(blocks=blocks, recomputed=recomputed)
            yield [*chunks[:i], changed, *chunks[i + 1 :]], number


def _model(
    tree: Tree, schedule: Schedule, rank: int, chunks: Sequence[Kept]
) -> tuple[Tree, tuple[range, ...]]:
    """A model with these stages on this rank, and on another one of each other block that `tree`
    has: they choose the kernels.
    """
    mine = {schedule.stage_of(rank, i): one.blocks for i, one in enumerate(chunks)}
    had = [block for blocks in mine.values() for block in blocks]
    others = [block for block in _each(tree.blocks) if block not in had]
    free = next((stage for stage in range(schedule.stages) if stage not in mine), None)
    blocks: list[Block] = []
    stages: list[range] = []
    for stage in range(schedule.stages):
        here = others if stage == free else mine.get(stage, ())
        stages.append(range(len(blocks), len(blocks) + len(here)))
        blocks += here
    return replace(tree, runs=runs_of(blocks)), tuple(stages)


def _each(blocks: Iterable[Block]) -> list[Block]:
    """Every one once."""
    found: list[Block] = []
    for block in blocks:
        found += [block] if block not in found else []
    return found


def grown(run: Sequence[Step], whole: Kept, start: int) -> tuple[Step, ...]:
    """What an action does on all layers of a stage, of what it does on those that were run, whose
    first is number `start`.
    """
    seen: dict[int, int] = {}
    for at, step in enumerate(run):
        layer = _layer(step.row.module)
        if layer is not None:
            seen.setdefault(layer - start, at)
    if not seen:
        return tuple(run)
    order, cuts = list(seen), [*seen.values(), len(run)]
    between = {layer: (a, b) for layer, a, b in zip(order, cuts[:-1], cuts[1:], strict=True)}
    steps = list(run[: cuts[0]])
    turned = order[0] > order[-1]
    for i in reversed(range(len(whole.layers))) if turned else range(len(whole.layers)):
        first, last = between[whole.stands[i]]
        shift = whole.layers.start + i - whole.stands[i] - start
        steps += [_moved(step, shift) for step in run[first:last]]
    return tuple(steps)


def _layer(module: str) -> int | None:
    """The number of the layer that a module is in."""
    name, _, inside = module.partition(".")
    return int(inside.partition(".")[0]) if name == "layers" and inside else None


def _moved(step: Step, shift: int) -> Step:
    """The same in a layer so much further up."""
    layer = _layer(step.row.module)
    if layer is None or shift == 0:
        return step
    inside = step.row.module.removeprefix(f"layers.{layer}")
    return step._replace(row=replace(step.row, module=f"layers.{layer + shift}{inside}"))


def extended(base: Part, longer: Sequence[tuple[Part, int]]) -> Part:
    """The update of a stage with so many more of each layer that one of `longer` has one more of:
    what each of its rows moves grows with every one, and rows that came come every time.
    """
    steps = list(base.steps)
    come: dict[int, list[Step]] = {}
    end = base.end
    for part, number in longer:
        a, b = ([step.row.op for step in one.steps] for one in (base, part))
        for way, i, j, m, n in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
            assert way in ("equal", "insert"), "an update that differs by more than its layers"
            if way == "insert":
                come.setdefault(i, []).extend(list(part.steps[m:n]) * number)
            for at, other in zip(range(i, j), range(m, n), strict=False):
                more = _less(part.steps[other], base.steps[at])
                steps[at] = _more(steps[at], more, number)
        end = plus(end, plus(part.end, base.end, -1), number)
    out: list[Step] = []
    for at in range(len(steps) + 1):
        out += [*come.get(at, ()), *steps[at : at + 1]]
    return Part(tuple(out), end)


class _Growth(NamedTuple):
    """How a row grows with a layer."""

    read: int
    written: int
    payload: int
    live: Live
    high: Live


def _less(a: Step, b: Step) -> _Growth:
    return _Growth(
        a.row.read - b.row.read,
        a.row.written - b.row.written,
        a.row.payload - b.row.payload,
        plus(a.live, b.live, -1),
        plus(a.high, b.high, -1),
    )


def _more(step: Step, by: _Growth, times: int) -> Step:
    row = replace(
        step.row,
        read=step.row.read + times * by.read,
        written=step.row.written + times * by.written,
        payload=step.row.payload + times * by.payload,
    )
    return Step(row, plus(step.live, by.live, times), plus(step.high, by.high, times))


def added_up(rank: int, rest: Live, done: Iterable[tuple[str, int, Part]]) -> Ledger:
    """The ledger of (action, how often, what it does)."""
    live = at_peak = rest
    rows = []
    for action, times, part in done:
        for step in part.steps:
            high, live = plus(live, step.high), plus(live, step.live)
            if high.total > at_peak.total:
                at_peak = high
            rows.append(replace(step.row, action=action, times=times, live=live, peak=high.total))
        live = plus(live, part.end)
    return Ledger(rank, rest, tuple(rows), at_peak)
