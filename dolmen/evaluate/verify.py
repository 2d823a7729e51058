"""Ours against transformers on the same random tokens, in fp32: the same function, the same
gradient, the same text.

    folder  -> dolmen, split over tp       \\  logits, loss, gradient norm,    Report: a row for
    against -> transformers, on one rank   /  each gradient, greedy text       each, with difference
                                                                               and tolerance

Each row's tolerance comes with its reason, below. No code of a model folder is ever run.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from dolmen.convert import hf
from dolmen.convert.weights import assemble
from dolmen.core import collectives, state
from dolmen.core.mesh import SINGLE, Mesh
from dolmen.data.batch import Batch
from dolmen.families import Model, compared, weight_map
from dolmen.model.decoder import Decoder
from dolmen.model.tree import Tree
from dolmen.parallel import data, tensor
from dolmen.serve import engine

SEQUENCES, NEW_TOKENS, SEED = 4, 16, 0

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
    """What was compared, and how it came out; the notes of rows are known to the first
    rank alone.
    """

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
            "compared", "difference", "allowed", "", "", title=self.title, caption=caption
        )
        for row in self.rows:
            verdict = "ok" if row.ok else "DIFFERS"
            table.add_row(
                row.name, f"{row.difference:.3g}", f"{row.tolerance:.3g}", verdict, row.note
            )
        return table


@dataclass(frozen=True)
class _Reference:
    """What transformers says."""

    logits: Tensor  # [sequences, length, vocab]
    loss: float
    gradients: dict[str, Tensor] | None  # by our names
    new_tokens: Tensor  # [sequences, new]
    new_logits: Tensor  # [sequences, new, vocab], of which they are the largest


@dataclass(frozen=True)
class _Tokens:
    """The same on every rank: windows [sequences, length + 1], whose beginnings are the prompts of
    the continuation.
    """

    windows: Tensor
    prompt: int
    new: int

    @property
    def prompts(self) -> Tensor:
        return self.windows[:, : self.prompt]


def verify(
    folder: Path | str,
    against: Path | str | None = None,
    mesh: Mesh = SINGLE,
    length: int = 64,
    gradients: bool = True,
) -> Report:
    """Compare dolmen on `folder` with transformers on `against` (default: the same folder), both
    paths or hub ids.

    Every rank calls it and gets the same verdict. The first rank's device holds the model three
    times in fp32 (ours and the gradients of both), or once where `gradients` is off. Raises
    ValueError or KeyError, before anything is loaded, where a folder cannot be read or the two hold
    models of different shapes.
    """
    folder, against = hf.resolve(folder), hf.resolve(folder if against is None else against)
    tree, notes = _structure(folder, against)
    padding = hf.read_config(against).config.get("pad_token_id")
    tokens = _tokens(tree, length, mesh.device, padding)
    read = tokens.windows.shape[1] - 1
    windows = {block.mixer.window for block in tree.blocks} - {None}
    for window in sorted(windows):
        if read <= window < tree.max_position_embeddings:
            notes.append(
                f"{read} tokens do not fill the sliding window of {window}: use a larger --length"
            )
    with _precise():
        theirs = None
        if mesh.first:
            with _quiet():
                theirs = _ask_transformers(against, tokens, mesh.device, gradients)
        model = engine.load(folder, mesh, torch.float32)
        rows = _compare(model, mesh, tokens, theirs, gradients)
    size = f"{SEQUENCES} x {read} random tokens, fp32, tp {mesh.tp.size}"
    return Report(
        f"dolmen on {folder}\ntransformers on {against}\n{size}", _agreed(rows, mesh), tuple(notes)
    )


def _structure(folder: Path, against: Path) -> tuple[Tree, list[str]]:
    """Our model, and a note for each value in which the two differ. Raises ValueError where shapes
    differ.
    """
    ours, theirs = hf.read_config(folder), hf.read_config(against)
    fields = [
        f"{name} is {a} in {folder.name}, {b} in {against.name}"
        for name, a, b in compared(ours, theirs)
    ]
    if ours.tree.shapes != theirs.tree.shapes:
        raise ValueError(
            f"{folder} and {against} hold models of different shapes ({'; '.join(fields)}): give "
            "another --against"
        )
    hf.check(folder, ours)
    if against != folder:
        hf.check(against, theirs)
    return ours.tree, fields


def _tokens(tree: Tree, length: int, device: torch.device, padding: int | None) -> _Tokens:
    """Random tokens, all but `padding`: transformers gives that row of the embedding no gradient
    (`padding_idx`), and we, who never pad, give it that of any token, so one such token would be a
    difference of 1e-2 between two right programs.
    """
    most = tree.max_position_embeddings
    if length < 1:
        raise ValueError(f"length is {length}: use --length 1 or more")
    shape = (SEQUENCES, max(2, min(length + 1, most)))
    generator = torch.Generator().manual_seed(SEED)
    vocabulary = tree.vocab_size
    if padding is None or vocabulary == 1:  # of one token, nothing else could be drawn
        windows = torch.randint(vocabulary, shape, generator=generator)
    else:
        windows = torch.randint(vocabulary - 1, shape, generator=generator)
        windows += windows >= padding % vocabulary  # torch counts a negative one from the end
    new = max(1, min(NEW_TOKENS, most // 2))
    return _Tokens(windows.to(device), min(windows.shape[1] - 1, most - new + 1), new)


@contextmanager
def _precise() -> Iterator[None]:
    """fp32 products in fp32: TF32 keeps 10 bits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and advice of transformers around our table; errors are shown."""
    from transformers import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _ask_transformers(
    folder: Path, tokens: _Tokens, device: torch.device, gradients: bool
) -> _Reference:
    """`eager` is the attention nearest to the papers; labels are shifted by transformers itself."""
    # 2.4 s to import: not owed by `--help`
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.core_model_loading import revert_weight_conversion

    model = (
        AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation="eager",
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
        )
        .to(device)
        .eval()
    )
    model.config.output_router_logits = False  # or the loss would hold the auxiliary one
    with torch.set_grad_enabled(gradients):
        out = model(tokens.windows, labels=tokens.windows, use_cache=False)
    if gradients:
        out.loss.backward()
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
    # experts apart, as in files
    stored = revert_weight_conversion(model, {name: p.grad for name, p in model.named_parameters()})
    return _Reference(
        out.logits.detach()[:, :-1],
        out.loss.item(),
        _by_our_names(hf.read_config(folder), stored) if gradients else None,
        told.sequences[:, tokens.prompt :],
        torch.stack(told.logits, 1),
    )


def _by_our_names(model: Model, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under transformers' names -> the same under ours, by the rules that import weights:
    they are linear.
    """
    weights = weight_map(model)
    named = {weights.canonical(name): tensor for name, tensor in stored.items()}
    found = dict(assemble([weights.entries[name] for name in named], named.__getitem__))
    assert found.keys() == model.tree.leaves.keys()
    return found


