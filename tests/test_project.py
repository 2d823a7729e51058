"""What stands around the code is whole: the site has every page, the workflow calls what the
Makefile has on what pyproject.toml promises, and versions agree.
"""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

import dolmen

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text()))
MADE = re.findall(r'"([\w.]+)": "(\w+\.md)"', (ROOT / "website/pages.py").read_text())
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


def leaves(value) -> list[str]:
    """Every string in a tree of lists and mappings."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for v in value for leaf in leaves(v)] if isinstance(value, list) else [value]


def test_the_site_has_every_page():
    pages = [page for _, page in MADE]
    for folder, prefix in (("docs", ""), ("website/api", "api/")):
        root = ROOT / folder
        pages += [f"{prefix}{p.relative_to(root).as_posix()}" for p in root.rglob("*.md")]
    assert sorted(leaves(read("website/mkdocs.yml")["nav"])) == sorted(pages)


def test_what_pages_are_made_of_is_there():
    assert MADE and all((ROOT / source).exists() for source, _ in MADE)


def named(page: str) -> list[str]:
    """`package.module.name` of all that a page of the API asks for, members too."""
    requested = re.findall(r"(?m)^::: ([\w.]+)((?:\n .*)*)", page)
    return [
        f"{name}.{member}"
        for name, options in requested
        for member in [*re.findall(r"\w+", "".join(re.findall(r"members: \[(.*)\]", options))), ""]
    ]


def place(name: str) -> tuple[Path, str]:
    """The file of a module and what is named in it: `dolmen.model.layout.Layout`."""
    at, parts = ROOT, [part for part in name.split(".") if part]
    while parts and (at / parts[0]).is_dir():
        at /= parts.pop(0)
    if parts and (at / f"{parts[0]}.py").is_file():
        return at / f"{parts[0]}.py", ".".join(parts[1:])
    return at / "__init__.py", ".".join(parts)


def test_what_the_api_pages_name_is_there():
    """griffe says so too, where the site is built; this needs no site."""
    found = [n for p in (ROOT / "website/api").glob("*.md") for n in named(p.read_text())]
    assert len(found) > 30
    for name in found:
        file, word = place(name)
        assert not word or re.search(rf"(?m)^(?:def|class) {word}\b", file.read_text()), name


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_calls_what_is_there(file):
    workflow = read(str(file.relative_to(ROOT)))
    assert True in workflow  # `on:`, as YAML 1.1 reads it
    for name, job in workflow["jobs"].items():
        assert set(job.get("needs", "").split()) <= workflow["jobs"].keys(), name
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), name
            requested = re.findall(r"\bmake ([\w-]+)", step.get("run", ""))
            assert set(requested) <= TARGETS, f"{name}: make {requested}"
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))


def test_the_matrix_is_what_is_promised():
    promised = {
        c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d", c)
    }
    (torch,) = (d for d in PROJECT["project"]["dependencies"] if d.startswith("torch>="))
    (pinned,) = re.findall(r"(?m)^torch==([\d.]+)$", (ROOT / "constraints.txt").read_text())
    matrices = [
        job["strategy"]["matrix"]
        for job in read(".github/workflows/ci.yml")["jobs"].values()
        if "strategy" in job
    ]
    assert matrices
    for matrix in matrices:
        assert set(matrix["python"]) == promised
        assert pinned in matrix["torch"]
        assert any(torch.startswith(f"torch>={t.removesuffix('.0')},") for t in matrix["torch"])
        newest = max(int(t.split(".")[1]) for t in matrix["torch"])
        assert torch.endswith(f",<2.{newest + 1}"), f"{torch}: the newest of it is not tried"


def test_versions_agree():
    assert read("CITATION.cff")["version"] == PROJECT["project"]["version"] == dolmen.__version__
    assert read("CITATION.cff")["license"] == PROJECT["project"]["license"]
    log = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"(?m)^## \[(\d[\w.]*)\]", log)
    assert "## [Unreleased]" in log and set(released) <= {dolmen.__version__}


def test_hooks_fetch_nothing():
    for repo in read(".pre-commit-config.yaml")["repos"]:
        assert repo["repo"] == "local"
        assert all(hook["language"] == "system" for hook in repo["hooks"])


def test_what_is_installed_for_tests_and_pages_is_pinned():
    """In constraints.txt, or a machine would run another linter than the next."""
    pinned = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text())
    for extra in PROJECT["project"]["optional-dependencies"].values():
        for dependency in extra:
            name = re.match(r"[\w.-]+", dependency)[0]
            # an extra may have others of ours in it
            assert name in [*pinned, "dolmen"], f"{name} is in no line of constraints.txt"


def test_no_two_files_of_tests_have_one_name():
    """pytest imports them by it, and stops at the second; spawned ranks find functions by it."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert [name for name, count in Counter(names).items() if count > 1] == []
