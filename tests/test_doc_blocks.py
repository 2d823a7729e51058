"""Code blocks of the documentation: each is fenced, and is run, read by the parser of the command
line, or marked as output (CONTRIBUTING.md has the table).
"""

import ast
import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest
import tinyrun
import yaml
from spawning import fork_ranks

import dolmen
from dolmen.cli import VERBS, command, runs
from dolmen.conversion import hf, source
from dolmen.core.messages import BadInput
from dolmen.files import storage
from dolmen.recipes import RECIPES

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"sh", "console", "python", "yaml", "json", "text"}
LAUNCHERS = ("srun", "torchrun", ".venv/bin/python")
PROGRAMS = {"pip", "pytest", "torchrun", "curl", "export", "tail", "head=$(scontrol"}
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
material = tinyrun.material


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: bool

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path, text: str) -> list[Block]:
    """The fenced blocks of a page."""
    lines, found, start = text.splitlines(), [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        marked = start > 0 and NOT_RUN.fullmatch(lines[start - 1]) is not None
        body = "\n".join(lines[start + 1 : number]) + "\n"
        found.append(Block(page, start + 1, lines[start][3:], body, marked))
        start = None
    return found


def indented(text: str) -> list[str]:
    """Lines that begin an indented code block, which does not say what it is."""
    prose = re.sub(r"(?ms)^```.*?^```", "", text).splitlines()
    pairs = zip(prose, prose[1:], strict=False)
    return [line for before, line in pairs if not before.strip() and line.startswith("    ")]


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]


def commands(block: Block) -> list[str]:
    """The command lines of a block, without comments; those of a transcript begin with `$ `."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [line for line in lines if shlex.split(line, comments=True)]


def problem_of_command(line: str) -> str | None:
    """Why a command line cannot work as it is written, or None."""
    words = shlex.split(line, comments=True)
    if words[0] in LAUNCHERS and "-m" in words:
        words = words[words.index("-m") + 1 :]
    match words:
        case ["dolmen", verb, *rest]:
            try:
                command.read(verb, rest)
            except (BadInput, KeyError, SystemExit) as error:
                return str(error)
        case ["make", *targets]:
            known = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
            return next((name for name in targets if "=" not in name and name not in known), None)
        case ["python", "-m", module, *_]:
            return None if importlib.util.find_spec(module) else f"there is no module {module}"
        case ["python", file, *_]:
            return None if (ROOT / file).exists() else f"there is no file {file}"
        case [program, *_]:
            return None if Path(program).name in PROGRAMS else f"{program} is not in PROGRAMS"
    return None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in which every path of a model opens as a model of `llama-8b`."""
    for name in ("pretrain", "quickstart"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").write_text(f"name: {name}\n")
    (tmp_path / "run.yaml").write_text("name: pretrain\n")
    model = RECIPES["llama-8b"]().model
    monkeypatch.chdir(tmp_path)
    # a run at a URL is that of `pretrain`
    run = tmp_path / "runs/pretrain/config.yaml"
    monkeypatch.setattr(storage, "pull_file", lambda url: run if url.startswith("s3://") else None)
    monkeypatch.setattr(source, "pin_source", str)
    monkeypatch.setattr(source, "open_source", lambda name: hf.Transformers(Path(name), model))
    return tmp_path


def test_every_code_block_is_fenced_and_says_what_it_is():
    offenders = [f"{page.name}: {line}" for page in PAGES for line in indented(page.read_text())]
    offenders += [
        f"{block}: {block.language!r}" for block in BLOCKS if block.language not in LANGUAGES
    ]
    assert offenders == []
    assert indented("a\n\n    make x\n") == ["    make x"] and not indented("```sh\n\n    x\n```")


def test_every_command_of_a_page_is_read_by_the_real_parser(folder, monkeypatch):
    monkeypatch.setattr(runs, "check_folder", lambda *_, **__: None)  # `folder` has a run
    shells = [block for block in BLOCKS if block.language in ("sh", "console")]
    lines = [(block, line) for block in shells for line in commands(block)]
    problems = [(f"{block}: {line}", problem_of_command(line)) for block, line in lines]
    assert [f"{line}\n    {problem}" for line, problem in problems if problem] == []
    assert len(lines) > 80
    for wrong in (
        "dolmen train quickstart --layout.xp 2",
        "make nothing",
        "python -m nothing",
        "x y",
    ):
        assert problem_of_command(wrong), wrong


def test_commands_of_exact_numerics_state_their_layout():
    """What a page says of layouts is not to depend on the dp of a recipe."""
    page = ROOT / "docs/concepts/numerics.md"
    blocks = [block for block in blocks_of(page, page.read_text()) if block.language == "sh"]
    exact = [c for block in blocks for c in commands(block) if "--train.numerics exact" in c]
    assert len(exact) >= 5
    assert [command for command in exact if "--layout.dp" not in command] == []


def test_the_readme_shows_every_verb():
    lines = [line for block in BLOCKS if block.page.name == "README.md" for line in commands(block)]
    shown = {words[1] for line in lines if (words := line.split())[0] == "dolmen"}
    assert shown == set(VERBS)


def test_yaml_and_json_are_valid():
    for block in BLOCKS:
        if block.language == "yaml":
            list(yaml.safe_load_all(block.text))
        if block.language == "json":
            [json.loads(line) for line in block.text.splitlines()]


def problems_of_calls(text: str) -> list[str]:
    """Calls of `dolmen.NAME` that their functions would not take."""
    found = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).startswith("dolmen."):
            continue
        try:
            function = eval(ast.unparse(call.func), {"dolmen": dolmen})
            given = {one.arg: None for one in call.keywords if one.arg}
            inspect.signature(function).bind(*call.args, **given)
        except (AttributeError, TypeError) as error:
            found.append(f"{ast.unparse(call)}: {error}")
    return found


