"""What every verb may raise."""

from dolmen.core.words import printable


class BadInput(Exception):
    """Something the user gave cannot be done. The message says what and which option mends it; exit
    code 2. On one line, also where a library's own text, which it ends in, has several, and of
    characters that a terminal shows.
    """

    def __init__(self, text: str):
        super().__init__(printable(" ".join(line.strip() for line in text.splitlines())))


class Failed(RuntimeError):
    """A run that cannot go on; the message says why and what mends it, and no traceback is shown;
    exit code 1. `final`: starting again by itself would only fail again.
    """

    def __init__(self, text: str, final: bool = False):
        super().__init__(text)
        self.final = final


def message(error: Exception) -> str:
    """An exception's text; KeyError quotes its own."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
