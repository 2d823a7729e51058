"""A wheel of this checkout, installed into a venv of its own, trains in a folder that knows nothing
of the checkout. Nothing is fetched: it sees the packages of the Python that runs the tests.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import tinyrun

ROOT = Path(__file__).parents[1]
BUILT_FROM = ("pyproject.toml", "README.md", "LICENSE", "dolmen")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
material, one_thread = tinyrun.material, tinyrun.one_thread
pytestmark = pytest.mark.full  # a venv, a build, and torch imported by two processes: 20 s


def run(words: list, folder: Path) -> str:
    """What a command prints, in `folder` and without the PYTHONPATH of the tests."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(w) for w in words], cwd=folder, env=env, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: setuptools writes beside its sources."""
    copy, to = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in BUILT_FROM:
        put = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        put(ROOT / name, copy / name)
    for name in ("tests", "benchmarks", "examples", "website"):  # there, and left out
        (copy / name).mkdir()
        (copy / name / "__init__.py").touch()
    run([*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", to, copy], copy)
    (built,) = to.iterdir()
    return built


def test_it_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    files = (p for p in (ROOT / "dolmen").rglob("*") if p.is_file() and p.suffix != ".pyc")
    here = {str(p.relative_to(ROOT)) for p in files}
    assert {n for n in names if n.startswith("dolmen/")} == here
    assert {n.split("/")[0].removesuffix(".dist-info") for n in names} == {
        "dolmen",
        wheel.name.removesuffix("-py3-none-any.whl"),
    }


def test_it_trains_elsewhere(wheel, material, tmp_path):
    """Two ranks, which import it anew."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    site = Path(
        run([python, "-c", "import site; print(*site.getsitepackages())"], tmp_path).strip()
    )
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    words = ["install", "--quiet", "--no-deps", "--no-index", wheel]
    run([*PIP, "--python", python, *words], tmp_path)
    where = run([python, "-c", "import dolmen; print(dolmen.__file__)"], tmp_path)
    assert where.strip() == str(site / "dolmen/__init__.py")

    dolmen = tmp_path / "env/bin/dolmen"
    assert "quickstart" in run([dolmen, "recipes"], tmp_path)
    run([dolmen, "train", material.file, "--layout.tp", 2, "--out", "run"], tmp_path)
    assert [step for step, *_ in tinyrun.losses(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
