"""What the docs name is there: files, `folder/file.name`, `word.word` and `word()`; and of what is
there, what they are to name.
"""

import ast
import re
from collections import Counter
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import get_type_hints

from dolmen.cli import VERBS
from dolmen.cli.parse import groups, options
from dolmen.cli.runs import model_groups, run_options
from dolmen.recipes import RECIPES
from dolmen.serving.config import GenerateConfig, ServeConfig
from dolmen.training.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ROOMS = ("dolmen", "tests", "benchmarks", "docs", "examples", "website")
PATH = re.compile(
    r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?:(?:::?|(?<=py): (?=\w+(?:\.\w+)*`))(\w+))?"
)
PLACE = re.compile(r"`(\w+/\w+)\.(?!py\b|md\b)(\w+)")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|\w+(?=\(\)))(?:\(.*?\))?`")
FORMS = (".py", ".md", ".json", ".jsonl", ".yaml", ".txt", ".png", ".sbatch")
GONE = {"cli.py"}


@cache
def files() -> list[Path]:
    """Files that a page may name."""
    folders = (p for room in ROOMS for p in (ROOT / room).rglob("*.*") if p.suffix != ".pyc")
    return [*ROOT.glob("*.md"), *folders]


@cache
def files_at(path: str) -> list[str]:
    """Contents of the files whose path ends in `path`."""
    found = [p for p in files() if f"/{path}" in p.as_posix()]
    found += [ROOT / path] if (ROOT / path).exists() else []
    return [p.read_text() for p in found]


@cache
def words() -> set[str]:
    """Words of the sources."""
    return {w for p in files() if p.suffix == ".py" for w in re.findall(r"\w+", p.read_text())}


def missing(text: str) -> list[str]:
    places = [*PATH.findall(text), *((f"{path}.py", name) for path, name in PLACE.findall(text))]
    lost = []
    for path, name in places:
        defined = re.compile(rf"^\s*(?:(?:def|class) )?{name}\b", re.M)
        if path not in GONE and not any(
            not name or defined.search(source) for source in files_at(path)
        ):
            lost.append(f"{path}:{name}")
    names = {n for n in NAME.findall(text) if not n.startswith("torch.")}
    return lost + [n for n in names if not n.endswith(FORMS) and not {*n.split(".")} <= words()]


def test_what_a_page_names_is_there():
    ours = [page for page in PAGES if page.name != "migrating.md"]  # which names options of others
    lost = [f"{page.name} names {name}" for page in ours for name in missing(page.read_text())]
    assert not lost, "\n".join(lost)


def test_what_is_not_there_is_told():
    gone = ["conversion/safetensors.py", "`train/run.absent`", "core/mesh.py:absent"]
    gone += ["`Mesh.absen" + "tee`", "`absen" + "tee()`"]
    assert [len(missing(name)) for name in gone] == [1] * 5
    assert not missing("core/mesh.py:Mesh `core/state.local` `Mesh.tp` `torch.zeros()`")


def test_the_overview_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text()
    packages = [p.parent.name for p in (ROOT / "dolmen").glob("*/__init__.py")]
    assert [name for name in packages if f"`{name}`" not in page] == []
    assert len(page) < 16_600


def test_a_package_names_its_files():
    """In its docstring, by topic; cli has a file for each verb besides."""
    wrong = []
    for file in sorted((ROOT / "dolmen").glob("**/*/__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        named = set(re.findall(r"(?<![\w/])(\w+)\.py", text))
        there = {p.stem for p in file.parent.glob("*.py")} - {"__init__"}
        there -= set(VERBS) if file.parent.name == "cli" else set()
        package = file.parent.relative_to(ROOT)
        wrong += [f"{package}/__init__.py does not name {name}.py" for name in there - named]
        wrong += [f"{package}/__init__.py names {name}.py" for name in named - there]
    assert not wrong, "\n".join(sorted(wrong))


def test_options_of_the_migrating_page_are_there():
    page = (ROOT / "docs" / "migrating.md").read_text()
    model = RECIPES["llama-8b"]().model
    known = run_options("train").keys() | options(model_groups(model)).keys()
    known |= {option.off for option in options(model_groups(model)).values() if option.switch}
    known |= options(groups(ServeConfig)).keys() | options(groups(GenerateConfig)).keys()
    said = re.findall(r"`--([\w.-]+)", page)
    assert len(said) > 150 and sorted({*said} - known) == []


def repeated(text: str) -> list[str]:
    """Lines of a page that stand in it twice, and are no row of a table or line of a program."""
    prose = "".join(text.split("```")[::2])
    lines = Counter(s for line in prose.splitlines() if len(s := line.strip()) > 40)
    return [line for line, times in lines.items() if times > 1 and line[0] != "|"]


def test_a_page_says_nothing_twice():
    found = [f"{page.name}: {line}" for page in PAGES for line in repeated(page.read_text())]
    assert not found, "\n".join(found)
    line = "\n- A line of more than forty letters, by two who did not know.\n"
    assert [len(repeated(page.read_text() + line + line)) for page in PAGES] == [1] * len(PAGES)


def sections(cls: type) -> set[type]:
    """The dataclasses that a run is made of."""
    hints = get_type_hints(cls).values()
    inside = {hint for hint in hints if isinstance(hint, type) and is_dataclass(hint)}
    return {cls}.union(*map(sections, inside))


def test_the_site_shows_every_section_of_a_run():
    pages = "\n".join(p.read_text() for p in (ROOT / "website" / "api").glob("*.md"))
    for cls in sections(RunConfig):
        whole = re.search(rf"^::: {re.escape(cls.__module__)}\n(    .*\n)*", pages, re.M)
        members = whole and re.search(r"members: \[(.*)\]", whole[0])
        shown = f"::: {cls.__module__}.{cls.__name__}\n" in pages
        shown |= whole is not None and (members is None or cls.__name__ in members[1].split(", "))
        assert shown, cls


def test_the_readme_warns_near_its_top_until_a_gpu_has_run():
    """`benchmarks.gpu report --write` replaces the sentence of docs/performance.md."""
    page = (ROOT / "docs" / "performance.md").read_text()
    untested = "No GPU has run this yet" in page.split("<!-- gpu: begin -->")[1]
    top = (ROOT / "README.md").read_text().split("\n## ")[0]
    assert ("**No GPU has run this code yet.**" in top) == untested
