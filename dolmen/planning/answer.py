"""Formats a plan: tables and lines for people, plain values for --json."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from dolmen.core.log import size
from dolmen.core.messages import plural
from dolmen.planning.inference import Inference
from dolmen.planning.plan import Candidate, Change, Compared, DryRun, Fleet, Plan, describe_usable

NAMES = {"bubble": "bubble", "memory": "memory traffic", "host": "host", "pp": "sends"}
MFU = (
    "MFU: floating-point operations of the model (causal attention, no recomputation) relative to "
    "the datasheet peak in {dtype}; HFU: with recomputation."
)
SHOWN = 4
"""Changes of a layout that are lines."""
DIFFERS = 0.01
"""Share of the peak: kinds of memory whose closed form differs by more are shown."""


def title(plan: Plan) -> str:
    """Return the lines above the ranking: model, cluster, batch, and how many layouts were
    considered and fit.
    """
    cluster = plan.cluster
    where = f"{cluster.name}, {plural(cluster.nodes, 'node')} of {cluster.gpus_per_node} GPUs"
    batch = f"{plan.global_batch_size:,} sequences of {plan.sequence_length:,}"
    # defaults decide the answer, so they are named
    knobs = " and ".join(f"--{name}" for name in plan.assumed)
    assumed = f" (a default; set {knobs})" if knobs else ""
    return (
        f"{plan.model}, {size(plan.parameters)} parameters, on {where} ({plan.gpus:,}), "
        f"{plan.dtype}\n{batch} = {size(plan.step_tokens)} tokens per "
        f"step{assumed}\n{plan.considered:,} layouts considered, {plan.fitting:,} fit into "
        f"{describe_usable(cluster.device.memory, plan.headroom)}"
    )


def table(plan: Plan) -> Table:
    """Return the ranking as a table, a row per layout: seconds per step with 90 % interval, tokens
    per second and GPU, MFU, HFU, memory of the fullest rank, bottleneck.
    """
    grid = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("", justify="right")
    grid.add_column("tie")
    # the only column that may wrap
    grid.add_column("layout", overflow="fold")
    for name in ("seconds", "90 %", "tok/s/GPU", "MFU", "HFU", "GiB", "bound"):
        grid.add_column(name, justify="right" if name != "bound" else "left", no_wrap=True)
    for number, (candidate, tie) in enumerate(zip(plan.ranked, plan.ties, strict=True), 1):
        e = candidate.estimate
        grid.add_row(
            str(number),
            tie_name(tie),
            candidate.words,
            f"{e.seconds:.3g}",
            f"{e.low:.3g}-{e.high:.3g}",
            f"{per_gpu(plan, candidate):,.0f}",
            f"{candidate.mfu:.1%}",
            f"{candidate.hfu:.1%}",
            f"{candidate.fullest / 2**30:.1f}",
            candidate.bound,
        )
    return grid


def tie_name(number: int) -> str:
    """Return the letter of a group of layouts whose order is not certain, A for the fastest; from
    the 27th on its number.
    """
    return chr(ord("A") + number - 1) if number <= 26 else str(number)


def per_gpu(plan: Plan, candidate: Candidate) -> float:
    """Return the tokens per second and GPU of a layout."""
    return plan.step_tokens / candidate.estimate.seconds / plan.gpus


def notes(plan: Plan) -> list[str]:
    """Return the lines below the ranking, which explain its columns."""
    return [
        f"GiB: peak of the fullest rank, of {plan.cluster.device.memory / 2**30:.0f}. "
        f"{plan.interval}.",
        MFU.format(dtype=plan.dtype),
        "tie: layouts with the same letter lie within the 90 % interval of the first of them, so "
        "their order is uncertain: choose by memory, or measure.",
        f"Exact memory: {plan.command}",
    ]


def dry_run_lines(plan: Plan) -> list[str | Table]:
    """Return lines and a table that compare the dry run of the first layout with the closed forms,
    and why layouts before it were excluded; if it was not run, a line that says why; nothing if it
    was not requested.
    """
    dry = plan.dry
    if dry is None:
        return []
    lines: list[str | Table] = [f"excluded by the dry run: {why}" for why in dry.rejected]
    if dry.left_out:
        return [*lines, f"No dry run of the first layout: {dry.left_out}."]
    grid = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False)
    grid.add_column("dry run of 1.", no_wrap=True)
    for rank in dry.ranks:
        grid.add_column(f"rank {rank.rank:,}", justify="right", no_wrap=True)
    grid.add_row("peak GiB", *(format_compared(rank.peak) for rank in dry.ranks))
    # kinds that hardly matter are not shown
    least = DIFFERS * max(rank.peak.counted for rank in dry.ranks)
    for kind in zip(*(rank.held for rank in dry.ranks), strict=True):
        if any(abs(compared.closed_form - compared.counted) >= least for compared in kind):
            grid.add_row(f"  {kind[0].name}", *map(format_compared, kind))
    for axis in dict.fromkeys(sent.name for rank in dry.ranks for sent in rank.sent):
        # a boundary stage may send over fewer axes
        per_rank = [next((s for s in rank.sent if s.name == axis), None) for rank in dry.ranks]
        grid.add_row(
            f"GiB sent over {axis}",
            *(format_compared(compared) if compared else "-" for compared in per_rank),
        )
    return [
        *lines,
        grid,
        "dry run: the real step on tensors without values. In brackets: error of the closed forms, "
        "or the form's own GiB where it is off tenfold. Kinds of memory are shown if they are off "
        f"by {DIFFERS:.0%} of the peak or more.",
        *_differing_seconds(plan.ranked[0].estimate.seconds, dry),
    ]


def _differing_seconds(step: float, dry: DryRun) -> list[str]:
    """Return a line for each mesh axis over which the first layout sends at least 1 % more or fewer
    bytes, by the dry run, than the closed forms count: by how much that may change its `step`
    seconds.
    """
    lines = []
    for axis in dict.fromkeys(sent.name for rank in dry.ranks for sent in rank.sent):
        sent_by_rank = [sent for rank in dry.ranks for sent in rank.sent if sent.name == axis]
        # the slowest rank decides
        worst = max(sent_by_rank, key=lambda sent: abs(sent.more_seconds))
        seconds = worst.more_seconds
        # below 1 % it is less than the interval
        if abs(worst.off) < DIFFERS or not seconds:
            continue
        way = "longer" if seconds > 0 else "shorter"
        lines.append(
            f"{axis}: links are busy for {abs(seconds):.3g} s per step {way} than the table "
            f"assumes ({worst.off:+.1%} of bytes), which changes its {step:.3g} s by at most "
            f"{seconds / step:+.1%}, less where computation hides it."
        )
    return lines


def format_compared(compared: Compared) -> str:
    """Format as "60.09 (+3.8%)": GiB as counted, and the relative error of the closed form; where
    that is ten times the count or more, the closed form itself: "0.00 (form: 2.93)".
    """
    if abs(compared.off) >= 10:
        # three ranks of these fit into 80 columns; rich truncates what does not
        return f"{compared.counted / 2**30:,.2f} (form: {compared.closed_form / 2**30:,.2f})"
    return f"{compared.counted / 2**30:,.2f} ({compared.off:+.1%})"


def explanation(plan: Plan) -> list[str]:
    """Return lines that say, for each layout, what its step consists of, what fills its fullest
    rank, and what single changes would gain.
    """
    lines = []
    for number, candidate in enumerate(plan.ranked, 1):
        seconds = candidate.estimate.seconds
        # largest first
        parts = sorted(candidate.estimate.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(
            f"{NAMES.get(name, name)} {value / seconds:.1%}"
            for name, value in parts
            # parts below a thousandth say nothing
            if value >= 0.001 * seconds
        )
        # the rank that decides whether it fits
        fullest = max(range(len(candidate.memory)), key=lambda rank: candidate.memory[rank].total)
        stage = candidate.memory[fullest]
        # the rows of a dry run do not have the latter
        kinds = {**stage.live._asdict(), "context and workspace": stage.other}
        sizes = ", ".join(
            f"{name} {value / 2**30:.1f}"
            for name, value in sorted(kinds.items(), key=lambda kind: -kind[1])
            if value >= 0.05 * 2**30
        )
        lines += [
            f"{number}. {candidate.words}: bound by {candidate.bound}",
            f"   time: {shares}",
            f"   GiB of stage {fullest}: {sizes}",
        ]
        # empty where they were not requested
        lines += [
            f"   {format_change(plan, candidate, change)}" for change in changes_to_show(candidate)
        ]
    return lines


def changes_to_show(candidate: Candidate) -> list[Change]:
    """Return at most 4 of a layout's changes: the fastest that fit, and the fastest of those that
    do not fit, if it is faster than the layout itself.
    """
    fitting = [change for change in candidate.changes if change.fits][: SHOWN - 1]
    # what more memory would buy
    faster = [c for c in candidate.changes if not c.fits and c.seconds < candidate.estimate.seconds]
    return [*fitting, *faster[:1]]


def format_change(plan: Plan, candidate: Candidate, change: Change) -> str:
    """Format a change in a line: its time relative to the layout's, memory, and lacking memory."""
    percent = change.seconds / candidate.estimate.seconds - 1
    way = f"{abs(percent):.1%} {'less' if percent < 0 else 'more'} time"
    # used only where it does not fit
    over = change.held - plan.cluster.device.memory * (1 - plan.headroom)
    lack = "" if change.fits else f", too large by {over / 2**30:.1f} GiB"
    return f"{change.words}: {way}, {change.held / 2**30:.1f} GiB{lack}"


