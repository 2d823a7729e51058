"""Reads the files in a run's folder repeatedly while it grows, each time only the rows that are
new. Every file goes through the gate (files/gate.py); one that it refuses is reported on the page
and not fatal, so that a damaged run shows what is left.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from dolmen.checkpoint import folders
from dolmen.core.config import flatten
from dolmen.core.log import size
from dolmen.core.messages import plural
from dolmen.files import gate, kinds
from dolmen.files.write import Tail
from dolmen.pages.page import evenly
from dolmen.training import goodput
from dolmen.watching.series import Series

METRICS, HISTORY, SAMPLES = "metrics.jsonl", "history.jsonl", "samples.jsonl"
COMPLETIONS = "rollouts/completions.jsonl"
ROWS = {
    METRICS: kinds.METRICS_ROW,
    HISTORY: kinds.HISTORY_ROW,
    SAMPLES: kinds.SAMPLE_ROW,
    COMPLETIONS: kinds.ROLLOUT_COMPLETION_ROW,
}
"""Files that are read while they grow: name -> schema of a row."""
MOST_PROMPTS, MOST_TEXTS, LONGEST_TEXT = 50, 12, 4000
MOST_OPTIONS, LONGEST_VALUE = 2000, 400
MOST_STARTS = 500
MOST_COMPLETIONS = 16
AXES = ("tp", "cp", "pp", "dp", "ep")


class WatchedRun:
    """The files of the run in `folder`, shown as `label`, read incrementally: only rows that are
    new since the last `read`. Raises ValueError for a folder without a run.
    """

    def __init__(self, folder: Path, label: str):
        """Prepare to read the run in `folder`, shown as `label`; no file is read yet. Raises
        ValueError for a folder without a run.
        """
        if not folder.is_dir():
            raise ValueError(
                f"{folder} is not a folder: give that of a run, such as runs/quickstart"
            )
        if not any((folder / name).exists() for name in ("config.yaml", METRICS)):
            raise ValueError(
                f"{folder} does not contain a run: it has neither config.yaml nor {METRICS}; give "
                "the folder that dolmen train wrote"
            )
        self.folder, self.label = folder, label
        self.tails = {name: Tail(folder / name, kind) for name, kind in ROWS.items()}
        self.refused: dict[str, str] = {}
        for name in ROWS:
            self._clear(name)

    def read(self) -> None:
        """Read the rows that were appended to metrics.jsonl, history.jsonl, samples.jsonl and the
        file of completions since the last call. A damaged file raises nothing: it is noted in
        `refused`, file name -> message.
        """
        self.refused = {}
        for name, tail in self.tails.items():
            self._read_new(tail, name)

    def _read_new(self, tail: Tail, name: str) -> None:
        """Read the new rows of the file `name` through `tail` and add them to what is shown; if the
        file was written anew, what was read of it before is dropped. Damage, and a file that is a
        link, is noted in `refused`.
        """
        try:
            # each time: a file may be replaced by a link while it is watched
            _refuse_link(tail.file)
            for row in tail.read():
                # `first`: this row is the first of a file, perhaps of one written anew
                if tail.first:
                    self._clear(name)
                self._add(name, row)
            if tail.first:  # made anew, and there is nothing in it yet
                self._clear(name)
        except gate.Refused as error:
            self.refused[name] = str(error)
        if tail.refused:
            self.refused[name] = (
                f"{plural(tail.refused, 'line')} of {name} skipped: damaged, or not written "
                "by dolmen"
            )

    def _clear(self, name: str) -> None:
        """Forget all rows that were read of the file `name`, which was written anew."""
        if name == METRICS:
            self.series = Series()
        elif name == HISTORY:
            self.history = History()
        elif name == SAMPLES:
            self.samples: dict[str, dict[int, str]] = {}
        else:
            self.completions: dict[int, list[str]] = {}

    def _add(self, name: str, row: Mapping[str, Any]) -> None:
        """Add a row of the file `name` to the series of metrics, the history, the completions (at
        most 16 per step) or the samples (of at most 50 prompts), whichever the file is of.
        """
        if name == METRICS:
            self.series.add(row)
        elif name == HISTORY:
            self.history.add(row)
        elif name == COMPLETIONS:
            texts = self.completions.setdefault(row["step"], [])
            # bounds on everything: a page of a long run must stay small
            if len(texts) < MOST_COMPLETIONS:
                texts.append(describe_completion(row))
        elif row["prompt"] in self.samples or len(self.samples) < MOST_PROMPTS:
            self.samples.setdefault(row["prompt"], {})[row["step"]] = row["text"]

    def as_dict(self) -> dict[str, Any]:
        """Return all that the page shows of the run, as plain values for JSON: label, folder,
        facts, series, history, checkpoints, samples (shortened), the first MOST_OPTIONS options,
        messages of damaged files. Reads config.yaml, goodput.json and the list of checkpoints anew.
        """
        config = self._read_file("config.yaml", gate.read_yaml, kinds.RUN) or {}
        # files of a run are not trusted: there may be more in them than dolmen writes
        options = dict(list(flatten(config).items())[:MOST_OPTIONS])
        return {
            "label": self.label,
            "folder": str(self.folder),
            "facts": self._facts(config),
            "series": self.series.as_dict(),
            **self.history.as_dict(),
            "checkpoints": self._checkpoints(),
            "samples": self._samples(),
            "options": {name: _format_option(value) for name, value in options.items()},
            "refused": sorted(self.refused.values()),
        }

    def _samples(self) -> list[dict[str, Any]]:
        """Return tables {"prompt": title, "texts": [[step, text], ...]}: one for each prompt, and
        one for each i, of the i-th logged completion of every rollout iteration; of many steps,
        evenly spaced ones.
        """
        tables = dict(self.samples)
        for i in range(max(map(len, self.completions.values()), default=0)):
            by_step = {step: texts[i] for step, texts in self.completions.items() if i < len(texts)}
            tables[f"Completion {i + 1} of each iteration"] = by_step
        return [
            {
                "prompt": _shorten(title),
                "texts": [[step, _shorten(by_step[step])] for step in _pick_steps(by_step)],
            }
            for title, by_step in tables.items()
        ]

    def _read_file(self, name: str, read: Callable[[Path, gate.Kind], Any], kind: gate.Kind) -> Any:
        """Return a file of the run as `read` reads it, anew each time; None where it is missing or
        damaged, which is noted in `refused`.
        """
        file = self.folder / name
        try:
            _refuse_link(file)
            return read(file, kind) if file.exists() else None
        except gate.Refused as error:
            self.refused[name] = str(error)
            return None

    def _checkpoints(self) -> list[int]:
        """Return the steps of the complete checkpoints on disk, in ascending order, at most the
        newest 500.
        """
        return list(folders.list_checkpoints(self.folder / "checkpoints"))[-MOST_STARTS:]

    def _facts(self, config: Mapping[str, Any]) -> list[list[str]]:
        """Return the rows [title, text] of the table at the top of the run: model, layout, batch,
        steps, state, goodput, losses and so on; those without a text are left out. `config`: the
        run's options, nested.
        """
        options, last = flatten(dict(config)), self.series.last
        start = self.history.starts[-1] if self.history.starts else {}
        model = [str(options[n]) for n in ("model.model_type",) if n in options]
        model += [f"{size(start['parameters'])} parameters"] if "parameters" in start else []
        processes = ""
        if "processes" in start:
            count = plural(start["processes"], "process", "processes")
            processes = f"{count} on {start.get('device', '?')}"
        # the last step that metrics.jsonl has
        step = max((i.step for i in self.series.intervals.values()), default=0)
        total = start.get("steps") or options.get("train.steps")
        facts = {
            **_rollouts(last),
            "model": ", ".join(model),
            "layout": _layout(options),
            "processes": processes,
            "batch": _batch(options),
            "steps": f"{step:,} of {total:,}" if isinstance(total, int) else f"{step:,}",
            "state": self._state(),
            "goodput": self._goodput(),
            "training loss": _number(last.get("loss")),
            "validation loss": _number(last.get("val_loss")),
            "skipped steps": f"{last.get('skipped_steps') or 0:,.0f}",
        }
        return [[name, words] for name, words in facts.items() if words]

    def _state(self) -> str:
        """Return how the last start of the run ended, or "in progress, or killed" with the time of
        its last update, and the number of starts if there are several; "" before the first.
        """
        if not self.history.starts:
            return ""
        last = self.history.starts[-1]
        starts = len(self.history.starts)
        again = f", {plural(starts, 'start')}" if starts > 1 else ""
        if last["ended"] is not None:
            return last["ended"] + again
        # a killed run writes no end, so files alone cannot show which
        return f"in progress, or killed; last update at {self._last_update()} (UTC){again}"

    def _goodput(self) -> str:
        """Return, from the run's goodput.json, the shares of wall time by activity as text, and the
        ranks for which the others wait longest; "" where the file is missing, damaged or empty.
        """
        sums = self._read_file(goodput.FILE, gate.read_json, kinds.GOODPUT)
        if sums is None or not (shares := goodput.shares(sums["seconds"])):
            return ""
        slow = goodput.slow_ranks(sums["slow"], sums["seconds"])
        return "; ".join(
            [
                goodput.describe(shares),
                *(f"{_shorten(name)}: the others wait {share:.0%}" for name, share in slow.items()),
            ]
        )

    def _last_update(self) -> str:
        """Return the time at which a file of metrics, history or samples was last written, in UTC
        as text.
        """
        files = [self.tails[name].file for name in (METRICS, HISTORY, SAMPLES)]
        times = [file.stat().st_mtime for file in files if file.exists()]
        return datetime.fromtimestamp(max(times), UTC).strftime("%Y-%m-%d %H:%M:%S")


class History:
    """The rows of history.jsonl: starts, saves, memory per rank, load of experts."""

    def __init__(self):
        """Start without rows."""
        self.starts: list[dict[str, Any]] = []
        self.saved: list[int] = []
        self.memory: dict[str, Any] = {}
        self.load: dict[str, Any] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row of history.jsonl: a start of the run, which drops saves of later steps; the end
        of the last start; a save; memory per rank; or loads of experts, of which the last are kept.
        """
        if "begun" in row and len(self.starts) < MOST_STARTS:
            names = ("step", "time", "begun", "steps", "reached", "processes", "device")
            facts = {name: row[name] for name in (*names, "parameters") if name in row}
            changed = [_shorten(line) for line in row.get("changed", ())][:50]
            self.starts.append({**facts, "changed": changed, "ended": None, "until": None})
            # checkpoints after the step that it starts from are not of this course
            self.saved = [step for step in self.saved if step <= row["step"]]
        # `until` is the last step of a start
        if "ended" in row and self.starts:
            self.starts[-1] |= {"ended": row["ended"], "until": row["step"]}
        if row.get("saved") and row["step"] not in self.saved[-1:]:
            self.saved = [*self.saved, row["step"]][-MOST_STARTS:]
        if "memory_gib" in row:
            self.memory = {"step": row["step"], "gib": row["memory_gib"]}
        if "router_load" in row:
            self.load = {"step": row["step"], "layers": row["router_load"]}

    def as_dict(self) -> dict[str, Any]:
        """Return starts, saved steps, memory per rank and loads of experts as plain values. A start
        that has no end and is followed by another is marked as killed, in place; its last step is
        the one that the next start reports as reached.
        """
        for start, after in pairwise(self.starts):
            start["ended"] = start["ended"] or "killed"
            if start["until"] is None:
                # a killed start writes no end: the next one reports the last step in metrics.jsonl
                start["until"] = after.get("reached")
        return {
            "starts": self.starts,
            "saved": self.saved,
            "memory": self.memory,
            "load": self.load,
        }


