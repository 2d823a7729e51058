"""The list of faults that benchmarks/mutants.py tries: each is where it says, exactly once, and is
Python; the tests that it names are there.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from benchmarks.mutants import right, score
from benchmarks.mutation import faults
from benchmarks.mutation.cases import Case
from benchmarks.mutation.faults import ROOT, Fault


@cache
def known_faults() -> list[Fault]:
    """The whole list, read once, by the worker that runs these tests."""
    return faults.read()


def test_each_is_there_once():
    counts = {(fault.file, fault.old): len(faults.places(fault)) for fault in known_faults()}
    wrong = [f"{file} has {n} times: {old}" for (file, old), n in counts.items() if n != 1]
    assert not wrong, "\n".join(wrong)


def test_each_is_python_and_changes_something():
    wrong = []
    for fault in known_faults():
        old, new = ([w.text for w in faults.words(text)] for text in (fault.old, fault.new))
        if old == new:
            wrong.append(f"{fault.why}: changes nothing")
        try:
            ast.parse(faults.mutated(fault), fault.file)
        except (SyntaxError, ValueError) as error:
            wrong.append(f"{fault.why}: {error}")
    assert not wrong, "\n".join(wrong)


def test_each_has_words_of_its_own_and_tests():
    assert [why for why, n in Counter(f.why for f in known_faults()).items() if n > 1] == []
    assert all(fault.why and fault.tests for fault in known_faults())
    assert len(known_faults()) >= 80


def test_a_file_that_is_named_twice_is_refused(tmp_path):
    fault = "  - {why: w, old: a, new: b, tests: [t]}\n"
    (tmp_path / "some.yaml").write_text(f"one.py:\n{fault}two.py:\n{fault}one.py:\n{fault}")
    with pytest.raises(ValueError, match=r"some.yaml names one.py twice"):
        faults.read(tmp_path)


def defined(file: Path) -> set[str]:
    return set(re.findall(r"(?m)^def (\w+)", file.read_text()))


def test_their_tests_are_there():
    known: dict[str, set[str]] = {}
    missing = []
    for fault in known_faults():
        for test in fault.tests:
            file, _, name = test.partition("::")
            if file not in known:
                known[file] = defined(ROOT / file) if (ROOT / file).exists() else set()
            if not known[file] or name and name.partition("[")[0] not in known[file]:
                missing.append(f"{test}: {fault.why}")
    assert not missing, "\n".join(missing)


TEXT = "def f(a, b):\n    # a comment\n    return g(a, b + 1)[0]\n"


def place(folder: Path, old: str, text: str = TEXT) -> list[str]:
    """What stands where `old` is found in a file of `text`."""
    (folder / "file.py").write_text(text)
    faults._source.cache_clear()
    fault = Fault("file.py", old, "", "", ())
    return [text[start:end] for start, end in faults.places(fault, folder)]


def test_white_space_line_breaks_and_comments_do_not_count(tmp_path):
    assert place(tmp_path, "g(a,b+1)") == ["g(a, b + 1)"]
    assert place(tmp_path, "g(\n    a,\n    b + 1,  # why\n)[0]") == ["g(a, b + 1)[0]"]
    broken = "def f(a, b):\n    return g(\n        a,\n        # why\n        b + 1,\n    )[0]\n"
    assert place(tmp_path, "g(a, b + 1)", broken) == [broken[broken.index("g(") : -4]]
    assert place(tmp_path, "a, b") == ["a, b", "a, b"]
    assert place(tmp_path, "g(a, b)") == place(tmp_path, "b + 10") == []
    with pytest.raises(ValueError, match="0 times, not once"):
        faults.mutated(Fault("file.py", "b + 10", "b", "", ()), tmp_path)
    with pytest.raises(ValueError, match="multi-line"):
        place(tmp_path, "g(a")


def test_the_score():
    """Of 84, 82 are killed and the rest named equivalent: these count as not killed."""
    killed, alive = Case("failed", "", 1.0), Case("passed", "", 1.0)
    faulty, same = Fault("", "", "", "", ()), Fault("", "", "", "", (), "no reason")
    found, ends = [faulty] * 82 + [same] * 2, [killed] * 82 + [alive] * 2
    assert score(found, ends) == "mutation score: 97.6 % (82 of 84 killed, 2 equivalent)"
    assert all(map(right, found, ends))
    assert score([faulty] * 2, [Case("late", "", 1.0), Case("broken", "", 1.0)]).endswith(
        "0.0 % (0 of 2 killed, 0 equivalent)"
    )
    assert not right(faulty, Case("broken", "", 1.0)) and not right(same, killed)
