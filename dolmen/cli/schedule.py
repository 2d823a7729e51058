"""dolmen schedule NAME --pp 4 --microbatches 8; dolmen schedule search --costs measured.json"""

from math import isfinite, prod
from pathlib import Path

from dolmen.core.filesystem import expand
from dolmen.core.log import console
from dolmen.core.messages import BadInput, escape, plural
from dolmen.files import write
from dolmen.parallel.schedule import SCHEDULES, Schedule, format_schedule, format_yaml
from dolmen.parallel.simulation import (
    Cost,
    Simulation,
    closed_form,
    make_schedule,
    read_schedule,
    simulate_stages,
)
from dolmen.planning import draw
from dolmen.planning.action_lists import search
from dolmen.planning.action_lists.problem import Costs, from_file
from dolmen.planning.action_lists.search import Found
from dolmen.planning.config import ScheduleOptions

SEARCH = "search"
MOST = 500_000  # some seconds
BOXES = 40_000  # more is no picture, and takes more than ten seconds
# of messages that speak of a run
KNOBS = {
    "--layout.pp": "--pp",
    "layout.pp": "pp",
    "--layout.virtual-stages": "--virtual-stages",
    "layout.virtual-stages": "virtual-stages",
    "--train.global-batch-size, --train.microbatch-size": "--microbatches",
    "but the run has": "but asked for are",
}


def run(options: ScheduleOptions) -> int:
    try:
        if options.out:
            write.check_new("--out", options.out)
        cost = given(options)
        times = Costs("options", cost._asdict())
        if options.costs:
            times = from_file(options.costs)
        if options.schedule == SEARCH:
            found, widths = searched(options, times)
            schedule, simulation = found.schedule, found.simulation
        else:
            found, widths, schedule = None, (), chosen(options)
            simulation = simulate_stages(schedule, times.stage_costs(schedule))
        if options.out:
            write_out(schedule, simulation, expand(options.out))
    except (ValueError, OSError) as error:
        text = str(error)
        for theirs, ours in KNOBS.items():
            text = text.replace(theirs, ours)
        raise BadInput(text) from None
    same = None if options.costs else closed_form(schedule, cost)
    report(schedule, simulation, same)
    if found:
        print(proof(found, widths))
    if options.list:
        print("\n" + format_schedule(schedule), end="")
    if options.out:
        print(f"wrote {escape(options.out)}")
    return 0


def searched(options: ScheduleOptions, times: Costs) -> tuple[Found, tuple[int, ...]]:
    """The shortest, and the numbers of stages per rank that were searched. Raises ValueError."""
    asked = {"pp": options.pp, "microbatches": options.microbatches}
    asked["virtual-stages"] = options.virtual_stages
    sizes = [d if a is None else a for a, d in zip(asked.values(), (4, 8, 1), strict=True)]
    for name, value in zip(asked, sizes, strict=True):
        if value < 1:
            raise ValueError(f"--{name} ({value}) must be at least 1")
    ranks, micros, chunks = sizes
    memory = ranks if options.memory is None else options.memory
    widths = (1, 2) if options.virtual_stages is None else (chunks,)
    return search.shortest_of(ranks, micros, widths, times, memory)


def proof(found: Found, widths: tuple[int, ...]) -> str:
    """What is known of the shortest with so many stages per rank, in a line."""
    span, looked = found.simulation.span, f"; {found.nodes:,} nodes" if found.nodes else ""
    gap = span / found.floor - 1
    said = "optimal" if found.optimal else f"not proven optimal: a gap of {gap:.2%}"
    like = "" if found.like == SEARCH else f"; the lists are those of {found.like}"
    of = " or ".join(map(str, widths)) + (" stage" if widths == (1,) else " stages")
    return f"lower bound {found.floor:.6g} of {of} per rank: {said}{looked}{like}"