def labels(paths: list[Path]) -> list[str]:
    """Return a name for each folder, to be shown: the last part of its path, or as many last parts,
    the same number for all, as make the names of different folders different.
    """
    full = [path.absolute().parts for path in paths]
    # runs/a/x and runs/b/x become a/x and b/x; 64 ends the search for equal paths
    depth = 1
    while len({parts[-depth:] for parts in full}) < len({*full}) and depth < 64:
        depth += 1
    return ["/".join(parts[-depth:]) for parts in full]


def differing_options(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """Return [option, [its value in each run]] for each option whose value is not the same in all
    runs; None where a run does not have it. `runs`: as of `WatchedRun.as_dict`.
    """
    names = {name: None for run in runs for name in run["options"]}
    rows = [[name, [run["options"].get(name) for run in runs]] for name in names]
    return [row for row in rows if len({*row[1]}) > 1]


def _refuse_link(file: Path) -> None:
    """Raise Refused for a symbolic link: it may point outside of the run's folder, and dolmen
    writes none.
    """
    if file.is_symlink():
        raise gate.refuse(file, "is a link, which is not followed")


def _pick_steps(steps: Iterable[int]) -> list[int]:
    """Return the steps in ascending order; of more than 12, 12 evenly spaced ones with the first
    and the last.
    """
    ordered = sorted(steps)
    return [ordered[i] for i in evenly(len(ordered), MOST_TEXTS)]


def describe_completion(row: Mapping[str, Any]) -> str:
    """Return a logged completion as text: its reward, tokens and whether it is finished or
    truncated in brackets, then prompt, arrow, completion. `row`: of completions.jsonl.
    """
    reward = f"reward {row['reward']:.4g}" if "reward" in row else "no reward"
    end = "finished" if row["finished"] else "truncated"
    facts = f"{reward}, {plural(row['tokens'], 'token')}, {end}"
    return f"[{facts}]  {row['prompt']} \u2192 {row['completion']}"


def _shorten(text: str) -> str:
    """Return the text; one of over 4,000 characters is cut there and followed by its length."""
    if len(text) <= LONGEST_TEXT:
        return text
    return f"{text[:LONGEST_TEXT]} ... ({len(text):,} characters)"


def _format_option(value: Any) -> str:
    """Return an option's value as text (JSON unless it is a string), cut at 400 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]} ..."


def _number(value: float | None) -> str:
    """Return a number as text with four decimals; "" for None."""
    return "" if value is None else f"{value:.4f}"


def _rollouts(last: Mapping[str, float | None]) -> dict[str, str]:
    """Return {title: text} of mean reward, completion length and share of finished completions of
    the last rollout iteration; "" for those that the run does not have. `last`: the last value of
    each metric.
    """
    length, finished = (last.get(f"rollout/{name}") for name in ("completion_length", "finished"))
    return {
        "mean reward": _number(last.get("rollout/reward")),
        "completion length": "" if length is None else f"{length:,.1f} tokens",
        "finished completions": "" if finished is None else f"{finished:.1%}",
    }


def _layout(options: Mapping[str, Any]) -> str:
    """Return the parallel layout in a run's options (dotted names) as text, such as "tp 2 x dp 4 x
    ZeRO 1", without axes of size 1; "one process" if all are, "" without any options.
    """
    # values come from a file: anything may be there, so types are checked
    degrees = [(axis, options.get(f"layout.{axis}")) for axis in AXES]
    words = [f"{axis} {n}" for axis, n in degrees if isinstance(n, int) and n > 1]
    zero = options.get("layout.zero")
    words += [f"ZeRO {zero}"] if isinstance(zero, int) and zero and words else []
    return " x ".join(words) if words else ("one process" if options else "")


def _batch(options: Mapping[str, Any]) -> str:
    """Return the size of a global batch in a run's options (dotted names) as text, such as "64
    sequences of 512 tokens"; "" if it is not there.
    """
    rows, length = (options.get(f"train.{n}") for n in ("global_batch_size", "sequence_length"))
    if not isinstance(rows, int):
        return ""
    of = f" of {length:,} tokens" if isinstance(length, int) else ""
    return f"{plural(rows, 'sequence')}{of}"
