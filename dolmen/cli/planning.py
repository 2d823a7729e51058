"""The verbs that predict a run: plan, dryrun and schedule.

dolmen plan MODEL --cluster CLUSTER[:NODES]
dolmen dryrun RECIPE|FILE.yaml --layout.tp 8 --ranks first,last
dolmen schedule NAME --pp 4 --microbatches 8
dolmen schedule search --costs measured.json
"""

from collections.abc import Iterator
from math import prod
from pathlib import Path

from dolmen.core.filesystem import expand
from dolmen.core.log import console, say
from dolmen.core.messages import BadInput, as_bad_input, escape, os_error_as_value, plural
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
from dolmen.planning import answer, draw, report, schedule_search, search
from dolmen.planning.config import DryrunRequest, PlanConfig, PlanRequest, ScheduleOptions
from dolmen.planning.hardware import LOCAL, measured_at
from dolmen.planning.inference import inference
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.schedule_problem import Costs, from_file
from dolmen.planning.schedule_search import ShortestSchedule
from dolmen.planning.search import add_fleets
from dolmen.planning.steady_state import check_layout, uneven_stages
from dolmen.recipes.overrides import load_run_to_plan


def run_plan(options: PlanConfig) -> int:
    """Run `dolmen plan`: find the fastest layouts of a model on a cluster, print them, and write
    the files of --json, --as-recipe and --report; with --measure, measure this machine instead;
    with --inference, predict memory and speed of inference instead. Returns 0. Raises BadInput.
    """
    with as_bad_input():
        if options.measure:
            return measure_local_cluster()
        request = resolve_request(options)
        # before the search, which takes up to minutes
        report.check(request.options)
        if request.run.train.numerics == "exact":
            say(
                "WARNING: plans count fast numerics, and train.numerics is exact, which takes more "
                "time and memory (docs/concepts/numerics.md) and covers fewer layouts"
            )
        if request.options.inference:
            return plan_inference(request)
        question = Question.from_request(request)
        plan = search.make_plan(question, request.options, progress=True)
        print_plan(plan, request.options)
        for line in write_files(question, plan, request.options):
            if request.options.json != "-":
                print(line)
    return 0


def measure_local_cluster() -> int:
    """Measure the speed of this machine, write it to a file as the cluster `local` of the planner,
    and print how to use it. Returns 0.
    """
    # torch takes a second to import, and no other plan needs it
    from dolmen.planning.measure import measure

    print(f"wrote {measure(measured_at())}: dolmen plan MODEL --cluster {LOCAL}")
    return 0


def resolve_request(options: PlanConfig) -> PlanRequest:
    """Return the planner's request: the options, with the run that their model (a recipe, YAML file
    or folder) stands for, which is loaded. Raises ValueError if no model is named.
    """
    if not options.model:
        raise ValueError(
            "name a model first: dolmen plan gpt3-175b --cluster dgx-a100:128 (dolmen recipes "
            "lists them)"
        )
    return PlanRequest(options.model, load_run_to_plan(options.model), options)


def print_plan(plan: Plan, options: PlanConfig) -> None:
    """Write the plan as JSON to --json, if set. Unless that is stdout (-), print the table of
    layouts, notes, the training time and cost of --tokens and the explanation of --explain if
    requested, and the comparison with a dry run.
    """
    write.save_json(answer.plan_dict(plan), options.json)
    # stdout holds the JSON only
    if options.json == "-":
        return
    screen = console()
    screen.print(answer.title(plan))
    # rich folds it to the width of the terminal
    screen.print(answer.table(plan))
    lines = answer.notes(plan)
    if options.tokens:
        lines += answer.budget(plan)
    if options.explain:
        lines += answer.explanation(plan)
    for line in lines:
        print(line)
    for line in answer.dry_run_lines(plan):
        screen.print(line)


def write_files(question: Question, plan: Plan, options: PlanConfig) -> Iterator[str]:
    """Write the fastest layout as a run to the YAML file of --as-recipe, and the HTML report to
    --report, each if set; yield a line "wrote FILE..." after each. Raises ValueError if one cannot
    be written.
    """
    if options.as_recipe is not None:
        file = Path(options.as_recipe)
        yield f"wrote {escape(file)}: {report.write_recipe(question, plan, file)}"
    if options.report is not None:
        with os_error_as_value(f"--report {options.report}"):
            page = report.page_path(options.report)
            report.write_report(add_fleets(question, plan), page)
            yield f"wrote {escape(page)}"


