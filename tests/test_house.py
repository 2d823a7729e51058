"""The rules of the house that a reader could break without noticing: who imports whom, who may say
DTensor, who reads the environment, and what is never done to a file from outside. Imports are read
from the source, those inside functions included.
"""

import ast
import importlib
import re
from pathlib import Path

import pytest

import dolmen

HOUSE = Path(dolmen.__file__).parent
# from above to below; None: dolmen/__init__.py
FOLDERS = (
    "core",
    "files",
    "pages",
    "launch",
    "ops",
    "parallel",
    "model",
    "families",
    "data",
    "optim",
    "objectives",
    "checkpoint",
    "conversion",
    "serving",
    "rollouts",
    "evaluation",
    "vocabulary",
    "training",
    "watching",
    "comparison",
    "planning",
    "recipes",
    "api",
    "cli",
    "__main__",
    None,
)
ENVIRONMENT = (
    "core/device.py",
    "core/groups.py",
    "core/launched.py",
    "cli/__init__.py",
    "launch/launcher.py",
    "launch/process.py",
)  # the entry point


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
        assert there != "recipes" or here in ("recipes", "api", "cli"), (
            f"{path} imports {name}: nothing but the command line and Python's imports a recipe"
        )


def defined(path: str) -> set[str]:
    """Names that a file gives to something, those of its submodules among them, and not what it
    imports.
    """
    nodes = list(ast.walk(FILES[path]))
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {n.name for n in nodes if isinstance(n, named)}
    found |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


DEFINED = {module_name(path): defined(path) for path in FILES if not path.endswith("__init__.py")}
DEFINED["dolmen.core.state"] |= {"Shard", "Replicate"}  # of torch: nobody else says DTensor