def chosen(options: ScheduleOptions) -> Schedule:
    """The schedule that is asked for; what is not said is the file's, or small. Raises
    ValueError.
    """
    if options.memory is not None:
        raise ValueError(f"--memory is of dolmen schedule {SEARCH}: {options.schedule} has its own")
    file = None if options.schedule in SCHEDULES else read_schedule(options.schedule)
    default = (
        (file.ranks, file.micros, file.chunks)
        if file
        else (4, 8, 2 if options.schedule in ("interleaved", "zero-bubble-v") else 1)
    )
    asked = (options.pp, options.microbatches, options.virtual_stages)
    sizes = [d if a is None else a for a, d in zip(asked, default, strict=True)]
    if prod(sizes) > MOST:
        raise ValueError(
            f"{prod(sizes):,} forwards are too many to list ({MOST:,}): use fewer --microbatches"
        )
    return make_schedule(options.schedule, *sizes)


def given(options: ScheduleOptions) -> Cost:
    """The times of the options. Raises ValueError for what is none, and beside those of a file."""
    cost = Cost(options.forward, options.backward, options.input, options.weight, options.send)
    unsaid = Cost()._asdict()
    for name, value in cost._asdict().items():
        if options.costs and value != unsaid[name]:
            raise ValueError(f"--costs has all times, and --{name} is one more: leave one out")
        if not isfinite(value) or value < 0 or value == 0 and name != "send":
            raise ValueError(
                f"--{name} ({value:g}) is no time: use a number above 0"
                + (", or 0" if name == "send" else "")
            )
    return cost


def write_out(schedule: Schedule, simulation: Simulation, to: Path) -> None:
    """The picture or the actions, by the name's end. Raises ValueError, and OSError where nothing
    can be written.
    """
    match to.suffix:
        case ".txt":
            write.replace(to, format_schedule(schedule))
        case ".yaml" | ".yml":
            write.replace(to, format_yaml(schedule))
        case ".svg" | ".png":
            picture(schedule, simulation, to)
        case other:
            raise ValueError(
                f"--out {to} ends in {other or 'nothing'}: use .svg or .png for the picture, .txt "
                f"or .yaml for the actions"
            )


def picture(schedule: Schedule, simulation: Simulation, to: Path) -> None:
    """Raises ValueError, and OSError where nothing can be written."""
    boxes = sum(map(len, schedule.actions))
    if boxes > BOXES:
        raise ValueError(
            f"{boxes:,} actions are more than a picture can show ({BOXES:,}): use fewer "
            f"--microbatches"
        )
    draw.gantt(simulation, schedule, to, title(schedule))


def title(schedule: Schedule) -> str:
    chunks = f", {schedule.chunks} virtual stages per rank" if schedule.chunks > 1 else ""
    name = escape(Path(schedule.name).name)
    ranks = plural(schedule.ranks, "rank")
    micros = plural(schedule.micros, "microbatch", "microbatches")
    return f"{name}: {ranks}, {micros}{chunks}"


def report(schedule: Schedule, simulation: Simulation, idle: float | None) -> None:
    """The table, and the bubble beside its closed form where there is one."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rank", "stages", "actions", "busy", "bubble", "live microbatches"):
        table.add_column(name, justify="right")
    for rank, (actions, busy, peak) in enumerate(
        zip(schedule.actions, simulation.busy, simulation.peak, strict=True)
    ):
        stages = " ".join(str(schedule.stage_of(rank, chunk)) for chunk in range(schedule.chunks))
        table.add_row(
            str(rank),
            stages,
            f"{len(actions):,}",
            f"{busy:.6g}",
            f"{1 - busy / simulation.span:.2%}",
            f"{peak:.4g}",
        )
    console().print(title(schedule))
    console().print(table)
    found = max(simulation.span - busy for busy in simulation.busy)
    formula = f" (closed form {idle:.6g})" if idle is not None else ""
    print(
        f"span {simulation.span:.6g}; idle {found:.6g}{formula}: {simulation.bubble:.2%} of the "
        f"span, {simulation.ratio:.2%} of the work"
    )
