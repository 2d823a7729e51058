"""Ledger rows of blocks, embedding, LM head and optimizer update, in closed form (operations.py).

The products of a block follow from its parameters, attention from its mixer, and collectives over
tp from its arrangement of norms and additions. A GPT block that writes attention scores
to memory reads and writes, in forward on a rank of tp:

    x -- norm -- q k v -- scores -- softmax -- dropout -- values -- out --(tp)-- add -- norm -- up
         2x      3 x w              2 n        2.5 n              x w           3.5x   2x   x f
      -- act -- down --(tp)-- add
         2 f    x f           3.5x

x: bytes of the residual stream, n: bytes of the scores (heads x queries x keys). They are what the
years differ in: n is 1 / 8 of all bytes at 2,048 tokens and h 12,288, and none with flash. Experts
stand in place of up, act and down, between two exchanges over ep:

    router -- in their order --(ep)-- gate up, of each -- act -- down --(ep)-- back in order, added
"""

from dataclasses import dataclass, replace
from functools import cached_property

from dolmen.model.count import attention_flops_per_token
from dolmen.model.spec import BlockSpec, LayerRun, ModelSpec, MoESpec, ParamSpecs, select_prefix
from dolmen.planning.ledger import LedgerRow
from dolmen.planning.operations import (
    Both,
    Maker,
    Operations,
    Program,
    RankShare,
    Rows,
    collective,
    memory,
)


def embedding_rows(spec: ModelSpec, share: RankShare, program: Program) -> Operations:
    """Return the operations (ledger rows) of the embedding for one microbatch on a rank, forward
    and backward: token lookup, collectives over tp, positions, dropout, and the weight gradient.
    """
    maker = Maker(spec.width, share, program)
    x, stream = maker.whole, maker.x
    forward = [memory("F", "embed", "rows", x, x)]
    # reads the gradient and the rows that it is added to
    backward = [memory("B", "embed", "rows", 2 * x, x)]
    if not program.buffers:  # the gradient of a whole table
        backward.append(maker.accumulation_row("embed", share.part(spec.vocab_size) * spec.width))
    if share.tp > 1:
        op = "reduce-scatter" if share.sequence_parallel else "all-reduce"
        forward.append(collective("F", "embed", op, x))
        if share.sequence_parallel:
            backward.insert(0, collective("B", "embed", "all-gather", x))
    if spec.embedding.positions is not None:
        forward.append(memory("F", "embed", "positions", 2 * stream, stream))
    if program.dropout:
        forward.append(memory("F", "embed", "dropout", stream, 1.5 * stream))
        backward.append(memory("B", "embed", "dropout", 1.5 * stream, stream))
    return Operations(tuple(forward), tuple(backward))


def head_rows(spec: ModelSpec, share: RankShare, program: Program) -> Operations:
    """Return the operations (ledger rows) of the final norm, the logits, and the loss over them in
    fp32, for one microbatch on a rank, forward and backward.
    """
    tokens, rows = share.tokens, share.part(spec.vocab_size)
    logits = tokens * rows
    maker = Maker(spec.width, share, replace(program, fp8=False))
    linear = maker.linear("head", rows, spec.width, tokens)
    # to fp32, largest, less it, exp, sum, over it; compiled in two visits
    passes = (22, 16) if program.attention == "scores" or program.fused == "no" else (8, 8)
    loss = [memory("F", "loss", "loss", *(p * logits for p in passes))]
    back = [memory("B", "loss", "loss", 6 * logits, 4 * logits)] if program.late_loss else []
    entered = maker.column_parallel("head", [linear])
    if not program.late_loss:
        entered = _fuse_loss(entered)
    if share.tp > 1:
        for size in (4, 4, 4):  # largest, sum, the label's
            loss.append(collective("F", "loss", "all-reduce", size * tokens))
    steps = [entered, (loss, back)]
    if spec.final_norm is not None:
        steps.insert(0, maker.norm("final_norm", spec.final_norm.kind))
    return Operations.join(steps)


def _fuse_loss(entered: Both) -> Both:
    """Return the head's rows (`entered`: forward, backward) with the products of gradients moved to
    forward, as the loss forms its gradients there. Only the reduction of the input's gradient over
    tp stays in backward.
    """
    forward, backward = entered
    computed: Rows = [replace(row, action="F") for row in backward if row.kind != "collective"]
    sums = [row for row in backward if row.kind == "collective" and row.op != "all-gather"]
    exposed = [replace(row, overlapped=False) for row in sums]
    return [*forward, *computed], exposed


