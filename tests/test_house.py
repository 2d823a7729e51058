"""The rules of the house that a reader could break without noticing: who imports whom, who may say
DTensor, who reads the environment, and what is never done to a file from outside. Imports are read
from the source, those inside functions included.
"""

import ast
from pathlib import Path

import pytest

import dolmen

HOUSE = Path(dolmen.__file__).parent
# from above to below; None: dolmen/__init__.py
FOLDERS = (
    "core",
    "files",
    "ops",
    "parallel",
    "model",
    "families",
    "convert",
    "data",
    "optim",
    "checkpoint",
    "train",
    "tune",
    "serve",
    "evaluate",
    "rl",
    "plan",
    "recipes",
    "cli",
    "api",
    "__main__",
    None,
)
ENVIRONMENT = ("core/mesh.py", "cli/__init__.py", "cli/launch.py")  # the entry point


def files() -> dict[str, ast.Module]:
    return {
        str(p.relative_to(HOUSE)): ast.parse(p.read_text(), str(p))
        for p in sorted(HOUSE.rglob("*.py"))
    }


FILES = files()


def module_name(path: str) -> str:
    parts = ("dolmen", *Path(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path) for path in FILES}


def imports(path: str, tree: ast.Module) -> set[str]:
    """Modules that a file names in an import, wherever in it; `from package import module` names
    the module.
    """
    package = (
        module_name(path).split(".")
        if path.endswith("__init__.py")
        else module_name(path).split(".")[:-1]
    )
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # a string: nothing comes from below
            found |= {
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base
                for alias in node.names
                if (base, alias.name) != ("dolmen", "__version__")
            }
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            found |= {
                a.value
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return found


IMPORTS = {path: imports(path, tree) for path, tree in FILES.items()}


def folder(module: str) -> str | None:
    """`core` for dolmen.core.mesh, `cli` for dolmen.cli; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def names(path: str) -> set[str]:
    """Every name and attribute a file uses or imports."""
    out = set()
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Name):
            out.add(node.id)
        elif isinstance(node, ast.Attribute):
            out.add(node.attr)
        elif isinstance(node, ast.alias):
            out |= {node.name, node.asname}
    return out


def test_every_folder_is_known():
    assert {folder(module) for module in MODULES} <= set(FOLDERS)


@pytest.mark.parametrize("path", FILES)
def test_imports_point_upward(path):
    here = folder(module_name(path))
    for name in IMPORTS[path]:
        if name.split(".")[0] != "dolmen":
            continue
        there = folder(name)
        assert FOLDERS.index(there) <= FOLDERS.index(here), (
            f"{path} imports {name}, which lies below it"
        )
        assert there != "recipes" or here in ("recipes", "cli"), (
            f"{path} imports {name}: nothing but the command line imports a recipe"
        )


def test_no_cycles():
    graph = {
        module_name(path): {n for n in names if n in MODULES and n != module_name(path)}
        for path, names in IMPORTS.items()
    }
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]):
        assert module not in way, (
            f"a cycle of imports: {' -> '.join((*way[way.index(module) :], module))}"
        )
        if module in done:
            return
        for other in sorted(graph[module]):
            visit(other, (*way, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())


@pytest.mark.parametrize("path", [p for p in FILES if p.startswith("ops/")])
def test_ops_know_of_no_processes(path):
    bad = {
        name
        for name in IMPORTS[path]
        if name.startswith(("torch.distributed", "dolmen.core.collectives", "dolmen.core.mesh"))
    }
    used = {ast.unparse(node) for node in ast.walk(FILES[path]) if isinstance(node, ast.Attribute)}
    assert not bad and not any(name.startswith("torch.distributed") for name in used), (
        f"{path} knows of processes: {bad}"
    )


@pytest.mark.parametrize("path", [p for p in FILES if p != "core/state.py"])
def test_only_state_speaks_dtensor(path):
    said = names(path) & {
        "DTensor",
        "to_local",
        "full_tensor",
        "distribute_tensor",
        "distribute_module",
        "from_local",
        "redistribute",
    }
    assert not said, f"{path} says {said}: core/state.py is the bridge"


@pytest.mark.parametrize("path", [p for p in FILES if p not in ENVIRONMENT])
def test_environment_is_read_at_the_entry_alone(path):
    assert not names(path) & {"environ", "getenv", "environb", "putenv"}, (
        f"{path} reads the environment"
    )


@pytest.mark.parametrize("path", FILES)
def test_nothing_runs_what_a_file_says(path):
    """No code of a downloaded model, no evaluation, and no unpickling but through a class that says
    what may be named.
    """
    assert not {n.split(".")[0] for n in IMPORTS[path]} & {
        "cloudpickle",
        "dill",
        "joblib",
        "shelve",
        "marshal",
    }, f"{path} imports a pickler"
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.ClassDef) and any(
            ast.unparse(base).endswith("Unpickler") for base in node.bases
        ):
            assert "find_class" in {d.name for d in node.body if isinstance(d, ast.FunctionDef)}, (
                f"{path}:{node.lineno} unpickles all"
            )
        if isinstance(node, ast.Call):
            safe(path, node)


PARSERS = ("json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.parse", "yaml.compose")
PARSERS += ("pickle.load", "pickle.loads", "tomllib.load", "tomllib.loads", "np.fromfile")
# Of what is not read from outside, or is read nowhere as a whole
PLAIN = {
    "core/agree.py": "the bytes of our own source, to compare ranks",
    "cli/launch.py": "/proc",
    "train/watch.py": "/proc",
    "data/quickstart_corpus.py": "documents, to be compressed",
    "data/tokenizer.py": "what the library of tokenizers gives as JSON",
    "checkpoint/seal.py": "what this process has just written",
}


@pytest.mark.parametrize("path", [p for p in FILES if not p.startswith("files/")])
def test_files_are_read_through_the_gate(path):
    """dolmen/files bounds size and depth and compares with a schema; who parses elsewhere does
    not.
    """
    for node in ast.walk(FILES[path]):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        parses = name in PARSERS or name.split(".")[-1] in ("read_text", "read_bytes")
        through = name.startswith("gate.") or isinstance(node.func, ast.Name)
        assert not parses or through or path in PLAIN, (
            f"{path}:{node.lineno} calls {name}: read it with dolmen.files.gate"
        )


def safe(path: str, call: ast.Call) -> None:
    name = ast.unparse(call.func)
    options = {k.arg: ast.unparse(k.value) for k in call.keywords}
    where = f"{path}:{call.lineno}"
    assert options.get("trust_remote_code", "False") == "False", f"{where} trusts remote code"
    assert name not in ("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler"), (
        f"{where} calls {name}"
    )
    if name == "torch.load":
        assert options.get("weights_only") == "True", (
            f"{where}: torch.load without weights_only=True"
        )
    if name in ("np.load", "numpy.load"):
        assert options.get("allow_pickle", "False") == "False", f"{where} may unpickle"
