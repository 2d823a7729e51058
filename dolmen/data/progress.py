"""What long preparations show: a bar where a person watches the terminal, else one plain line.
Always on stderr.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TimeRemainingColumn,
)


def say(text: str, shown: bool = True) -> None:
    if shown:
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(
    title: str, total: int | None, shown: bool, count: ProgressColumn | None = None
) -> Iterator[Callable[[int], None]]:
    """Says `title` and yields `reach(done)`, which moves the bar to `done` of `total` (None:
    unknown); `count` shows the two, as bytes unless it is given.
    """
    say(title, shown)
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda done: None
        return
    with Progress(
        BarColumn(),
        count or DownloadColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda done: progress.update(task, completed=done)
