"""Two programs' numbers of one model as rows, each a difference and its tolerance. On ranks that do
not know the other program's (None) a row is of zeros, from the same collectives.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor

from dolmen.core import collectives, state
from dolmen.core.mesh import Mesh
from dolmen.model.decoder import Decoder

# fp32 rounds at 6e-8, and two right programs add in different orders. Seen over 24 random layers,
# and in brackets with activations fifty times the others: logits 3e-6 (3e-5), loss 1e-7 (1e-7),
# norm 7e-6 (2e-5), gradients 4e-6 (6e-4).
LOGITS = 1e-4  # of the largest logit
LOSS = 1e-5  # relative: a mean over hundreds of tokens
NORM = 1e-4  # relative, of the whole gradient
GRADIENT = 2e-3  # of a tensor's norm, or of FLOOR times the whole gradient's:
FLOOR = 1e-3  # key biases have gradient zero, the rest is rounding


@dataclass(frozen=True)
class Row:
    """One comparison. A difference that is not a number is not within any tolerance."""

    name: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True)
class Report:
    """What was compared, and how it came out; only the first rank knows the notes of rows."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return all(row.ok for row in self.rows)

    def table(self) -> Table:
        """For a rich console."""
        caption = "\n".join(self.notes) or None
        table = Table(
            "compared",
            "difference",
            "allowed",
            "",
            "",
            title=self.title,
            title_justify="left",
            caption=caption,
            caption_justify="left",
            box=None,
            padding=(0, 2, 0, 0),
            pad_edge=False,
        )
        for row in self.rows:
            verdict = "ok" if row.ok else "DIFFERS"
            table.add_row(
                row.name, f"{row.difference:.3g}", f"{row.tolerance:.3g}", verdict, row.note
            )
        return table


@dataclass(frozen=True)
class Reference:
    """What transformers says."""

    logits: Tensor  # [sequences, length, vocab]
    loss: float
    gradients: dict[str, Tensor] | None  # by our names
    new_tokens: Tensor  # [sequences, new]
    new_logits: Tensor  # [sequences, new, vocab], of which they are the largest


def logits_row(logits: Float[Tensor, "sequences length vocab"], theirs: Reference | None) -> Row:
    """The largest difference of our logits, absolute."""
    if theirs is None:
        return Row("logits", 0, 0)
    assert logits.shape == theirs.logits.shape, (logits.shape, theirs.logits.shape)
    largest, apart = theirs.logits.abs().max().item(), (logits - theirs.logits).abs().max().item()
    return Row("logits", apart, LOGITS * largest, f"absolute; the largest is {largest:.4g}")


def relative_row(name: str, ours: float, theirs: float | None, tolerance: float) -> Row:
    """|ours - theirs| / |theirs|; nothing to compare where theirs is None, on all ranks but one."""
    if theirs is None:
        return Row(name, 0, 0)
    apart = abs(ours - theirs) / abs(theirs) if theirs else math.nan
    return Row(name, apart, tolerance, f"relative; {ours:.7g} and {theirs:.7g}")


def gradient_rows(model: Decoder, theirs: dict[str, Tensor] | None) -> list[Row]:
    """Norm of the whole gradient, and the parameter whose gradient, of its leaf's shape, differs
    most: |ours - theirs| / |theirs|.
    """
    ours, apart = 0.0, {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert p.grad is not None, name
        gradient, p.grad = state.gather_full(p.grad), None  # whole, one at a time
        if theirs is None:
            continue
        assert gradient.shape == theirs[name].shape, (name, gradient.shape, theirs[name].shape)
        ours += gradient.double().square().sum().item()
        apart[name] = torch.linalg.vector_norm(gradient - theirs[name]).item()
    if theirs is None:
        return [Row("gradient norm", 0, 0), Row("gradients", 0, 0)]
    norms = {name: torch.linalg.vector_norm(g).item() for name, g in theirs.items()}
    whole = math.hypot(*norms.values())
    relative = {
        name: apart[name] / max(norms[name], FLOOR * whole) if whole else math.nan for name in apart
    }
    worst = max(
        relative, key=lambda name: math.inf if math.isnan(relative[name]) else relative[name]
    )
    return [
        relative_row("gradient norm", math.sqrt(ours), whole, NORM),
        Row("gradients", relative[worst], GRADIENT, f"relative; worst is {worst}"),
    ]


def greedy_row(continued: list[list[int]], theirs: Reference | None, tolerance: float) -> Row:
    """Number of texts that differ, but for those whose first other token is as good within the
    tolerance of logits.
    """
    if theirs is None:
        return Row("greedy tokens", 0, 0)
    wrong, ties = 0, 0
    assert theirs.new_tokens.shape == (len(continued), len(continued[0])), theirs.new_tokens.shape
    for ours, other, logits in zip(
        continued, theirs.new_tokens.tolist(), theirs.new_logits, strict=True
    ):
        if ours == other:
            continue
        step = next(i for i, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b)
        tie = (logits[step, other[step]] - logits[step, ours[step]]).item() <= 2 * tolerance
        wrong, ties = wrong + (not tie), ties + tie
    best = theirs.new_logits.topk(min(2, theirs.new_logits.shape[-1]), -1).values
    margin = (best[..., 0] - best[..., -1]).min().item()
    note = f"{len(continued)} texts of {len(continued[0])} tokens; smallest margin {margin:.2g}"
    return Row("greedy tokens", wrong, 0, note + f"; {ties} part at a tie" * bool(ties))


def agreed(rows: list[Row], mesh: Mesh) -> tuple[Row, ...]:
    """The first rank's numbers, on every rank."""
    numbers = torch.tensor(
        [[row.difference, row.tolerance] for row in rows], dtype=torch.float64, device=mesh.device
    )
    if not mesh.first:
        numbers.zero_()
    numbers = collectives.reduce_scalar(collectives.reduce_scalar(numbers, mesh.tp), mesh.dp)
    return tuple(
        replace(row, difference=d, tolerance=t)
        for row, (d, t) in zip(rows, numbers.tolist(), strict=True)
    )
