"""The rows of a stage in closed form, for layouts by the hundred thousand: what the dry run of a
block would count, as few rows as tell its seconds. Products are read off leaves, attention off the
mixer, the collectives of tp off the arrangement, at 2 x additions a block.

    forward      enter (sequence parallelism: all-gather), products, attention, leave (all-reduce,
                 or reduce-scatter), and what memory bounds: norms, activations, additions
    backward     each product twice, attention 2.5 times, each collective turned around; what is
                 computed again before it
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from dolmen.model.count import attention_flops_per_token
from dolmen.model.tree import Block, Experts, Leaf, Leaves, Run, Tree, under
from dolmen.planning.ledger import Row
from dolmen.planning.space import Choice

BACKWARD = 2.5
"""Of attention against forward: it forms the scores again."""
RING_BACKWARD = 3
"""Of what a ring sends, against forward: keys and values again, in half precision, and their
gradients in fp32."""


class Work(NamedTuple):
    """Rows of a part of a stage, for one microbatch."""

    forward: tuple[Row, ...]
    inputs: tuple[Row, ...]
    """Of backward, what the stage before waits for, with what is computed again."""
    weights: tuple[Row, ...]
    """The rest: gradients of weights."""


@dataclass(frozen=True)
class Outline:
    """Of a model on sequences of `sequence_length`."""

    tree: Tree
    sequence_length: int
    element_bytes: int = 2

    def block(self, number: int, choice: Choice) -> Work:
        """Of layer `number`."""
        block = self.tree.blocks[number]
        leaves = under(self.tree.leaves, f"layers.{number}")
        forward, weights = self._products(list(leaves.values()), block, choice)
        entered, left = self._collectives(choice, block.arrangement.additions)
        swept = self._swept(block, choice)
        attention = self._attention(block, choice)
        experts = self._to_experts(block, choice)
        ring = self._round_ring(leaves, block, choice)
        onward = (*entered, *forward, attention, *experts, *ring, *left, swept)
        if choice.recompute == "full":
            again = onward
        else:
            again = (attention,) if choice.recompute == "selective" else ()
        turned = self._backward(attention)
        # under sequence parallelism what entered is gathered once more for the weights' gradients
        gathered = entered if choice.sequence_parallel else ()
        back = (*again, *_mirrored(left), *forward, turned, *experts, swept, swept)
        back += tuple(replace(row, payload=RING_BACKWARD * row.payload) for row in ring)
        back += (
            *gathered,
            *_mirrored(entered),
            *self._reduced(choice, block.arrangement.additions),
        )
        return Work(onward, back, weights)

    def embedding(self, choice: Choice) -> Work:
        """A lookup, whose sum crosses tp."""
        bytes_ = self._stream(choice)
        rows = (Row("F0", "embed", "memory", "embedding", 0, 2 * bytes_, bytes_),)
        _, left = self._collectives(choice, 1)
        elements = -(-self.tree.vocab_size // choice.tp) * self.tree.width
        return Work((*rows, *left), _mirrored(left), (*rows, self._added("embed", elements)))

    def head(self, choice: Choice) -> Work:
        """Products, and what the loss sweeps over: logits in half precision and in fp32, and
        their gradient.
        """
        tokens, rows = self._tokens(choice), -(-self.tree.vocab_size // choice.tp)
        width, e = self.tree.width, self.element_bytes
        product = _product("head", 1, tokens, rows, width, e)
        entered, _ = self._collectives(choice, 1)
        logits = tokens * rows
        swept = Row("F0", "head", "memory", "loss", 0, 8 * logits, 8 * logits)
        # the loss forms its gradients in forward
        both = (product, _product("head", 1, tokens, width, rows, e))
        both += (_product("head", 1, rows, width, tokens, e), self._added("head", rows * width))
        return Work((*entered, *both, swept), (*_mirrored(entered), *self._reduced(choice, 1)), ())

    def update(self, elements: int, moments: int) -> tuple[Row, ...]:
        """Of the optimizer, over what this rank has of `elements`: gradients twice (their norm),
        parameters and moments read and written.
        """
        read, written = 4 * elements * (3 + moments), 4 * elements * (1 + moments)
        return (Row("optimizer", "", "memory", "adamw", 0, read, written),)

    def _tokens(self, choice: Choice) -> int:
        return choice.microbatch_size * self.sequence_length // choice.cp

    def _stream(self, choice: Choice) -> int:
        """Bytes of the residual stream of a microbatch."""
        bytes_ = self._tokens(choice) * self.tree.hidden_size * self.element_bytes
        return bytes_ // choice.tp if choice.sequence_parallel else bytes_

    def _products(
        self, leaves: list[Leaf], block: Block, choice: Choice
    ) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """(those of forward, which backward has as many of; those of weight gradients)."""
        sizes, tokens = {"tp": choice.tp, "ep": choice.ep}, self._tokens(choice)
        forward, weights = [], []
        for leaf in leaves:
            if not leaf.products:
                continue
            *stack, out, inp = leaf.held(sizes)
            batch, rows = 1, tokens
            if stack and isinstance(block.mlp, Experts):
                # of all ranks of ep as many come as go
                batch, rows = stack[0], -(-tokens * block.mlp.per_token // stack[0])
            e = self.element_bytes
            forward.append(_product(leaf.role, batch, rows, out, inp, e))
            weights.append(_product(leaf.role, batch, out, inp, rows, e))
            weights.append(self._added(leaf.role, batch * out * inp))
        return tuple(forward), tuple(weights)

    def _added(self, module: str, elements: int) -> Row:
        """A microbatch's gradients to the sum of those before it, which is in fp32."""
        return Row(
            "B0", module, "memory", "add", 0, (self.element_bytes + 4) * elements, 4 * elements
        )

    def _attention(self, block: Block, choice: Choice) -> Row:
        one = replace(self.tree, runs=(Run((block,), 1),))
        per_token = attention_flops_per_token(one, self.sequence_length) / 3
        tokens, heads = self._tokens(choice), block.mixer.heads / choice.tp
        moved = round(tokens * heads * sum(block.mixer.head_sizes) * self.element_bytes)
        flops = round(per_token * tokens / choice.tp)
        return Row("F0", "attn", "attention", "attention", flops, 2 * moved, moved)

    def _backward(self, row: Row) -> Row:
        return replace(
            row,
            op="attention_backward",
            flops=round(BACKWARD * row.flops),
            read=2 * row.read,
            written=2 * row.written,
        )

    def _swept(self, block: Block, choice: Choice) -> Row:
        """Norms and additions of the stream, activations of the feed-forward layer, rope."""
        around = block.arrangement
        stream = self._stream(choice) * (2 * around.norms + 3 * around.additions)
        mlp = block.mlp
        wide = (mlp.size * mlp.per_token) if isinstance(mlp, Experts) else mlp.size
        gated = 3 if isinstance(mlp, Experts) or mlp.gated else 2
        heads = block.mixer.heads * sum(block.mixer.head_sizes)
        turned = 2 * heads if block.mixer.positions is not None else 0
        inside = self._tokens(choice) * self.element_bytes * (wide * gated + turned) / choice.tp
        if isinstance(mlp, Experts):  # put in the order of experts, and back
            copies = 4 * self._tokens(choice) * mlp.per_token * self.tree.hidden_size
            inside += copies * self.element_bytes
        moved = round(stream + inside)
        return Row("F0", "", "memory", "sweeps", 0, moved // 2, moved - moved // 2)

    def _collectives(self, choice: Choice, pairs: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
        """What enters and leaves tp, forward."""
        if choice.tp == 1:
            return (), ()
        payload = self._tokens(choice) * self.tree.hidden_size * self.element_bytes
        if not choice.sequence_parallel:
            return (), (_collective("all-reduce", "tp", payload),) * pairs
        gather = _collective("all-gather", "tp", payload)
        return (gather,) * pairs, (_collective("reduce-scatter", "tp", payload),) * pairs

    def _reduced(self, choice: Choice, pairs: int) -> tuple[Row, ...]:
        """What entered without a collective sums its gradients over tp."""
        if choice.tp == 1 or choice.sequence_parallel:
            return ()
        payload = self._tokens(choice) * self.tree.hidden_size * self.element_bytes
        return (_collective("all-reduce", "tp", payload),) * pairs

    def _to_experts(self, block: Block, choice: Choice) -> tuple[Row, ...]:
        if choice.ep == 1 or not isinstance(block.mlp, Experts):
            return ()
        payload = self._stream(choice) * block.mlp.per_token
        return (_collective("all-to-all", "ep", payload),) * 2

    def _round_ring(self, leaves: Leaves, block: Block, choice: Choice) -> tuple[Row, ...]:
        """Keys and values of a whole sequence, whichever way cp brings them."""
        if choice.cp == 1:
            return ()
        made = [leaf for name, leaf in leaves.items() if name in ("attn.k.weight", "attn.v.weight")]
        width = sum(leaf.held({"tp": choice.tp})[0] for leaf in made)
        if not made:  # of latents
            width = block.mixer.heads // choice.tp * sum(block.mixer.head_sizes)
        payload = self._tokens(choice) * choice.cp * width * self.element_bytes
        return (_collective("all-gather", "cp", payload),)


def _product(module: str, batch: int, rows: int, columns: int, inner: int, e: int) -> Row:
    read = e * batch * (rows * inner + inner * columns)
    shape = (batch, rows, columns, inner)
    flops = 2 * batch * rows * columns * inner
    return Row("F0", module, "product", "mm", flops, read, e * batch * rows * columns, shape)


def _collective(op: str, axis: str, payload: int) -> Row:
    return Row("F0", "", "collective", op, axis=axis, payload=payload)


TURNED = {"all-gather": "reduce-scatter", "reduce-scatter": "all-gather"}


def _mirrored(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The collectives of backward: a gather's sums, a scatter's gathers; a sum's are none."""
    return tuple(replace(row, op=TURNED[row.op]) for row in rows if row.op in TURNED)
