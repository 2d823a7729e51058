"""Counts the operators of a step that runs on tensors without values: FLOPs, bytes, collectives.

    Counting   a dispatch mode: it sees every operator, and writes a row of the ledger for it
    PRODUCTS   functions that count the FLOPs of matrix products and attention, two per
               multiplication and addition, from shapes (batch, rows, columns, contraction)
    Places     the module in which an operator runs

Problem: a ledger names the module of each operator, and in backward no module is entered.

Idea: autograd numbers its nodes in the order of forward. In forward, hooks record with the number
of the next node which module is entered or left. In backward, the module of an operator is the one
that was recorded last before the number of the node that runs.
"""

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from dolmen.core.state import is_distributed
from dolmen.core.torch_private import dispatch
from dolmen.planning.ledger import Kind, LedgerRow, Live

Shape = tuple[int, int, int, int]


class Multiplied(NamedTuple):
    """Products or attention of one operator: shape, FLOPs, dtype."""

    kind: str
    """product, or attention."""
    shape: Shape
    """(batch, rows, columns, contraction); for attention (sequences x heads, queries, keys, size of
    a head).
    """
    flops: int
    dtype: torch.dtype
    """Dtype of the factors."""


def _count_product(a: Tensor, b: Tensor) -> Multiplied:
    """Return shape, FLOPs and dtype of a matrix product [..., rows, contraction] x [...,
    contraction, columns]. A grouped product counts the sum of its groups, however rows or
    contraction are divided among them.
    """
    # grouped: a 2D `a` has the rows, or the contraction, of all groups together
    batch = a.shape[0] if a.ndim == 3 else 1
    shape = batch, a.shape[-2], b.shape[-1], a.shape[-1]
    return Multiplied("product", shape, 2 * math.prod(shape), a.dtype)


def _count_flash(
    q: Tensor,
    segments: Tensor | None,
    longest: tuple[int, int],
    causal: bool,
    options: dict[str, Any],
) -> Multiplied:
    """Return shape, FLOPs and dtype of one product of attention scores, for flash attention. `q`:
    [sequences, queries, heads, size], or with `segments` (cumulative lengths) [tokens, heads,
    size], each segment taken as long as the `longest` (queries, keys). Windows and causality reduce
    the FLOPs.
    """
    heads, size = q.shape[-2:]
    queries, keys = longest
    # packed: tokens over the longest segment
    sequences = q.shape[0] if segments is None else q.shape[0] // queries
    left, right = options["window_size_left"], options["window_size_right"]
    seen = _attended_pairs(queries, keys, left, 0 if causal else right)
    shape = sequences * heads, queries, keys, size
    return Multiplied("attention", shape, 2 * sequences * heads * size * seen, q.dtype)


@cache
def _attended_pairs(queries: int, keys: int, left: int, right: int) -> int:
    """Return how many (query, key) pairs of a sequence attend: keys up to `left` before and `right`
    after the diagonal (-1: unbounded), which ends at the last query and the last key.
    """
    before = keys if left < 0 else left
    behind = keys if right < 0 else right
    # the last query sees the last key
    diagonal = range(keys - queries, keys)
    return sum(max(0, min(keys - 1, at + behind) - max(0, at - before) + 1) for at in diagonal)


def _count_flash_forward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Return shape, FLOPs and dtype of flash attention's forward from the operator's arguments: two
    products, scores and their weighted sum of values.
    """
    q, _, _, segments, _, queries, keys, _, causal = args[:9]
    scores = _count_flash(q, segments, (queries, keys), causal, options)
    return scores._replace(flops=2 * scores.flops)


def _count_flash_backward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Return shape, FLOPs and dtype of flash attention's backward from the operator's arguments: as
    `_count_flash` has them of its forward, causal masks and segments included, with five times the
    FLOPs of the scores' product: scores once more, and the gradients of scores, queries, keys and
    values.
    """
    _, q, _, _, _, _, segments, _, queries, keys, _, causal = args[:12]
    scores = _count_flash(q, segments, (queries, keys), causal, options)
    return scores._replace(flops=5 * scores.flops)


