"""dolmen plan MODEL --cluster CLUSTER[:NODES]"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dolmen.core.log import console
from dolmen.core.messages import BadInput, escape, message
from dolmen.files import write
from dolmen.planning import answer, outputs, search
from dolmen.planning.config import PlanConfig, PlanRequest
from dolmen.planning.hardware import LOCAL, measured_at
from dolmen.planning.inference import inference
from dolmen.planning.plan import Plan
from dolmen.planning.question import Question
from dolmen.planning.report import write_report
from dolmen.planning.search import add_fleets
from dolmen.recipes.named import planned


def run(options: PlanConfig) -> int:
    try:
        if options.measure:
            return measure_here()
        request = asked(options)
        outputs.check(request.options)
        if request.options.inference:
            return generation(request)
        question = Question.from_request(request)
        found = search.make_plan(question, request.options, progress=True)
        tell(found, request.options)
        for line in written(question, found, request.options):
            if request.options.json != "-":
                print(line)
    except (ValueError, KeyError, OSError) as error:
        raise BadInput(message(error)) from None
    return 0


def measure_here() -> int:
    """Measure this machine and write it as the cluster `local`."""
    # torch takes a second to import, and no other plan needs it
    from dolmen.planning.measure import measure

    print(f"wrote {measure(measured_at())}: dolmen plan MODEL --cluster {LOCAL}")
    return 0


def asked(options: PlanConfig) -> PlanRequest:
    """Raises ValueError."""
    if not options.model:
        raise ValueError(
            "name a model first: dolmen plan gpt3-175b --cluster dgx-a100:128 (dolmen recipes "
            "lists them)"
        )
    return PlanRequest(options.model, planned(options.model), options)


def tell(found: Plan, asked: PlanConfig) -> None:
    """The table and what was asked beside it, or JSON."""
    save(answer.plan_dict(found), asked.json)
    if asked.json == "-":
        return
    screen = console()
    screen.print(answer.title(found))
    screen.print(answer.table(found))
    told = answer.notes(found)
    if asked.tokens:
        told += answer.budget(found)
    if asked.explain:
        told += answer.explanation(found)
    for line in told:
        print(line)
    for line in answer.dry_run_lines(found):
        screen.print(line)


def written(question: Question, found: Plan, asked: PlanConfig) -> Iterator[str]:
    """What was asked for as a file: a line each. Raises ValueError."""
    if asked.as_recipe is not None:
        file = Path(asked.as_recipe)
        yield f"wrote {escape(file)}: {outputs.write_recipe(question, found, file)}"
    if asked.report is not None:
        try:
            page = write_report(add_fleets(question, found), Path(asked.report))
            yield f"wrote {escape(page)}"
        except OSError as error:
            raise ValueError(f"--report {asked.report}: {error.strerror}") from None


def generation(request: PlanRequest) -> int:
    """The table of inference, or JSON."""
    asked = request.options
    found = inference(Question.from_request(request), asked.batch, asked.length)
    save(answer.inference_dict(found), asked.json)
    if asked.json != "-":
        screen = console()
        screen.print(answer.inference_title(found))
        screen.print(answer.inference_table(found))
    return 0


def save(content: dict[str, Any], to: str | None) -> None:
    """To a file, or to the terminal. Raises ValueError."""
    if to is None:
        return
    text = json.dumps(content, indent=1) + "\n"
    if to == "-":
        print(text, end="")
        return
    try:
        write.replace(Path(to), text)
    except OSError as error:
        raise ValueError(f"--json {to}: {error.strerror}") from None
