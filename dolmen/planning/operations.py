"""The ledger rows that a dry run would count, in closed form, for single operations (`Maker`).

A `Program` describes how an implementation computes (fused kernels, attention, buffers): dolmen's,
or those of published runs (benchmarks/planning). A `RankShare` describes what a rank has of a
microbatch. blocks.py puts a step together from these rows, fast enough for a hundred thousand
layouts.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.planning.ledger import LedgerRow


@dataclass(frozen=True)
class Program:
    """How an implementation computes a model: its habits."""

    attention: Literal["scores", "flash", "tuned"] = "flash"
    """Scores in memory, or in a kernel that never writes them: FlashAttention 2, or one that is
    written for the device."""
    fused: Literal["no", "pairs", "compiled"] = "pairs"
    """Memory-bound operations that are one kernel: none; those that Megatron wrote by hand (bias
    and activation, mask and softmax, bias, dropout and addition); any that follow one another.
    """
    dropout: bool = False
    gradient: int = 4
    """Bytes of a gradient that microbatches add to."""
    accumulates: bool = True
    """The product of a weight gradient adds to it, without a pass of its own."""
    random_state: int = 0
    """Bytes of its random state that a block copies to the host or back, in forward and as it is
    computed again."""
    fp8: bool = False
    """Products of blocks are in fp8, and their inputs cast first."""
    element: int = 2
    """Bytes of an element that is multiplied."""
    converts: bool = False
    """A gradient is put in the dtype of the sum by a pass of its own first."""
    grouped: bool = True
    """Products of all experts of a rank are one kernel, and not one each."""
    joined: bool = True
    """Queries, keys and values are one product, and so are a gate and what it multiplies."""
    ring: int = 1
    """Gradients of keys and values that a ring sends, against themselves: in half precision, or in
    fp32 (2)."""
    buffers: bool = True
    """Gradients lie in buffers that are zeroed and scaled, and weights in half precision beside the
    update's (Megatron's mixed precision)."""
    late_loss: bool = True
    """Gradients of logits are formed in backward, not with the loss."""


OURS = Program(
    "flash", "compiled", accumulates=False, joined=False, ring=2, buffers=False, late_loss=False
)
"""How dolmen computes a step."""


@dataclass(frozen=True)
class RankShare:
    """The part of a microbatch that a rank has."""

    sequences: int
    """Sequences of the microbatch."""
    length: int
    """Tokens of a sequence, on all ranks of cp together."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    ep: int = 1
    load: float = 1.0
    """Rows that the experts of a rank get, over those of a router that sends equally many to all;
    what a capacity leaves room for."""
    copies: float | None = None
    """Copies that are sent of a token that goes to experts: one for each of them, or fewer where
    those of a node share one (DeepEP).
    """
    folded: bool = False
    """Experts are whole on the ranks of tp, which are among those of ep, each with the tokens of
    its own residual stream (Megatron-Core, 2504.14960)."""

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch on this rank: its share over cp."""
        return self.sequences * -(-self.length // self.cp)

    @property
    def stream(self) -> int:
        """Tokens of the residual stream on this rank: with sequence parallelism a tp-th of
        `tokens`.
        """
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    @property
    def routed(self) -> int:
        """Tokens that this rank sends to experts; as many come back."""
        return self.stream if self.folded else self.tokens

    def part(self, width: int) -> int:
        """Return this rank's share of `width` heads or columns: divided by tp and rounded up."""
        return -(-width // self.tp)


Rows = list[LedgerRow]
Both = tuple[Rows, Rows]
"""Rows of forward and of backward."""
WEIGHTS = "weights"
"""Mark in the operator name of a row that makes gradients of weights."""


@dataclass(frozen=True)
class Operations:
    """Ledger rows of forward and of a whole backward for one microbatch."""

    forward: tuple[LedgerRow, ...]
    backward: tuple[LedgerRow, ...]

    @staticmethod
    def join(steps: Iterable[Both]) -> "Operations":
        """Return consecutive steps, each a pair of ledger rows (forward, backward), as one;
        backward goes through the steps in reverse.
        """
        steps = list(steps)
        forward = [row for step in steps for row in step[0]]
        # last step first
        return Operations(tuple(forward), tuple(r for s in reversed(steps) for r in s[1]))

    @property
    def inputs(self) -> tuple[LedgerRow, ...]:
        """Rows of backward for which the stage before waits: all but those that make gradients of
        weights.
        """
        return tuple(row for row in self.backward if WEIGHTS not in row.op)

    @property
    def weights(self) -> tuple[LedgerRow, ...]:
        """Rows of backward that make gradients of weights."""
        return tuple(row for row in self.backward if WEIGHTS in row.op)

    def add_recomputation(self, recompute: str) -> "Operations":
        """Return the operations with the forward rows that are recomputed added to backward:
        "full", all; "selective", the inner part of attention; "op", as torchtitan's, all but
        attention and every other product; "none", nothing. Collectives are repeated with "full"
        only.
        """
        again = list(self.forward)
        if recompute == "selective":
            again = [row for row in again if row.module in ("attn.scores", "attn.flash")]
        elif recompute == "op":
            products = [row for row in again if row.kind == "product"]
            # torchtitan's policy saves every second product
            input_products = {id(row) for row in products[::2]}
            again = [
                r for r in again if r.kind in ("product", "memory") and id(r) not in input_products
            ]
        elif recompute == "none":
            again = []
        return replace(self, backward=(*(replace(r, action="B") for r in again), *self.backward))


def memory(action: str, module: str, op: str, read: float, written: float) -> LedgerRow:
    """Return a ledger row whose time is bound by the bytes it reads and writes."""
    return LedgerRow(action, module, "memory", op, read=round(read), written=round(written))


def collective(
    action: str, module: str, op: str, payload: int, overlapped: bool = False, axis: str = "tp"
) -> LedgerRow:
    """Return the ledger row of a collective over the ranks of a mesh axis. `overlapped`: it hides
    behind the products that follow.
    """
    return LedgerRow(
        action, module, "collective", op, axis=axis, payload=payload, overlapped=overlapped
    )


@dataclass(frozen=True)
class Maker:
    """Builds the rows of single operations as `program` does them on a rank's share. `hidden`:
    hidden size.
    """

    hidden: int
    share: RankShare
    program: Program

    @property
    def x(self) -> int:
        """Bytes of a microbatch's residual stream on this rank (with sequence parallelism, its
        tokens only).
        """
        return self.program.element * self.share.stream * self.hidden

    @property
    def whole(self) -> int:
        """Bytes of a microbatch's residual stream on all ranks of tp together."""
        return self.program.element * self.share.tokens * self.hidden

    def product(self, action: str, module: str, shape: tuple[int, int, int, int]) -> LedgerRow:
        """Return the ledger row of a product [batch, rows, contraction] x [batch, contraction,
        columns]; `shape` is (batch, rows, columns, contraction).
        """
        batch, rows, columns, contraction = shape
        dtype = "fp8" if self.program.fp8 else ""
        e = self.program.element
        return LedgerRow(
            action,
            module,
            "product",
            "mm",
            # a multiplication and an addition each
            flops=2 * batch * rows * columns * contraction,
            read=(1 if dtype else e) * batch * contraction * (rows + columns),
            written=e * batch * rows * columns,
            shape=shape,
            dtype=dtype,
        )

    def linear(self, module: str, out: int, inp: int, rows: int, batch: int = 1) -> Both:
        """Return the ledger rows (forward, backward) of a linear layer [out, inp] on `rows` tokens:
        the product, then those of the gradients of input and weight. `batch`: number of experts,
        each with a matrix and `rows` tokens of its own.
        """
        # one small product per expert
        if batch > 1 and not self.program.grouped:
            forward, backward = self.linear(module, out, inp, rows)
            return [replace(r, times=batch) for r in forward], [
                replace(r, times=batch) for r in backward
            ]
        weight = self.product("B", module, (batch, out, inp, rows))
        # the mark by which `weights` finds it
        weight = replace(weight, op=f"mm of {WEIGHTS}")
        elements = batch * out * inp
        backward = [self.product("B", module, (batch, rows, inp, out)), weight]
        # the sum is read and written by the product itself
        if self.program.accumulates:
            more = self.program.gradient * elements
            read, written = weight.read + more, weight.written + more
            backward[1] = replace(weight, read=read, written=written)
        else:
            backward.append(self.accumulation_row(module, elements))
        return [self.product("F", module, (batch, rows, out, inp))], backward

    def accumulation_row(self, module: str, elements: int) -> LedgerRow:
        """Return the ledger row that adds a microbatch's weight gradients (`elements` of them) to
        the sum of those before it.
        """
        e, g = self.program.element, self.program.gradient
        if self.program.converts:
            return memory(
                "B", module, f"add of {WEIGHTS}", (e + 2 * g) * elements, 2 * g * elements
            )
        # reads gradient and sum, writes the sum
        return memory("B", module, f"add of {WEIGHTS}", (e + g) * elements, g * elements)

    def norm(self, module: str, kind: str) -> Both:
        """Return the ledger rows (forward, backward) of a norm of this `kind`. An RMSNorm without a
        fused kernel goes through memory six times: to fp32, square, mean, times, back, times the
        weight.
        """
        x, eager = self.x, self.program.fused == "no" and kind == "rmsnorm"
        # fused: read once, written once
        forward = memory("F", module, "norm", *((10 * x, 8 * x) if eager else (x, x)))
        backward = memory("B", module, "norm", *((16 * x, 10 * x) if eager else (4 * x, x)))
        return [forward], [backward]

    def column_parallel(self, module: str, linears: list[Both], sends: bool = True) -> Both:
        """Return the ledger rows (forward, backward) of column-parallel linear layers with one
        input, and their collectives over tp (none unless `sends`): an all-reduce of the input's
        gradient, or with sequence parallelism an all-gather of the input and a reduce-scatter of
        its gradient.
        """
        share = self.share
        forward = [row for linear in linears for row in linear[0]]
        inputs = [linear[1][0] for linear in linears]
        weights = [row for linear in linears for row in linear[1][1:]]
        if share.tp == 1 or not sends:
            return forward, [*inputs, *weights]
        if share.sequence_parallel:
            # S -> R: tokens are gathered before the product
            forward = [collective("F", module, "all-gather", self.whole), *forward]
            # the input was not kept gathered
            again = collective("B", module, "all-gather", self.whole, overlapped=True)
            out = collective("B", module, "reduce-scatter", self.whole, overlapped=True)
            return forward, [again, *inputs, out, *weights]
        # weight gradients do not wait for it
        summed = collective("B", module, "all-reduce", self.whole, overlapped=True)
        return forward, [*inputs, summed, *weights]

    def row_parallel(self, module: str, linear: Both, sends: bool = True) -> Both:
        """Return the ledger rows (forward, backward) of a row-parallel linear layer with its
        collectives over tp (none unless `sends`): an all-reduce of the partial sums, or with
        sequence parallelism a reduce-scatter, and an all-gather of the gradient.
        """
        forward, backward = list(linear[0]), list(linear[1])
        if self.share.tp > 1 and sends:
            if self.share.sequence_parallel:
                forward.append(collective("F", module, "reduce-scatter", self.whole))
                backward = [collective("B", module, "all-gather", self.whole), *backward]
            else:
                forward.append(collective("F", module, "all-reduce", self.whole))
        return forward, backward
