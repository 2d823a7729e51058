"""Faults made by rule on the syntax tree of a function: `candidates` lists all of a file.

    comparison   < and <=, > and >=, == and !=, is and is not, in and not in
    arithmetic   + and -, * and /, // and *, % and //, ** and *, & and |, << and >>; -x and x
    constant     a number more or less by one; True and False
    swap         two neighbouring positional arguments, but not of min(a, b) and other SYMMETRIC
    negate       the condition of if, while, x if y else z, or of a comprehension
    drop         a call, an assignment of what has a value already, raise, del, continue, break
    axis         another mesh axis; another dim where an argument or `shape[...]` is one
    sorted       sorted(x) and list(x)
    minmax       min and max, also in argmin, amin, minimum, MIN, clamp(min=...)

No rule changes docstrings, strings, annotations, decorators, default values, arguments of
exceptions, what is printed or warned, or assertions: no test should depend on these, or (defaults)
they are executed at import. An operator whose operand is visibly text or a list is no arithmetic.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
MESH_AXES = ("dp", "tp", "pp", "cp", "ep")
DIM_NAMES = {"dim", "dims", "axis", "dim0", "dim1", "start_dim", "end_dim"}
DIM_PLACES = {  # methods of torch -> which of their positional arguments are dims
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin", "cumsum", "softmax"), (0,)),
    **dict.fromkeys(("log_softmax", "logsumexp", "size", "unsqueeze", "squeeze", "select"), (0,)),
    **dict.fromkeys(("narrow", "index_select", "gather", "scatter", "scatter_add"), (0,)),
    **dict.fromkeys(("transpose", "movedim", "flatten"), (0, 1)),
    **dict.fromkeys(("chunk", "split", "tensor_split", "repeat_interleave", "unbind"), (1,)),
    **dict.fromkeys(("cat", "stack", "unflatten"), (1,)),
}
OPPOSITE = {"min": "max", "amin": "amax", "argmin": "argmax", "minimum": "maximum", "MIN": "MAX"}
OPPOSITE |= {high: low for low, high in OPPOSITE.items()}
SYMMETRIC = {*OPPOSITE, "equal", "gcd", "lcm", "hypot", "logaddexp", "promote_types"}
SYMMETRIC -= {"argmin", "argmax"}
REPORTS = {"print", "warn", "say", "note", "report", "debug", "info", "warning", "error"}
"""Functions and methods whose calls only tell a person something."""
TYPE_TESTS = {"isinstance", "issubclass", "cast", "hasattr", "getattr"}
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Candidate:
    """One fault: characters `start` to `end` of the text of `file` become `new`."""

    file: str
    function: str
    """Qualified name; functions inside a function belong to it."""
    rule: str
    line: int
    lines: tuple[int, ...]
    """Lines that are executed where this is: the first of the expression, of the statement."""
    start: int
    end: int
    new: str
    before: str
    """The lines that change, without their white space."""
    after: str

    @property
    def why(self) -> str:
        return f"{self.file}:{self.line} {self.function} [{self.rule}]: {self.before}"

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """What names this fault when lines above it have moved."""
        return self.file, self.function, self.before, self.after


def candidates(file: str, text: str) -> list[Candidate]:
    """Every fault of every function of `text`, in the order of the syntax tree."""
    whole = ast.parse(text)
    found = []
    for name, function in functions(whole):
        found += _Function(file, text, name).visit_body(function)
    return list(dict.fromkeys(found))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, by qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:  # if, try, with
            yield from functions(node, prefix)


def called(node: ast.AST) -> str:
    """The last name of the function of a call, or ''."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _integer(node: ast.AST) -> int | None:
    """The value of a literal integer with its sign."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _integer(node.operand)
        return None if value is None else -value
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None


class _Function:
    """Walks one function, and collects its faults."""

    def __init__(self, file: str, text: str, name: str):
        self.file, self.text, self.name = file, text, name
        self.found: list[Candidate] = []
        self.statement: ast.stmt
        self.bound: set[str] = set()

    @cached_property
    def _starts(self) -> list[int]:
        """The first character of each line."""
        starts = [0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    def _place(self, line: int, column: int) -> int:
        """The character at a line, from 1, and a column in bytes of UTF-8, as ast counts them."""
        first = self._starts[line - 1]
        row = self.text[first : self._starts[line]]
        return first + len(row.encode()[:column].decode())

    def _span(self, node) -> tuple[int, int]:
        start = self._place(node.lineno, node.col_offset)
        return start, self._place(node.end_lineno, node.end_col_offset)

    def _source(self, node) -> str:
        start, end = self._span(node)
        return self.text[start:end]

    def _add(self, rule: str, line: int, span: tuple[int, int], new: str) -> None:
        start, end = span
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", end)
        last = len(self.text) if last < 0 else last
        old_lines = self.text[first:last]
        new_lines = self.text[first:start] + new + self.text[end:last]
        before, after = (" ".join(lines.split()) for lines in (old_lines, new_lines))
        lines = tuple(dict.fromkeys((line, self.statement.lineno)))
        self.found.append(
            Candidate(self.file, self.name, rule, line, lines, start, end, new, before, after)
        )

    def visit_body(self, function) -> list[Candidate]:
        arguments = function.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        self.bound |= {argument.arg for argument in every}
        for number, statement in enumerate(function.body):
            value = getattr(statement, "value", None)
            if number or not (isinstance(value, ast.Constant) and isinstance(value.value, str)):
                self._visit_statement(statement)
        return self.found

    def _visit_statement(self, node: ast.stmt) -> None:
        self.statement = node
        if isinstance(node, FUNCTIONS):
            self.visit_body(node)
            return
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Assert, ast.Raise)):
            if isinstance(node, ast.Raise):
                self._drop(node)
            return
        if isinstance(node, ast.Expr) and called(node.value) in REPORTS:
            return
        self._drop(node)
        if isinstance(node, ast.AugAssign):
            between = self._span(node.target)[1], self._span(node.value)[0]
            self._operator("arithmetic", node, between, ARITHMETIC.get(type(node.op)), "=")
        if isinstance(node, (ast.If, ast.While)):
            self._negate(node.test)
        for name, value in ast.iter_fields(node):
            if name != "annotation":
                self._visit_field(value)

    def _visit_field(self, value) -> None:
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.stmt):
                self._visit_statement(child)
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                for _, inner in ast.iter_fields(child):
                    self._visit_field(inner)
            elif isinstance(child, ast.AST):
                self._visit_expression(child)

    def _visit_expression(self, node, dim: bool = False) -> None:
        """`dim`: whether the value is one, for the rule `axis`."""
        if isinstance(node, (ast.JoinedStr, ast.pattern)) or called(node) in REPORTS:
            return
        number = _integer(node)
        if dim and number is not None:
            # of another dim: 0 and 1, -1 and -2, else the one before
            other = {0: 1, -1: -2}.get(number, number - 1 if number > 0 else number + 1)
            self._add("axis", node.lineno, self._span(node), str(other))
            return
        if dim and isinstance(node, ast.Tuple):
            for child in node.elts:
                self._visit_expression(child, dim=True)
            return
        if isinstance(node, ast.Compare):
            self._compare(node)
        elif isinstance(node, ast.BinOp):
            self._arithmetic(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and number is None:
            self._add("arithmetic", node.lineno, self._span(node), self._source(node.operand))
        elif isinstance(node, ast.Constant):
            self._constant(node)
        elif isinstance(node, ast.IfExp):
            self._negate(node.test)
        elif isinstance(node, ast.comprehension):
            for condition in node.ifs:
                self._negate(condition)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            self._rename(node)
        elif isinstance(node, ast.Call):
            self._call(node)
            return
        elif isinstance(node, ast.Subscript) and getattr(node.value, "attr", "") == "shape":
            self._visit_expression(node.value)
            self._visit_expression(node.slice, dim=True)
            return
        for child in ast.iter_child_nodes(node):
            self._visit_expression(child)

    def _operator(self, rule, node, between: tuple[int, int], change, tail: str = "") -> None:
        """Replace the operator in the text `between` its operands, which may have brackets."""
        if change is None:
            return
        old, new = change
        pattern = (old if "\\" in old else re.escape(old)) + re.escape(tail)
        start, end = between
        found = re.search(pattern, self.text[start:end])
        if found is not None:
            line = self.text.count("\n", 0, start + found.start()) + 1
            span = start + found.start(), start + found.end()
            self._add(rule, line if line >= node.lineno else node.lineno, span, new + tail)

    def _compare(self, node: ast.Compare) -> None:
        left = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            between = self._span(left)[1], self._span(right)[0]
            self._operator("comparison", node, between, COMPARISONS[type(operator)])
            left = right

    def _arithmetic(self, node: ast.BinOp) -> None:
        for operand in (node.left, node.right):
            text = isinstance(operand, ast.Constant) and isinstance(operand.value, (str, bytes))
            if text or isinstance(operand, TEXTS):
                return
        between = self._span(node.left)[1], self._span(node.right)[0]
        self._operator("arithmetic", node, between, ARITHMETIC.get(type(node.op)))

    def _constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("constant", node.lineno, self._span(node), str(not node.value))
        elif isinstance(node.value, (int, float)):
            for new in (node.value + 1, node.value - 1):
                if new != node.value:
                    text = repr(new) if new >= 0 else f"({new!r})"
                    self._add("constant", node.lineno, self._span(node), text)

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            new = self._source(test.operand)
        else:
            new = f"not ({self._source(test)})"
        self._add("negate", test.lineno, self._span(test), new)

    def _rename(self, node: ast.Attribute | ast.Name) -> None:
        name = node.attr if isinstance(node, ast.Attribute) else node.id
        end = self._span(node)[1]
        if name in OPPOSITE:
            self._add("minmax", node.lineno, (end - len(name), end), OPPOSITE[name])
        if isinstance(node, ast.Attribute) and name in MESH_AXES:
            other = MESH_AXES[(MESH_AXES.index(name) + 1) % len(MESH_AXES)]
            self._add("axis", node.lineno, (end - len(name), end), other)

    def _call(self, node: ast.Call) -> None:
        name = called(node)
        if name in TYPE_TESTS:
            for argument in node.args[:1]:
                self._visit_expression(argument)
            return
        if name == "sorted" and isinstance(node.func, ast.Name):
            self._add(
                "sorted", node.lineno, self._span(node), f"list({self._source(node.args[0])})"
            )
        for left, right in zip(node.args, node.args[1:], strict=False):
            sources = self._source(left), self._source(right)
            starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
            # else a tensor and a dim
            both = isinstance(node.func, ast.Name) or _integer(right) is None
            symmetric = name in SYMMETRIC and both
            if sources[0] != sources[1] and not starred and not symmetric:
                (start, first_end), (last_start, end) = self._span(left), self._span(right)
                between = self.text[first_end:last_start]
                self._add("swap", left.lineno, (start, end), sources[1] + between + sources[0])
        self._visit_expression(node.func)
        # a function of torch or of numpy has the tensor first
        module = isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        shift = int(module and node.func.value.id in ("torch", "F", "np"))
        if name in ("cat", "stack"):
            shift = 0
        dims = {place + shift for place in DIM_PLACES.get(name, ())}
        for place, argument in enumerate(node.args):
            self._visit_expression(argument, dim=place in dims)
        bounds = {keyword.arg for keyword in node.keywords} & {"min", "max"}
        for keyword in node.keywords:
            if keyword.arg in bounds and len(bounds) == 1 and name.startswith("clamp"):
                start = self._span(keyword)[0]
                self._add("minmax", keyword.lineno, (start, start + 3), OPPOSITE[str(keyword.arg)])
            self._visit_expression(keyword.value, dim=keyword.arg in DIM_NAMES)

    def _drop(self, node: ast.stmt) -> None:
        """Drop a statement without which the function can still run."""
        targets = []
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node, ast.AnnAssign) and node.value is None:
                return
        names = {
            name.id
            for target in targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        known = names <= self.bound
        self.bound |= names
        if isinstance(node, (ast.For, ast.With)):
            inside = node.target if isinstance(node, ast.For) else node
            self.bound |= {
                name.id
                for name in ast.walk(inside)
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
            }
        simple = (ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)
        call = isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await))
        if call or isinstance(node, simple) or targets and known:
            self._add("drop", node.lineno, self._span(node), "pass")
