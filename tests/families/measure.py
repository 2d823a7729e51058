"""How far a case is from its reference: the numbers that the tests hold, and that the table of
families shows (benchmarks/families.py).
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from family_cases import CASES, build, save
from stored import exported_trained
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from wide import Wide, double

from dolmen.conversion.source import ModelSource, load_weights, open_source
from dolmen.core import state
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.spec import ModelSpec
from dolmen.ops.loss import IGNORED
from dolmen.serving import engine

LENGTH, PROMPT, NEW = 40, 7, 12  # longer than windows and first contexts of the cases


def read(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSource, Decoder]:
    """Ours, of a folder; NaN where nothing was read."""
    source = open_source(folder)
    ours = Decoder(source.spec).to(dtype).eval()
    parameters = dict(ours.named_parameters())
    with torch.no_grad():
        for p in parameters.values():
            p.fill_(float("nan"))
        load_weights(
            source, lambda name, full: state.write_region(parameters[name], full.to(dtype))
        )
    return source, ours


def tokens_of(source: ModelSource, rows: int = 2, length: int = LENGTH) -> Tensor:
    """Without padding: transformers gives its rows of tables no gradient."""
    tokens = torch.randint(0, source.spec.vocab_size, (rows, length))
    padding = source.model.config.get("pad_token_id")
    if source.spec.embedding.types is not None and padding is not None:
        tokens = tokens.masked_fill(tokens == padding, 0)
    return marked(source.spec, tokens)


def marked(spec: ModelSpec, tokens: Tensor) -> Tensor:
    """With a blank in each row of a model that knows positions by it, of another kind in each; the
    last row of three has none.
    """
    if spec.blanks is not None:
        known = [mask.token for mask in spec.blanks.masks if mask.token is not None]
        for row, mask in zip(tokens, (known[0], known[-1]), strict=False):
            row[2], row[5] = mask, spec.blanks.start
    return tokens


def labelled(case: str, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """What the model is given of `tokens`, and what it is to say: the next ones, or what some of
    them were.
    """
    if CASES[case].fills:
        return tokens, torch.where(torch.rand(tokens.shape) < 0.3, tokens.flip(0), IGNORED)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Gradients:
    """Of one batch's loss."""

    loss: float
    """Relative difference."""
    expected: dict[str, Tensor]
    """Of the reference, by stored names."""
    off: dict[str, float]
    """Largest difference of each, by the tensor's largest element."""


def gradients(case: str, dtype: torch.dtype, folder: Path) -> Gradients:
    """Ours and the reference's, in `dtype`; what is stored is fp32."""
    stored, source_folder = build(case), save(build(case), folder)
    theirs, mode, plain = stored, nullcontext(), CASES[case].plain is not None
    if dtype == torch.float64 and plain:
        theirs = stored.double()
    elif dtype == torch.float64:
        theirs, mode = double(stored.config, CASES[case].made), Wide()
        if CASES[case].alter:
            theirs = CASES[case].alter(theirs).double()
        theirs.load_state_dict(stored.state_dict())
    source, ours = read(source_folder, dtype)
    tokens, labels = labelled(case, tokens_of(source))
    with mode:
        logits = theirs(tokens).logits
    assert logits.dtype == dtype
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss = (
        engine.run_whole(ours, tokens, head.cross_entropy_function(labels))
        / (labels != IGNORED).sum()
    )
    expected.backward()
    loss.backward()
    parameters = dict(ours.named_parameters())
    got = dict(exported_trained(source.model, lambda name: parameters[name].grad))
    wanted = _stored(theirs, plain)
    assert got.keys() == wanted.keys()
    largest = max(g.abs().max() for g in wanted.values())
    off = {
        # a key's bias shifts all scores of a query alike: its true gradient is 0
        name: float((got[name] - g).abs().max() / max(g.abs().max(), 1e-3 * largest))
        for name, g in wanted.items()
    }
    return Gradients(abs(loss.item() / expected.item() - 1), wanted, off)


def _stored(theirs: nn.Module, plain: bool) -> dict[str, Tensor]:
    """Gradients by the names that files have."""
    found = {n: p.grad for n, p in theirs.named_parameters()}
    return found if plain else revert_weight_conversion(theirs, found)


@torch.no_grad()
def texts(case: str, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy texts of three prompts: ours with a cache, and the reference's; none of a model that
    fills in tokens.
    """
    if CASES[case].fills:
        return [], []
    theirs, ours = build(case), engine.load_decoder(open_source(save(build(case), folder)))
    prompts = marked(ours.spec, torch.randint(0, ours.spec.vocab_size, (3, PROMPT)))
    theirs.generation_config = transformers.GenerationConfig()  # no token ends a text
    expected = theirs.generate(prompts, max_new_tokens=NEW, do_sample=False)[:, PROMPT:]
    return engine.generate(ours, prompts.tolist(), NEW), expected.tolist()
