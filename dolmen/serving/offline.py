"""Answers all prompts of a file, with data-parallel models taking rows from one counter.

Which model of several side by side (dp) answers which row, and how its answer comes to the rank
that writes: through a store that all ranks reach, so that no model waits for another one.

    next    a counter: the first rank of a model adds one to it, and answers the row of that number
    row/G/N what the first rank of model G has taken the N-th time, for the others of it
    done    a counter: so many answers have been given
    ask/N   the N-th of them

A single model takes the rows as they come, and needs no store.

`dolmen generate MODEL --input FILE --output FILE`: rows in, rows out.

    prepared   the model's words and all rows are read and checked; nothing is written
    answered   rows go to the engine as it has room, and out as they end (answers.py)

All ranks of a model (tp, pp) do the same with the same rows, and so decide the same; the first rank
of all writes. Several models side by side (dp) take rows one by one from a counter that all see
, each when it has room.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dolmen.conversion.source import Source, open_source, tokenizer_folder
from dolmen.core import agree
from dolmen.core.config import to_dict
from dolmen.core.log import say
from dolmen.core.mesh import Mesh
from dolmen.core.messages import counted
from dolmen.core.paths import expand
from dolmen.core.torch_private import processes
from dolmen.data.tokenizer import load_tokenizer
from dolmen.files import gate
from dolmen.files.kinds import JOURNAL_ROW
from dolmen.optim.optimizer import DTYPES
from dolmen.serving import adapters, engine, meter, rows
from dolmen.serving import answers as written
from dolmen.serving.answers import Answers
from dolmen.serving.config import GenerateConfig
from dolmen.serving.defaults import resolved
from dolmen.serving.engine import Engine
from dolmen.serving.prompts import Prompts, Read
from dolmen.serving.request import Ended, Happened, Limits
from dolmen.serving.rows import Row, line_of
from dolmen.serving.text import Incremental, check_stop

NAME = "dolmen generate"


class Deal:
    """Rows that are to be answered, by their numbers, and answers that are to be written."""

    def __init__(self, rows: Sequence[int], mesh: Mesh):
        """The same `rows`, in order, on all ranks."""
        self.rows, self.models = rows, mesh.dp.size
        self.model, self.leads = mesh.dp.rank, mesh.tp.rank == 0 and mesh.pp.rank == 0
        self.store = None if self.models == 1 else processes.store(NAME)
        self._taken = self._own = self._given = 0
        self._answers: deque[tuple[int, dict[str, Any]]] = deque()

    def take(self, running: int) -> int | None:
        """The next row of this model, which has so many `running`; None where it is to take none
        now. All of its ranks ask the same. While few are left, a model takes no more than its share
        of them.
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
        left = max(len(self.rows) - self._taken, 0)
        if running and running >= (left + running) / self.models:
            return len(self.rows)
        key = f"row/{self.model}/{self._own}"
        self._own += 1
        if not self.leads:
            return int(store.get(key))
        number = store.add("next", 1) - 1
        store.set(key, str(number))
        return number

    def give(self, number: int, answer: dict[str, Any]) -> None:
        """An answer of this model; one of its ranks brings it to the one that writes."""
        if self.store is None:
            self._answers.append((number, answer))
        elif self.leads:
            place = self.store.add("done", 1)
            self.store.set(f"ask/{place}", line_of({"row": number, "answer": answer}).decode())

    def given(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """On the rank that writes: what has been given since it last asked."""
        if self.store is None:
            while self._answers:
                yield self._answers.popleft()
            return
        there = self.store.add("done", 0)
        while self._given < there:
            self._given += 1
            key = f"ask/{self._given}"
            found = gate.parse_json(self.store.get(key), NAME, JOURNAL_ROW)
            self.store.delete_key(key)
            yield found["row"], found["answer"]


PAUSE = 0.02  # seconds between two looks of a rank that has nothing else to do
# What decides the answers, and so must be the same when they go on.
DECIDING = (
    "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty "
    "presence_penalty frequency_penalty logit_bias stop num_samples logprobs max_input_tokens "
    "skip_bad seed dtype weights"
).split()


@dataclass(frozen=True)
class Job:
    """What is to be answered, checked."""

    prompts: Prompts
    read: Read
    asked: dict[str, Any]
    """What decides the answers, as plain values."""
    digest: str
    """Of the rows."""
    left: bool
    """Whether any row is."""

    @property
    def config(self) -> GenerateConfig:
        return self.prompts.config

    @property
    def output(self) -> Path:
        return expand(self.config.output or "")


def check(config: GenerateConfig) -> None:
    """Raises ValueError for options that have no meaning, before anything is read."""
    if config.output is None:
        raise ValueError("--input is answered into a file: give --output FILE")
    config.of_tokens.check()
    check_stop(config.stop)
    for name in ("num_samples", "max_input_tokens", "max_batch_tokens"):
        value = to_dict(config)[name]
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: use --{name.replace('_', '-')} 1 or more")
    adapters.check_name(config.adapter, adapters.named(config.adapters))
    rows.check_file(expand(config.input or ""))


def prepared(config: GenerateConfig, tell: bool, fresh: bool) -> Job:
    """Reads what is asked and all rows of --input; `tell` says what was found, and `fresh` that
    nothing has been written by this run. Raises ValueError, with nothing written.
    """
    check(config)
    file = expand(config.input or "")
    source = open_source(config.folder)
    config, told = resolved(config, source.generation_config)
    config.of_tokens.check()
    tokenizer = load_tokenizer(tokenizer_folder(source), option="")
    folders = adapters.named(config.adapters)
    adapters.opened(folders, source)
    prompts = Prompts(config, source, tokenizer, file, folders)
    for line in told:
        say(line, tell)
    output, digest = expand(config.output or ""), written.digest(file)
    asked = _deciding(config, source)
    if fresh:  # what is there is told before long files are read
        written.check(output, None, config.resume, asked, digest)
    read = prompts.read()
    left = not fresh or written.check(output, len(read.places), config.resume, asked, digest)
    if fresh and config.resume and output.exists():
        written.check_rows(output, prompts.at(read.places))
    _tell(read, config, tell)
    return Job(prompts, read, asked, digest, left)


def _deciding(config: GenerateConfig, source: Source) -> dict[str, Any]:
    said = to_dict(config)
    model = {"model": str(Path(source.where).resolve()), "iteration": source.iteration}
    beside = {"adapters": list(config.adapters), "adapter": config.adapter}
    # left out where there are none, as journals of before have neither
    return {name: said[name] for name in DECIDING} | model | (beside if config.adapters else {})


def _tell(read: Read, config: GenerateConfig, tell: bool) -> None:
    if read.bad:
        say(f"{counted(read.bad, 'row')} left out: they cannot be answered", tell)
    if read.cut:
        say(
            f"{counted(read.cut, 'prompt')} cut to {counted(config.max_input_tokens or 0, 'token')}"
            ", from the left",
            tell,
        )
    if read.short:
        say(
            f"{counted(read.short, 'row')} may end before --max-new-tokens: the model has no "
            "position for more",
            tell,
        )


def answered(job: Job, mesh: Mesh) -> None:
    """All rows of `job` that have no answer yet are answered, by all ranks of `mesh`. Raises
    ValueError, also for scores that are no numbers, and OSError where the output cannot be written.
    """
    config, source = job.config, job.prompts.source
    dtype = DTYPES[config.dtype] if config.dtype else None
    model = engine.load_placed(source, mesh, dtype, config.weights)
    beside = adapters.opened(adapters.named(config.adapters), source, mesh)
    answers = Answers(job.output, job.asked, job.digest) if mesh.first else None
    left = _left(job, answers, mesh)
    deal = Deal(left, mesh)
    counts = meter.Meter(len(job.read.places), len(job.read.places) - len(left))
    work = Work(job, deal, answers, counts)
    tokenizer = job.prompts.tokenizer
    with (
        meter.shown(counts, mesh.first) as screen,
        Engine(
            model,
            stop=engine.stop_tokens(source),
            known=tokenizer.get_vocab().values(),
            limits=Limits(tokens=config.max_batch_tokens),
            mesh=mesh,
            weights=config.weights,
            adapters=adapters.placed(beside, model, mesh),
        ) as running,
    ):
        try:
            while work.feed(running):
                work.take(running, running.step())
                screen.refresh()
            while not work.collected():
                time.sleep(PAUSE)
                screen.refresh()
        finally:
            if answers is not None:
                answers.close()
    if answers is not None:
        answers.finish()
        say(_summary(job, counts, work.close))
        say(str(running.memory))


def _left(job: Job, answers: Answers | None, mesh: Mesh) -> list[int]:
    """Numbers of the rows that have no answer, the same on all ranks."""
    total = range(len(job.read.places))

    def found() -> list[int]:
        assert answers is not None, "the first rank has them"
        return [row for row in total if not answers.has(row)]

    return found() if mesh.size == 1 else agree.once(found)


def _summary(job: Job, counts: meter.Meter, close: int) -> str:
    seconds = max(counts.seconds, 1e-9)
    text = (
        f"wrote {job.output}: {counted(len(job.read.places), 'row')}; "
        f"{counted(counts.tokens, 'new token')} in {seconds:,.1f} s, "
        f"{counts.tokens / seconds:,.0f} per second"
    )
    if close:
        text += (
            f"; {counted(close, 'token')} lay within 1e-4 of another one, and may be that one in "
            "another batch or layout"
        )
    return text


class Work:
    """Rows on their way through an engine."""

    def __init__(self, job: Job, deal: Deal, answers: Answers | None, counts: meter.Meter):
        self.job, self.deal, self.answers, self.counts = job, deal, answers, counts
        self.close = 0
        self._rows = self._streamed()
        self._running: dict[int, tuple[int, Row]] = {}  # by the engine's numbers
        self._texts: dict[tuple[int, int], Incremental] = {}  # where there are stop strings
        self._ended: dict[int, dict[int, dict[str, Any]]] = {}  # of rows with several samples
        self._next: tuple[int, Row] | None = None

    def _streamed(self) -> Iterator[tuple[int, Row]]:
        return iter(enumerate(self.job.prompts.at(self.job.read.places)))

    def feed(self, engine: Engine) -> bool:
        """Give the engine as many rows as it has room for. -> Whether it has any."""
        room = engine.limits.rows // self.job.config.num_samples
        while len(self._running) < max(room, 1):
            number = self.deal.take(len(self._running))
            if number is None:
                break
            row = next(row for here, row in self._rows if here == number)
            request, _ = self.job.prompts.request(row)
            self._running[engine.add(request)] = number, row
        return engine.busy

    def take(self, engine: Engine, happened: Happened) -> None:
        """What a step has brought."""
        ended = list(happened.ended)
        if self.job.config.stop:
            for chosen in happened.chosen:
                key = chosen.number, chosen.sample
                text = self._texts.setdefault(
                    key, Incremental(self.job.prompts.tokenizer, self.job.config.stop)
                )
                text.add(chosen.token)
                if text.stopped is not None:
                    ended += engine.cancel(*key)
        _require_finite(ended, self._running)
        self.counts.count(0, len(happened.chosen))
        for one in ended:
            self._end(one)
        self.collected()

    def _end(self, one: Ended) -> None:
        number, row = self._running[one.number]
        samples = self._ended.setdefault(one.number, {})
        samples[one.sample] = self._answer(one)
        self.close += one.close
        several = self.job.config.num_samples
        if len(samples) < several:
            return
        del self._running[one.number], self._ended[one.number]
        own = [samples[i] for i in range(several)]
        self.deal.give(number, row.fields | (own[0] if several == 1 else {"samples": own}))

    def _answer(self, one: Ended) -> dict[str, Any]:
        text, tokenizer = (
            self._texts.pop((one.number, one.sample), None),
            self.job.prompts.tokenizer,
        )
        stopped = False
        if text is not None:
            text.end()
            stopped = text.stopped is not None
        found = (
            text.whole
            if text is not None and stopped
            else tokenizer.decode(one.tokens, skip_special_tokens=True)
        )
        answer = {
            "text": found,
            "tokens": one.tokens,
            "finish_reason": "stop" if stopped else one.why,
        }
        if self.job.config.logprobs is not None:
            answer["logprobs"] = [each.logprob for each in one.logprobs]
        return answer

    def collected(self) -> bool:
        """On the first rank: answers of all models are written. -> Whether all rows are there, or
        another rank writes them.
        """
        if self.answers is None:
            return True
        for number, answer in self.deal.given():
            self.answers.add(number, answer)
            self.counts.count(1, 0)
        return self.counts.done == self.counts.rows


def _require_finite(ended: list[Ended], running: dict[int, tuple[int, Row]]) -> None:
    for one in ended:
        if one.why == "not finite":
            raise ValueError(
                f"{running[one.number][1].where}: the scores of new token {len(one.tokens) + 1} "
                "are not finite: the model has diverged, or needs --dtype float32"
            )