def _count_cudnn(q: Tensor, k: Tensor, causal: bool, products: int) -> Multiplied:
    """Return shape, FLOPs and dtype of `products` products of attention scores in cuDNN's
    attention, without segments or windows: q is [sequences, heads, queries, size].
    """
    sequences, heads, queries, size = q.shape
    # no window
    seen = _attended_pairs(queries, k.shape[2], -1, 0 if causal else -1)
    flops = products * 2 * sequences * heads * size * seen
    return Multiplied("attention", (sequences * heads, queries, k.shape[2], size), flops, q.dtype)


def _count_cudnn_forward(args: Sequence[Any], _: dict[str, Any]) -> Multiplied:
    """Return shape, FLOPs and dtype of cuDNN attention's forward (two products) from the operator's
    arguments, which lack `is_causal` where it is false.
    """
    return _count_cudnn(args[0], args[1], len(args) > 6 and args[6], 2)


def _count_cudnn_backward(args: Sequence[Any], _: dict[str, Any]) -> Multiplied:
    """Return shape, FLOPs and dtype of cuDNN attention's backward (five products) from the
    operator's arguments.
    """
    return _count_cudnn(args[1], args[2], args[14], 5)


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any]], Multiplied]] = {
    "aten.mm": lambda args, _: _count_product(*args[:2]),
    "aten.bmm": lambda args, _: _count_product(*args[:2]),
    "aten.addmm": lambda args, _: _count_product(*args[1:3]),
    "aten.addmm_": lambda args, _: _count_product(*args[1:3]),
    "aten.baddbmm": lambda args, _: _count_product(*args[1:3]),
    "aten.baddbmm_": lambda args, _: _count_product(*args[1:3]),
    "aten._grouped_mm": lambda args, _: _count_product(*args[:2]),
    "aten._scaled_mm_v2": lambda args, _: _count_product(*args[:2]),
    "aten._flash_attention_forward": _count_flash_forward,
    "aten._flash_attention_backward": _count_flash_backward,
    "aten._scaled_dot_product_cudnn_attention": _count_cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward": _count_cudnn_backward,
}
"""Functions that count an operator, by its name without overload."""


COLLECTIVES = {
    "_c10d_functional.all_reduce": "all-reduce",
    "_c10d_functional.all_reduce_": "all-reduce",
    "_c10d_functional.all_gather_into_tensor": "all-gather",
    "_c10d_functional.reduce_scatter_tensor": "reduce-scatter",
    "_c10d_functional.all_to_all_single": "all-to-all",
    "c10d.allreduce_": "all-reduce",
    "c10d._allgather_base_": "all-gather",
    "c10d._reduce_scatter_base_": "reduce-scatter",
    "c10d.send": "send",
    "c10d.recv_": "receive",
}
"""Operators that send -> what they are."""
WAIT = "_c10d_functional.wait_tensor"
HOLD = frozenset(
    f"_c10d_functional.{name}"
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
)
"""Collectives that send their input itself, and no copy of it."""
SILENT = ("c10d.", "_c10d_functional.", "prim.", "profiler.")
"""Prefixes of the names of other operators that compute nothing."""
SHORT = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
EMPTY = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided"})
"""Operators that allocate and touch nothing."""


