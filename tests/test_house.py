"""Static rules of the package that a change could break without noticing: the order of imports, who
may name DTensor, who reads the environment, and what is never done to a file from outside. Imports
are read from the source, those inside functions included. One test per rule; each lists all
places that break it.
"""

import ast
import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from pathlib import Path

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
    "rl",
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
    "core/mesh.py",
    "core/environment.py",
    "cli/__init__.py",
    "launch/fork_server.py",
    "launch/launcher.py",
    "launch/process.py",
)  # the entry point


@cache  # as all below: a worker that runs none of these tests reads no source
def files() -> dict[str, ast.Module]:
    """The syntax tree of each file, by its path in the package."""
    return {
        str(p.relative_to(HOUSE)): ast.parse(p.read_text(), str(p))
        for p in sorted(HOUSE.rglob("*.py"))
    }


@cache
def nodes(path: str) -> tuple[ast.AST, ...]:
    """Every node of the syntax tree of a file."""
    return tuple(ast.walk(files()[path]))


@cache
def source_of(node: ast.AST) -> str:
    """The source of a node, without its layout."""
    return ast.unparse(node)


def calls(path: str) -> Iterator[ast.Call]:
    return (node for node in nodes(path) if isinstance(node, ast.Call))


def attributes(path: str) -> Iterator[ast.Attribute]:
    return (node for node in nodes(path) if isinstance(node, ast.Attribute))


def assert_none(rule: Callable[[str], Iterable[str]], paths: Iterable[str] | None = None) -> None:
    """Assert that no file breaks `rule`, a function from a path to places. Lists all places."""
    found = [place for path in paths or files() for place in rule(path)]
    assert not found, f"{len(found)} places break the rule:\n" + "\n".join(found)