def budget(plan: Plan) -> list[str]:
    """Return lines with days, GPU hours, energy and money for training on the plan's tokens with
    the first layout; energy and money only where power and prices are known.
    """
    best = plan.ranked[0]
    fleet = Fleet(plan.gpus, best.estimate, best.words)
    days = plan.days(best.estimate)
    # `seconds` are days here (`Plan.days`)
    hours = plan.gpus * 24 * days.seconds
    lines = [
        f"{size(plan.budget)} tokens: {days.seconds:,.1f} days "
        f"({days.low:,.1f} to {days.high:,.1f}), {hours:,.0f} GPU hours"
    ]
    if plan.cluster.node_watts is not None:
        # MWh
        energy = plan.cluster.nodes * plan.cluster.node_watts / 1e6 * 24 * days.seconds
        lines.append(f"energy: {energy:,.1f} MWh at full power of the nodes, without cooling")
    if plan.prices.rent:
        lines.append(f"rented: {plan.rent_cost(fleet):,.0f} at {plan.prices.rent:g} per GPU hour")
    if plan.prices.node:
        lines.append(
            f"owned: {plan.owning_cost(fleet):,.0f}, nodes at {plan.prices.node:,.0f} over "
            f"{plan.prices.years:g} years, {plan.prices.kilowatt_hour:g} per kWh"
        )
    return lines


