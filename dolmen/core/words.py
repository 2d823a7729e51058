"""Words for people."""

from collections.abc import Iterable


def counted(count: int, one: str, several: str | None = None) -> str:
    """1, 'process', 'processes' -> '1 process'; 1,200 of it '1,200 processes'. `several` is unset
    where it is `one` with an s.
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


LONGEST = 80  # characters of a value in a message


def shown(value: object) -> str:
    """A value in a message, as Python writes it, within a line."""
    return cut(repr(value))


def cut(text: str) -> str:
    """`text` within 80 characters, and how long it was where it is cut."""
    if len(text) <= LONGEST:
        return text
    return f"{text[: LONGEST - 3]}... ({len(text):,} characters)"


def printable(text: str) -> str:
    """`text` with what a terminal would obey, not show, as Python writes it: a right-to-left
    override turns the rest of a line around.
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DTYPES |= {"half": "float16", "float": "float32", "double": "float64"}


def choices(value: str, known: Iterable[object]) -> str:
    """What to say after `X is VALUE: `, of which only the `known` ones are taken."""
    names = [str(name) for name in known]
    meant = DTYPES.get(value.lower().removeprefix("torch."), value.removeprefix("torch."))
    if meant in names:
        return f"did you mean {meant}?"
    return f"use one of {', '.join(names)}"


def divisor(number: int, near: int) -> int:
    """The largest of `number` that is at most `near`: for `set X to a divisor, such as `."""
    return max(n for n in range(1, min(near, number) + 1) if number % n == 0)
