"""Counts the operators of a step run without values: FLOPs, bytes and collectives.

What an operator multiplies: its shape as (batch, rows, columns, contraction), and its floating
point operations, two per multiplication and addition.

Sees every operator of a step on tensors without values, and writes it down: rows of a ledger.

Which module an operator belongs to is known in forward by hooks, which put down under the number of
autograd's next node which module is entered or left; backward, at a node, looks its number up.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from dolmen.core.state import is_distributed
from dolmen.core.torch_private import dispatch
from dolmen.planning.ledger import Kind, LedgerRow, Live
from dolmen.planning.memory import Memory

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


def _matrices(a: Tensor, b: Tensor) -> Multiplied:
    """[..., rows, contraction] x [..., contraction, columns]; of groups, of rows or of what is
    contracted over, the sum of their products.
    """
    batch = a.shape[0] if a.ndim == 3 else 1
    shape = batch, a.shape[-2], b.shape[-1], a.shape[-1]
    return Multiplied("product", shape, 2 * math.prod(shape), a.dtype)


def _flash(
    q: Tensor,
    segments: Tensor | None,
    longest: tuple[int, int],
    causal: bool,
    options: dict[str, Any],
) -> Multiplied:
    """One of the products of scores: of q [sequences, queries, heads, size], or of the segments of
    [tokens, heads, size], each as long as the longest.
    """
    heads, size = q.shape[-2:]
    queries, keys = longest
    sequences = q.shape[0] if segments is None else q.shape[0] // queries
    left, right = options["window_size_left"], options["window_size_right"]
    seen = _seen(queries, keys, left, 0 if causal else right)
    shape = sequences * heads, queries, keys, size
    return Multiplied("attention", shape, 2 * sequences * heads * size * seen, q.dtype)


@cache
def _seen(queries: int, keys: int, left: int, right: int) -> int:
    """Pairs of a query and a key that it sees: as many keys left and right of the diagonal, -1 for
    no bound, which ends at the last query and the last key.
    """
    before = keys if left < 0 else left
    behind = keys if right < 0 else right
    diagonal = range(keys - queries, keys)
    return sum(max(0, min(keys - 1, at + behind) - max(0, at - before) + 1) for at in diagonal)


def _flash_forward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Scores, and their sum of values."""
    q, _, _, segments, _, queries, keys, _, causal = args[:9]
    one = _flash(q, segments, (queries, keys), causal, options)
    return one._replace(flops=2 * one.flops)


def _flash_backward(args: Sequence[Any], options: dict[str, Any]) -> Multiplied:
    """Scores once more, and the gradients of scores, queries, keys and values: five products."""
    _, q, _, _, _, _, segments, _, queries, keys, _, causal = args[:12]
    one = _flash(q, segments, (queries, keys), causal, options)
    return one._replace(flops=5 * one.flops)


def _cudnn(q: Tensor, k: Tensor, causal: bool, products: int) -> Multiplied:
    """So many products of the scores of whole tensors, q [sequences, heads, queries, size]."""
    sequences, heads, queries, size = q.shape
    seen = _seen(queries, k.shape[2], -1, 0 if causal else -1)
    flops = products * 2 * sequences * heads * size * seen
    return Multiplied("attention", (sequences * heads, queries, k.shape[2], size), flops, q.dtype)


def _cudnn_forward(args: Sequence[Any], _: dict[str, Any]) -> Multiplied:
    """Scores, and their sum of values. `is_causal` is left out where it is false."""
    return _cudnn(args[0], args[1], len(args) > 6 and args[6], 2)


def _cudnn_backward(args: Sequence[Any], _: dict[str, Any]) -> Multiplied:
    """Count five products, as `_flash_backward`."""
    return _cudnn(args[1], args[2], args[14], 5)


