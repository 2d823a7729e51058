"""Ours against transformers on the same random tokens, in fp32: the same function, the same
gradient, the same text.

    source  -> dolmen, split over tp       \\  logits, loss, gradient norm,    Report: a row for
    against -> transformers, on one rank   /  each gradient, greedy text       each, with difference
                                                                               and tolerance

Each row's tolerance comes with its reason, in compare.py. No code of a model folder is ever run.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dolmen.conversion.hf_export import check_expressible, transformers_folder
from dolmen.conversion.moments import check_whole
from dolmen.conversion.source import Source
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.core.torch_private import hub
from dolmen.data.batch import Batch
from dolmen.evaluation import theirs
from dolmen.evaluation.compare import (
    LOSS,
    Reference,
    Report,
    Row,
    agreed,
    gradient_rows,
    greedy_row,
    logits_row,
    relative_row,
)
from dolmen.evaluation.validate import batch_of, objective_of
from dolmen.families import Model, compare_fields
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.parallel import data, vocabulary
from dolmen.serving import engine

SEQUENCES, NEW_TOKENS, SEED = 4, 16, 0


@dataclass(frozen=True)
class _Tokens:
    """The same on every rank: windows [sequences, length + 1], whose beginnings are the prompts of
    the continuation.
    """

    windows: Tensor
    prompt: int
    new: int
    """0: the model fills in tokens, and continues no text."""

    @property
    def prompts(self) -> Tensor:
        return self.windows[:, : self.prompt]

    def batch(self, tree: ModelSpec) -> Batch:
        """What is read and is to be said."""
        return batch_of(tree, self.windows.cpu().numpy())


def verify(
    source: Source,
    against: Source | None = None,
    mesh: Mesh = SINGLE,
    length: int = 64,
    gradients: bool = True,
) -> Report:
    """Compare dolmen on `source` with transformers on `against` (default: the same source), which
    is exported for the while where transformers cannot load it.

    Every rank calls it and gets the same verdict. The first rank's device holds the model three
    times in fp32 (ours and the gradients of both), or once where `gradients` is off. Raises
    ValueError or KeyError, before anything is loaded, where a source cannot be read or exported, or
    the two hold models of different shapes.
    """
    against = source if against is None else against
    notes = _differences(source, against)
    tree = source.tree
    tokens = _tokens(tree, length, mesh.device, against.model.config.get("pad_token_id"))
    read = tokens.batch(tree).tokens.shape[1]
    windows = {block.mixer.window for block in tree.blocks}
    for window in sorted(w for w in windows if w is not None):
        if read <= window < tree.max_position_embeddings:
            notes.append(
                f"{read} tokens do not fill the sliding window of {window}: use a larger --length"
            )
    with theirs.precise():
        reference = None
        if mesh.first:
            with theirs.quiet(), transformers_folder(against) as folder:
                reference = _ask_transformers(folder, against.model, tokens, mesh.device, gradients)
        model = engine.load_decoder(source, mesh, torch.float32)
        rows = _compare(model, mesh, tokens, reference, gradients)
    size = f"{SEQUENCES} x {read} random tokens, fp32, tp {mesh.tp.size}"
    exported = "" if against.transformers else ", exported"
    return Report(
        f"dolmen on {source.where}\ntransformers on {against.where}{exported}\n{size}",
        agreed(rows, mesh),
        tuple(notes),
    )


def _differences(source: Source, against: Source) -> list[str]:
    """A note for each value in which the two differ. Raises ValueError where shapes differ, and
    where one cannot be read or transformers is not to be asked.
    """
    check_expressible(against.model, against.tree)
    if not against.model.family.in_transformers:
        raise ValueError(
            f"{against.where} is of {against.model.model_type}, for which transformers has no "
            "class: verify has nothing to compare it with"
        )
    fields = [
        f"{name} is {a} in {source.where.name}, {b} in {against.where.name}"
        for name, a, b in compare_fields(source.model, against.model)
    ]
    if source.tree.shapes != against.tree.shapes:
        raise ValueError(
            f"{source.where} and {against.where} hold models of different shapes "
            f"({'; '.join(fields)}): give another --against"
        )
    check_whole(source, against)
    return fields


def _tokens(tree: ModelSpec, length: int, device: torch.device, padding: int | None) -> _Tokens:
    """Random tokens; how many of them, and of a continuation, the model takes."""
    most = tree.max_position_embeddings
    if length < 1:
        raise ValueError(f"length is {length}: use --length 1 or more")
    shape = (SEQUENCES, max(2, min(length + 1, most)))
    windows = theirs.draw(tree.vocab_size, shape, padding, SEED)
    new = 0 if tree.both_ways else max(1, min(NEW_TOKENS, most // 2))
    return _Tokens(windows.to(device), min(windows.shape[1] - 1, most - new + 1), new)


def _ask_transformers(
    folder: Path, stated: Model, tokens: _Tokens, device: torch.device, gradients: bool
) -> Reference:
    """Of a folder of the model `stated`. Labels are shifted by transformers itself, but for those
    of a model that fills in tokens.
    """
    from transformers import GenerationConfig  # 2.4 s to import: not owed by `--help`

    model = theirs.load(folder, stated, torch.float32, device)
    with torch.set_grad_enabled(gradients):
        if tokens.new:
            out = model(tokens.windows, labels=tokens.windows, use_cache=False)
            logits, loss = out.logits[:, :-1], out.loss
        else:
            logits, loss = theirs.asked(model, stated, tokens.batch(stated.tree))
    if gradients:
        loss.backward()
    stored = hub.revert_weight_names(model, {name: p.grad for name, p in model.named_parameters()})
    wanted = theirs.by_our_names(stated, stored) if gradients else None
    if not tokens.new:
        none = tokens.windows[:, :0], logits.detach()[:, :0]
        return Reference(logits.detach(), loss.item(), wanted, *none)
    # greedy and endless, whatever the folder's own says
    model.generation_config = GenerationConfig()
    told = model.generate(
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
        wanted,
        told.sequences[:, tokens.prompt :],
        torch.stack(told.logits, 1),
    )


def _compare(
    model: Decoder, mesh: Mesh, tokens: _Tokens, reference: Reference | None, gradients: bool
) -> list[Row]:
    """The rows, on the first rank; elsewhere (`reference` is None) rows of zeros, from the same
    collectives.
    """
    batch = tokens.batch(model.tree)
    objective, count = objective_of(model.tree, batch), batch.weight
    batch = batch.to(mesh.device)
    inputs = batch.tokens
    with torch.no_grad():
        logits = vocabulary.gather_vocabulary(
            model(inputs, head.compute_logits), model.tree.vocab_size, mesh.tp
        )
    with torch.set_grad_enabled(gradients):
        judged = model(inputs, lambda hidden, head: objective(hidden, head, batch))
        loss = judged.total / count
    rows = [
        logits_row(logits, reference),
        relative_row("loss", loss.item(), reference and reference.loss, LOSS),
    ]
    if gradients:
        loss.backward()
        data.sum_partial(model, model.partial(), mesh)
        rows += gradient_rows(model, reference and reference.gradients)
    if not tokens.new:
        return rows
    if not logits.isfinite().all():
        return [*rows, Row("greedy tokens", math.nan, 0, "none: logits are not finite")]
    continued = engine.generate(model, tokens.prompts.tolist(), tokens.new)
    return [*rows, greedy_row(continued, reference, rows[0].tolerance)]
