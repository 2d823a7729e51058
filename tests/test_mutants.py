"""The list of faults that benchmarks/mutants.py tries: each is where it says, exactly once, and is
Python; the tests that it names are there. The rules that make faults, the draw, and the record of
which tests execute which line.
"""

import ast
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.mutants import right, score
from benchmarks.mutation import automatic, faults, record, rules
from benchmarks.mutation.cases import Case
from benchmarks.mutation.faults import ROOT, Fault
from benchmarks.mutation.record import Record


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


RULES = {
    "comparison": {
        "return a < b": ["return a <= b"],
        "return a not in b": ["return a in b"],
        "return (a) == (b) is None": ["return (a) != (b) is None", "return (a) == (b) is not None"],
    },
    "arithmetic": {
        "return a + b * a": ["return a - b * a", "return a + b / a"],
        "a //= b": ["a *= b"],
        "return f(-a)": ["return f(a)"],
        "return a + [b]": [],
        "return 'text' % a": [],
    },
    "constant": {
        "return a[2]": ["return a[3]", "return a[1]"],
        "return f(a, on=True)": ["return f(a, on=False)"],
        "return 0.5": ["return 1.5", "return (-0.5)"],
    },
    "swap": {
        "return f(a, b, a)": ["return f(b, a, a)", "return f(a, a, b)"],
        "return f(a, a)": [],
        "return f(*a, b)": [],
        "return isinstance(a, int)": [],
        "return min(a, 1)": [],
        "return x.amin(a, 1)": ["return x.amin(1, a)"],
    },
    "negate": {
        "if a: f(b)": ["if not (a): f(b)"],
        "while not a: f(b)": ["while a: f(b)"],
        "return a if a > b else b": ["return a if not (a > b) else b"],
        "return [x for x in a if x]": ["return [x for x in a if not (x)]"],
    },
    "drop": {
        "f(a)": ["pass"],
        "a = b": ["pass"],
        "c = b": [],
        "a.c = b": ["pass"],
        "a += b": ["pass"],
        "raise ValueError(a + b)": ["pass"],
        "return a": [],
    },
    "axis": {
        "return a.mesh.tp": ["return a.mesh.pp"],
        "return a.sum(dim=-1)": ["return a.sum(dim=-2)"],
        "return a.transpose(1, 2)": ["return a.transpose(0, 2)", "return a.transpose(1, 1)"],
        "return torch.softmax(a, 0)": ["return torch.softmax(a, 1)"],
        "return torch.cat(a, 1)": ["return torch.cat(a, 0)"],
        "return a.shape[0]": ["return a.shape[1]"],
        "return a[0]": [],
    },
    "sorted": {"return sorted(a, key=f)": ["return list(a)"]},
    "minmax": {
        "return min(a, b)": ["return max(a, b)"],
        "return a.clamp(min=b)": ["return a.clamp(max=b)"],
        "return a.clamp(min=b, max=f)": [],
        "return ReduceOp.MAX": ["return ReduceOp.MIN"],
    },
}


def afters(line: str, rule: str | None = None) -> list[str]:
    found = rules.candidates("file.py", f"def g(a, b):\n    {line}\n")
    return [candidate.after for candidate in found if rule in (None, candidate.rule)]


def test_each_rule():
    """Lines of a function, and what a rule makes of them."""
    wrong = [
        f"{rule}: {line} becomes {afters(line, rule)}, not {expected}"
        for rule, lines in RULES.items()
        for line, expected in lines.items()
        if afters(line, rule) != expected
    ]
    assert not wrong, "\n".join(wrong)


EXCLUDED = '''
LIMIT = 1 + 2

@decorated(1 + 2)
def g(a: "1 + 2", b=1 + 2) -> "1 + 2":
    """Text, 1 + 2."""
    c: Literal[1 + 2] = a
    print(1 + 2)
    log.warning("%d", 1 + 2)
    warnings.warn("text", stacklevel=1 + 2)
    assert 1 + 2 == 3, 1 + 2
    d = f"{1 + 2}"
    def inside(x=1 + 2):
        """Text, 1 + 2."""
        return x
    return inside
'''


def test_excluded_places():
    assert rules.candidates("file.py", EXCLUDED) == []
    refusal = rules.candidates("file.py", "def g(a):\n    raise ValueError(1 + 2)\n")
    assert [(c.rule, c.after) for c in refusal] == [("drop", "pass")]


METHODS = '''"""é"""
class Outer:
    class Inner:
        def method(self, x):
            def nested(y):
                return "é", y + 1
            return nested(x)
if True:
    def below(x):
        return (
            x
            - 1
        )
'''


