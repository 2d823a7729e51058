"""The rows of what stands at the ends of a model, and of what follows the last backward, in closed
form (operations.py).
"""

from dataclasses import replace

from dolmen.model.tree import Tree
from dolmen.planning.ledger import Row
from dolmen.planning.operations import (
    Both,
    Maker,
    Operations,
    Program,
    Rows,
    Share,
    collective,
    memory,
)


def embedding_rows(tree: Tree, share: Share, program: Program) -> Operations:
    """Of tokens looked up, positions added, dropout."""
    maker = Maker(tree.width, share, program)
    x, stream = maker.whole, maker.x
    forward = [memory("F", "embed", "rows", x, x)]
    backward = [memory("B", "embed", "rows", 2 * x, x)]
    if not program.buffers:  # the gradient of a whole table
        backward.append(maker.added_up("embed", share.part(tree.vocab_size) * tree.width))
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
    tokens, rows = share.tokens, share.part(tree.vocab_size)
    logits = tokens * rows
    maker = Maker(tree.width, share, replace(program, fp8=False))
    linear = maker.linear("head", rows, tree.width, tokens)
    # to fp32, largest, less it, exp, sum, over it; compiled in two visits
    passes = (22, 16) if program.attention == "scores" or program.fused == "no" else (8, 8)
    loss = [memory("F", "loss", "loss", *(p * logits for p in passes))]
    back = [memory("B", "loss", "loss", 6 * logits, 4 * logits)] if program.late_loss else []
    entered = maker.entered("head", [linear])
    if not program.late_loss:
        entered = _at_once(entered)
    if share.tp > 1:
        for size in (4, 4, 4):  # largest, sum, the label's
            loss.append(collective("F", "loss", "all-reduce", size * tokens))
    steps = [entered, (loss, back)]
    if tree.final_norm is not None:
        steps.insert(0, maker.norm("final_norm", tree.final_norm.kind))
    return Operations.of(steps)


def _at_once(entered: Both) -> Both:
    """The products of a head whose loss forms its gradients: all of forward, where what entered is
    there; what leaves it crosses tp in backward.
    """
    forward, backward = entered
    computed: Rows = [replace(row, action="F") for row in backward if row.kind != "collective"]
    sums = [row for row in backward if row.kind == "collective" and row.op != "all-gather"]
    kept = [replace(row, beside=False) for row in sums]
    return [*forward, *computed], kept


def update_rows(
    elements: int, held: int, sharded: bool, program: Program, clips: bool = True, moments: int = 2
) -> tuple[Row, ...]:
    """Of the update: `elements` parameters that this rank updates, `held` whose gradients it has
    whole before (`sharded`: of ZeRO they differ).
    """
    g = program.gradient
    passes = [memory("optimizer", "", "zero", 0, g * held)] if program.buffers else []
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
