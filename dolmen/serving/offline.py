"""`dolmen generate MODEL --input FILE --output FILE`: completions of all rows of a file.

    prepare    read the options and check all rows; nothing is written
    generate   send rows to the engine as it has room; write them as they finish (output_file.py)

All ranks of a replica (tp, pp) do the same with the same rows, and so schedule the same; the first
rank of all writes the output and shows the progress: a bar with tokens per second and the time left
on a terminal, else a plain line every EVERY seconds, always on stderr.

Problem: replicas (dp) finish rows at different times, and none should wait for another.

Idea: each takes the next row from a counter in a store that all ranks reach (`RowQueue`):

    next    a counter: the first rank of a replica adds 1 to it, and takes the row of that number
    row/G/N the N-th row that replica G has taken, for its other ranks
    done    a counter: number of finished rows
    ask/N   the N-th finished row, for the rank that writes

A single replica takes the rows in order, and needs no store.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from dolmen.conversion.source import ModelSource
from dolmen.core import consensus
from dolmen.core.config import to_dict
from dolmen.core.filesystem import expand
from dolmen.core.log import duration, say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import plural
from dolmen.core.torch_private import processes
from dolmen.data.tokenizer import PreTrainedTokenizer
from dolmen.files import gate
from dolmen.files.kinds import JOURNAL_ROW
from dolmen.serving import adapters
from dolmen.serving.config import GenerateConfig
from dolmen.serving.engine import Engine, open_engine
from dolmen.serving.generation import StopStrings, apply_generation_config
from dolmen.serving.output_file import OutputFile, check_finished, check_output
from dolmen.serving.output_file import digest as digest_of
from dolmen.serving.prompt_file import FileSummary, PromptFile, PromptRow, check_file, json_line
from dolmen.serving.request import FinishedSequence, Limits, StepOutput

EVERY = 30.0  # seconds between two plain lines
RECENT = 60.0  # seconds that the rate is averaged over, as early rows predict late ones poorly


class Meter:
    """Counts finished rows and new tokens, and formats the rate over the last RECENT seconds."""

    def __init__(self, rows: int, done: int):
        """`rows`: all rows of the job. `done`: those that an earlier run had finished."""
        self.rows, self.done, self.tokens = rows, done, 0
        self._start = self._last_line = time.monotonic()
        self._marks = [(self._start, done, 0)]

    def count(self, rows: int, tokens: int) -> None:
        """Add newly finished rows and new tokens."""
        self.done += rows
        self.tokens += tokens
        now = time.monotonic()
        if now - self._marks[-1][0] > RECENT / 20:
            # at most 20 marks: one each RECENT / 20 = 3 seconds
            self._marks = [mark for mark in self._marks if now - mark[0] < RECENT]
            self._marks.append((now, self.done, self.tokens))

    def __str__(self) -> str:
        """Format as `12 of 256 rows, 2,743 tokens/s, 1:23 left`."""
        start, done, tokens = self._marks[0]
        seconds = max(time.monotonic() - start, 1e-9)
        left = "-:--"
        if self.done > done:
            left = duration((self.rows - self.done) * seconds / (self.done - done))
        rate = (self.tokens - tokens) / seconds
        return f"{self.done:,} of {plural(self.rows, 'row')}, {rate:,.0f} tokens/s, {left} left"

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        """Return whether EVERY (30) seconds have passed since the last plain line; if so, restart
        that interval.
        """
        now = time.monotonic()
        if now - self._last_line < EVERY:
            return False
        self._last_line = now
        return True


@contextmanager
def progress_display(meter: Meter, visible: bool) -> Iterator["ProgressDisplay"]:
    """Show the meter within this context, on stderr: a bar on a terminal, else plain lines.
    `visible`: False on ranks that print nothing. `refresh()` of what is yielded updates it.
    """
    console = Console(stderr=True)
    if not (visible and console.is_terminal):
        yield ProgressDisplay(meter, None, visible)
        return
    with Progress(
        BarColumn(), TextColumn("{task.description}"), console=console, transient=True
    ) as bar:
        yield ProgressDisplay(meter, bar, visible)


class ProgressDisplay:
    """Shows a meter as a progress bar, as plain lines (`bar` None), or not at all."""

    def __init__(self, meter: Meter, bar: Progress | None, visible: bool):
        """`bar`: None for plain lines. `visible`: False prints nothing."""
        self.meter, self.bar, self.visible = meter, bar, visible
        self.task = None if bar is None else bar.add_task("", total=meter.rows)

    def refresh(self) -> None:
        """Update the bar, or print a plain line if one is due."""
        meter = self.meter
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=meter.done, description=str(meter))
        elif self.visible and meter.is_due():
            say(str(meter))


NAME = "dolmen generate"


class RowQueue:
    """Distributes row numbers among the replicas (dp), and brings finished rows to the rank that
    writes them.
    """

    def __init__(self, rows: Sequence[int], mesh: Mesh):
        """`rows`: numbers of the rows to generate, the same on all ranks."""
        self.rows, self.replicas = rows, mesh.dp.size
        self.replica, self.leads = mesh.dp.rank, mesh.tp.rank == 0 and mesh.pp.rank == 0
        self.store = None if self.replicas == 1 else processes.store(NAME)
        self._taken = self._replica_count = self._collected = 0
        self._finished: deque[tuple[int, dict[str, Any]]] = deque()

    def take(self, running: int) -> int | None:
        """Return the number of the next row for this replica, which has `running` rows at work;
        None: none is left, or the other replicas should have the rest.

        All ranks of a replica make the same calls and get the same rows. When few rows are left, a
        replica takes no more than its share of them.
        """
        if self.store is None:
            number = self._taken
        else:
            number = self._next(self.store, running)
        if number >= len(self.rows):
            return None
        self._taken = number + 1
        return self.rows[number]

    def _next(self, store: processes.Store, running: int) -> int:
        """Return the index of the next row from the counter in the store; len(rows) for none. The
        replica's first rank takes it and publishes it for the replica's other ranks.
        """
        left = max(len(self.rows) - self._taken, 0)
        # near the end: leave the rest to replicas that have less to do
        if running and running >= (left + running) / self.replicas:
            return len(self.rows)
        # written once and read by each other rank of the replica, so it is not deleted
        key = f"row/{self.replica}/{self._replica_count}"
        self._replica_count += 1
        if not self.leads:
            return int(store.get(key))
        number = store.add("next", 1) - 1
        store.set(key, str(number))
        return number

    def finish(self, number: int, row: dict[str, Any]) -> None:
        """Hand a finished row of this replica to the rank that writes the output: `number`, and the
        output fields in `row`.
        """
        if self.store is None:
            self._finished.append((number, row))
        elif self.leads:
            place = self.store.add("done", 1)
            self.store.set(f"ask/{place}", json_line({"row": number, "answer": row}).decode())

    def collect(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and fields of the rows that all replicas finished since the last call, and
        remove them from the store. Only the rank that writes calls it.
        """
        if self.store is None:
            while self._finished:
                yield self._finished.popleft()
            return
        # adding 0 reads the counter without waiting
        finished = self.store.add("done", 0)
        while self._collected < finished:
            self._collected += 1
            key = f"ask/{self._collected}"
            result = gate.parse_json(self.store.get(key), NAME, JOURNAL_ROW)
            # completions are large, and the store is in the memory of one process
            self.store.delete_key(key)
            yield result["row"], result["answer"]