class Places:
    """Tells the module in which an operator runs, in forward by hooks, in backward by autograd's
    node numbers.
    """

    def __init__(self, model: nn.Module):
        """Map the modules of `model` to their names; nothing is entered yet."""
        self.names = {id(module): name for name, module in model.named_modules()}
        self.within: list[str | None] = [None]
        self.numbers: list[int] = [0]
        self.entered: list[str | None] = [None]

    @property
    def here(self) -> str | None:
        """Name of the module that computes now, in forward or backward; "" for the model itself,
        None outside of it.
        """
        # None outside of backward
        number = dispatch.backward_sequence_number()
        if number is None or len(self.within) > 1:  # a module that is computed again
            return self.within[-1]
        # the last change of module before this node was made
        return self.entered[bisect_right(self.numbers, number) - 1]

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Context manager with global forward hooks that record when modules are entered
        and left.
        """
        # global hooks: they also run for modules that are computed again
        entering = hooks.register_module_forward_pre_hook(self._enter_module)
        leaving = hooks.register_module_forward_hook(self._leave_module, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _enter_module(self, module: nn.Module, args: object) -> None:
        """Push the module's name (that of its parent for a module outside the model): a forward
        pre-hook.
        """
        self.within.append(self.names.get(id(module), self.within[-1]))
        self._record_module()

    def _leave_module(self, module: nn.Module, args: object, result: object) -> None:
        """Pop the module that ends: a forward hook."""
        self.within.pop()
        self._record_module()

    def _record_module(self) -> None:
        """Record that autograd nodes from the next number on belong to the current module."""
        number = dispatch.next_sequence_number()
        # no node was made since: only the latest module counts
        if self.numbers[-1] == number:
            self.entered[-1] = self.within[-1]
            return
        self.numbers.append(number)
        self.entered.append(self.within[-1])


# Bytes of tensors that are alive, by kind: a storage counts from the operator that creates it
# until its last tensor is freed.
#
# A new storage has the kind `making`, until a later operator shows what it is (`set_kind`): a
# gradient is a temporary of its module (activation) until it has been added to its parameter's.


@dataclass(slots=True)
class _Held:
    """A storage that is alive, with the size and kind under which it is counted."""

    bytes: int
    kind: Kind
    reference: weakref.ref[torch.UntypedStorage]


class Memory:
    """Bytes of live storages by kind, with their maximum. Storages are known by the identity of
    their Python object, which lives as long as they do.
    """

    def __init__(self) -> None:
        """Start with no storages."""
        self.held: dict[int, _Held] = {}
        self.bytes: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
        self.total = self.most = 0
        self.at_most = Live()
        """By kind, when there were `most`."""
        self.lately = 0
        """The most since `since_last`."""
        self.making: Kind = "parameter"

    @property
    def live(self) -> Live:
        """Bytes held now, by kind."""
        return Live(*self.bytes.values())

    @contextmanager
    def makes(self, kind: Kind) -> Iterator[None]:
        """Context manager in which new storages are counted as `kind`."""
        before, self.making = self.making, kind
        try:
            yield
        finally:
            self.making = before

    def begin(self) -> None:
        """Restart the peak (`most`, `at_most`, `lately`) from what is held now."""
        self.most = self.total
        self.at_most, self.lately = self.live, self.total

    def since_last(self) -> int:
        """Return the most bytes held since the last call (or `begin`), and start anew."""
        # the next interval begins with what is held now
        most, self.lately = self.lately, self.total
        return most

    def add(self, tensor: Tensor) -> None:
        """Count the storage of an operator's result from now until it is freed, if it is new; else
        update its size.
        """
        storage = tensor.untyped_storage()
        key = id(storage)
        # a view, or an in-place operator
        if key in self.held:
            self.resize(storage)
            return
        # called when the last tensor of the storage dies
        reference = weakref.ref(storage, lambda _: self._remove(key))
        self.held[key] = _Held(storage.nbytes(), self.making, reference)
        self._add_bytes(self.making, storage.nbytes())

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Update the counted size of a storage, which FSDP frees and allocates in place; unknown
        ones are ignored.
        """
        entry = self.held.get(id(storage))
        if entry is not None and entry.bytes != storage.nbytes():
            self._add_bytes(entry.kind, storage.nbytes() - entry.bytes)
            entry.bytes = storage.nbytes()

    def set_kind(self, kind: Kind, tensor: Tensor) -> None:
        """Change the kind under which the storage of `tensor` is counted; unknown ones are
        ignored.
        """
        entry = self.held.get(id(tensor.untyped_storage()))
        if entry is not None and entry.kind != kind:
            # the sum does not change, so neither does the peak
            self.bytes[entry.kind] -= entry.bytes
            self.bytes[kind] += entry.bytes
            entry.kind = kind

    def kind_of(self, tensor: Tensor) -> Kind | None:
        """Return the kind of a tensor's storage; None if it was not counted."""
        entry = self.held.get(id(tensor.untyped_storage()))
        return None if entry is None else entry.kind

    def _remove(self, key: int) -> None:
        """Subtract a storage that has been freed, by its key in `held`."""
        entry = self.held.pop(key)
        self._add_bytes(entry.kind, -entry.bytes)

    def _add_bytes(self, kind: Kind, size: int) -> None:
        """Add bytes (negative: subtract) to a kind, and update `lately` and `most`."""
        self.bytes[kind] += size
        self.total += size
        self.lately = max(self.lately, self.total)
        if self.total > self.most:
            self.most, self.at_most = self.total, self.live