def test_python_that_is_not_run_calls_what_is_there():
    marked = [block for block in BLOCKS if block.language == "python" and block.not_run]
    assert [f"{block}: {text}" for block in marked for text in problems_of_calls(block.text)] == []
    assert len(problems_of_calls("dolmen.absent()\ndolmen.load('m', nothing=1, x=2)")) >= 1


START = ["install", "quickstart", "own-text", "tune-and-chat", "serve"]
TUTORIAL = [ROOT / "docs" / "get-started" / f"{name}.md" for name in START]
RUN = [b for b in BLOCKS if b.language == "python" and not b.not_run and b.page not in TUTORIAL]


def test_a_page_of_get_started_is_short():
    assert sorted(TUTORIAL) == sorted((ROOT / "docs" / "get-started").iterdir())
    assert [p.name for p in TUTORIAL if len(p.read_text().splitlines()) >= 80] == []


SMALLER = {
    "train": {"train.steps": "2", "layout.tp": "1", "train.sequence-length": "128"},
    "quickstart": {
        "data.path": "docs/",
        "data.tokenizer": "bpe:300",
        "model.num-hidden-layers": "1",
        "layout.dp": "1",
    },
    "sft": {"data.template": "chatml"},
    "grpo": {"data.template": "chatml"},
}
"""Options of the commands of *Get started* in the test: by verb, then by recipe."""


def smaller(line: str) -> list[str]:
    """Return the words of a command after `dolmen`, with the tutorial's model in place of the hub's
    and two steps.
    """
    line = line.replace("Qwen/Qwen3-0.6B", "runs/notes")
    _, verb, *words = shlex.split(line, comments=True)
    if verb != "train":
        return [verb, *words]
    changed = {**SMALLER[verb], **SMALLER.get(words[0], {})}
    if "--resume" in words:
        changed = {"train.steps": "3", "layout.tp": "1", "layout.dp": "1"}
    text = f" {shlex.join(words)} "
    for name in (*changed, "train.epochs"):
        text = re.sub(rf" --{name} [^-]\S*(?= )", "", text)
    said = (word for name, value in changed.items() for word in (f"--{name}", value))
    return [verb, *shlex.split(text), *said]


@contextlib.contextmanager
def served(words: list[str], port: int):
    """`dolmen serve`, as the page has it, in a process of its own and at a free port."""
    environment = {**os.environ, "PYTHONPATH": tinyrun.path_of()}
    command = [sys.executable, "-m", "dolmen", *words, "--port", str(port)]
    server = subprocess.Popen(command, env=environment)
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        assert server.wait() == 0


@pytest.mark.full
@pytest.mark.slow
def test_get_started_runs(material, tmp_path, monkeypatch):
    """Every command and program of the pages, one page after the other, in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 plus 4?\n"))
    shutil.copytree(material.docs, "docs")
    shutil.copy(ROOT / "README.md", "README.md")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    names: dict = {}
    with contextlib.ExitStack() as servers:
        for block in (block for page in TUTORIAL for block in BLOCKS if block.page == page):
            if block.language == "sh" and not block.not_run:
                for line in (line for line in commands(block) if line.startswith("dolmen ")):
                    words = smaller(line.replace(" --port 8000", ""))
                    if words[0] == "serve":
                        servers.enter_context(served(words, port))
                    else:
                        result = tinyrun.dolmen(*words)
                        assert result.code == 0, (line, result.err)
            elif block.language == "python" and not block.not_run:
                text = block.text.replace(":8000/", f":{port}/")
                exec(compile(text, str(block), "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in RUN}), ids=lambda page: page.name)
def test_python_of_a_page_runs(page, material, tmp_path, monkeypatch, forked_ranks, capfd):
    """In order, in one folder; a program that starts a process group on two ranks."""
    monkeypatch.chdir(tmp_path)
    for name in ("model", "path/to/model"):
        shutil.copytree(material.model, tmp_path / name)
    for name in ("book.txt", "other.txt"):
        texts = [file.read_text() for file in sorted(material.docs.iterdir())]
        (tmp_path / name).write_text("".join(texts))
    names = {"dolmen": dolmen, "model": dolmen.load("model")}
    for block in (block for block in RUN if block.page == page):
        if "init_process_group" in block.text:
            Path("toy.py").write_text(block.text)
            assert fork_ranks(2, runpy.run_path, str(Path("toy.py").resolve())) == {0}
            assert "step 1: loss 4.5610" in capfd.readouterr().out
        else:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block.text, str(block), "exec"), names)
