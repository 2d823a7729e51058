"""Dry-runs the fastest layouts, and compares the counts with the closed forms (`confirm`).

A layout that the dry run finds too large, or that would crash, is rejected, and the next one is
run, TRIED at most. Counts are cached on disk under a hash of all that they depend on: the code of
the package, the version of torch, and the options of the run's step. Reading them takes no torch.
"""

import hashlib
import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args

from dolmen.core.config import flatten, to_dict
from dolmen.core.log import gib
from dolmen.files import gate, kinds, write
from dolmen.planning.config import Device, DryrunConfig, DryrunRequest, ranks_of
from dolmen.planning.cost import row_seconds
from dolmen.planning.hardware import measured_at
from dolmen.planning.ledger import WORDS
from dolmen.planning.plan import Compared, DryRun, RankRun, command_options, words
from dolmen.planning.question import Question
from dolmen.planning.space import LayoutChoice
from dolmen.planning.steady_state import blocks_run
from dolmen.training.config import RunConfig


@cache
def program_hash() -> str:
    """Return a hash of the package's source code, followed by the version of torch; cached."""
    root, digest = Path(__file__).parent.parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        # any change of the code may change what a step does
        digest.update(file.read_bytes())
    return f"{digest.hexdigest()} {version('torch')}"


def step_hash(run: RunConfig, *more: object) -> str:
    """Return a hash of the program, of all options on which a step of `run` depends except its
    model, and of `more`.
    """
    parts = (run.adapter, run.layout, run.objective, run.optimizer, run.train)
    text = repr((program_hash(), parts, run.sequence_length, run.data.document_mask, more))
    return hashlib.sha256(text.encode()).hexdigest()


TRIED = 3
"""Layouts that are run, until one fits."""
MOST = 8000
"""Blocks, forward and backward, of all ranks that are run: about 10 ms of a core each."""
AXES = {"fsdp": "dp", "edp": "dp"}
"""Names in cost.Parts of the axes that parameters and gradients cross."""


def confirm(question: Question, choices: Sequence[LayoutChoice], progress: bool) -> DryRun:
    """Dry-run the fastest of `choices` (in this order), at most three, until one fits the device's
    memory. Return its counts against the closed forms, and why those before it were rejected; or
    why there is none. `progress` shows a bar on stderr.
    """
    rejected: list[str] = []
    for choice in choices[:TRIED]:
        run = question.run_with_layout(choice.options)
        try:
            counted = count_ranks(run, device_of(question), progress)
        except ValueError as error:
            rejected.append(f"{words(choice.options)}: {error}")
            continue
        if isinstance(counted, str):
            return DryRun((), tuple(rejected), counted)
        ranks = tuple(compare_rank(question, choice, counts) for counts in counted)
        # the context is in no ledger
        peak = max(rank.peak.counted for rank in ranks) + question.cluster.device.reserved
        if peak <= question.memory:
            return DryRun(ranks, tuple(rejected))
        over = peak - question.memory
        rejected.append(
            f"{words(choice.options)}: {gib(peak)} by the dry run, {gib(over)} too much"
        )
    return DryRun((), (), f"none of the first {len(rejected)} layouts passes: {rejected[0]}")


def device_of(question: Question) -> Device:
    """Return the device whose kernels the dry run chooses: the cluster's if its kernels are known,
    else an H100.
    """
    # a100-40gb runs the kernels of an a100
    name = question.cluster.device.name.partition("-")[0]
    return next((known for known in get_args(Device) if known == name), "h100")


def command(question: Question, choice: LayoutChoice) -> str:
    """Return the `dolmen dryrun` command for a layout, as `confirm` runs it: with all options in
    which its run differs from the one that the model's name stands for.
    """
    plain = flatten(to_dict(question.named))
    run = flatten(to_dict(question.run_with_layout(choice.options)))
    options = {name.replace("_", "-"): value for name, value in run.items() if value != plain[name]}
    words = command_options({**options, "device": device_of(question)})
    return f"dolmen dryrun {shlex.quote(question.name)} {words}"


