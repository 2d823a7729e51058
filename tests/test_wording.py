"""How the package is written, as numbers that only fall: fragments in place of docstrings, names of
functions that are no verb, class names that are used twice, and words of our own for what the field
has a word for. LIMITS holds what was counted last; whoever mends some lowers the number with them.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from test_house import files, nodes

LIMITS = {
    "fragments": 0,
    "participles": 0,
    "prepositions": 0,
    "shared class names": 0,
    "private words": 0,
}
FRAGMENTS = set(
    """of what that those as with by in whether which where whose on from between behind
    beside""".split()
)
"""First words of a docstring that is no sentence: it begins with a verb or names the thing."""
PARTICIPLES = set(
    """made told said found held kept begun drawn known shown given taken chosen written laid sent
    left put done gone met lost taught""".split()
)
NOUNS = {"seed", "embed", "feed", "need", "speed"}  # end as participles do
PREPOSITIONS = set(
    """of on at in by to with beside behind before after apart alone within under over as where
    what whose which whether how until those here there own whole all both none nothing each once
    again away ahead alike back""".split()
)
STANDARD = ("to", "to_", "as_", "with_", "all_")  # Tensor.to, as_tensor, with_suffix, all_reduce
PRIVATE = set(
    """told tells asked beside judged judging drawn foretold foretells apart begun alike
    redraws""".split()
)
NAMED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: str) -> Iterator[ast.Constant]:
    """Docstrings of a file, those behind an attribute of a class or a module among them."""
    for node in nodes(path):
        if not isinstance(node, NAMED):
            continue
        for place, statement in enumerate(node.body):
            value = statement.value if isinstance(statement, ast.Expr) else None
            attribute = isinstance(node, (ast.Module, ast.ClassDef))
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                if place == 0 or attribute:
                    yield value


def fragments(path: str) -> Iterator[str]:
    for text in docstrings(path):
        first = re.search(r"[A-Za-z]+", text.value)
        if first and first[0].lower() in FRAGMENTS:
            yield f"{path}:{text.lineno}: {text.value.split(chr(10))[0][:60]}"


def functions(path: str) -> Iterator[tuple[ast.AST, str]]:
    """Functions that are no property, and their names."""
    for node in nodes(path):
        if isinstance(node, FUNCTIONS) and not node.name.startswith("__"):
            if not any("property" in ast.unparse(d) for d in node.decorator_list):
                yield node, node.name.strip("_")


def participles(path: str) -> Iterator[str]:
    for node, name in functions(path):
        ends = name.endswith("ed") and "_" not in name and name not in NOUNS
        if name in PARTICIPLES or ends:
            yield f"{path}:{node.lineno}: {name}"


def prepositions(path: str) -> Iterator[str]:
    for node, name in functions(path):
        if name == STANDARD[0] or name.startswith(STANDARD[1:]):
            continue
        if name in PREPOSITIONS or name.split("_")[0] in PREPOSITIONS and name.count("_") <= 1:
            yield f"{path}:{node.lineno}: {name}"


def classes(path: str) -> Iterator[tuple[int, str]]:
    return ((n.lineno, n.name) for n in files()[path].body if isinstance(n, ast.ClassDef))


def shared_class_names(path: str) -> Iterator[str]:
    """Classes whose name another file has too."""
    times = Counter(name for other in files() for _, name in classes(other))
    yield from (f"{path}:{line}: {name}" for line, name in classes(path) if times[name] > 1)


def private_words(path: str) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name):
            name = node.id
        else:
            continue
        words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r"_\1", name).lower())
        if not PRIVATE.isdisjoint(words):
            yield f"{path}:{node.lineno}: {name}"


MEASURES = {
    "fragments": fragments,
    "participles": participles,
    "prepositions": prepositions,
    "shared class names": shared_class_names,
    "private words": private_words,
}


@pytest.mark.parametrize("measure", LIMITS)
def test_wording_gets_no_worse(measure):
    found = {path: list(MEASURES[measure](path)) for path in files()}
    number, limit = sum(map(len, found.values())), LIMITS[measure]
    worst = sorted(found.values(), key=len, reverse=True)[:5]
    places = "\n".join(place for file in worst for place in file[:8])
    assert number <= limit, (
        f"{number} {measure}, and {limit} were counted last; the files with most:\n{places}"
    )


def test_what_is_counted(monkeypatch):
    """One of each kind, in a file that has little else."""
    text = '''"""Of a module."""
class Part:
    """Return it."""
def told(): "What is told."
def of_those(): """Return them."""
def seed(drawn): return drawn.apart
'''
    spec = {"a.py": ast.parse(text), "b.py": ast.parse("class Part: pass")}
    monkeypatch.setattr("test_wording.files", lambda: spec)
    monkeypatch.setattr("test_wording.nodes", lambda path: list(ast.walk(spec[path])))
    counts = {name: sum(len(list(count(p))) for p in spec) for name, count in MEASURES.items()}
    assert list(counts.values()) == [2, 1, 1, 2, 4]
