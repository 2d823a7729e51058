"""Compares dolmen with transformers on the same random tokens, in fp32: the same function, the same
gradient, the same text.

    source  -> dolmen, split over tp       \\  logits, loss, gradient norm,    Report: a row
    against -> transformers, on one rank   /  each gradient, greedy text       for each, with the
                                                                               difference and its
                                                                               tolerance

Each tolerance stands next to its reason. On ranks without transformers' numbers (None) the
rows are zeros, from the same collectives. No code of a model folder is ever run.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from rich.table import Table
from torch import Tensor

from dolmen.conversion.hf_export import check_expressible, transformers_folder
from dolmen.conversion.source import ModelSource
from dolmen.conversion.weights import check_whole
from dolmen.core import collectives, state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.torch_private import hub
from dolmen.data.batch import Batch
from dolmen.evaluation import reference_model
from dolmen.evaluation.validate import batch_of, objective_of
from dolmen.families import ModelConfig, compare_fields
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.parallel import data, vocabulary
from dolmen.serving import engine

SEQUENCES, NEW_TOKENS, SEED = 4, 16, 0


@dataclass(frozen=True)
class VerifyRow:
    """Comparison of one quantity. A NaN difference is not within any tolerance."""

    name: str
    difference: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """True if the difference is within its tolerance."""
        return abs(self.difference) <= self.tolerance


@dataclass(frozen=True)
class VerifyReport:
    """Results of `verify`, the same on all ranks, except that only rank 0 has the rows' notes."""

    title: str
    rows: tuple[VerifyRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if all rows are within their tolerances."""
        return all(row.ok for row in self.rows)

    def table(self) -> Table:
        """Return the comparison as a table for a rich console, a row per quantity."""
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
    """Numbers that transformers computed."""

    logits: Tensor  # [sequences, length, vocab]
    loss: float
    gradients: dict[str, Tensor] | None  # by our names
    new_tokens: Tensor  # [sequences, new]
    new_logits: Tensor  # [sequences, new, vocab], of which they are the largest


@dataclass(frozen=True)
class _Tokens:
    """Random tokens, the same on every rank: windows [sequences, length + 1], whose first `prompt`
    tokens are prompts for greedy generation of `new` tokens.
    """

    windows: Tensor
    prompt: int
    new: int
    """Number of tokens to generate; 0 for masked LMs."""

    @property
    def prompts(self) -> Tensor:
        """Prompts for generation: the first `prompt` tokens of each window, [sequences, prompt]."""
        return self.windows[:, : self.prompt]

    def batch(self, spec: ModelSpec) -> Batch:
        """Return the windows as a training batch for the model `spec`."""
        return batch_of(spec, self.windows.cpu().numpy())


def verify(
    source: ModelSource,
    against: ModelSource | None = None,
    mesh: Mesh = SINGLE,
    length: int = 64,
    gradients: bool = True,
) -> VerifyReport:
    """Compare dolmen on `source` with transformers on `against` (default: the same source), which
    is exported to a temporary folder if transformers cannot load it.

    Collective; every rank returns the same verdict. Rank 0 holds the model three times in fp32
    (ours, and the gradients of both), or once without `gradients`. Raises ValueError or KeyError,
    before loading, where a source cannot be read or exported, or the models have different shapes.
    """
    against = source if against is None else against
    notes = _differences(source, against)
    spec = source.spec
    tokens = _tokens(spec, length, mesh.device, against.model.config.get("pad_token_id"))
    read = tokens.batch(spec).tokens.shape[1]
    windows = {block.mixer.window for block in spec.blocks}
    for window in sorted(w for w in windows if w is not None):
        if read <= window < spec.max_position_embeddings:
            notes.append(
                f"--length {read} is shorter than the sliding window of {window}, so the "
                "window is not tested: use a larger --length"
            )
    with reference_model.fp32_products():
        reference = None
        # transformers runs on rank 0 only
        if mesh.first:
            with reference_model.quiet_transformers(), transformers_folder(against) as folder:
                reference = _run_transformers(folder, against.model, tokens, mesh.device, gradients)
        model = engine.load_decoder(source, mesh, torch.float32)
        rows = _compare(model, mesh, tokens, reference, gradients)
    size = f"{SEQUENCES} x {read} random tokens, fp32, tp {mesh.tp.size}"
    exported = "" if against.transformers else ", exported"
    return VerifyReport(
        f"dolmen on {source.where}\ntransformers on {against.where}{exported}\n{size}",
        broadcast_rows(rows, mesh),
        tuple(notes),
    )


def _differences(source: ModelSource, against: ModelSource) -> list[str]:
    """Return a note for each config.json field in which the two models differ. Raises ValueError
    where shapes differ, a source cannot be read, or transformers has no such model.
    """
    check_expressible(against.model, against.spec)
    if not against.model.family.in_transformers:
        raise ValueError(
            f"{against.where} is a {against.model.model_type}, for which transformers has no "
            "class to compare with"
        )
    fields = [
        f"{name} is {a} in {source.where.name}, {b} in {against.where.name}"
        for name, a, b in compare_fields(source.model, against.model)
    ]
    if source.spec.shapes != against.spec.shapes:
        raise ValueError(
            f"{source.where} and {against.where} are models of different shapes "
            f"({'; '.join(fields)}): give another --against"
        )
    check_whole(source, against)
    return fields


def _tokens(spec: ModelSpec, length: int, device: torch.device, padding: int | None) -> _Tokens:
    """Return random tokens for the comparison: `length` + 1 per sequence, or as many as the model's
    positions allow, without the id `padding`.
    """
    most = spec.max_position_embeddings
    shape = (SEQUENCES, max(2, min(length + 1, most)))
    windows = reference_model.random_tokens(spec.vocab_size, shape, padding, SEED)
    new = 0 if spec.both_ways else max(1, min(NEW_TOKENS, most // 2))
    return _Tokens(windows.to(device), min(windows.shape[1] - 1, most - new + 1), new)


def _run_transformers(
    folder: Path, stated: ModelConfig, tokens: _Tokens, device: torch.device, gradients: bool
) -> Reference:
    """Load transformers' model from `folder` (which dolmen reads as `stated`), run it on the
    tokens, and return its logits, loss, gradients if wanted, and greedily generated tokens for
    causal models.
    """
    from transformers import GenerationConfig  # 2.4 s to import: not owed by `--help`

    model = reference_model.load_reference(folder, stated, torch.float32, device)
    with torch.set_grad_enabled(gradients):
        if tokens.new:
            out = model(tokens.windows, labels=tokens.windows, use_cache=False)
            logits, loss = out.logits[:, :-1], out.loss
        else:
            logits, loss = reference_model.logits_and_loss(model, stated, tokens.batch(stated.spec))
    if gradients:
        loss.backward()
    stored = hub.revert_weight_names(model, {name: p.grad for name, p in model.named_parameters()})
    expected_gradients = reference_model.tensors_by_our_names(stated, stored) if gradients else None
    if not tokens.new:
        none = tokens.windows[:, :0], logits.detach()[:, :0]
        return Reference(logits.detach(), loss.item(), expected_gradients, *none)
    # greedy and endless, whatever the folder's own has
    model.generation_config = GenerationConfig()
    generated = model.generate(
        tokens.prompts,
        attention_mask=torch.ones_like(tokens.prompts),
        max_new_tokens=tokens.new,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Reference(
        logits.detach(),
        loss.item(),
        expected_gradients,
        generated.sequences[:, tokens.prompt :],
        torch.stack(generated.logits, 1),
    )


def _compare(
    model: Decoder, mesh: Mesh, tokens: _Tokens, reference: Reference | None, gradients: bool
) -> list[VerifyRow]:
    """Compute logits, loss, gradients and greedy tokens with dolmen, and return a comparison of
    each with the reference. Collective; on ranks without a `reference` the numbers are zeros.
    """
    batch = tokens.batch(model.spec)
    objective, count = objective_of(model.spec, batch), batch.weight
    batch = batch.to(mesh.device)
    inputs = batch.tokens
    with torch.no_grad():
        logits = vocabulary.gather_vocabulary(
            model(inputs, head.compute_logits), model.spec.vocab_size, mesh.tp
        )
    with torch.set_grad_enabled(gradients):
        output = model(inputs, lambda hidden, head: objective(hidden, head, batch))
        loss = output.total / count
    rows = [
        logits_row(logits, reference),
        relative_row("loss", loss.item(), reference and reference.loss, LOSS),
    ]
    if gradients:
        loss.backward()
        # gradients that each tp rank has a part of
        data.sum_partial(model, model.partial(), mesh)
        rows += gradient_rows(model, reference and reference.gradients)
    if not tokens.new:
        return rows
    if not logits.isfinite().all():
        return [*rows, VerifyRow("greedy tokens", math.nan, 0, "none: logits are not finite")]
    continued = engine.generate(model, tokens.prompts.tolist(), tokens.new)
    return [*rows, greedy_row(continued, reference, rows[0].tolerance)]


# fp32 rounds at 6e-8, and two correct implementations add in different orders. Seen over 24 random
# layers, and in brackets with activations fifty times the others: logits 3e-6 (3e-5), loss 1e-7
# (1e-7), norm 7e-6 (2e-5), gradients 4e-6 (6e-4).
LOGITS = 1e-4  # of the largest logit
LOSS = 1e-5  # relative: a mean over hundreds of tokens
NORM = 1e-4  # relative, of the whole gradient
GRADIENT = 2e-3  # of a tensor's norm, or of FLOOR times the whole gradient's:
FLOOR = 1e-3  # key biases have gradient zero, the rest is rounding


def logits_row(
    logits: Float[Tensor, "sequences length vocab"], reference: Reference | None
) -> VerifyRow:
    """Return the comparison of the logits: their largest absolute difference, of which 1e-4 times
    the largest logit is allowed; zeros without a reference.
    """
    if reference is None:
        return VerifyRow("logits", 0, 0)
    assert logits.shape == reference.logits.shape, (logits.shape, reference.logits.shape)
    largest, difference = (
        reference.logits.abs().max().item(),
        (logits - reference.logits).abs().max().item(),
    )
    return VerifyRow(
        "logits", difference, LOGITS * largest, f"absolute; the largest is {largest:.4g}"
    )


def relative_row(name: str, ours: float, reference: float | None, tolerance: float) -> VerifyRow:
    """Return the comparison of one number: |ours - reference| / |reference|, NaN if the reference
    is 0; zeros without a reference.
    """
    if reference is None:
        return VerifyRow(name, 0, 0)
    difference = abs(ours - reference) / abs(reference) if reference else math.nan
    return VerifyRow(name, difference, tolerance, f"relative; {ours:.7g} and {reference:.7g}")


def gradient_rows(model: Decoder, reference: dict[str, Tensor] | None) -> list[VerifyRow]:
    """Return two comparisons: the norm of the whole gradient, and the parameter whose gradient
    differs most, as |ours - reference| / |reference|, where |reference| counts as at least 1e-3 of
    the whole norm. Gathers each gradient on every rank, one at a time, and frees it. Zeros without
    a reference.
    """
    ours, differences = 0.0, {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        assert p.grad is not None, name
        gradient, p.grad = state.gather_full(p.grad), None  # whole, one at a time
        if reference is None:
            continue
        assert gradient.shape == reference[name].shape, (
            name,
            gradient.shape,
            reference[name].shape,
        )
        ours += gradient.double().square().sum().item()
        differences[name] = torch.linalg.vector_norm(gradient - reference[name]).item()
    if reference is None:
        return [VerifyRow("gradient norm", 0, 0), VerifyRow("gradients", 0, 0)]
    norms = {name: torch.linalg.vector_norm(g).item() for name, g in reference.items()}
    full = math.hypot(*norms.values())
    relative = {
        name: differences[name] / max(norms[name], FLOOR * full) if full else math.nan
        for name in differences
    }
    worst = max(
        relative, key=lambda name: math.inf if math.isnan(relative[name]) else relative[name]
    )
    return [
        relative_row("gradient norm", math.sqrt(ours), full, NORM),
        VerifyRow("gradients", relative[worst], GRADIENT, f"relative; worst is {worst}"),
    ]


def greedy_row(
    continued: list[list[int]], reference: Reference | None, tolerance: float
) -> VerifyRow:
    """Return the comparison of generated token ids: how many of the sequences differ from
    transformers', 0 allowed. A sequence whose first different token has a logit within twice the
    `tolerance` counts as a tie, not as a difference. Zeros without a reference.
    """
    if reference is None:
        return VerifyRow("greedy tokens", 0, 0)
    wrong, ties = 0, 0
    assert reference.new_tokens.shape == (len(continued), len(continued[0])), (
        reference.new_tokens.shape
    )
    for ours, other, logits in zip(
        continued, reference.new_tokens.tolist(), reference.new_logits, strict=True
    ):
        if ours == other:
            continue
        # first token that differs: later ones follow from it
        step = next(i for i, (a, b) in enumerate(zip(ours, other, strict=True)) if a != b)
        tie = (logits[step, other[step]] - logits[step, ours[step]]).item() <= 2 * tolerance
        wrong, ties = wrong + (not tie), ties + tie
    best = reference.new_logits.topk(min(2, reference.new_logits.shape[-1]), -1).values
    margin = (best[..., 0] - best[..., -1]).min().item()
    note = (
        f"{len(continued)} sequences of {len(continued[0])} tokens; smallest logit margin "
        f"{margin:.2g}"
    )
    return VerifyRow("greedy tokens", wrong, 0, note + f"; {ties} differ at a tie" * bool(ties))


def broadcast_rows(rows: list[VerifyRow], mesh: Mesh) -> tuple[VerifyRow, ...]:
    """Return the comparisons with rank 0's differences and tolerances on every rank. Collective."""
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
