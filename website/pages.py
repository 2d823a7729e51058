"""Pages of the site that are not in docs/ as they are read: those of the repository's root, the
examples, the Python API, the style sheet, and the tables of options.

A hook of mkdocs (website/mkdocs.yml). README.md and its neighbours are written to be read in the
repository, so their links are changed to where the site has the same page. The page of options
has a mark for each command, which becomes the tables of its options, read from the fields.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from mkdocs.structure.files import File, Files

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # the options of this checkout

from dolmen.cli.command import CONFIGS, PARTS, find  # noqa: E402
from dolmen.cli.parse import Option, OptionGroup, groups  # noqa: E402
from dolmen.cli.runs import model_groups  # noqa: E402
from dolmen.core.config import Mark, is_optional, plain_type  # noqa: E402
from dolmen.planning.config import DryrunConfig  # noqa: E402
from dolmen.recipes import RECIPES  # noqa: E402
from dolmen.training.config import RunConfig  # noqa: E402
from dolmen.training.request import LaunchOptions  # noqa: E402

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples": "examples.md",
}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#]+)")
OPTIONS = re.compile(r"<!-- options: (.+) -->")
NAMES = {int: "integer", float: "number", str: "text", bool: "switch"}
SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def on_files(files: Files, config) -> Files:
    """Add the pages that are not in docs/."""
    for name, page in PAGES.items():
        path = ROOT / name
        text = programs(path) if path.is_dir() else LINK.sub(relink, path.read_text())
        files.append(File.generated(config, page, content=text))
    for path in sorted((HERE / "api").glob("*.md")):
        files.append(File.generated(config, f"api/{path.name}", content=path.read_text()))
    files.append(File.generated(config, "site.css", content=(HERE / "site.css").read_text()))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    """Fill in the tables of options."""
    return OPTIONS.sub(lambda mark: "\n".join(tables(mark[1])), markdown)


def relink(link: re.Match) -> str:
    """Return the site's path of a page that the repository's root links to."""
    return PAGES.get(link[1]) or link[1].removeprefix("docs/")


def programs(folder: Path) -> str:
    """Return a page with the programs of a folder."""
    parts = [
        f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in folder.glob("*.py")
    ]
    return "\n".join(["# Examples\n\nThe tests run them.\n", *sorted(parts, reverse=True)])


def option_groups(verb: str) -> list[OptionGroup]:
    """Return the options of a command, by section; `model` is the family Llama's."""
    if verb == "model":
        model = RECIPES["llama-8b"]().model
        assert model is not None
        return model_groups(model)
    if verb == "run":
        first, *sections = groups(RunConfig)
        own = tuple(option for option in first.options if option.name not in ("name", "model"))
        return [OptionGroup("", "", own), *sections]
    if verb in ("train", "dryrun"):
        return groups({"train": LaunchOptions, "dryrun": DryrunConfig}[verb])
    verb, _, part = verb.partition(" ")
    return groups(find(PARTS[verb][1][part] if part else CONFIGS[verb]))


def tables(verb: str) -> Iterator[str]:
    """Yield the lines of a command's tables."""
    for group in option_groups(verb):
        if not group.options:
            continue
        if group.title:
            yield f"\n### `--{group.title}`\n\n{group.about}"
        yield "\n| option | type | default | range | meaning |\n|---|---|---|---|---|"
        yield from map(row, group.options)


def row(option: Option) -> str:
    """Return the row of an option."""
    text = option.text.replace("|", "\\|").replace("<", "&lt;")
    positional = Mark.POSITIONAL in option.marks
    cells = (
        f"`{option.name.upper()}`" if positional else f"`--{option.name}`",
        type_name(option.hint).replace("|", "\\|"),
        default_text(option.default),
        ", ".join(bounds(option)),
    )
    return f"| {' | '.join(cells)} | {text} |"


def default_text(value: Any) -> str:
    """Return a default as it is typed."""
    if value is MISSING:
        return "required"
    if isinstance(value, bool):
        return "on" if value else "off"
    if value in (None, (), ""):
        return ""
    text = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
    return f"`{text}`"


def type_name(hint: Any) -> str:
    """Return the name of a type as a user would say it."""
    kind = plain_type(hint)
    if get_origin(kind) is tuple:
        return f"{type_name(get_args(kind)[0])}, several"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(kind))
    return NAMES.get(kind, str(kind)) + (", or unset" if is_optional(hint) else "")


def bounds(option: Option) -> Iterator[str]:
    """Yield the bounds of an option's values, but those of every number."""
    for mark in metadata(option.hint) + list(option.marks):
        for field in getattr(mark, "metadata", ()):
            for name, sign in SIGNS.items():
                bound = getattr(field, name, None)
                if bound is not None and abs(bound) < 2**53:
                    yield f"{sign} {bound:,}"


def metadata(hint: Any) -> list[Any]:
    """Return what annotations say of a type, at any depth."""
    inside = [mark for part in get_args(hint) for mark in metadata(part)]
    return [*getattr(hint, "__metadata__", ()), *inside]