class Counting(dispatch.Dispatch):
    """Dispatch mode that records every operator of a step as a ledger row, and the memory held from
    the start.
    """

    def __init__(self, axes: Mapping[str, Sequence[str]], instant: bool):
        """Start with nothing counted. `axes`: for each process group's name, the mesh axes that it
        serves. `instant`: a send is complete at once (NCCL, where the host does not wait); over
        gloo it is waited for.
        """
        super().__init__()
        self.axes, self.instant = axes, instant
        self.memory = Memory()
        self.places: Places | None = None
        self.rows: list[LedgerRow] = []
        self.since: list[dict[str, Any]] = []
        """Rows of the action that is under way."""
        self.sent: dict[int, Tensor] = {}
        """What has just been sent, by the storage that the result will come in."""
        self.going: dict[int, Tensor] = {}
        """What is under way, by the same."""

    @contextmanager
    def count_memory(self) -> Iterator[None]:
        """Context manager in which all memory that is allocated and freed is counted, by this
        dispatch mode.
        """
        with dispatch.observe_resizes(self.memory.resize), self:
            yield

    @contextmanager
    def step(self, model: nn.Module) -> Iterator[None]:
        """Context manager in which the operators of a step of `model` are recorded as ledger rows;
        the memory peak starts here.
        """
        self.places = Places(model)
        self.memory.begin()
        with self.places.follow(), self.memory.makes("activation"):
            yield

    def end_action(self, action: str, times: int = 1) -> None:
        """Assign the rows recorded since the last call to a schedule action (such as "F0"), which
        the whole step does `times` times, and add them to `rows`.
        """
        end = self.memory.since_last()
        # memory may rise after the last operator, as hooks allocate
        if self.since:
            self.since[-1]["peak"] = max(end, self.since[-1]["peak"])
        self.rows += [LedgerRow(action=action, times=times, **row) for row in self.since]
        self.since = []

    def read(self, tensor: Tensor) -> None:
        """Add a ledger row for a read of a tensor by the host, which waits for the device; nothing
        before the first `step`.
        """
        if self.places is not None:
            self._add_row("host", "read", read=tensor.nbytes)

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operator on tensors without values and return its result; update the memory and
        add its ledger row.
        """
        # what stands for a part of a tensor, or for one to come, calls the operators itself
        if any(is_distributed(type_) or issubclass(type_, dispatch.Arriving) for type_ in types):
            return NotImplemented
        options, name = kwargs or {}, str(operator.overloadpacket)
        out = operator(*args, **options)
        if name in HOLD:
            self.sent[id(out.untyped_storage())] = args[0]
        elif name == WAIT:
            out = self._wait(args[0])
        # only for this operator's results
        self.memory.making, making = self._kind, self.memory.making
        outputs = [t for t in _tensors(out) if not isinstance(t, dispatch.Arriving)]
        if not operator.is_view:  # of what was not made here, such as the batch, too
            for tensor in outputs:
                self.memory.add(tensor)
        self.memory.making = making
        for kind, tensor in known_kinds(name, args, options, outputs, self.memory.kind_of):
            self.memory.set_kind(kind, tensor)
        if self.places is not None and not operator.is_view:
            self._add_operator_row(operator, name, args, options, outputs)
        return dispatch.completed_work() if self.instant and name == "c10d.send" else out

    def _wait(self, tensor: Tensor) -> Tensor:
        """Return the tensor of a collective that is waited for. Its input is held until the second
        wait: without values torch waits once by itself at the start, as if it compiled.
        """
        key = id(tensor.untyped_storage())
        if key in self.sent:
            self.going[key] = self.sent.pop(key)
        else:
            self.going.pop(key, None)
        return tensor

    @property
    def _kind(self) -> Kind:
        """Memory kind of a tensor that is made now: a buffer in a step outside of all modules, else
        the current kind.
        """
        if self.places is None or self.places.here is not None:
            return self.memory.making
        return "buffer"

    def _add_operator_row(
        self,
        operator: Any,
        name: str,
        args: Sequence[Any],
        options: dict[str, Any],
        outputs: list[Tensor],
    ) -> None:
        """Add the ledger row of an operator: collective or send with its axis and bytes; a product
        or attention with FLOPs; anything else by the bytes it reads and writes. Operators that
        compute nothing add none.
        """
        sends = COLLECTIVES.get(name)
        inputs = [*_tensors(args), *_tensors(options)]
        if sends is not None:
            # the larger of input and output: the gathered, or the unscattered one
            payload = max(t.nbytes for t in (*inputs, *outputs))
            kind = "send" if sends in ("send", "receive") else "collective"
            axis = self._collective_axis(sends, name, args)
            if axis is not None:
                self._add_row(kind, sends, axis=axis, payload=payload)
            return
        if name in EMPTY or name.startswith(SILENT):
            return
        product = PRODUCTS.get(name)
        moved = {
            "read": sum(t.nbytes for t in inputs),
            "written": sum(t.nbytes for t in outputs if not operator.is_view),
        }
        if product is None:
            self._add_row("memory", name.removeprefix("aten."), **moved)
            return
        # FLOPs by formula, from shapes only
        counted = product(args, options)
        op = name.removeprefix("aten.")
        factors = SHORT[counted.dtype]
        self._add_row(
            counted.kind, op, flops=counted.flops, shape=counted.shape, dtype=factors, **moved
        )

    def _collective_axis(self, sends: str, name: str, args: Sequence[Any]) -> str | None:
        """Return the mesh axis of a collective, by the process group in its `args`; None for a
        group of this rank alone, over which FSDP also runs at ZeRO 0. Axes with the same ranks
        share a group: which of them is named depends on the kind of transfer, `sends`
        ("all-to-all", "send", ...), and the operator's `name`.
        """
        names = self._group_axes(args)
        if names is None:
            return None
        if name.startswith("c10d.") and sends not in ("send", "receive"):
            order = OF_PARAMETERS
        else:
            # only experts exchange tokens all to all
            order = OF_EXPERTS if sends == "all-to-all" else OF_ACTIVATIONS
        # the lists below hold every axis, so one is found
        return next(axis for axis in order if axis in names)

    def _group_axes(self, args: Sequence[Any]) -> Sequence[str] | None:
        """Return the mesh axes of the process group among an operator's arguments; None if the
        group has no axis.
        """
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                return self.axes.get(dist.ProcessGroup.unbox(argument).group_name)
            if isinstance(argument, str) and argument in self.axes:
                return self.axes[argument]
        return None

    def _add_row(self, kind: str, op: str, **more: Any) -> None:
        """Add a ledger row for an operation in the current module, with the memory now and the peak
        since the last row.
        """
        assert self.places is not None
        self.since.append(
            dict(
                module=self.places.here or "",
                kind=kind,
                op=op,
                live=self.memory.live,
                peak=self.memory.since_last(),
                **more,
            )
        )


OF_PARAMETERS = ("dp", "fsdp", "edp", "cp", "ep", "world")
"""Axes after which a group that is several is called, in this order: FSDP's first."""
OF_EXPERTS = ("ep", "tp", "cp", "dp", "fsdp", "edp", "world")
OF_ACTIVATIONS = ("tp", "pp", "cp", "dp", "ends", "ep", "fsdp", "edp", "world")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operator, also inside lists, tuples and
    dicts.
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def known_kinds(
    name: str,
    args: Sequence[Any],
    options: dict[str, Any],
    outputs: list[Tensor],
    kind_of: Callable[[Tensor], Kind | None],
) -> Iterator[tuple[Kind, Tensor]]:
    """Yield (memory kind, tensor) for the tensors of an operator whose kind follows from the
    operator, such as those that FSDP gathers into.
    """
    match name:
        # FSDP packs shards here before it gathers them
        case "fsdp.all_gather_copy_in":
            yield "buffer", args[1]
        case "fsdp.split_with_sizes_copy":
            for tensor in options["out"]:
                yield "compute", tensor
        # FSDP packs gradients here before it reduces them
        case "fsdp.chunk_cat":
            yield "buffer", options["out"]
        case "c10d._reduce_scatter_base_":
            yield "gradient", args[0]
            yield "buffer", args[1]
        case "c10d.allreduce_":
            for tensor in args[0]:
                yield "gradient", tensor
        case "c10d.recv_":
            for tensor in args[0]:
                yield "activation", tensor
        # a cast of a parameter is the copy that computes
        case "aten._to_copy":
            match kind_of(args[0]):
                case "unsharded":
                    yield "unsharded", outputs[0]
                case "parameter":
                    yield "compute", outputs[0]