def test_functions_lines_and_characters():
    """The function, the executed lines and the characters, behind a letter of two bytes too."""
    every = rules.candidates("file.py", METHODS)
    numbers = {METHODS[c.start : c.end] for c in every if c.rule == "constant"}
    assert numbers == {"1"}
    found = [c for c in every if c.rule == "arithmetic"]
    assert [(c.function, c.lines) for c in found] == [
        ("Outer.Inner.method", (6,)),
        ("below", (12, 10)),
    ]
    assert [METHODS[c.start : c.end] for c in found] == ["+", "-"]


def test_faults_made_by_rule_are_python_and_change_something():
    """One in 400 of all that the rules make of dolmen."""
    wrong = []
    for path in sorted((ROOT / "dolmen").rglob("*.py"))[::8]:
        text = path.read_text("utf-8")
        whole = ast.dump(ast.parse(text))
        for candidate in rules.candidates(str(path), text)[::50]:
            new = text[: candidate.start] + candidate.new + text[candidate.end :]
            try:
                if ast.dump(ast.parse(new)) == whole:
                    wrong.append(f"{candidate.why}: changes nothing")
            except SyntaxError as error:
                wrong.append(f"{candidate.why} -> {candidate.after}: {error}")
    assert not wrong, "\n".join(wrong)


def small_functions() -> dict[str, list[rules.Candidate]]:
    """Functions with one place of the rule `negate` and 20, 200 and 2,000 of `constant`."""
    texts = {
        f"f{n}": f"def f{n}(a):\n    if a:\n        return {list(range(2, n + 2))}\n"
        for n in (10, 100, 1000)
    }
    return {name: rules.candidates(f"{name}.py", text) for name, text in texts.items()}


def test_the_draw_is_uniform_over_functions_then_rules(monkeypatch):
    """Frequencies over 2,000 first draws; five standard deviations of a third are 105."""
    functions = small_functions()
    first = [automatic.draw(functions, 1, seed)[0] for seed in range(2000)]
    by_function = Counter(candidate.function for candidate in first)
    assert all(abs(by_function[name] - 2000 / 3) < 105 for name in functions), by_function
    by_rule = Counter(candidate.rule for candidate in first)
    assert abs(by_rule["negate"] - 1000) < 112, by_rule  # half: there are two rules
    places = Counter(c.start for c in first if (c.function, c.rule) == ("f10", "constant"))
    assert len(places) == 10 and max(places.values()) < 2 * min(places.values()), places


def test_a_seed_draws_the_same_faults_each_once():
    functions = small_functions()
    sampled = automatic.draw(functions, 500, 7)
    assert sampled == automatic.draw(dict(reversed(functions.items())), 500, 7)
    assert len(set(sampled)) == 500 and sampled != automatic.draw(functions, 500, 8)
    with pytest.raises(ValueError, match="--automatic 9999: these packages have 2223 possible"):
        automatic.draw(functions, 9999, 7)


def test_whole_commands_record_the_packages_without_tests_of_their_own():
    assert automatic.recorded_packages(Record(folders=("tests/ops", "tests/optim/test_a.py"))) == [
        "ops",
        "optim",
    ]
    found = automatic.recorded_packages(Record(folders=("tests/cli",)))
    assert {"api", "cli", "launch"} <= set(found) and not {"ops", "serving"} & set(found)


def test_a_fault_made_by_rule_is_put_where_it_was_found(tmp_path):
    """The second of two equal operators; text that has changed since is an error."""
    text = "def f(a):\n    return a + a + a\n"
    (tmp_path / "file.py").write_text(text)
    faults._source.cache_clear()
    outer, inner = rules.candidates("file.py", text)
    fault = Fault("file.py", "+", outer.new, "", (), None, (outer.start, outer.end))
    assert faults.mutated(fault, tmp_path) == "def f(a):\n    return a + a - a\n"
    assert fault.key("") != replace(fault, span=(inner.start, inner.end)).key("")
    with pytest.raises(ValueError, match="0 times, not once"):
        faults.mutated(replace(fault, span=(0, 1)), tmp_path)


def saved_record(path: Path, folder: str, seconds: dict[str, float], digest: str = "d") -> None:
    lines = {"dolmen/ops/norm.py": {3: set(seconds), 4: set()}}
    Record(seconds, {"dolmen/ops/norm.py": digest}, lines, (folder,)).save(path)


