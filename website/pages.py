"""What the site has beside docs/: the root's pages, the examples, the functions, a style sheet.

A hook of mkdocs (website/mkdocs.yml). README.md and its neighbours are written to be read in the
repository, so their links are turned to where the site has the same page.
"""

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples": "examples.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#]+)")


def on_files(files: Files, config) -> Files:
    """Adds the pages that are not in docs/."""
    for name, page in PAGES.items():
        at = ROOT / name
        text = programs(at) if at.is_dir() else LINK.sub(moved, at.read_text())
        files.append(File.generated(config, page, content=text))
    for path in sorted((HERE / "api").glob("*.md")):
        files.append(File.generated(config, f"api/{path.name}", content=path.read_text()))
    files.append(File.generated(config, "site.css", content=(HERE / "site.css").read_text()))
    return files


def moved(link: re.Match) -> str:
    """Where the site has what the repository's root has."""
    return PAGES.get(link[1]) or link[1].removeprefix("docs/")


def programs(folder: Path) -> str:
    """A page of the programs of a folder."""
    parts = [
        f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in folder.glob("*.py")
    ]
    return "\n".join(["# Examples\n\nThe tests run them.\n", *sorted(parts, reverse=True)])
