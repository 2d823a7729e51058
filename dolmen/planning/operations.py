"""The rows of one block, of the embedding and of the head, in closed form: what a dry run counts,
for programs that are not ours and cannot be run here (`Program`). Of a GPT block with scores in
memory, forward, on a rank of tp:

    x -- norm -- q k v -- scores -- softmax -- dropout -- values -- out --(tp)-- add -- norm -- up
         2x      3 x w              2 n        2.5 n              x w           3.5x   2x   x f
      -- act -- down --(tp)-- add
         2 f    x f           3.5x

x: bytes of the residual stream, n: bytes of the scores (heads x queries x keys). They are what the
years differ in: n is 1 / 8 of all bytes at 2,048 tokens and h 12,288, and none with flash.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from dolmen.model.tree import Attention, Block, Experts, Mlp, Tree
from dolmen.planning.ledger import Row

BYTES = 2  # of an element that is multiplied


@dataclass(frozen=True)
class Program:
    """How an implementation computes what a model says."""

    attention: Literal["scores", "flash", "tuned"] = "flash"
    """Scores in memory, or in a kernel that never writes them: FlashAttention 2, or one that is
    written for the device."""
    fused: Literal["no", "pairs", "compiled"] = "pairs"
    """Which operations of bytes are one kernel: none; those that Megatron wrote by hand (bias and
    activation, mask and softmax, bias, dropout and addition); whatever follows another.
    """
    dropout: bool = False
    gradient: int = 4
    """Bytes of a gradient that microbatches add to."""
    accumulates: bool = True
    """Whether the product of a weight gradient adds to it, without a pass of its own."""
    random_state: int = 0
    """Bytes of its random state that a block copies to the host or back, in forward and as it is
    computed again."""
    fp8: bool = False
    """Products of blocks are in fp8, and their inputs cast first."""


@dataclass(frozen=True)
class Share:
    """What a rank has of a microbatch."""

    sequences: int
    length: int
    """Tokens of a sequence, on all ranks of cp together."""
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False

    @property
    def tokens(self) -> int:
        return self.sequences * -(-self.length // self.cp)

    @property
    def stream(self) -> int:
        """Tokens of the residual stream."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens

    def part(self, width: int) -> int:
        """Of heads or columns that tp divides."""
        return -(-width // self.tp)


@dataclass(frozen=True)
class Operations:
    """Rows of F and of B for one microbatch; B with no recomputation."""

    forward: tuple[Row, ...]
    backward: tuple[Row, ...]

    def recomputed(self, recompute: str) -> "Operations":
        """With what backward computes again: "full", all; "selective", attention over scores;
        "op", as torchtitan's: all but attention and every other product. Collectives are sent
        again with "full" alone.
        """
        again = [row for row in self.forward if row.module != "attn.residual"]
        if recompute == "selective":
            again = [row for row in again if row.module == "attn.scores"]
        elif recompute == "op":
            products = [row for row in again if row.kind == "product"]
            kept = {id(row) for row in products[::2]}
            again = [r for r in again if r.kind in ("product", "memory") and id(r) not in kept]
        elif recompute == "full":
            again = list(self.forward)
        else:
            again = []
        return replace(self, backward=(*(replace(r, action="B") for r in again), *self.backward))


def product(action: str, module: str, shape: tuple[int, int, int, int], dtype: str = "") -> Row:
    """[batch, rows, contraction] x [batch, contraction, columns]."""
    batch, rows, columns, contraction = shape
    size = 1 if dtype == "fp8" else BYTES
    return Row(
        action,
        module,
        "product",
        "mm",
        flops=2 * batch * rows * columns * contraction,
        read=size * batch * contraction * (rows + columns),
        written=BYTES * batch * rows * columns,
        shape=shape,
        dtype=dtype,
    )


def memory(action: str, module: str, op: str, read: float, written: float) -> Row:
    return Row(action, module, "memory", op, read=round(read), written=round(written))


def collective(action: str, module: str, op: str, payload: int, beside: bool = False) -> Row:
    return Row(action, module, "collective", op, axis="tp", payload=payload, beside=beside)


@dataclass(frozen=True)
class _Maker:
    """Makes the rows of one block."""

    block: Block
    hidden: int
    share: Share
    program: Program

    @property
    def attention(self) -> Attention:
        """Raises ValueError for other mixers."""
        if not isinstance(self.block.mixer, Attention):
            raise ValueError(f"{self.block.mixer.words}: its rows are known of a dry run alone")
        return self.block.mixer

    @property
    def mlp(self) -> Mlp:
        """Raises ValueError for experts."""
        if isinstance(self.block.mlp, Experts):
            raise ValueError("rows of experts are known of a dry run alone")
        return self.block.mlp

    @property
    def x(self) -> int:
        """Bytes of the residual stream on this rank."""
        return BYTES * self.share.stream * self.hidden

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries and of keys, on this rank."""
        return self.share.part(self.attention.heads), self.share.part(self.attention.kv_heads)

    def linear(self, module: str, out: int, inp: int) -> tuple[Row, list[Row]]:
        """Forward, and backward: the input's gradient, then the weight's."""
        tokens = self.share.tokens
        dtype = "fp8" if self.program.fp8 else ""
        weight = product("B", module, (1, out, inp, tokens), dtype)
        more = self.program.gradient * out * inp
        if self.program.accumulates:
            weight = replace(weight, read=weight.read + more, written=weight.written + more)
        backward = [product("B", module, (1, tokens, inp, out), dtype), weight]
        if not self.program.accumulates:
            backward.append(memory("B", module, "add", 2 * more, more))
        return product("F", module, (1, tokens, out, inp), dtype), backward

    def casts(self, module: str, action: str, elements: float) -> Iterator[Row]:
        """To fp8, of what is multiplied: read, rounded, and written both ways around, as a product
        takes both of its factors by rows; its largest number is known of what makes it.
        """
        if self.program.fp8:
            yield memory(action, module, "cast", 2 * elements, 2 * elements)

    def norm(self, module: str) -> tuple[list[Row], list[Row]]:
        x = self.x
        eager = self.program.fused == "no" and self.block.norm.kind == "rmsnorm"
        # RMSNorm without a kernel: to fp32, square, mean, times, back, times the weight
        forward = memory("F", module, "norm", *((10 * x, 8 * x) if eager else (x, x)))
        backward = memory("B", module, "norm", *((16 * x, 10 * x) if eager else (4 * x, x)))
        return [forward], [backward]

    def added(self, module: str, biased: bool) -> tuple[list[Row], list[Row]]:
        """What leaves a branch, with its bias and dropout, added to the residual stream."""
        x, masked = self.x, 0.5 * self.x * self.program.dropout
        backward = [memory("B", module, "add", 2 * x, x)]  # of the two gradients that meet
        if self.program.dropout:
            backward.append(memory("B", module, "dropout", x + masked, x))
        if biased:
            backward.append(memory("B", module, "bias", x, 0))
        forward = [memory("F", module, "add", 2 * x, x + masked)]
        if self.program.fused == "no":
            forward = [memory("F", module, "add", 2 * x, x)]
            if biased:
                forward.append(memory("F", module, "bias", x, x))
            if self.program.dropout:
                forward.append(memory("F", module, "dropout", x, x + masked))
        return forward, backward

    def inner(self) -> tuple[list[Row], list[Row]]:
        """Between q, k, v and the output projection."""
        if self.program.attention == "scores":
            return self._scores()
        return self._flash()

    def _flash(self) -> tuple[list[Row], list[Row]]:
        (heads, kv), share = self.heads, self.share
        size, tokens = self.attention.head_size, share.tokens
        pairs = tokens * share.length / (2 if self.attention.mask == "causal" else 1)
        flops = round(4 * heads * pairs * size)
        q, k = BYTES * tokens * heads * size, BYTES * tokens * kv * size
        shape = (share.sequences * heads, tokens // share.sequences, share.length, size)
        forward = Row(
            "F", "attn.flash", "attention", self.program.attention, flops, 2 * k + q, q, shape=shape
        )
        backward = Row(
            "B",
            "attn.flash",
            "attention",
            f"{self.program.attention} backward",
            round(2.5 * flops),
            3 * q + 2 * k,
            q + 2 * k,
            shape=shape,
        )
        rows = [forward], [backward]
        if share.cp > 1:
            whole = 2 * k * share.cp
            ring = Row("F", "attn.ring", "collective", "all-gather", axis="cp", payload=whole)
            rows[0].append(ring)
            # keys and values again, and their gradients
            rows[1].append(replace(ring, action="B", payload=2 * whole))
        return rows

    def _scores(self) -> tuple[list[Row], list[Row]]:
        (heads, _), share, module = self.heads, self.share, "attn.scores"
        size, length = self.attention.head_size, share.length
        queries = share.tokens // share.sequences
        batch = share.sequences * heads
        n = BYTES * batch * queries * length
        qk, values = (batch, queries, length, size), (batch, queries, size, length)
        forward = [product("F", module, qk), memory("F", module, "softmax", n, n)]
        backward = [memory("B", module, "softmax", 2 * n, n)]
        if self.program.fused == "no":  # scaled, masked in two operations
            forward.append(memory("F", module, "scale and mask", 3 * n, 3 * n))
            backward.append(memory("B", module, "scale and mask", 2 * n, 2 * n))
            forward.append(memory("F", module, "transpose", 4 * n * size / length, n))
            backward.append(memory("B", module, "transpose", 4 * n * size / length, n))
        if self.program.dropout:
            forward.append(memory("F", module, "dropout", n, 1.5 * n))
            backward.append(memory("B", module, "dropout", 1.5 * n, n))
        forward.append(product("F", module, values))
        backward += [product("B", module, qk)] * 2 + [product("B", module, values)] * 2
        return forward, backward

    def rotated(self) -> tuple[list[Row], list[Row]]:
        if self.attention.positions is None:
            return [], []
        heads = sum(self.heads)
        qk = BYTES * self.share.tokens * heads * self.attention.head_size
        # eager: to fp32, times a complex number, back
        eager = self.program.fused == "no"
        read, written = (5 * qk, 5 * qk) if eager else (qk, qk)
        return (
            [memory("F", "attn.rope", "rope", read, written)],
            [memory("B", "attn.rope", "rope", read, written)],
        )

    def activated(self) -> tuple[list[Row], list[Row]]:
        mlp, eager = self.mlp, self.program.fused == "no"
        f = BYTES * self.share.tokens * self.share.part(mlp.size)
        if mlp.gated:
            forward = [memory("F", "mlp.act", "gate", (3 if eager else 2) * f, (1 + eager) * f)]
            return forward, [
                memory("B", "mlp.act", "gate", (5 if eager else 3) * f, (2 + eager) * f)
            ]
        bias = f if mlp.bias else 0
        if eager:  # 0.5 x (1 + tanh(a x (1 + b x x))) is nine operations, and backward twice those
            forward = [memory("F", "mlp.act", "act", 12 * f + bias, 9 * f + bias)]
            return forward, [memory("B", "mlp.act", "act", 24 * f + bias, 18 * f)]
        forward = [memory("F", "mlp.act", "act", f, f)]
        return forward, [memory("B", "mlp.act", "act", 2 * f + bias, f)]

    def entered(self, module: str, linears: list[tuple[Row, list[Row]]]) -> tuple[list, list]:
        """Columns of one input, and what crosses tp for them: I -> R, or S -> R."""
        share = self.share
        whole = BYTES * share.tokens * self.hidden
        inputs = [rows[1][0] for rows in linears]
        weights = [row for rows in linears for row in rows[1][1:]]
        forward = [rows[0] for rows in linears]
        backward = [*inputs, collective("B", module, "all-reduce", whole, beside=True), *weights]
        if share.sequence_parallel:
            forward = [collective("F", module, "all-gather", whole), *forward]
            again = collective("B", module, "all-gather", whole, beside=True)
            out = collective("B", module, "reduce-scatter", whole, beside=True)
            backward = [again, *inputs, out, *weights]
        if share.tp == 1:
            backward = [*inputs, *weights]
        return forward, backward

    def left(self, module: str, linear: tuple[Row, list[Row]]) -> tuple[list, list]:
        """Rows, whose partial sums leave: P -> I, or P -> S."""
        forward, backward = [linear[0]], linear[1]
        whole = BYTES * self.share.tokens * self.hidden
        if self.share.tp > 1 and self.share.sequence_parallel:
            forward.append(collective("F", module, "reduce-scatter", whole))
            backward = [collective("B", module, "all-gather", whole), *backward]
        elif self.share.tp > 1:
            forward.append(collective("F", module, "all-reduce", whole))
        return forward, backward

    def block_rows(self) -> Operations:
        attention, mlp, hidden = self.attention, self.mlp, self.hidden
        (heads, kv), size = self.heads, self.attention.head_size
        inner = self.share.part(mlp.size)
        x = self.share.tokens * hidden
        qkv = self.linear("attn.qkv", (heads + 2 * kv) * size, hidden)
        out = self.linear("attn.o", hidden, heads * size)
        up = self.linear("mlp.up", (2 if mlp.gated else 1) * inner, hidden)
        down = self.linear("mlp.down", hidden, inner)
        wide = self.share.tokens * (inner + heads * size)
        casts = (
            [*self.casts("mlp", "F", 2 * x + wide)],
            [*self.casts("mlp", "B", 2 * x + 2 * wide)],
        )
        steps = [
            self.norm("attn_norm"),
            self.entered("attn.qkv", [qkv]),
            self.rotated(),
            self.inner(),
            self.left("attn.o", out),
            self.added("attn.add", attention.o_bias),
            self.norm("mlp_norm"),
            self.entered("mlp.up", [up]),
            self.activated(),
            self.left("mlp.down", down),
            self.added("mlp.add", mlp.bias),
            casts,
        ]
        forward = [row for step in steps for row in step[0]]
        if self.program.random_state:
            forward.append(Row("F", "random", "host", "copy", read=self.program.random_state))
        backward = [row for step in reversed(steps) for row in step[1]]
        return Operations(tuple(forward), tuple(backward))


def block_rows(block: Block, hidden: int, share: Share, program: Program) -> Operations:
    """Raises ValueError for experts, and for mixers that are not attention over heads."""
    return _Maker(block, hidden, share, program).block_rows()


def embedding_rows(tree: Tree, share: Share, program: Program) -> Operations:
    """The rows of tokens looked up, positions added, dropout."""
    x = BYTES * share.tokens * tree.hidden_size
    stream = BYTES * share.stream * tree.hidden_size
    forward = [memory("F", "embed", "rows", x, x)]
    backward = [memory("B", "embed", "rows", 2 * x, x)]
    if share.tp > 1:
        op = "reduce-scatter" if share.sequence_parallel else "all-reduce"
        forward.append(collective("F", "embed", op, x))
        if share.sequence_parallel:
            backward.insert(0, collective("B", "embed", "all-gather", x))
    if tree.embedding.positions is not None:
        forward.append(memory("F", "embed", "positions", 2 * stream, stream))
    if program.dropout:
        forward.append(memory("F", "embed", "dropout", stream, 1.5 * stream))
        backward.append(memory("B", "embed", "dropout", 1.5 * stream, stream))
    return Operations(tuple(forward), tuple(backward))


def head_rows(tree: Tree, share: Share, program: Program) -> Operations:
    """The final norm, logits, and the loss over them in fp32."""
    hidden, tokens = tree.hidden_size, share.tokens
    rows = share.part(tree.vocab_size)
    logits = tokens * rows
    maker = _Maker(tree.blocks[0], hidden, share, replace(program, fp8=False))
    linear = maker.linear("head", rows, hidden)
    entered = maker.entered("head", [linear])
    norm = maker.norm("final_norm")
    # to fp32, largest, less it, exp, sum, over it; compiled in two visits
    passes = (22, 16) if program.attention == "scores" or program.fused == "no" else (8, 8)
    forward = [*norm[0], *entered[0], memory("F", "loss", "loss", *(p * logits for p in passes))]
    backward = [memory("B", "loss", "loss", 6 * logits, 4 * logits), *entered[1], *norm[1]]
    if share.tp > 1:
        for size in (4, 4, 4):  # largest, sum, the label's
            forward.append(collective("F", "loss", "all-reduce", size * tokens))
    return Operations(tuple(forward), tuple(backward))


def update_rows(
    elements: int, held: int, sharded: bool, program: Program, clips: bool = True
) -> tuple[Row, ...]:
    """Of the update: `elements` parameters that this rank updates, `held` whose gradients it has
    whole before (`sharded`: of ZeRO they differ).
    """
    g = program.gradient
    passes = [memory("optimizer", "", "zero", 0, g * held)]
    if clips:
        passes.append(memory("optimizer", "", "norm", g * elements, 0))
        passes.append(memory("optimizer", "", "scale", g * elements, g * elements))
    if not sharded and g == 2:
        passes.append(memory("optimizer", "", "to fp32", 2 * elements, 4 * elements))
    # gradient, two moments, master copy; the copy that computes
    passes.append(memory("optimizer", "", "adam", 16 * elements, 14 * elements))
    return tuple(passes)