PAUSE = 0.02  # seconds between two looks at the store of a rank that has nothing else to do
# Options that decide the completions, and so must be the same on --resume.
DECIDING = (
    "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias stop num_samples logprobs max_input_tokens "
    "skip_bad seed dtype weights compile"
).split()


@dataclass(frozen=True)
class Job:
    """The options and rows of a run, checked."""

    prompts: PromptFile
    summary: FileSummary
    options: dict[str, Any]
    """Options that decide the completions, as plain values."""
    digest: str
    """Digest of the input file."""
    unfinished: bool
    """True if rows are left to generate."""

    @property
    def config(self) -> GenerateConfig:
        """Options of the run, with the defaults of generation_config.json filled in."""
        return self.prompts.config

    @property
    def output(self) -> Path:
        """Path of the output file."""
        return expand(self.config.output or "")


def check_options(config: GenerateConfig) -> None:
    """Raise ValueError for options out of range, before anything is read."""
    if config.output is None:
        raise ValueError("--input writes to a file: give --output FILE")
    config.sampling_params.check()
    adapters.check_name(config.adapter, adapters.parse_adapters(config.adapters))
    check_file(expand(config.input or ""))


def prepare(
    config: GenerateConfig,
    source: ModelSource,
    tokenizer: PreTrainedTokenizer,
    verbose: bool,
    fresh: bool,
) -> Job:
    """Check the options and all rows of --input, and return the job. Raises ValueError, with
    nothing written.

    `verbose`: print a summary of the rows. `fresh`: this run has not written anything yet, so that
    an existing output is an error (or, with --resume, is checked against the rows).
    """
    file = expand(config.input or "")
    config, lines = apply_generation_config(config, source.generation_config)
    config.sampling_params.check()
    folders = adapters.parse_adapters(config.adapters)
    prompts = PromptFile(config, source, tokenizer, file, folders)
    for line in lines:
        say(line, verbose)
    output, digest = expand(config.output or ""), digest_of(file)
    # after generation_config.json has been applied: its defaults decide completions too
    options = _deciding_options(config, source)
    if fresh:  # an existing output is refused before long files are read
        check_output(output, None, config.resume, options, digest)
    summary = prompts.check_rows()
    rows = len(summary.places)
    unfinished = not fresh or check_output(output, rows, config.resume, options, digest)
    if fresh and config.resume and output.exists():
        check_finished(output, prompts.rows_at(summary.places))
    _print_summary(summary, config, verbose)
    return Job(prompts, summary, options, digest, unfinished)


