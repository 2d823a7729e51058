"""What long preparations show: a bar where a person watches the terminal, else one plain line. Always on stderr."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


def say(text: str, shown: bool = True) -> None:
    if shown:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(title: str, total: int | None, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yields `reach(done)`, which moves the bar to `done` of `total` bytes (None: unknown)."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        say(title, shown)
        yield lambda done: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.update(task, completed=done)
