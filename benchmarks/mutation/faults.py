"""One-line faults as data: `*.yaml` beside this file, source file -> list of faults. What is
replaced is matched on tokens, so that no reformatting hides it: white space, line breaks, comments
and the comma before a closing bracket do not count.
"""

import hashlib
import io
import json
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast
BLANK = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Fault:
    """`old` of `file` becomes `new`; one of `tests` (pytest node ids) should fail."""

    file: str
    old: str
    new: str
    why: str
    """What is wrong then, in words: the fault's name, one of a kind."""
    tests: tuple[str, ...]
    equivalent: str | None = None
    """Why no test can see it; it is run all the same, and must survive."""
    span: tuple[int, int] | None = None
    """Characters of the file that `old` is, where it is not named by its text alone."""

    def key(self, spec: str) -> str:
        """Digest of everything that decides the result: the fault, and the tree it is put into."""
        facts = [spec, self.file, self.old, self.new, self.span, *self.tests]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def read(folder: Path = Path(__file__).parent) -> list[Fault]:
    """All faults, in the order of the files. Raises ValueError for one that is not whole, and for
    a source file that is named twice, of which YAML would keep the last.
    """
    found = []
    for path in sorted(folder.glob("*.yaml")):
        text = path.read_text()
        files = [key.value for key, _ in yaml.compose(text, LOADER).value]
        if twice := sorted(file for file, n in Counter(files).items() if n > 1):
            raise ValueError(f"{path.name} names {', '.join(twice)} twice")
        for file, faults in yaml.load(text, LOADER).items():
            for values in faults:
                try:
                    found.append(Fault(file, **{**values, "tests": tuple(values["tests"])}))
                except (KeyError, TypeError) as error:
                    raise ValueError(f"{path.name}: {values}: {error}") from None
    return found


@dataclass(frozen=True)
class Word:
    """A token, and where it is in the text."""

    text: str
    start: int
    end: int


def words(text: str) -> list[Word]:
    """The tokens of `text` that count. Raises ValueError for brackets that do not match."""
    lines = [0]
    for line in io.StringIO(text):
        lines.append(lines[-1] + len(line))
    out: list[Word] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in BLANK:
                continue
            if token.string in ")]}" and out and out[-1].text == ",":
                out.pop()
            (top, left), (bottom, right) = token.start, token.end
            out.append(Word(token.string, lines[top - 1] + left, lines[bottom - 1] + right))
    except tokenize.TokenError as error:
        raise ValueError(f"{text!r}: {error}") from None
    return out


@cache
def _source(path: Path) -> tuple[str, list[Word]]:
    text = path.read_text("utf-8")
    return text, words(text)


def places(fault: Fault, root: Path = ROOT) -> list[tuple[int, int]]:
    """Where in its file the fault's `old` stands, as (first, last) characters."""
    text, have = _source(root / fault.file)
    if fault.span is not None:
        return [fault.span] if text[slice(*fault.span)] == fault.old else []
    want = [word.text for word in words(fault.old)]
    texts = [word.text for word in have]
    return [
        (have[i].start, have[i + len(want) - 1].end)
        for i in range(len(texts) - len(want) + 1)
        if texts[i : i + len(want)] == want
    ]


def mutated(fault: Fault, root: Path = ROOT) -> str:
    """The text of the fault's file with the fault in it. Raises ValueError unless `old` is there
    exactly once.
    """
    found = places(fault, root)
    if len(found) != 1:
        raise ValueError(f"{fault.file}: {fault.old!r} is there {len(found)} times, not once")
    text, _ = _source(root / fault.file)
    (start, end), new = found[0], fault.new
    return text[:start] + new + text[end:]


def spec(root: Path = ROOT) -> str:
    """Digest of the code and of the tests."""
    digest = hashlib.blake2b(digest_size=12)
    for path in _sources(root):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(root: Path) -> Iterable[Path]:
    found = [*(root / "dolmen").rglob("*"), *(root / "tests").rglob("*")]
    return sorted(p for p in found if p.is_file() and "__pycache__" not in p.parts)