def plan_inference(request: PlanRequest) -> int:
    """Run `dolmen plan --inference`: predict memory and time per token for each tensor-parallel
    size, write --json, and print the table unless the JSON goes to stdout. Returns 0.
    """
    options = request.options
    estimate = inference(Question.from_request(request), options.batch, options.length)
    write.save_json(answer.inference_dict(estimate), options.json)
    if options.json != "-":
        screen = console()
        screen.print(answer.inference_title(estimate))
        screen.print(answer.inference_table(estimate))
    return 0


def run_dryrun(request: DryrunRequest) -> int:
    """Run `dolmen dryrun`: run a training step without GPUs as some ranks of a layout, print a
    table of their memory, FLOPs and messages, and write --json. Returns 0. Raises BadInput.
    """
    with as_bad_input():
        write.check_json(request.options.json)
        # needs no torch, so mistakes are found in milliseconds
        check_layout(request)
        # torch takes seconds to import: what cannot be run is refused before
        say("loading torch ...")
        from dolmen.planning import dryrun

        dry_run = dryrun.report(request, progress=True)
    screen = console()
    screen.print(dry_run.title)
    if note := uneven_stages(dry_run.run):
        screen.print(note)
    screen.print(dry_run.table())
    with as_bad_input():
        write.save_json(dry_run.as_dict(), request.options.json)
    return 0


SEARCH = "search"
MAX_FORWARDS = 500_000  # listing them takes some seconds
MAX_BOXES = 40_000  # drawing more takes over ten seconds and shows nothing
# Messages are those of a run: its options -> those of `dolmen schedule`.
OPTION_NAMES = {
    "--layout.pp": "--pp",
    "layout.pp": "pp",
    "--layout.virtual-stages": "--virtual-stages",
    "layout.virtual-stages": "virtual-stages",
    "--train.global-batch-size, --train.microbatch-size": "--microbatches",
    "but the run has": "but the options say",
}


def run_schedule(options: ScheduleOptions) -> int:
    """Run `dolmen schedule`: build, read or search a pipeline schedule, simulate it, print the
    report (and its actions with --list), and write --out. Returns 0. Raises BadInput, whose
    messages name the options of this verb.
    """
    try:
        if options.out:
            # before a search that may take minutes
            write.check_new("--out", options.out)
        cost = parse_cost(options)
        times = Costs("options", cost._asdict())
        if options.costs:
            times = from_file(options.costs)
        if options.schedule == SEARCH:
            shortest, widths = search_schedule(options, times)
            schedule, simulation = shortest.schedule, shortest.simulation
        else:
            shortest, widths, schedule = None, (), build_schedule(options)
            # a list of costs must fit its ranks or stages
            simulation = simulate_stages(schedule, times.stage_costs(schedule))
        if options.out:
            write_out(schedule, simulation, expand(options.out))
    except (ValueError, OSError) as error:
        text = str(error)
        for run_option, schedule_option in OPTION_NAMES.items():
            # the checks are those of a run, with its option names
            text = text.replace(run_option, schedule_option)
        raise BadInput(text) from None
    # the formulas are for equal times on all ranks
    idle_formula = None if options.costs else closed_form(schedule, cost)
    print_report(schedule, simulation, idle_formula)
    if shortest:
        print(proof(shortest, widths))
    if options.list:
        print("\n" + format_schedule(schedule), end="")
    if options.out:
        print(f"wrote {escape(options.out)}")
    return 0


def search_schedule(
    options: ScheduleOptions, times: Costs
) -> tuple[ShortestSchedule, tuple[int, ...]]:
    """Search the shortest pipeline schedule for the action times `times` and the ranks,
    microbatches and memory of the options (by default 4, 8, and what 1F1B needs). Return it, and
    the numbers of stages per rank that were tried: --virtual-stages, or 1 and 2. Raises ValueError.
    """
    ranks, micros = options.pp or 4, options.microbatches or 8
    # what 1F1B holds on its first rank
    memory = ranks if options.memory is None else options.memory
    # two chunks can shorten the bubble, more hardly do
    widths = (options.virtual_stages,) if options.virtual_stages else (1, 2)
    return schedule_search.shortest_of(ranks, micros, widths, times, memory)


def proof(shortest: ShortestSchedule, widths: tuple[int, ...]) -> str:
    """Return a line of text with the proven lower bound of a schedule's length, and whether the
    found schedule is optimal or by how much it may be longer. `widths`: numbers of stages per rank
    that were searched.
    """
    span, nodes = shortest.simulation.span, f"; {shortest.nodes:,} nodes" if shortest.nodes else ""
    gap = span / shortest.floor - 1
    verdict = "optimal" if shortest.optimal else f"not proven optimal, gap {gap:.2%}"
    like = "" if shortest.like == SEARCH else f"; the same as {shortest.like}"
    of = " or ".join(map(str, widths)) + (" stage" if widths == (1,) else " stages")
    return f"lower bound {shortest.floor:.6g} of {of} per rank: {verdict}{nodes}{like}"