def module_name(path: str) -> str:
    parts = ("dolmen", *Path(path).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> frozenset[str]:
    return frozenset(module_name(path) for path in files())


@cache
def imports(path: str) -> frozenset[str]:
    """Modules that a file names in an import, wherever in it; `from package import module` names
    the module.
    """
    package = module_name(path).split(".")
    if not path.endswith("__init__.py"):
        package = package[:-1]
    found: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            # a string: nothing comes from below
            found |= {
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base
                for alias in node.names
                if (base, alias.name) != ("dolmen", "__version__")
            }
        elif isinstance(node, ast.Call) and source_of(node.func).split(".")[-1] in (
            "import_module",
            "__import__",
        ):
            found |= {
                a.value
                for a in node.args
                if isinstance(a, ast.Constant) and isinstance(a.value, str)
            }
    return frozenset(found)


def folder(module: str) -> str | None:
    """`core` for dolmen.core.mesh, `cli` for dolmen.cli; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def names(path: str) -> set[str | None]:
    """Every name and attribute a file uses or imports."""
    out: set[str | None] = set()
    for node in nodes(path):
        if isinstance(node, ast.Name):
            out.add(node.id)
        elif isinstance(node, ast.Attribute):
            out.add(node.attr)
        elif isinstance(node, ast.alias):
            out |= {node.name, node.asname}
    return out


def test_every_folder_is_known():
    assert {folder(module) for module in modules()} <= set(FOLDERS)


def imports_from_below(path: str) -> Iterator[str]:
    here = folder(module_name(path))
    for name in sorted(imports(path)):
        if name.split(".")[0] != "dolmen":
            continue
        there = folder(name)
        if FOLDERS.index(there) > FOLDERS.index(here):
            yield f"{path} imports {name}, which lies below it"
        if there == "recipes" and here not in ("recipes", "api", "cli"):
            yield f"{path} imports {name}: only the command line and Python's imports a recipe"


def test_imports_point_upward():
    assert_none(imports_from_below)


def defined(path: str) -> set[str]:
    """Names that a file gives to something, those of its submodules among them, and not what it
    imports.
    """
    named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = {n.name for n in nodes(path) if isinstance(n, named)}
    found |= {n.id for n in nodes(path) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return found


@cache
def definitions() -> dict[str, set[str]]:
    """The names that each module defines."""
    found = {module_name(p): defined(p) for p in files() if not p.endswith("__init__.py")}
    found["dolmen.core.state"] |= {"Shard", "Replicate"}  # of torch: nobody else says DTensor
    return found


def names_from_another_importer(path: str) -> Iterator[str]:
    called = {}  # what a module is called here -> the module
    taken = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dolmen"):
            for alias in node.names:
                called[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                taken.append((node, node.module, alias.name))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            taken.append((node, node.value.id, node.attr))
    for node, of, name in taken:
        module = called.get(of, of) if isinstance(node, ast.Attribute) else of
        known = definitions().get(module)
        if known is not None and not name.startswith("__") and name not in known:
            yield f"{path}:{node.lineno} takes {name} from {module}, which only imports it"


def test_a_name_is_taken_from_the_file_that_defines_it():
    """And not from one that imports it for itself, and may stop to."""
    assert_none(names_from_another_importer)


def asserts_of_checks(path: str) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef) and node.name == "__post_init__":
            for inside in ast.walk(node):
                if isinstance(inside, ast.Assert):
                    yield f"{path}:{inside.lineno} checks by an assert"


def test_what_is_refused_is_refused_without_asserts_too():
    """`python -O` leaves them out, and all that an assert calls."""
    assert_none(asserts_of_checks)


def wide_digits(path: str) -> Iterator[str]:
    r"""Places of strings with `\d`."""
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and r"\d" in node.value:
            yield f"{path}:{node.lineno}"


def test_patterns_take_no_digits_of_other_scripts():
    r"""`\d` has 650 of them besides [0-9], in names of files and tensors that anybody chooses."""
    assert_none(wide_digits)


def is_set(node: ast.AST, variables: Collection[str] = ()) -> bool:
    """Whether an expression is a set: by its form, or a variable that one was assigned to."""
    match node:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name("set" | "frozenset")):
            return True
        case ast.Call(func=ast.Attribute(attr="union" | "intersection" | "difference")):
            return True
        case ast.BinOp(left, ast.Sub() | ast.BitAnd() | ast.BitOr() | ast.BitXor(), right):
            sides = (left, right)
            return any(is_set(side) or source_of(side).endswith(".keys()") for side in sides)
        case ast.Name(name):
            return name in variables
    return False


def orders_of_sets(path: str) -> Iterator[str]:
    for function in nodes(path):
        if not isinstance(function, ast.FunctionDef):
            continue
        inside = [*ast.walk(function)]
        variables = {
            node.targets[0].id
            for node in inside
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and is_set(node.value)
        }
        for node in inside:
            match node:
                case ast.Call(func=ast.Name("list" | "tuple" | "iter" | "enumerate"), args=[whole]):
                    taken = is_set(whole, variables)
                case ast.Call(func=ast.Attribute(attr="join"), args=[whole]):
                    taken = is_set(whole, variables)
                case _:
                    taken = False
            if taken:
                yield f"{path}:{node.lineno}: {source_of(node)[:80]}: sort it, or keep a dict"


def test_no_order_is_that_of_a_set():
    """Of text it differs from process to process: ranks, files and messages would differ too."""
    assert_none(orders_of_sets)


def test_no_folder_has_the_name_of_a_function():
    """A package is a noun and a function a verb: importing a module must not put it in the place
    of `dolmen.train`.
    """
    for module in sorted(modules() - {"dolmen.__main__"}):
        importlib.import_module(module)
    for name in dolmen.__all__:
        assert name.startswith("__") or callable(getattr(dolmen, name)), f"dolmen.{name}"


def test_no_cycles():
    graph = {
        module_name(path): {n for n in imports(path) & modules() if n != module_name(path)}
        for path in files()
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


PROCESSES = (
    "torch.distributed",
    "dolmen.core.collectives",
    "dolmen.core.transfers",
    "dolmen.core.mesh",
)


def uses_of_processes(path: str) -> Iterator[str]:
    yield from (f"{path} imports {n}" for n in sorted(imports(path)) if n.startswith(PROCESSES))
    for node in attributes(path):
        if source_of(node).startswith("torch.distributed"):
            yield f"{path}:{node.lineno} says {source_of(node)}"


def test_ops_know_of_no_processes():
    assert_none(uses_of_processes, [p for p in files() if p.startswith("ops/")])


DTENSOR = {
    "DTensor",
    "to_local",
    "full_tensor",
    "distribute_tensor",
    "distribute_module",
    "from_local",
    "redistribute",
}


def test_only_state_speaks_dtensor():
    def uses(path: str) -> Iterator[str]:
        for name in sorted(DTENSOR & names(path)):
            yield f"{path} says {name}: core/state.py is the bridge"

    assert_none(uses, [p for p in files() if p != "core/state.py"])


def test_environment_is_read_at_the_entry_alone():
    def reads(path: str) -> Iterator[str]:
        for name in sorted({"environ", "getenv", "environb", "putenv"} & names(path)):
            yield f"{path} reads the environment: {name}"

    assert_none(reads, [p for p in files() if p not in ENVIRONMENT])


PICKLERS = {"cloudpickle", "dill", "joblib", "shelve", "marshal"}


def runs_of_code(path: str) -> Iterator[str]:
    for name in sorted({n.split(".")[0] for n in imports(path)} & PICKLERS):
        yield f"{path} imports {name}, a pickler"
    for node in nodes(path):
        if isinstance(node, ast.ClassDef) and any(
            source_of(base).endswith("Unpickler") for base in node.bases
        ):
            if "find_class" not in {d.name for d in node.body if isinstance(d, ast.FunctionDef)}:
                yield f"{path}:{node.lineno} unpickles all"
    for call in calls(path):
        name = source_of(call.func)
        options = {k.arg: source_of(k.value) for k in call.keywords}
        where = f"{path}:{call.lineno}"
        if options.get("trust_remote_code", "False") != "False":
            yield f"{where} trusts remote code"
        if name in ("eval", "exec", "pickle.load", "pickle.loads", "pickle.Unpickler"):
            yield f"{where} calls {name}"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield f"{where}: torch.load without weights_only=True"
        if name in ("np.load", "numpy.load") and options.get("allow_pickle", "False") != "False":
            yield f"{where} may unpickle"


def test_nothing_runs_what_a_file_says():
    """No code of a downloaded model, no evaluation, and no unpickling but through a class that says
    what may be named.
    """
    assert_none(runs_of_code)


PARSERS = ("json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.parse", "yaml.compose")
PARSERS += ("pickle.load", "pickle.loads", "tomllib.load", "tomllib.loads", "np.fromfile")
# Of what is not read from outside, or is read nowhere as a whole
PLAIN = {
    "training/profile.py": "the trace that this process has just recorded",
    "core/consensus.py": "the bytes of our own source, to compare ranks",
    "planning/winner.py": "the bytes of our own source, to know when it has changed",
    "launch/process.py": "/proc",
    "launch/watchdog.py": "/proc",
    "data/sources.py": "documents, to be compressed",
    "data/tokenizer.py": "what the library of tokenizers gives as JSON",
    "checkpoint/seal.py": "what this process has just written",
    "rl/function_worker.py": "requests and replies of a process that this one has started",
}


def parsers_beside_the_gate(path: str) -> Iterator[str]:
    for call in calls(path):
        name = source_of(call.func)
        parses = name in PARSERS or name.split(".")[-1] in ("read_text", "read_bytes")
        through = name.startswith("gate.") or isinstance(call.func, ast.Name)
        if parses and not through:
            yield f"{path}:{call.lineno} calls {name}: read it with dolmen.files.gate"


def test_files_are_read_through_the_gate():
    """dolmen/files bounds size and depth and compares with a schema; who parses elsewhere does
    not.
    """
    assert PLAIN.keys() <= files().keys()
    paths = [p for p in files() if not p.startswith("files/") and p not in PLAIN]
    assert_none(parsers_beside_the_gate, paths)


# Of named tuples, os, sys and type stubs: documented, for all their underscore
DOCUMENTED = {"_replace", "_asdict", "_exit", "_current_frames", "_typeshed.DataclassInstance"}
SPELLED = re.compile(r"torch\._|/torch/|TORCHELASTIC|TORCH_GLOO|FSDP::")


def private(name: str) -> bool:
    """Whether a part of a dotted name begins with one underscore."""
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(path: str) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom | ast.Import):
            of = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            said = [f"{of}.{alias.name}".lstrip(".") for alias in node.names]
            bad = [name for name in said if private(name) and name not in DOCUMENTED]
        elif isinstance(node, ast.Attribute):
            of = node.value
            own = isinstance(of, ast.Name) and of.id in ("self", "cls")
            own = own or isinstance(of, ast.Call) and source_of(of) == "super()"
            bad = private(node.attr) and not own and node.attr not in DOCUMENTED
            bad = [source_of(node)] if bad or source_of(node) == "torch.ops.aten" else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value if "\n" not in node.value else ""  # prose names them
            bad = SPELLED.findall(text)
        else:
            continue
        yield from (
            f"{path}:{node.lineno} says {name}: see dolmen/core/torch_private" for name in bad
        )


def test_private_names_of_torch_have_one_place():
    """Where each has a reason and a test. Nor does anybody take a private name from a file of the
    package.
    """
    assert_none(private_names, [p for p in files() if not p.startswith("core/torch_private/")])


# Where tensors are of the device, and which calls wait for it: the values of one, a result as large
# as values say, a copy to it. `.to(device)` is seen by its argument.
COMPUTE = ("ops/", "parallel/", "model/", "optim/", "training/step.py", "training/loop.py")
COMPUTE += ("training/balance.py", "evaluation/validate.py")
COMPUTE += ("data/batch.py",)
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "argwhere", "bincount", "unique", "equal")
WAITS += ("unique_consecutive", "masked_select", "synchronize", "one_hot", "is_nonzero")
HOST = {  # calls that touch the host's own tensors alone
    "ops/attention/spec.py": {"tolist"},  # Documents.host_starts
    "ops/attention/blocks.py": {"tolist"},  # Documents.host_starts
    "ops/rope.py": {"tolist"},  # PositionIds.from_ids the host's ids
    "ops/attention/reference.py": {"to"},  # for tests
    "data/batch.py": {"numpy", "tolist"},  # of a batch on the CPU
    "training/step.py": {"to"},  # Batch.to
    "evaluation/validate.py": {"to"},  # Batch.to
}


def waits(call: ast.Call) -> str | None:
    """The name of what a call waits by, if it does."""
    text = source_of(call.func)
    name = text.split(".")[-1]
    options = {k.arg for k in call.keywords}
    if name in WAITS and isinstance(call.func, ast.Attribute):
        return name
    if text in ("torch.tensor", "torch.as_tensor", "torch.from_numpy") and "device" in options:
        return text
    moved = [source_of(a) for a in (*call.args, *(k.value for k in call.keywords))]
    copies = name == "to" and any("device" in a for a in moved)
    return name if copies and "non_blocking" not in options else None


def waits_for_the_device(path: str) -> Iterator[str]:
    for call in calls(path):
        if (name := waits(call)) and name not in HOST.get(path, ()):
            yield f"{path}:{call.lineno} calls {source_of(call.func)}: use dolmen.core.device"


def test_compute_reads_the_device_through_host_alone():
    """What a step does is counted by tests/training/test_reads.py; here is what no test runs."""
    assert_none(waits_for_the_device, [p for p in files() if p.startswith(COMPUTE)])


ASKS = ("is_cuda", "is_cpu", "is_meta", "get_device", "is_available")
ASKS += ("get_device_capability", "get_device_properties")


def questions_about_hardware(path: str) -> Iterator[str]:
    for node in attributes(path):
        said = source_of(node)
        if node.attr in ASKS or said.endswith("device.type"):
            yield f"{path}:{node.lineno} says {said}: ask dolmen.ops.kernels.Kernels"


def test_kernels_are_chosen_where_a_model_is_built():
    """No layer asks what it runs on: it is told (ops/kernels.py), so that a CPU or a fake tensor
    takes the path of a GPU.
    """
    layers = [p for p in files() if p.startswith(("ops/", "parallel/", "model/"))]
    assert_none(questions_about_hardware, [p for p in layers if p != "ops/kernels.py"])
