"""YAML as plain values, built from the parser's events in one loop without recursion, so that depth
and size are known before anything is made of them.

An alias repeats its anchor: ten lines of ten aliases each are 10^10 values. Each is counted with
all that it repeats, and one inside its own anchor, which would never end, is refused. No tags (they
name types of Python), no dates, no base-60 numbers: text that looks like one is text.
"""

import re
from typing import Any

import yaml

PARSER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
MOST = 2**20  # values of one document, and of its text every 64 characters, aliases written out
FLOAT = re.compile(r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?")
INTEGER = re.compile(r"([-+]?)(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]*|[1-9][0-9_]*)")
INFINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
WORDS |= {w: True for word in ("yes", "true", "on") for w in (word, word.title(), word.upper())}
WORDS |= {w: False for word in ("no", "false", "off") for w in (word, word.title(), word.upper())}


class _Open:
    """A list or mapping that is not closed yet. `before`: values of the document before it."""

    def __init__(self, values: list | dict, anchor: str | None, before: int):
        """`values`: the empty container. `anchor`: its name for aliases, if any."""
        self.values, self.anchor, self.before = values, anchor, before
        self.height = 1
        self.key: Any = self

    def add(self, value: Any) -> None:
        """Append a value to an open list; to an open mapping add names and values alternately.
        Raises ValueError for a repeated name, or one that is no scalar.
        """
        if isinstance(self.values, list):
            self.values.append(value)
        elif self.key is self:
            if isinstance(value, (dict, list)):
                raise ValueError("a mapping has a list or mapping as a key")
            if value in self.values:
                raise ValueError(f"{ascii(value)[:80]} is given twice in one mapping")
            self.key = value
        else:
            self.values[self.key], self.key = value, self


class _Builder:
    """Builds the values of a document from events, and bounds their number and depth."""

    def __init__(self, depth: int):
        """`depth`: most levels of nesting."""
        self.depth, self.count = depth, 0
        self.stack = [_Open([], None, 0)]
        self.anchors: dict[str, tuple[Any, int, int]] = {}  # value, values in it, height

    def grow(self, values: int, height: int) -> None:
        """Add `values` to the number of values so far, and check the depth of a subtree `height`
        levels high. Raises ValueError beyond a limit.
        """
        self.count += values
        if self.count > MOST:
            raise ValueError(f"more than {MOST:,} values")
        if len(self.stack) - 1 + height > self.depth:
            raise ValueError(f"nested deeper than {self.depth}")

    def take(self, event: yaml.Event) -> None:
        """Handle one event of the parser: add a scalar, open or close a list or mapping, or repeat
        an anchor. Raises ValueError beyond a limit, and for tags.
        """
        match event:
            case yaml.ScalarEvent():
                value = scalar(event)
                # long text counts as several values
                weight = 1 + len(event.value) // 64
                self.grow(weight, 0)
                self.append_value(value, event.anchor, weight, 0)
            case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                _no_tag(event)
                self.grow(1, 1)
                empty = [] if isinstance(event, yaml.SequenceStartEvent) else {}
                self.stack.append(_Open(empty, event.anchor, self.count - 1))
            case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                done = self.stack.pop()
                self.append_value(done.values, done.anchor, self.count - done.before, done.height)
            case yaml.AliasEvent():
                self.repeat(event.anchor)

    def repeat(self, anchor: str) -> None:
        """Add the value of an anchor again, counted with everything in it. Raises ValueError for an
        unknown anchor, or an alias within its own.
        """
        if any(part.anchor == anchor for part in self.stack):
            raise ValueError(f"the alias *{anchor} is inside its own anchor")
        if anchor not in self.anchors:
            raise ValueError(f"the alias *{anchor} has no anchor before it")
        value, count, height = self.anchors[anchor]
        self.grow(count, height)
        self.append_value(value, None, count, height)

    def append_value(self, value: Any, anchor: str | None, count: int, height: int) -> None:
        """Add a complete value, with the number of values in it and its height, to the innermost
        open container; remember it if it has an anchor.
        """
        self.stack[-1].add(value)
        self.stack[-1].height = max(self.stack[-1].height, height + 1)
        if anchor is not None:
            self.anchors[anchor] = value, count, height


def parse_yaml(text: str, depth: int) -> Any:
    """Return the values of a text with at most one document; None if it is empty. Raises
    ValueError, with the line, for malformed YAML, tags, and more than `depth` levels or MOST (2^20)
    values.
    """
    building, documents = _Builder(depth), 0
    line = 1
    try:
        for event in yaml.parse(text, Loader=PARSER):
            line = event.start_mark.line + 1
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                raise ValueError("more than one document")
            # events before an error were built: nothing is returned then
            building.take(event)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from None
    except yaml.YAMLError as error:  # a character that YAML does not know
        raise ValueError(" ".join(str(error).split())) from None
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None
    values = building.stack[0].values
    return values[0] if values else None


def _no_tag(event: yaml.ScalarEvent | yaml.CollectionStartEvent) -> None:
    """Raise ValueError for a value with a tag, such as !!python/object."""
    if event.tag not in (None, "!"):
        raise ValueError(f"the tag {ascii(event.tag)[1:81]}: tags are not supported")


def scalar(event: yaml.ScalarEvent) -> Any:
    """Return the value of a scalar event: quoted ones as text, others as null, boolean, number or
    text by the rules of YAML 1.1 and PyYAML, without dates and base-60 numbers. Raises ValueError
    for a tag.
    """
    _no_tag(event)
    text = event.value
    if not event.implicit[0]:
        return text
    if text in WORDS:
        return WORDS[text]
    if FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    if INFINITE.fullmatch(text):
        return float(text.replace(".", "").lower())
    if match := INTEGER.fullmatch(text):
        return _integer(text, match[1], match[2].replace("_", ""))
    return text


def _integer(text: str, sign: str, digits: str) -> int | str:
    """Parse an integer in base 2, 8, 10 or 16; `text` itself if it is none. Raises ValueError
    beyond 64 bits.
    """
    base = 8 if re.fullmatch("0[0-7]+", digits) else 0
    try:
        # int() takes quadratic time; 100 digits exceed 64 bits in any base
        value = int(sign + digits[:100], base)
    except ValueError:  # 0x_
        return text
    if abs(value) >= 2**64:
        raise ValueError(f"an integer of {len(digits):,} digits, more than 64 bits")
    return value