def test_tests_of_a_line_are_the_fastest_of_each_function_first(tmp_path):
    """Two records as one; the lines asked for are tried in order."""
    with pytest.raises(ValueError, match="has no records: use --record"):
        record.read(tmp_path)
    saved_record(
        tmp_path / "a.json.gz", "tests/ops", {"t::slow": 9.0, "t::b[1]": 2.0, "t::b[2]": 1}
    )
    left_out = {f"{file}::test": 0.01 for file in record.LEFT_OUT}
    saved_record(tmp_path / "b.json.gz", "tests/model", {"t::b[3]": 0.5, "t::fast": 0.1} | left_out)
    known = record.read(tmp_path)
    assert known.folders == ("tests/ops", "tests/model") and len(known.seconds) == 6
    order = ("t::fast", "t::b[3]", "t::slow", "t::b[2]", "t::b[1]")
    assert known.tests("dolmen/ops/norm.py", (4, 3), 9) == order
    assert known.tests("dolmen/ops/norm.py", (3,), 2) == order[:2]
    assert known.tests("dolmen/ops/norm.py", (5,), 2) == known.tests("other.py", (3,), 2) == ()
    saved_record(tmp_path / "c.json.gz", "tests/rl", {"t::c": 1.0}, "other")
    with pytest.raises(ValueError, match="another text of dolmen/ops/norm.py .* --record tests/rl"):
        record.read(tmp_path)


def test_cases_that_execute_the_lines_of_others_are_repeated():
    """The cheapest of a function is never: `c[3]` has the lines of two others together."""
    seconds = {"a": 1.0, "b[1]": 0.5, "b[2]": 2.0, "c[1]": 0.1, "c[2]": 0.2, "c[3]": 0.3}
    lines = {1: {"a", "b[1]", "b[2]", "c[1]", "c[3]"}, 2: {"c[2]", "c[3]"}, 3: {"b[1]"}}
    known = Record(seconds, {}, {"dolmen/ops/norm.py": lines})
    assert list(known.repeated().items()) == [("b", (2.0, ["b[2]"])), ("c", (0.3, ["c[3]"]))]


@pytest.mark.full
@pytest.mark.spawn
def test_a_recorded_run_knows_the_rows_of_spawned_ranks(tmp_path):
    """A line that a rank executes belongs to the row that did, of two that share a world."""
    file = "tests/parallel/test_styles.py"
    known = record.record_tests(file, ["-k", "whole and (toy-tp4 or zero3)"], tmp_path)
    case = f"{file}::test_a_module_is_as_it_was_whole"
    assert set(known.seconds) == {f"{case}[toy-tp4]", f"{case}[toy-dp2 tp2 zero3]"}
    counts = Counter(frozenset(tests) for tests in known.lines["dolmen/parallel/data.py"].values())
    assert all(counts[frozenset([test])] >= 2 for test in known.seconds), counts
    assert record.read(tmp_path).lines == known.lines


def test_the_test_that_killed_is_found_again():
    fault = Fault("", "", "", "", ("t.py::a", "t.py::a[x: y]"))

    def killer(reported: str, fault: Fault = fault) -> tuple[str, ...]:
        return automatic.killing_test(fault, Case("failed", reported, 1.0)).tests

    assert killer("t.py::a[x: y]: AssertionError: 1") == ("t.py::a[x: y]",)
    assert killer("the process died") == ("t.py::a",)
    files = automatic.with_files(replace(fault, tests=("s.py::c", *fault.tests)))
    assert files.tests == ("t.py", "s.py")
    assert killer("t.py::b[1]: AssertionError: 1", files) == ("t.py::b[1]",)
    assert killer("t.py: ImportError: no", files) == ("t.py",)


def test_the_report_of_faults_made_by_rule():
    """An equivalent fault that is killed is no equivalent; what no test reaches is not killed."""
    (candidate,) = rules.candidates("dolmen/ops/norm.py", "def f(a):\n    return a + a\n")
    faulty = Fault("dolmen/ops/norm.py", "+", "-", "", ())
    same = replace(faulty, equivalent="no reason")
    ends = [(faulty, "killed"), (same, "killed"), (same, "survived")]
    ends += [(faulty, "survived"), (faulty, "late"), (faulty, "unreached")]
    found = [automatic.Result(candidate, fault, 3, verdict) for fault, verdict in ends]
    reported = automatic.report(found, Record({"t": 1.0}, folders=("tests/ops",)))
    assert "| ops | 6 | 2 | 1 | 1 | 1 | 1 | 40 % |" in reported
    assert "| 3 | 6 | 2 | 1 | 1 | 1 | 1 | 40 % |" in reported and "| arithmetic | 6 |" in reported
    assert "- equivalent: dolmen/ops/norm.py:2 f [arithmetic] (no reason)\n" in reported
    assert "`return a + a`\n  `return a - a`" in reported
    assert reported.endswith(
        "mutation score: 40.0 % of 6 drawn; 50.0 % of the 5 whose line a recorded test executes"
    )


def test_each_equivalent_fault_can_be_made_and_has_a_reason():
    assert automatic.stale_equivalents() == []
    assert all(automatic.equivalents().values())
