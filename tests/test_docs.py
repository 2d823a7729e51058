"""What the docs name is there: files, `folder/file.name`, `word.word` and `word()`; and of what is
there, what they are to name.
"""

import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from dolmen.cli.options import VERBS
from dolmen.training.config import RunConfig

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
ROOMS = ("dolmen", "tests", "benchmarks", "docs", "examples", "website")
FILES = [*ROOT.glob("*.md"), *(p for room in ROOMS for p in (ROOT / room).rglob("*.*"))]
WORDS = set(re.findall(r"\w+", "\n".join(p.read_text() for p in FILES if p.suffix == ".py")))
PATH = re.compile(r"(?<![\w/.])((?:[\w-]+/)*[\w-]+\.(?:py|md))(?:::?(\w+))?")
PLACE = re.compile(r"`(\w+/\w+)\.(?!py\b|md\b)(\w+)")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+|\w+(?=\(\)))(?:\(.*?\))?`")
FORMS = (".py", ".md", ".json", ".jsonl", ".yaml", ".txt", ".png", ".sbatch")
GONE = {"cli.py"}  # and said to be


def missing(text: str) -> list[str]:
    places = [*PATH.findall(text), *((f"{path}.py", name) for path, name in PLACE.findall(text))]
    lost = []
    for path, name in places:
        at = [p for p in (ROOT / path, *FILES) if p.exists() and f"/{path}" in p.as_posix()]
        defined = re.compile(rf"^\s*(?:(?:def|class) )?{name}\b", re.M)
        if path not in GONE and not any(not name or defined.search(p.read_text()) for p in at):
            lost.append(f"{path}:{name}")
    names = {n for n in NAME.findall(text) if not n.startswith("torch.")}
    return lost + [n for n in names if not n.endswith(FORMS) and not {*n.split(".")} <= WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_is_there(page):
    assert missing(page.read_text()) == []


def test_what_is_not_there_is_told():
    gone = ["conversion/safetensors.py", "`train/run.absent`", "core/mesh.py:absent"]
    gone += ["`Mesh.absen" + "tee`", "`absen" + "tee()`"]
    assert [len(missing(name)) for name in gone] == [1] * 5
    assert not missing("core/mesh.py:Mesh `core/state.local` `Mesh.tp` `torch.zeros()`")


def unmapped(page: str) -> list[str]:
    """Files of dolmen that the map of the house does not name. Those that are one of many of a kind
    are found otherwise: families by their FAMILY, verbs by VERBS.
    """
    words = set(re.findall(r"\w+", page))
    folder = ROOT / "dolmen"
    files = [p for p in folder.rglob("*.py") if p.stem not in ("__init__", "__main__")]
    known = {
        p
        for p in files
        if p.parent.name == "families"
        and "\nFAMILY = " in p.read_text()
        or p.parent.name == "cli"
        and p.stem in {*VERBS, "train"}
    }
    return sorted(str(p) for p in files if p not in known and p.stem not in words)


def test_the_map_of_the_house_names_every_file():
    page = (ROOT / "docs" / "architecture.md").read_text()
    house = page.split("```")[1]
    assert unmapped(house) == []
    assert len(unmapped(house.replace("unknown.py", ""))) == 1


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