def _deciding_options(config: GenerateConfig, source: ModelSource) -> dict[str, Any]:
    """Return the options that decide the completions, with the resolved model and its iteration, as
    plain values: they must be equal on --resume.
    """
    values = to_dict(config)
    model: dict[str, Any] = {
        "model": str(Path(source.where).resolve()),
        "iteration": source.iteration,
    }
    lora = {"adapters": list(config.adapters), "adapter": config.adapter}
    # without adapters neither is in the journal
    model |= lora if config.adapters else {}
    # n-gram drafts change no token
    if config.speculative.method == "draft":
        model["speculative"] = values["speculative"]
    return {name: values[name] for name in DECIDING} | model


def _print_summary(read: FileSummary, config: GenerateConfig, verbose: bool) -> None:
    """Print how many rows are left out, cut, or limited by the model's positions, if any."""
    if read.bad:
        say(f"{plural(read.bad, 'row')} skipped: they are invalid", verbose)
    if read.cut:
        say(
            f"{plural(read.cut, 'prompt')} truncated to "
            f"{plural(config.max_input_tokens or 0, 'token')}, from the left",
            verbose,
        )
    if read.short:
        say(
            f"{plural(read.short, 'row')} may end before --max-new-tokens, at "
            "max_position_embeddings",
            verbose,
        )


def generate(job: Job, source: ModelSource, mesh: Mesh, draft: ModelSource | None = None) -> None:
    """Generate the unfinished rows of `job` with the model of `source` on all ranks of `mesh`, and
    write them to the output; the first rank shows the progress and prints a summary. `draft`: draft
    model of speculative decoding.

    Raises ValueError, also for logits that are not finite, and OSError where the output cannot be
    written.
    """
    config, limits = job.config, Limits(tokens=job.config.max_batch_tokens)
    output = OutputFile(job.output, job.options, job.digest) if mesh.first else None
    left = _list_unfinished_rows(job, output, mesh)
    rows = len(job.summary.places)
    meter = Meter(rows, rows - len(left))
    runner = RowRunner(job, RowQueue(left, mesh), output, meter)
    with (
        progress_display(meter, mesh.first) as screen,
        open_engine(
            config, source, job.prompts.tokenizer, mesh, limits, config.adapters, draft
        ) as running,
    ):
        try:
            while runner.feed(running):
                runner.handle(running, running.step())
                screen.refresh()
            # this replica has nothing left, but others may still run
            while not runner.write_finished():
                # the store has no notification, so look again
                time.sleep(PAUSE)
                screen.refresh()
        finally:
            if output is not None:
                output.close()
    if output is not None:
        output.finish()
        say(_summary(job, meter, runner.close))
        say(str(running.usage))
        if config.speculative.method is not None:
            say(f"speculative decoding: {running.acceptance}")


def _list_unfinished_rows(job: Job, output: OutputFile | None, mesh: Mesh) -> list[int]:
    """Return the numbers of the rows that the output does not have yet. The first rank reads them
    off `output` and broadcasts them; it is None on the others.
    """
    total = range(len(job.summary.places))

    def list_rows() -> list[int]:
        """Return the numbers of the rows that the output lacks."""
        assert output is not None, "the first rank has opened it"
        return [row for row in total if not output.has(row)]

    return list_rows() if mesh.size == 1 else consensus.run_on_rank_zero(list_rows)


