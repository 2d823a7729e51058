"""Exceptions that every command may raise, and how values and options are worded in messages.

Messages name options as the command line does. `python_spelling` turns them into Python's:
`--train.global-batch-size 8` is `train.global_batch_size 8`, and as `--resume` is `resume=True`,
`--train.no-compile` is `train.compile=False`. A whole command, such as `dolmen export RUN --to
DIR`, is for a shell.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches


class BadInput(Exception):
    """User input that cannot be used. The message names the problem and the option that mends it;
    exit code 2. Reduced to one printable line, also where a library's own text, which it ends in,
    has several.
    """

    def __init__(self, text: str):
        """Take the message, and reduce it to one printable line."""
        super().__init__(one_line(text))


class Failed(RuntimeError):
    """A run that cannot continue; the message gives the reason and the remedy, and no traceback is
    shown; exit code 1. `final`: restarting would only fail again.
    """

    def __init__(self, text: str, final: bool = False):
        """Take the message, and reduce it to one printable line. `final`: a restart would only fail
        again.
        """
        super().__init__(one_line(text))
        self.final = final


def message(error: Exception) -> str:
    """Return an exception's text; of a KeyError without the quotes that str() adds."""
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


@contextmanager
def as_bad_input(*types: type[Exception]) -> Iterator[None]:
    """Context manager: turn exceptions of these types (default: ValueError, KeyError and OSError)
    into BadInput, except that of a closed pipe.
    """
    types = types or (ValueError, KeyError, OSError)
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has closed the pipe
        raise
    except types as error:
        raise BadInput(message(error)) from None


@contextmanager
def os_error_as_value(option: str) -> Iterator[None]:
    """Context manager: turn an OSError inside into a ValueError whose message is `option` (an
    option with its value), a colon and the system's reason.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {error.strerror or error}") from None


COMMAND = r"\bdolmen (?:export|generate|train) [^;)]*"
OPTION = r"(?<![\w./-])(--)?([a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*)(?![\w/-])"
MENTION = re.compile(f"{COMMAND}|{OPTION}")


def python_spelling(text: str, keywords: Mapping[str, str], switches: Collection[str] = ()) -> str:
    """Return the message `text` with options respelled as Python keywords: `--train.no-compile` as
    `train.compile=False`. `keywords`: from an option's name (without dashes before it, `_` for `-`)
    to its replacement; `switches`: options that take no value. Whole dolmen commands, unknown
    options, and words with neither dashes before them nor a section stay.
    """

    def respell(match: re.Match[str]) -> str:
        """Return the Python spelling of one matched option; any other match as it is."""
        dashes, name = match.groups()
        name = (name or "").replace("-", "_")  # empty: a command
        section, _, last = name.rpartition(".")
        if not dashes and not section:
            return match[0]
        if name in keywords:
            named = text.startswith(" is ", match.end())  # with a value of its own
            return keywords[name] + ("=True" if dashes and name in switches and not named else "")
        positive = f"{section}.{last.removeprefix('no_')}"
        return f"{keywords[positive]}=False" if positive in keywords else match[0]

    return MENTION.sub(respell, text)


def plural(count: int, one: str, several: str | None = None) -> str:
    """Return a count with its noun: '1 process', '1,200 processes'. `several` is the plural, by
    default `one` with an s.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


LONGEST = 80  # characters of a value in a message


def brief(value: object) -> str:
    """Return repr(value) for a message; where it has over 80 characters its first 77, dots and its
    length.
    """
    return cut(repr(value))


def cut(text: str) -> str:
    """Return `text`, and where it has over 80 characters its first 77, dots and its length."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 3]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """Return `text` with characters that a terminal would obey, not show, escaped as in Python: a
    right-to-left override turns the rest of a line around.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def megabytes(size: int) -> str:
    """Return a size in bytes as text: "1,234.5 MB", or "812 bytes" below 0.1 MB."""
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else plural(size, "byte")


def one_line(text: str) -> str:
    """Return a message, which may hold names of files and the text of libraries, as one printable
    line.
    """
    return printable(" ".join(line.strip() for line in text.splitlines()))


def escape(name: object) -> str:
    """Return a name that a user or a file has chosen, with line breaks and control characters
    escaped.
    """
    return printable(str(name))


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DTYPES |= {"half": "float16", "float": "float32", "double": "float64"}
# what others call a format of --to
FORMATS = {"transformers": "hf", "huggingface": "hf", "safetensors": "hf"}
FORMATS |= {"mcore": "megatron-core", "torch_dist": "torch-dist", "dist": "torch-dist"}


def choices(value: str, known: Iterable[object]) -> str:
    """Return the end of a message behind "X is VALUE: ": "did you mean bfloat16?" where `value` is
    another name of a known one (of a dtype or a format), else "use one of ..." with all known
    values.
    """
    names = [str(name) for name in known]
    plain = value.lower().removeprefix("torch.")
    meant = (DTYPES | FORMATS).get(plain, value.removeprefix("torch."))
    if meant in names:
        return f"did you mean {meant}?"
    return f"use one of {', '.join(names)}"


def did_you_mean(
    name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6, most: int = 3
) -> str:
    """Return "did you mean a or b?" with up to `most` of the known names that are closest to
    `name`, of a similarity (difflib's ratio) of `cutoff` or more; `otherwise` where there is none.
    """
    near = get_close_matches(name, [*known], n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


MOST_UNKNOWN = 5  # unknown options that one message names


def unknown_options(advice: Mapping[str, str]) -> str:
    """Return the message for one or more unknown options, of which it names at most five. `advice`:
    option, as it is typed -> what to use instead, or "".
    """
    if len(advice) == 1:
        ((name, near),) = advice.items()
        return f"unknown option {name}" + (f": {near}" if near else "")
    named = [f"{name} ({near})" if near else name for name, near in advice.items()]
    more = [f"{len(named) - MOST_UNKNOWN} more"] if len(named) > MOST_UNKNOWN else []
    return f"unknown options {', '.join([*named[:MOST_UNKNOWN], *more])}"


def divisor(number: int, near: int) -> int:
    """Return the largest divisor of `number` that is at most `near` (1 or more): for messages such
    as "set X to a divisor, such as 4".
    """
    return max(n for n in range(1, min(near, number) + 1) if number % n == 0)
