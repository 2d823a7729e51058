"""The console and progress bars.

One console, silent on all ranks but the first; plain lines where the output is no terminal. Long
preparations show a progress bar on a terminal, else one plain line, always on stderr.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TimeRemainingColumn

from dolmen.core.messages import printable


def console(shown: bool = True) -> Console:
    """Return a rich Console on standard output that prints plain text without markup, nothing
    unless `shown`; 100 columns wide for tables where the output is no terminal.
    """
    out = Console(quiet=not shown, highlight=False, markup=False, soft_wrap=True)
    return (
        out
        if out.is_terminal
        else Console(quiet=not shown, highlight=False, markup=False, soft_wrap=True, width=100)
    )


def size(count: float, unit: str = "") -> str:
    """Return a count as text with three digits and a decimal prefix: 12,345,678 -> '12.3 M'. `unit`
    follows the prefix (12.3 MB); 10^9 is B without a unit, else G.
    """
    count = float(f"{count:.3g}")  # 999.6 is 1 k
    for factor, prefix in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        # a count of parameters is in billions, 7 B; with a unit it is SI's giga
        (1e9, "B" if not unit else "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(count) >= factor:
            return f"{count / factor:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}".rstrip()


def gib(count: float) -> str:
    """Return bytes as text in MiB, or GiB from 1 GiB on."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return seconds as H:MM:SS or M:SS text, such as '1:02:03' or '2:03'."""
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def say(text: str, shown: bool = True) -> None:
    """Print lines to stderr if `shown`, with terminal control characters escaped."""
    if shown:
        text = "\n".join(map(printable, text.split("\n")))
        Console(stderr=True).print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def bar(
    title: str, total: int | None, shown: bool, count: ProgressColumn | None = None
) -> Iterator[Callable[[int], None]]:
    """Context manager: print `title` to stderr and show a progress bar below it on a terminal;
    neither unless `shown`. Yields `reach(done)`, which moves the bar to `done` of `total` (None:
    unknown) and does nothing without a bar. `count`: column that shows the two, as bytes by
    default.
    """
    say(title, shown)
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        # a log file would keep every redraw of a bar
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