def plan_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain values for --json, in seconds and bytes."""
    return {
        "model": plan.model,
        "parameters": plan.parameters,
        "cluster": plan.cluster.name,
        "nodes": plan.cluster.nodes,
        "gpus": plan.gpus,
        "dtype": plan.dtype,
        "global_batch_size": plan.global_batch_size,
        "sequence_length": plan.sequence_length,
        "assumed": list(plan.assumed),
        "device_bytes": plan.cluster.device.memory,
        "considered": plan.considered,
        "fitting": plan.fitting,
        "interval": plan.interval,
        "ranked": [
            _candidate_dict(plan, candidate, tie)
            for candidate, tie in zip(plan.ranked, plan.ties, strict=True)
        ],
        **({} if plan.dry is None else {"dryrun": _dry_run_dict(plan.dry)}),
        **({"days": plan.days(plan.ranked[0].estimate).seconds} if plan.tokens else {}),
    }


def _dry_run_dict(dry: DryRun) -> dict[str, Any]:
    """Return the dry run as plain values, pairs as [counted, closed form]."""
    return {
        "ranks": [
            {
                "rank": rank.rank,
                "peak_bytes": rank.peak.counted,
                "closed_form_bytes": rank.peak.closed_form,
                "held": {kind.name: [kind.counted, kind.closed_form] for kind in rank.held},
                "sent": {axis.name: [axis.counted, axis.closed_form] for axis in rank.sent},
                "more_s": {axis.name: axis.more_seconds for axis in rank.sent},
            }
            for rank in dry.ranks
        ],
        "rejected": list(dry.rejected),
        "left_out": dry.left_out,
    }


def _candidate_dict(plan: Plan, candidate: Candidate, tie: int) -> dict[str, Any]:
    """Return a layout of the ranking as plain values. `tie`: number of its group."""
    e = candidate.estimate
    return {
        "layout": candidate.layout,
        "tie": tie,
        "seconds": e.seconds,
        "low_s": e.low,
        "high_s": e.high,
        "parts_s": e.parts,
        "tokens_s_gpu": per_gpu(plan, candidate),
        "mfu": candidate.mfu,
        "hfu": candidate.hfu,
        "bound": candidate.bound,
        "peak_bytes": candidate.fullest,
        "stages": [
            {**stage.live._asdict(), "other": stage.other, "total": stage.total}
            for stage in candidate.memory
        ],
        "changes": [change._asdict() for change in candidate.changes],
    }


def inference_title(plan: Inference) -> str:
    """Return the line above the table of --inference: model, cluster, dtype, sequences."""
    cluster = plan.cluster
    sequences = plural(plan.batch, "sequence")
    return (
        f"{plan.model}: generation on {cluster.name}, {plan.dtype}, {sequences} of "
        f"{plan.length:,} tokens, one copy on tp GPUs"
    )


def inference_table(plan: Inference) -> Table:
    """Return the table of --inference, a row for each tp: memory, whether it fits, milliseconds per
    token, throughput, bottleneck.
    """
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    names = (
        "tp",
        "weights GiB",
        "KV cache GiB",
        "total GiB",
        "fits",
        "ms/token",
        "tok/s/GPU",
        "bound",
    )
    for name in (*names, "max sequences"):
        grid.add_column(name, justify="right")
    for row in plan.rows:
        grid.add_row(
            str(row.tp),
            f"{row.weights / 2**30:.1f}",
            f"{row.cache / 2**30:.2f}",
            f"{row.held / 2**30:.1f}",
            "yes" if row.fits else "no",
            f"{1000 * row.seconds:.3g}",
            f"{row.tokens_per_second:,.0f}",
            row.bound,
            f"{row.most_texts:,}",
        )
    return grid


def inference_dict(plan: Inference) -> dict[str, Any]:
    """Return the plan of --inference as plain values for --json, in seconds and bytes."""
    return {
        "model": plan.model,
        "cluster": plan.cluster.name,
        "batch": plan.batch,
        "length": plan.length,
        "dtype": plan.dtype,
        "device_bytes": plan.cluster.device.memory,
        "rows": [{**asdict(row), "held": row.held} for row in plan.rows],
    }
