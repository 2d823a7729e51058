"""What this Python lacks of what dolmen needs, from a folder of wheels: no network is asked.

    python -m benchmarks.gpu.packages --to .whl      where there is a network: fill the folder

What is there already stays as it is: a wheel is installed for a package that is missing alone, and
beside the others, so that nothing of the machine changes.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What machines with torch and transformers were seen to lack, and what that needs.
LACKING = ("pydantic", "pydantic-core", "annotated-types", "typing-inspection")
LACKING += ("datasets", "dill", "multiprocess", "pandas")
LACKING += ("zstandard", "xxhash", "jaxtyping", "wadler-lindig")
MOST = 64 << 20  # bytes that may have to travel
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def required() -> list[str]:
    """Names of the packages that pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [re.split(r"[<>=!~\[; ]", line, maxsplit=1)[0] for line in project["dependencies"]]


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[str]:
    """Of `required`, what is not installed."""
    return [name for name in required() if version(name) is None]


def wheels(folder: Path) -> dict[str, Path]:
    """Package -> its wheel in the folder."""
    found = {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}
    return {name.lower(): path for name, path in sorted(found.items())}


def install(folder: Path) -> Path | None:
    """Where wheels of the folder were installed for what is missing; None where nothing is, or
    there are none. Raises RuntimeError, with what pip says, where it cannot.
    """
    if not missing():
        return None
    wanted = [path for name, path in wheels(folder).items() if version(name) is None]
    if not wanted:
        return None
    site = Path(tempfile.mkdtemp(prefix="dolmen_site_"))
    words = ["--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", str(site)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *words, *map(str, wanted)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"pip cannot install the wheels of {folder}: {done.stderr.strip()}")
    return site


def fill(folder: Path, python: str, machine: str, names: tuple[str, ...] = LACKING) -> None:
    """Download wheels of `names` for that Python and machine, in the versions of constraints.txt
    where it has one. Once all have come they replace what the folder had of the same packages;
    what else lies there stays. Raises ValueError where one does not come, or they are too many
    bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for p in PLATFORMS for word in ("--platform", f"{p}_{machine}")]
    with tempfile.TemporaryDirectory(dir=folder, prefix=".coming-") as coming:
        words = ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "-d", coming]
        words += ["--python-version", python, "-c", str(ROOT / "constraints.txt"), *platforms]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", *words, *names],
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            told = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            raise ValueError(
                f"pip found no wheels for Python {python} on {machine}, and {folder} is as it "
                f"was: {(told or ['no reason given'])[-1]}"
            )
        before = wheels(folder)
        for name, path in wheels(Path(coming)).items():
            if name in before:
                before[name].unlink()
            path.rename(folder / path.name)
    size = sum(path.stat().st_size for path in folder.glob("*.whl"))
    print(f"{len(wheels(folder))} wheels, {size / 2**20:.1f} MiB, in {folder}")
    if size > MOST:
        raise ValueError(f"{size:,} bytes of wheels are over {MOST:,}")


def environment(site: Path | None) -> dict[str, str]:
    """Of a process that is to import this checkout, and what was installed beside it."""
    old = os.environ.get("PYTHONPATH")
    path = [str(ROOT), *([str(site)] if site else []), *([old] if old else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--to", type=Path, default=Path(".whl"))
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--machine", default="x86_64", help="its processor")
    given = parser.parse_args()
    try:
        fill(given.to, given.python, given.machine)
    except (ValueError, OSError) as error:
        sys.exit(f"benchmarks.gpu.packages: {error}")


if __name__ == "__main__":
    main()