PRODUCTS: dict[str, Callable[[Sequence[Any], dict[str, Any]], Multiplied]] = {
    "aten.mm": lambda args, _: _matrices(*args[:2]),
    "aten.bmm": lambda args, _: _matrices(*args[:2]),
    "aten.addmm": lambda args, _: _matrices(*args[1:3]),
    "aten.addmm_": lambda args, _: _matrices(*args[1:3]),
    "aten.baddbmm": lambda args, _: _matrices(*args[1:3]),
    "aten.baddbmm_": lambda args, _: _matrices(*args[1:3]),
    "aten._grouped_mm": lambda args, _: _matrices(*args[:2]),
    "aten._scaled_mm_v2": lambda args, _: _matrices(*args[:2]),
    "aten._flash_attention_forward": _flash_forward,
    "aten._flash_attention_backward": _flash_backward,
    "aten._scaled_dot_product_cudnn_attention": _cudnn_forward,
    "aten._scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
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
    """The module in which operators run, followed by hooks."""

    def __init__(self, model: nn.Module):
        self.names = {id(module): name for name, module in model.named_modules()}
        self.within: list[str | None] = [None]
        self.numbers: list[int] = [0]
        self.entered: list[str | None] = [None]

    @property
    def here(self) -> str | None:
        """The module that computes now, "" of the model itself; None outside of it."""
        number = dispatch.backward_sequence_number()
        if number is None or len(self.within) > 1:  # a module that is computed again
            return self.within[-1]
        return self.entered[bisect_right(self.numbers, number) - 1]

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Within, modules say when they are entered and left."""
        entering = hooks.register_module_forward_pre_hook(self._enter)
        leaving = hooks.register_module_forward_hook(self._leave, always_call=True)
        try:
            yield
        finally:
            entering.remove()
            leaving.remove()

    def _enter(self, module: nn.Module, args: object) -> None:
        self.within.append(self.names.get(id(module), self.within[-1]))
        self._note()

    def _leave(self, module: nn.Module, args: object, result: object) -> None:
        self.within.pop()
        self._note()

    def _note(self) -> None:
        number = dispatch.next_sequence_number()
        if self.numbers[-1] == number:
            self.entered[-1] = self.within[-1]
            return
        self.numbers.append(number)
        self.entered.append(self.within[-1])


class Counting(dispatch.Dispatch):
    """Rows of what is computed and sent in `step`; what is held, from the first."""

    def __init__(self, axes: Mapping[str, Sequence[str]], instant: bool):
        """`axes`: of each group by its name, those of the mesh that are it. `instant`: what is sent
        has gone at once, as over NCCL the host finds it soon; over gloo it is waited for.
        """
        super().__init__()
        self.axes, self.instant = axes, instant
        self.memory = Memory()
        self.places: Places | None = None
        self.rows: list[LedgerRow] = []
        self.highs: list[Live] = []
        """Of each row, what was held when it was the most while it ran."""
        self.since: list[dict[str, Any]] = []
        """Rows of the action that is under way."""
        self.sent: dict[int, Tensor] = {}
        """What has just been sent, by the storage that the result will come in."""
        self.going: dict[int, Tensor] = {}
        """What is under way, by the same."""

    @contextmanager
    def seeing(self) -> Iterator[None]:
        """Within, what is held is counted."""
        with dispatch.observe_resizes(self.memory.resize), self:
            yield

    @contextmanager
    def step(self, model: nn.Module) -> Iterator[None]:
        """Within is the step of `model` that rows are of."""
        self.places = Places(model)
        self.memory.begin()
        with self.places.follow(), self.memory.makes("activation"):
            yield

    def end_action(self, action: str, times: int = 1) -> None:
        """The rows since the last call are of this action, which the step does so often."""
        end = self.memory.since_last()
        if self.since and end.total > self.highs[-1].total:
            self.highs[-1], self.since[-1]["peak"] = end, end.total
        self.rows += [LedgerRow(action=action, times=times, **row) for row in self.since]
        self.since = []

    def read(self, tensor: Tensor) -> None:
        """The host has read a tensor."""
        if self.places is not None:
            self._row("host", "read", read=tensor.nbytes)

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # what stands for a part of a tensor, or for one to come, calls the operators itself
        if any(is_distributed(one) or issubclass(one, dispatch.Arriving) for one in types):
            return NotImplemented
        options, name = kwargs or {}, str(operator.overloadpacket)
        out = operator(*args, **options)
        if name in HOLD:
            self.sent[id(out.untyped_storage())] = args[0]
        elif name == WAIT:
            out = self._wait(args[0])
        self.memory.making, making = self._kind, self.memory.making
        made = [t for t in _tensors(out) if not isinstance(t, dispatch.Arriving)]
        if not operator.is_view:  # of what was not made here, such as the batch, too
            for tensor in made:
                self.memory.add(tensor)
        self.memory.making = making
        for kind, tensor in known_kinds(name, args, options, made, self.memory.kind_of):
            self.memory.is_now(kind, tensor)
        if self.places is not None and not operator.is_view:
            self._seen(operator, name, args, options, made)
        return dispatch.completed_work() if self.instant and name == "c10d.send" else out

    def _wait(self, tensor: Tensor) -> Tensor:
        """Return `tensor` itself for a wait on it. (torch makes another where it has no values.)
        What is sent is not let go before the result has been waited for. Without values torch does
        so at once, too, as if it compiled: the second time is ours.
        """
        key = id(tensor.untyped_storage())
        if key in self.sent:
            self.going[key] = self.sent.pop(key)
        else:
            self.going.pop(key, None)
        return tensor

    @property
    def _kind(self) -> Kind:
        """Kind of a tensor that is made now: in a step outside of all modules, a buffer."""
        if self.places is None or self.places.here is not None:
            return self.memory.making
        return "buffer"

    def _seen(
        self,
        operator: Any,
        name: str,
        args: Sequence[Any],
        options: dict[str, Any],
        made: list[Tensor],
    ) -> None:
        """One more row, of what computes or sends."""
        sends = COLLECTIVES.get(name)
        given = [*_tensors(args), *_tensors(options)]
        if sends is not None:
            payload = max(t.nbytes for t in (*given, *made))
            kind = "send" if sends in ("send", "receive") else "collective"
            axis = self._axis(sends, name, args)
            if axis is not None:
                self._row(kind, sends, axis=axis, payload=payload)
            return
        if name in EMPTY or name.startswith(SILENT):
            return
        product = PRODUCTS.get(name)
        moved = {
            "read": sum(t.nbytes for t in given),
            "written": sum(t.nbytes for t in made if not operator.is_view),
        }
        if product is None:
            self._row("memory", name.removeprefix("aten."), **moved)
            return
        found = product(args, options)
        op = name.removeprefix("aten.")
        factors = SHORT[found.dtype]
        self._row(found.kind, op, flops=found.flops, shape=found.shape, dtype=factors, **moved)

    def _axis(self, sends: str, name: str, args: Sequence[Any]) -> str | None:
        """The axis of a collective. Groups of the same ranks are one: it is the one that such an
        operator is for. None in a group of this rank alone, which FSDP asks at ZeRO 0 too.
        """
        names = self._names(args)
        if names is None:
            return None
        if name.startswith("c10d.") and sends not in ("send", "receive"):
            order = OF_PARAMETERS
        else:
            order = OF_EXPERTS if sends == "all-to-all" else OF_ACTIVATIONS
        return next(axis for axis in order if axis in names)

    def _names(self, args: Sequence[Any]) -> Sequence[str] | None:
        """The axes of the group that an operator is given, which comes before what it adds by."""
        for argument in args:
            if isinstance(argument, torch.ScriptObject):
                return self.axes.get(dist.ProcessGroup.unbox(argument).group_name)
            if isinstance(argument, str) and argument in self.axes:
                return self.axes[argument]
        return None

    def _row(self, kind: str, op: str, **more: Any) -> None:
        assert self.places is not None
        self.highs.append(self.memory.since_last())
        self.since.append(
            dict(
                module=self.places.here or "",
                kind=kind,
                op=op,
                live=self.memory.live,
                peak=self.highs[-1].total,
                **more,
            )
        )


OF_PARAMETERS = ("dp", "fsdp", "edp", "cp", "ep", "world")
"""Axes after which a group that is several is called, in this order: FSDP's first."""
OF_EXPERTS = ("ep", "tp", "cp", "dp", "fsdp", "edp", "world")
OF_ACTIVATIONS = ("tp", "pp", "cp", "dp", "ends", "ep", "fsdp", "edp", "world")


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors among the inputs or results of an operator."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


def known_kinds(
    name: str,
    args: Sequence[Any],
    options: dict[str, Any],
    made: list[Tensor],
    kind_of: Callable[[Tensor], Kind | None],
) -> Iterator[tuple[Kind, Tensor]]:
    """Yield the tensors of an operator whose kind follows from it."""
    match name:
        case "fsdp.all_gather_copy_in":
            yield "buffer", args[1]
        case "fsdp.split_with_sizes_copy":
            for tensor in options["out"]:
                yield "compute", tensor
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
        case "aten._to_copy":
            match kind_of(args[0]):
                case "unsharded":
                    yield "unsharded", made[0]
                case "parameter":
                    yield "compute", made[0]