@pytest.mark.parametrize("path", FILES)
def test_a_name_is_taken_from_the_file_that_defines_it(path):
    """And not from one that imports it for itself, and may stop to."""
    called = {}  # what a module is called here -> the module
    taken = []
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dolmen"):
            for alias in node.names:
                called[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                taken.append((node, node.module, alias.name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken.append((node, node.value.id, node.attr))
    for node, of, name in taken:
        module = called.get(of, of) if isinstance(node, ast.Attribute) else of
        if module in DEFINED and not name.startswith("__"):
            assert name in DEFINED[module], (
                f"{path}:{node.lineno} takes {name} from {module}, which only imports it"
            )


@pytest.mark.parametrize("path", FILES)
def test_what_is_refused_is_refused_without_asserts_too(path):
    """`python -O` leaves them out, and all that an assert calls."""
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            for inside in ast.walk(node):
                assert not isinstance(inside, ast.Assert), f"{path}:{inside.lineno}"


def test_no_folder_has_the_name_of_a_function():
    """A room is a noun and a function a verb: importing a module must not put it in the place of
    `dolmen.train`.
    """
    for module in sorted(MODULES - {"dolmen.__main__"}):
        importlib.import_module(module)
    for name in dolmen.__all__:
        assert name.startswith("__") or callable(getattr(dolmen, name)), f"dolmen.{name}"


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
        if name.startswith(
            (
                "torch.distributed",
                "dolmen.core.collectives",
                "dolmen.core.transfers",
                "dolmen.core.mesh",
            )
        )
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
    "planning/winner.py": "the bytes of our own source, to know when it has changed",
    "launch/process.py": "/proc",
    "launch/watch.py": "/proc",
    "training/profile.py": "the trace that this process has just recorded",
    "data/quickstart_corpus.py": "documents, to be compressed",
    "data/tokenizer.py": "what the library of tokenizers gives as JSON",
    "checkpoint/seal.py": "what this process has just written",
    "rollouts/judge.py": "what the process that has started this one asks",
    "rollouts/apart.py": "what a process that this one has started answers",
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


# Of named tuples, os, sys and type stubs: documented, for all their underscore
DOCUMENTED = {"_replace", "_asdict", "_exit", "_current_frames", "_typeshed.DataclassInstance"}
SPELLED = re.compile(r"torch\._|/torch/|TORCHELASTIC|TORCH_GLOO|FSDP::")


def private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


@pytest.mark.parametrize("path", [p for p in FILES if not p.startswith("core/torch_private/")])
def test_private_names_of_torch_have_one_place(path):
    """Where each has a reason and a test. Nor does anybody take a private name from a file of the
    house.
    """
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.ImportFrom | ast.Import):
            of = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            said = [f"{of}.{alias.name}".lstrip(".") for alias in node.names]
            bad = [name for name in said if private(name) and name not in DOCUMENTED]
        elif isinstance(node, ast.Attribute):
            said = ast.unparse(node)
            own = ast.unparse(node.value) in ("self", "cls", "super()")
            bad = [said] if private(node.attr) and not own and node.attr not in DOCUMENTED else []
            bad += [said] if said.startswith("torch.ops.aten") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value if "\n" not in node.value else ""  # prose names them
            bad = SPELLED.findall(text)
        else:
            continue
        assert not bad, f"{path}:{node.lineno} says {bad[0]}: dolmen/core/torch_private is for such"


# Where tensors are of the device, and which calls wait for it: the values of one, a result as large
# as values say, a copy to it. `.to(device)` is seen by its argument.
COMPUTE = ("ops/", "parallel/", "model/", "optim/", "training/step.py", "training/loop.py")
COMPUTE += ("training/balance.py", "training/gradients.py", "evaluation/validate.py")
COMPUTE += ("data/batch.py",)
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "bincount", "unique", "equal")
WAITS += ("unique_consecutive", "masked_select", "synchronize", "one_hot", "is_nonzero")
HOST = {  # calls that touch the host's own tensors alone
    "ops/attention/spec.py": {"tolist"},  # Documents.host_starts
    "ops/attention/blocks.py": {"tolist"},  # Documents.host_starts
    "ops/positions.py": {"tolist"},  # PositionIds.of the host's ids
    "ops/attention/reference.py": {"to"},  # for tests
    "data/batch.py": {"numpy", "tolist"},  # of a batch on the CPU
    "training/gradients.py": {"to"},  # Batch.to
    "evaluation/validate.py": {"to"},  # Batch.to
}


def waits(call: ast.Call) -> str | None:
    """The name of what a call waits by, if it does."""
    text = ast.unparse(call.func)
    name = text.split(".")[-1]
    options = {k.arg for k in call.keywords}
    if name in WAITS and isinstance(call.func, ast.Attribute):
        return name
    if text in ("torch.tensor", "torch.as_tensor", "torch.from_numpy") and "device" in options:
        return text
    moved = [ast.unparse(a) for a in (*call.args, *(k.value for k in call.keywords))]
    copies = name == "to" and any("device" in a for a in moved)
    return name if copies and "non_blocking" not in options else None


@pytest.mark.parametrize("path", [p for p in FILES if p.startswith(COMPUTE)])
def test_compute_reads_the_device_through_host_alone(path):
    """What a step does is counted by tests/training/test_reads.py; here is what no test runs."""
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Call) and (name := waits(node)):
            assert name in HOST.get(path, ()), (
                f"{path}:{node.lineno} calls {ast.unparse(node.func)}: use dolmen.core.device"
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


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if p.split("/")[0] in ("ops", "parallel", "model") and p != "ops/kernels.py"],
)
def test_kernels_are_chosen_where_a_model_is_built(path):
    """No layer asks what it runs on: it is told (ops/kernels.py), so that a CPU or a fake tensor
    takes the road of a GPU.
    """
    for node in ast.walk(FILES[path]):
        if isinstance(node, ast.Attribute):
            said = ast.unparse(node)
            asks = node.attr in ("is_cuda", "is_cpu", "is_meta", "get_device", "is_available")
            asks = asks or node.attr in ("get_device_capability", "get_device_properties")
            assert not asks and not said.endswith("device.type"), (
                f"{path}:{node.lineno} says {said}: ask dolmen.ops.kernels.Kernels"
            )