def build_schedule(options: ScheduleOptions) -> Schedule:
    """Return the pipeline schedule that options.schedule names, or reads from a file. Unset ranks,
    microbatches and chunks are the file's, or 4, 8, and 1 (2 for interleaved and zero-bubble-v).
    Raises ValueError, also if options.memory is set (for search only), and for over 500,000
    forwards.
    """
    if options.memory is not None:
        raise ValueError(
            f"--memory is an option of dolmen schedule {SEARCH} only: leave it out for "
            f"{options.schedule}"
        )
    file = None if options.schedule in SCHEDULES else read_schedule(options.schedule)
    default = (
        (file.ranks, file.micros, file.chunks)
        if file
        else (4, 8, 2 if options.schedule in ("interleaved", "zero-bubble-v") else 1)
    )
    requested = (options.pp, options.microbatches, options.virtual_stages)
    sizes = [a or d for a, d in zip(requested, default, strict=True)]
    # checked before the lists are built
    if prod(sizes) > MAX_FORWARDS:
        raise ValueError(
            f"{prod(sizes):,} forwards are too many to list ({MAX_FORWARDS:,}): use fewer "
            "--microbatches"
        )
    return make_schedule(options.schedule, *sizes)


def parse_cost(options: ScheduleOptions) -> Cost:
    """Return the times of forward, backward, input, weight and send actions that the options set.
    Raises ValueError for a changed time in addition to --costs.
    """
    cost = Cost(options.forward, options.backward, options.input, options.weight, options.send)
    # a time that is left at its default does not contradict --costs
    default = Cost()._asdict()
    for name, value in cost._asdict().items():
        if options.costs and value != default[name]:
            raise ValueError(f"--costs and --{name} both set times: use one of them")
    return cost


def write_out(schedule: Schedule, simulation: Simulation, to: Path) -> None:
    """Write a schedule to the file `to`: a picture of its simulation for .svg and .png, the lists
    of actions for .txt and .yaml. Raises ValueError for another suffix, OSError if the file cannot
    be written.
    """
    match to.suffix:
        case ".txt":
            write.replace(to, format_schedule(schedule))
        case ".yaml" | ".yml":
            write.replace(to, format_yaml(schedule))
        case ".svg" | ".png":
            draw_picture(schedule, simulation, to)
        case other:
            raise ValueError(
                f"--out {to} ends in {other or 'nothing'}: use .svg or .png for the picture, .txt "
                f"or .yaml for the actions"
            )


def draw_picture(schedule: Schedule, simulation: Simulation, to: Path) -> None:
    """Draw the simulated schedule over time, a row per rank, to the image file `to`. Raises
    ValueError for more than 40,000 actions, and OSError.
    """
    boxes = sum(map(len, schedule.actions))
    if boxes > MAX_BOXES:
        raise ValueError(
            f"{boxes:,} actions are more than a picture can show ({MAX_BOXES:,}): use fewer "
            f"--microbatches"
        )
    draw.gantt(simulation, schedule, to, schedule_title(schedule))


def schedule_title(schedule: Schedule) -> str:
    """Return a title for a schedule: its name with its numbers of ranks, microbatches and, if over
    1, virtual stages per rank.
    """
    chunks = f", {schedule.chunks} virtual stages per rank" if schedule.chunks > 1 else ""
    name = escape(Path(schedule.name).name)
    ranks = plural(schedule.ranks, "rank")
    micros = plural(schedule.micros, "microbatch", "microbatches")
    return f"{name}: {ranks}, {micros}{chunks}"


def print_report(schedule: Schedule, simulation: Simulation, idle: float | None) -> None:
    """Print a simulated schedule: title, a table of the ranks (stages, actions, busy time, bubble,
    microbatches in flight), and a line with span, idle time and bubble. `idle`: idle time by the
    closed formula, printed for comparison; None where there is none.
    """
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
    console().print(schedule_title(schedule))
    console().print(table)
    # of the rank that idles longest
    idle_time = max(simulation.span - busy for busy in simulation.busy)
    # a test of the simulator that users can see
    formula = f" (closed form {idle:.6g})" if idle is not None else ""
    print(
        f"span {simulation.span:.6g}; idle {idle_time:.6g}{formula}: {simulation.bubble:.2%} of "
        f"the span, {simulation.ratio:.2%} of the work"
    )