def update_rows(
    elements: int,
    local_elements: int,
    sharded: bool,
    program: Program,
    clips: bool = True,
    moments: int = 2,
) -> tuple[LedgerRow, ...]:
    """Return the ledger rows of the optimizer update of `elements` parameters on this rank, which
    holds gradients of `local_elements` parameters before (with ZeRO, `sharded`, more than it
    updates). `clips`: gradients are clipped by norm. `moments`: numbers of optimizer state per
    parameter.
    """
    g = program.gradient
    passes = [memory("optimizer", "", "zero", 0, g * local_elements)] if program.buffers else []
    if clips:
        passes.append(memory("optimizer", "", "norm", g * elements, 0))
    if clips and program.buffers:
        passes.append(memory("optimizer", "", "scale", g * elements, g * elements))
    if not sharded and g == 2:
        passes.append(memory("optimizer", "", "to fp32", 2 * elements, 4 * elements))
    # gradient, moments, master copy; the copy that computes
    read, written = 4 * (2 + moments), 4 * (1 + moments) + 2 * program.buffers
    passes.append(memory("optimizer", "", "adam", read * elements, written * elements))
    return tuple(passes)


BACKWARD = 2.5
"""FLOPs of fused attention's backward against its forward: it forms the scores again."""


def block_rows(spec: ModelSpec, number: int, share: RankShare, program: Program) -> Operations:
    """Return the operations (ledger rows) of layer `number` for one microbatch on a rank, forward
    and backward.
    """
    params = select_prefix(spec.params, f"layers.{number}")
    return _Block(spec.hidden_size, share, program, spec, number, params).rows()