def _summary(job: Job, meter: Meter, close: int) -> str:
    """Format rows, tokens and tokens per second of a finished run, and how many tokens were near
    ties (`close`).
    """
    seconds = max(meter.seconds, 1e-9)
    text = (
        f"wrote {job.output}: {plural(len(job.summary.places), 'row')}; "
        f"{plural(meter.tokens, 'new token')} in {seconds:,.1f} s, "
        f"{meter.tokens / seconds:,.0f} per second"
    )
    if close:
        text += (
            f"; {plural(close, 'token')} had a runner-up within 1e-4, which another batch or "
            "layout may choose"
        )
    return text


class RowRunner:
    """Submits rows to an engine, collects their samples, and hands finished rows to the queue."""

    def __init__(self, job: Job, queue: RowQueue, output: OutputFile | None, meter: Meter):
        """`queue`: where row numbers come from. `output`: the file, on the rank that writes.
        `meter`: counts rows and tokens.
        """
        self.job, self.queue, self.output, self.meter = job, queue, output, meter
        self.close = 0
        self._rows = iter(enumerate(job.prompts.rows_at(job.summary.places)))
        self._running: dict[int, tuple[int, PromptRow]] = {}  # by number of the request
        self._stops = StopStrings(job.prompts.tokenizer, job.config.stop)
        self._samples: dict[int, dict[int, dict[str, Any]]] = {}  # finished ones of running rows

    def feed(self, engine: Engine) -> bool:
        """Submit rows until as many run as the engine takes, or none is left; return whether the
        engine is busy.
        """
        # a row has num_samples sequences at once
        capacity = engine.limits.rows // self.job.config.num_samples
        while len(self._running) < max(capacity, 1):
            number = self.queue.take(len(self._running))
            if number is None:
                break
            # numbers only rise, so one pass over the file is enough
            row = next(row for index, row in self._rows if index == number)
            request, _ = self.job.prompts.request(row)
            self._running[engine.add(request)] = number, row
        return engine.busy

    def handle(self, engine: Engine, output: StepOutput) -> None:
        """Take in the result of a step: end samples that have reached a stop string, complete the
        rows whose samples are all finished, and write those (of all replicas, on the first rank).
        Raises ValueError for logits that are not finite.
        """
        finished = self._stops.finish(engine, output)
        _require_finite(finished, self._running)
        self.meter.count(0, len(output.new_tokens))
        for sequence in finished:
            self._finish_sample(sequence)
        self.write_finished()

    def _finish_sample(self, sequence: FinishedSequence) -> None:
        """Store the output fields of a finished sample; with the row's last sample, hand the row to
        the queue.
        """
        number, row = self._running[sequence.number]
        samples = self._samples.setdefault(sequence.number, {})
        samples[sequence.sample] = self._output_fields(sequence)
        self.close += sequence.close
        count = self.job.config.num_samples
        if len(samples) < count:
            return
        del self._running[sequence.number], self._samples[sequence.number]
        ordered = [samples[i] for i in range(count)]
        fields = ordered[0] if count == 1 else {"samples": ordered}
        self.queue.finish(number, row.fields | fields)

    def _output_fields(self, sequence: FinishedSequence) -> dict[str, Any]:
        """Return the output fields of a sample: text, token ids, finish reason, and
        log-probabilities if requested.
        """
        text, reason = self._stops.take_text(sequence)
        fields = {"text": text, "tokens": sequence.tokens, "finish_reason": reason}
        if self.job.config.logprobs is not None:
            fields["logprobs"] = [logprob.logprob for logprob in sequence.logprobs]
        return fields

    def write_finished(self) -> bool:
        """Write the finished rows of all replicas, on the first rank. Returns whether all rows of
        the job are written; always True on ranks that do not write.
        """
        if self.output is None:
            return True
        for number, row in self.queue.collect():
            self.output.add(number, row)
            self.meter.count(1, 0)
        return self.meter.done == self.meter.rows


def _require_finite(
    finished: list[FinishedSequence], running: dict[int, tuple[int, PromptRow]]
) -> None:
    """Raise ValueError that names file and line of the first sequence whose logits are not
    finite.
    """
    for sequence in finished:
        if sequence.finish_reason == "not finite":
            raise ValueError(
                f"{running[sequence.number][1].where}: the logits of new token "
                f"{len(sequence.tokens) + 1} are not finite: the model has diverged, or needs "
                "--dtype float32"
            )
