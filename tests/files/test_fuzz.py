"""Damaged files of every kind, 200 in the short tier and 1,000 in the full: each is refused in one
line with its name, or gives exactly what another parser finds in it, in little CPU time and memory.
A case is a kind and a seed:

    fuzz(SUBJECTS["state.json"], "state.json", folder, [17])
"""

import re
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mutations import damaged
from subjects import SUBJECTS, Subject, equal, plain, said, writes

from dolmen.files import kinds
from dolmen.files.gate import Refused

SHORT, FULL = range(200), range(200, 1000)  # seeds of either tier
SECONDS = 2.0  # of CPU time, for one case; the slowest takes 0.2 here
MEMORY = 1 << 30  # bytes more than before; the largest file that a case makes has 2 MB


class TooLong(BaseException):
    """No Exception: a reader that catches all of them must not catch this one."""


@contextmanager
def limits():
    """SECONDS and MEMORY for what is within."""

    def stop(*_):
        raise TooLong

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGPROF, before)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the limit of memory is behind an error, which a reader may have put into words."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


def case(subject: Subject, undamaged, file: Path) -> str | None:
    """What is wrong with what the reader makes of the damaged `file`; None if nothing."""
    try:
        with limits():
            value = subject.read(file)
    except TooLong:
        return f"takes more than {SECONDS} s of CPU time"
    except Refused as error:
        if out_of_memory(error):
            return f"takes more than {MEMORY:,} bytes: {error}"
        text = str(error)
        if str(file.parent) not in text.split(": ")[0] or "\n" in text or len(text) > 2000:
            return f"is refused in other words: {text[:300]!r}"
        return None
    except BaseException as error:
        return f"ends in {type(error).__name__}: {str(error)[:300]}"
    try:
        good = subject.same(value, undamaged, file)
    except Exception as error:
        return f"is read, where another parser or the schema refuses: {error!r}"[:400]
    return None if good else f"gives another value: {str(value)[:300]}"


def fuzz(subject: Subject, kind: str, folder: Path, seeds: Iterable[int]) -> list[str]:
    """What was found, a line per case, each with its seed."""
    file = subject.make(folder)
    whole = file.read_bytes()
    undamaged = subject.read(file)
    found = []
    for seed in seeds:
        file.write_bytes(damaged(whole, f"{kind} {seed}"))
        if wrong := case(subject, undamaged, file):
            found.append(f"{kind}, seed {seed}: {wrong}")
    return found


@pytest.fixture
def folder(tmp_path):
    """In memory where there is such a place: 1,000 files take a second there, and three on disk."""
    shared = Path("/dev/shm")
    if not shared.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as name:
        yield Path(name)


def hold(kind: str, folder: Path, seeds: range) -> None:
    found = fuzz(SUBJECTS[kind], kind, folder, seeds)
    assert not found, f"{len(found)} of {len(seeds)}:\n" + "\n".join(found[:10])


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUBJECTS)
def test_damaged_files_are_refused_or_read_as_they_are(kind, folder):
    hold(kind, folder, SHORT)


@pytest.mark.full
@pytest.mark.parametrize("kind", SUBJECTS)
def test_more_damaged_files_are_refused_or_read_as_they_are(kind, folder):
    hold(kind, folder, FULL)


def slow(file: Path):
    began = time.monotonic()
    while b"[" in file.read_bytes() and time.monotonic() - began < 60:
        pass
    raise Refused(f"{file}: no")


def large(file: Path):
    try:
        return bytearray(1 << 34)
    except MemoryError as error:
        raise Refused(f"{file}: no") from error


def other_words(file: Path):
    raise Refused("no\nno")


CONTROLS: dict[str, tuple[Callable, Callable, str]] = {
    "plain JSON": (plain, lambda v, u, f: True, "ends in RecursionError"),
    "no schema": (
        lambda f: refused_json(f),
        said(kinds.GENERATION_CONFIG.schema),
        "another parser or the schema",
    ),
    "numbers as text": (
        lambda f: str(refused_json(f)),
        said(Any),
        "gives another value",
    ),
    "slow": (slow, equal, "takes more than 0.05 s"),
    "large": (large, equal, "takes more than .* bytes"),
    "other words": (other_words, equal, "is refused in other words"),
}


def refused_json(file: Path):
    """A reader that parses and refuses, and compares nothing with a schema."""
    try:
        return plain(file)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{file}: no") from error


@pytest.mark.parametrize("control", CONTROLS)
def test_the_fuzzer_sees_a_reader_without_a_gate(control, tmp_path, monkeypatch):
    if control == "slow":
        monkeypatch.setitem(globals(), "SECONDS", 0.05)
    read, same, want = CONTROLS[control]
    make = writes("config.json", b'{"eos_token_id": [1, 2], "bos_token_id": 0}')
    whole = make(tmp_path).read_bytes()
    found = []
    for seed in range(200):
        (tmp_path / "config.json").write_bytes(damaged(whole, f"config.json {seed}"))
        wrong = case(Subject(make, read, same), plain, tmp_path / "config.json")
        found += [wrong] if wrong else []
        if control in ("slow", "large") and found:
            break
    assert any(re.search(want, line) for line in found), found[:5]
