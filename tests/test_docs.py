"""What the docs name is there: files, `folder/file.name`, `word.word` and `word()`."""

import re
from pathlib import Path

import pytest

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
    gone = ["convert/safetensors.py", "`train/run.absent`", "core/mesh.py:absent"]
    gone += ["`Mesh.absen" + "tee`", "`absen" + "tee()`"]
    assert [len(missing(name)) for name in gone] == [1] * 5
    assert not missing("core/mesh.py:Mesh `core/state.local` `Mesh.tp` `torch.zeros()`")