def count_ranks(run: RunConfig, device: Device, progress: bool) -> list[dict[str, Any]] | str:
    """Return what a dry run counts on its default ranks (first, middle, last), as --json of `dolmen
    dryrun` has it, from the cache on disk or newly counted; or a text with the reason why none was
    made. Raises ValueError for a step that would crash.
    """
    file = measured_at() / "winners" / f"{step_hash(run, run.known_model, device)}.json"
    with suppress(gate.Refused, OSError):
        ranks_ = gate.read_json(file, kinds.DRYRUN)["ranks"]
        if _is_whole(ranks_, run):
            return ranks_
    # torch takes two seconds to import, and what has been counted needs none
    from dolmen.planning.dryrun import report

    options = DryrunConfig(device=device)
    # eager and on one core: about 10 ms each
    number = blocks_run(run, options)
    if number > MOST:
        return f"it runs {number:,} blocks one by one, which takes minutes"
    counts = report(DryrunRequest(run, options), progress).as_dict()
    with suppress(OSError):  # a home that cannot be written to costs the time again
        file.parent.mkdir(parents=True, exist_ok=True)
        write.replace(file, json.dumps(counts), lasting=False)
    return counts["ranks"]


def _is_whole(ranks: list[dict[str, Any]], run: RunConfig) -> bool:
    """Return whether cached counts have the default ranks and add up; otherwise they are counted
    again.
    """
    expected = ranks_of(DryrunConfig().ranks, run.layout.world)
    return [rank["rank"] for rank in ranks] == expected and all(
        rank["live_bytes"].keys() == {*WORDS.values()}
        and min(rank["live_bytes"].values()) >= 0
        and sum(rank["live_bytes"].values()) == rank["peak_bytes"]
        for rank in ranks
    )


def compare_rank(question: Question, choice: LayoutChoice, counted: dict[str, Any]) -> RankRun:
    """Compare what a dry run counted on a rank with the closed forms of its pipeline rank: peak,
    memory by kind, and bytes sent by axis, with predicted seconds; axes on which neither sends are
    left out.
    """
    # pipeline ranks are the outermost axis of the world
    rank = counted["rank"] // (question.cluster.gpus // choice.pp)
    closed_form = question.capacity.stage_memory(choice, rank, question.batch).live
    sizes = {"tp": choice.tp, "cp": choice.cp, "ep": choice.ep, "pp": choice.pp}
    sizes["dp"] = choice.dp * choice.cp
    sent: Counter[str] = Counter()
    for collective in counted["collectives"]:
        axis = AXES.get(collective["axis"], collective["axis"])
        if axis in sizes:
            sent[axis] += bytes_leaving(collective["op"], collective["bytes"], sizes[axis])
    closed_form_bytes: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    machine = question.pricing.machine(choice)
    for row in question.pricing.communication_rows(choice, rank):
        axis = AXES.get(row.axis, row.axis)
        closed_form_bytes[axis] += bytes_leaving(row.op, row.payload * row.times, sizes[axis])
        seconds[axis] += row_seconds(row, machine) * row.times
    live = counted["live_bytes"]
    return RankRun(
        counted["rank"],
        Compared("peak", counted["peak_bytes"], closed_form.total),
        tuple(Compared(w, live[w], closed_form._asdict()[kind]) for kind, w in WORDS.items()),
        tuple(
            Compared(axis, sent[axis], closed_form_bytes[axis], seconds[axis])
            for axis in sizes
            if sent[axis] or closed_form_bytes[axis]
        ),
    )


def bytes_leaving(op: str, payload: int, ranks: int) -> int:
    """Return the bytes that leave one of `ranks` ranks in a collective or send of this payload
    (`LedgerRow.payload`). A receive sends nothing.
    """
    if op in ("send", "receive"):
        return payload * (op == "send")
    # ring algorithms; all-to-all keeps its own part
    return payload * (ranks - 1) // ranks * (2 if op == "all-reduce" else 1)