def _compare(
    model: Decoder, mesh: Mesh, tokens: _Tokens, theirs: _Reference | None, gradients: bool
) -> list[Row]:
    """The rows, on the first rank; elsewhere (`theirs` is None) rows of zeros, from the same
    collectives.
    """
    batch = Batch.of_windows(tokens.windows.cpu().numpy())
    inputs, labels = batch.tokens.to(mesh.device), batch.labels.to(mesh.device)
    with torch.no_grad():
        logits = tensor.gather_vocabulary(model(inputs), model.tree.vocab_size, mesh.tp)
    with torch.set_grad_enabled(gradients):
        loss = model(inputs, labels) / batch.real_tokens
    rows = [
        _logits_row(logits, theirs),
        _relative("loss", loss.item(), theirs and theirs.loss, LOSS),
    ]
    if gradients:
        loss.backward()
        data.sum_partial(model, model.partial(), mesh)
        rows += _gradient_rows(model, theirs and theirs.gradients)
    if not logits.isfinite().all():
        return [*rows, Row("greedy tokens", math.nan, 0, "none: logits are not finite")]
    continued = engine.generate(model, tokens.prompts.tolist(), tokens.new)
    return [*rows, _greedy_row(continued, theirs, rows[0].tolerance)]


def _logits_row(logits: Tensor, theirs: _Reference | None) -> Row:
    if theirs is None:
        return Row("logits", 0, 0)
    assert logits.shape == theirs.logits.shape, (logits.shape, theirs.logits.shape)
    largest, apart = theirs.logits.abs().max().item(), (logits - theirs.logits).abs().max().item()
    return Row("logits", apart, LOGITS * largest, f"absolute; the largest is {largest:.4g}")


def _relative(name: str, ours: float, theirs: float | None, tolerance: float) -> Row:
    if theirs is None:
        return Row(name, 0, 0)
    apart = abs(ours - theirs) / abs(theirs) if theirs else math.nan
    return Row(name, apart, tolerance, f"relative; {ours:.7g} and {theirs:.7g}")


def _gradient_rows(model: Decoder, theirs: dict[str, Tensor] | None) -> list[Row]:
    """Norm of the whole gradient, and the parameter whose gradient differs most: |ours - theirs| /
    |theirs|.
    """
    ours, apart = 0.0, {}
    for name, p in model.named_parameters():
        gradient, p.grad = state.full(p.grad), None  # whole, one at a time
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
        _relative("gradient norm", math.sqrt(ours), whole, NORM),
        Row("gradients", relative[worst], GRADIENT, f"relative; worst is {worst}"),
    ]


def _greedy_row(continued: list[list[int]], theirs: _Reference | None, tolerance: float) -> Row:
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
    note = f"{len(continued)} texts of {len(ours)} tokens; smallest margin {margin:.2g}"
    return Row("greedy tokens", wrong, 0, note + f"; {ties} part at a tie" * bool(ties))


def _agreed(rows: list[Row], mesh: Mesh) -> tuple[Row, ...]:
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