@dataclass(frozen=True)
class _Block(Maker):
    """Builds the rows of one block. `number`: its layer; `params`: its parameters."""

    spec: ModelSpec
    number: int
    params: ParamSpecs

    @cached_property
    def block(self) -> BlockSpec:
        """Spec of the layer with this number."""
        return self.spec.blocks[self.number]

    def rows(self) -> Operations:
        """Return the operations of the block, forward and backward, in the order of forward."""
        around, kind = self.block.arrangement, self.block.norm.kind
        separate = around.additions == 2
        attention = [
            name
            for name, param in self.params.items()
            if name.startswith("attn.") and param.products and name != "attn.o.weight"
        ]
        steps = [
            self.norm("attn_norm", kind),
            self.column_parallel("attn.qkv", self.linears("attn.qkv", attention)),
            self.rope_rows(),
            self.attention_rows(),
            self.row_parallel(
                "attn.o", self.linears("attn.o", ["attn.o.weight"])[0], sends=separate
            ),
        ]
        if separate:
            steps.append(self.residual_rows("attn.add", "attn.o.bias" in self.params))
        if around.norm_count > 1:
            steps.append(self.norm("mlp_norm", kind))
        steps += self.mlp_rows(sends=separate)
        steps.append(self.residual_rows("mlp.add", "mlp.down.bias" in self.params))
        # norms behind the branches too
        steps += [self.norm("norm", kind)] * (around.norm_count - 2)
        if self.program.fp8:
            steps.append(self.cast_rows())
        if self.program.random_state:
            state = LedgerRow("F", "random", "host", "copy", read=self.program.random_state)
            steps.append(([state], []))
        return Operations.join(steps)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the part of the weight `name` that this rank multiplies. Key and
        value heads that are replicated count only those that this rank's queries use.
        """
        param = self.params[name]
        alone = self.share.folded and param.stacked
        shape = list(param.local_shape({"tp": 1 if alone else self.share.tp, "ep": self.share.ep}))
        for cut in param.shards:
            if cut.or_replicate and not cut.splits(self.share.tp):
                shape[cut.dim] = self.share.part(cut.units) * (param.shape[cut.dim] // cut.units)
        return tuple(shape)

    def linears(self, module: str, names: list[str]) -> list[Both]:
        """Return the ledger rows of the linear layers with the weights `names`, a (forward,
        backward) pair for each; those with the same input width are one product if the program
        joins them.
        """
        shapes = [self.local_shape(name) for name in names]
        if self.program.joined and len({shape[-1] for shape in shapes}) == 1:
            *stack, _, inp = shapes[0]
            shapes = [(*stack, sum(shape[-2] for shape in shapes), inp)]
        linears = []
        for *stack, out, inp in shapes:
            batch = stack[0] if stack else 1
            linears.append(
                self.linear(module, out, inp, self.expert_rows(batch, bool(stack)), batch)
            )
        return linears

    def expert_rows(self, batch: int, stacked: bool) -> int:
        """Return how many rows (tokens) a matrix multiplies: all of this rank; for one of `batch`
        stacked experts an equal part of the routed copies, times `load`.
        """
        mlp, tokens = self.block.mlp, self.share.routed
        if not stacked or not isinstance(mlp, MoESpec):
            return self.share.tokens
        return -(-round(self.share.load * tokens * mlp.per_token) // batch)

    @property
    def heads(self) -> tuple[int, int]:
        """Number of query heads and of key heads on this rank of tp."""
        mixer, size = self.block.mixer, self.block.mixer.head_size
        k = self.params.get("attn.k.weight")
        return self.share.part(mixer.heads), self.share.part(
            k.shape[0] // size if k else mixer.heads
        )

    def attention_rows(self) -> Both:
        """Return the ledger rows (forward, backward) of attention between q, k, v and the output
        projection: with scores in memory, or as one fused kernel.
        """
        return self.score_rows() if self.program.attention == "scores" else self.flash_rows()

    def flash_rows(self) -> Both:
        """Return the ledger rows (forward, backward) of fused attention: one kernel each way, and
        with cp the ring's exchange of keys, values and their gradients.
        """
        (heads, kv), share, name = self.heads, self.share, self.program.attention
        of_key, of_value = self.block.mixer.head_sizes
        # a model of this block alone
        block_model = replace(self.spec, runs=(LayerRun((self.block,), 1),))
        # a third of forward and backward together
        per_token = attention_flops_per_token(block_model, share.length) / 3
        flops = round(per_token * share.tokens / share.tp)
        e, tokens = self.program.element, share.tokens
        q, out = e * tokens * heads * of_key, e * tokens * heads * of_value
        kv_bytes = e * tokens * kv * (of_key + of_value)
        shape = (share.sequences * heads, tokens // share.sequences, share.length, of_key)
        row = LedgerRow("F", "attn.flash", "attention", name, flops, q + kv_bytes, out, shape=shape)
        back = replace(
            row,
            action="B",
            op=f"{name} backward",
            flops=round(BACKWARD * flops),
            read=q + 2 * out + kv_bytes,
            written=q + kv_bytes,
        )
        if share.cp == 1:
            return [row], [back]
        payload = kv_bytes * share.cp
        sent = collective("F", "attn.ring", "all-gather", payload, axis="cp")
        # once more, and gradients on the way home, which is a hop longer
        more = 1 + self.program.ring * share.cp / (share.cp - 1)
        returned = replace(sent, action="B", payload=round(more * payload))
        return [row, sent], [back, returned]

    def score_rows(self) -> Both:
        """Return the ledger rows (forward, backward) of attention that writes its scores to memory:
        two products, softmax, dropout.
        """
        (heads, _), share, module = self.heads, self.share, "attn.scores"
        (size, of_value), length = self.block.mixer.head_sizes, share.length
        queries = share.tokens // share.sequences
        batch = share.sequences * heads
        # bytes of the scores
        n = self.program.element * batch * queries * length
        qk, values = (batch, queries, length, size), (batch, queries, of_value, length)
        plain = replace(self, program=replace(self.program, fp8=False))
        forward = [plain.product("F", module, qk), memory("F", module, "softmax", n, n)]
        backward = [memory("B", module, "softmax", 2 * n, n)]
        if self.program.fused == "no":  # scaled, masked in two operations
            forward.append(memory("F", module, "scale and mask", 3 * n, 3 * n))
            backward.append(memory("B", module, "scale and mask", 2 * n, 2 * n))
            forward.append(memory("F", module, "transpose", 4 * n * size / length, n))
            backward.append(memory("B", module, "transpose", 4 * n * size / length, n))
        if self.program.dropout:
            forward.append(memory("F", module, "dropout", n, 1.5 * n))
            backward.append(memory("B", module, "dropout", 1.5 * n, n))
        forward.append(plain.product("F", module, values))
        # gradients of queries and of keys
        backward += [plain.product("B", module, qk)] * 2
        # gradients of scores and of values
        backward += [plain.product("B", module, values)] * 2
        return forward, backward

    def rope_rows(self) -> Both:
        """Return the ledger rows (forward, backward) that rotate queries and keys; none without
        positions in the mixer.
        """
        if self.block.mixer.positions is None:
            return [], []
        heads, size = sum(self.heads), self.block.mixer.head_size
        qk = self.program.element * self.share.tokens * heads * size
        # eager: to fp32, times a complex number, back
        moved = (5 if self.program.fused == "no" else 1) * qk
        return (
            [memory("F", "attn.rope", "rope", moved, moved)],
            [memory("B", "attn.rope", "rope", moved, moved)],
        )

    def residual_rows(self, module: str, biased: bool) -> Both:
        """Return the ledger rows (forward, backward) that add a branch to the residual stream, with
        its bias (if `biased`) and dropout.
        """
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

    def mlp_rows(self, sends: bool) -> list[Both]:
        """Return the ledger rows of the feed-forward layer, a (forward, backward) pair per step:
        dense, or router, shared experts, dispatch, experts and combine. `sends`: its input has a
        collective over tp of its own.
        """
        if not isinstance(self.block.mlp, MoESpec):
            down = self.linears("mlp.down", ["mlp.down.weight"])[0]
            return [
                self.column_parallel("mlp.up", self.up_rows("mlp"), sends),
                self.activation_rows("mlp"),
                self.row_parallel("mlp.down", down),
            ]
        shared: list[Both] = []
        if "mlp.shared.up.weight" in self.params:
            shared = [*self.up_rows("mlp.shared"), self.activation_rows("mlp.shared")]
            shared += self.linears("mlp.shared", ["mlp.shared.down.weight"])
        down = self.linears("mlp.down", ["mlp.experts.down.weight"])[0]
        routed = self.linears("mlp.router", ["mlp.router.weight"])
        there, back = self.dispatch_rows(), self.dispatch_rows()
        # with folded experts tokens stay on their own tp rank
        sends = sends and not self.share.folded
        return [
            self.column_parallel("mlp.router", routed, sends),
            *shared,
            there,
            *self.up_rows("mlp.experts"),
            self.activation_rows("mlp.experts"),
            down,
            back,
            self.row_parallel("mlp.down", ([], []), not self.share.folded),
        ]

    def up_rows(self, prefix: str) -> list[Both]:
        """Return the ledger rows of the gate and up projections whose weights lie below `prefix`, a
        (forward, backward) pair each.
        """
        names = (f"{prefix}.gate.weight", f"{prefix}.up.weight")
        return self.linears("mlp.up", [name for name in names if name in self.params])

    def activation_rows(self, prefix: str) -> Both:
        """Return the ledger rows (forward, backward) of the activation function of the feed-forward
        layer at `prefix`, with the gate's product if there is one.
        """
        eager = self.program.fused == "no"
        *stack, inner, _ = self.local_shape(f"{prefix}.up.weight")
        rows = self.expert_rows(stack[0], True) * stack[0] if stack else self.share.tokens
        f = self.program.element * rows * inner
        if f"{prefix}.gate.weight" in self.params:
            forward = [memory("F", "mlp.act", "gate", (3 if eager else 2) * f, (1 + eager) * f)]
            more = memory("B", "mlp.act", "gate", (5 if eager else 3) * f, (2 + eager) * f)
            return forward, [more]
        bias = f if f"{prefix}.up.bias" in self.params else 0
        if eager:  # 0.5 x (1 + tanh(a x (1 + b x x))) is nine operations, and backward twice those
            forward = [memory("F", "mlp.act", "act", 12 * f + bias, 9 * f + bias)]
            return forward, [memory("B", "mlp.act", "act", 24 * f + bias, 18 * f)]
        forward = [memory("F", "mlp.act", "act", f, f)]
        return forward, [memory("B", "mlp.act", "act", 2 * f + bias, f)]

    def dispatch_rows(self) -> Both:
        """Return the ledger rows (forward, backward) that sort tokens by expert and exchange them
        over ep; the same rows also stand for the way back. Under sequence parallelism only this
        rank's tokens are sent.
        """
        assert isinstance(self.block.mlp, MoESpec)
        share, often = self.share, self.block.mlp.per_token * self.share.load
        moved = often * (self.x if share.folded else self.whole)
        copies = often if share.copies is None else share.copies * share.load
        rows: list[Rows] = [[], []]
        for action, some in zip("FB", rows, strict=True):
            some.append(memory(action, "mlp.experts", "sort", moved, moved))
            if share.ep > 1:
                # one copy per expert, or per node with experts (DeepEP)
                payload = round(copies * self.x)
                some.append(collective(action, "mlp.experts", "all-to-all", payload, axis="ep"))
        return rows[0], rows[1]

    def cast_rows(self) -> Both:
        """Return the ledger rows (forward, backward), whether or not the run uses fp8, of casting
        inputs of matrix products to fp8: each element is read once in 16 bits and written in two
        layouts. Counts inputs of hidden width (forward and backward), and the wide ones of MLP and
        attention (once in forward, twice in backward).
        """
        name = next(name for name in self.params if name.endswith("up.weight"))
        *stack, inner, _ = self.local_shape(name)
        # experts that are multiplied one after another are cast so too
        times = stack[0] if stack and not self.program.grouped else 1
        rows = self.expert_rows(stack[0], True) * stack[0] if stack else self.share.tokens
        x = (self.share.tokens + rows) * self.hidden
        wide = rows * inner + self.share.tokens * self.heads[0] * self.block.mixer.head_size
        casts: list[Rows] = []
        for action, elements in (("F", x + wide), ("B", x + 2 * wide)):
            buffer = memory(action, "mlp", "cast", 2 * elements / times, 2 * elements / times)
            casts.append([replace(buffer, times=times)])
        return casts[0], casts[1]
