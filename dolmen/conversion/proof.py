"""Proof that a conversion is the same model: the written folder is opened again, by nothing but
what it says of itself, and compared with the source, tensor by tensor and then by what both
compute.

Both compute on the same random tokens in fp32, from the numbers that were written, so all logits
are equal to the bit. Where both models fit into memory they are computed whole, else a layer at a
time, with one layer's weights in memory, and what leaves every layer is compared.
"""

from collections.abc import Collection, Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dolmen.conversion.moments import Moments, Tensors
from dolmen.conversion.source import Source
from dolmen.conversion.weights import Scales
from dolmen.core.messages import Failed
from dolmen.model import head
from dolmen.model.decoder import Decoder
from dolmen.model.split import PipelinePart, single_process

TOKENS = 24
ROOM = 2 * 2**30
"""Bytes that both models may take in memory at once."""


class Unlike(Failed):
    """The written model differs from its source."""


def compare_weights(
    source: Tensors, written: Tensors, only: Collection[str] | None = None, of: str = ""
) -> Generator[int, None, None]:
    """Yields 1 for each parameter, or each of `only`, that is the same to the bit, in the dtype
    that it is written in. Raises Unlike naming the first that is not, with the kind `of` which it
    is.
    """
    specs = written.specs
    if source.specs.keys() != specs.keys():
        other = sorted(source.specs.keys() ^ specs.keys())
        raise Unlike(f"what was written has other parameters than {source.where}: {other[:3]}")
    for name, tensor in source.stream(only):
        expected = tensor.to(specs[name].dtype)
        if not _same(expected, written.read(name)):
            raise Unlike(
                f"{of}{name} reads back otherwise from {written.where} than it was written"
            )
        del tensor, expected
        yield 1


def compare_state(state: Moments, written: Source) -> str:
    """Check that an optimizer's state is the same to the bit, dtypes too; return a report. Raises
    Unlike.
    """
    found = written.moments
    if found is None or found.step != state.step:
        raise Unlike(f"{written.where} has not the optimizer of {state.step} updates")
    kinds = {**found.kinds, "param": written.precise}
    for kind, tensors in state.kinds.items():
        specs = kinds[kind].specs
        for name in found.kinds["exp_avg"].specs:
            if specs[name] != tensors.specs[name]:
                raise Unlike(f"{kind} of {name} is {specs[name].dtype} in {written.where}")
        for _ in compare_weights(tensors, kinds[kind], of=f"{kind} of "):
            pass
    masters = " and fp32 masters" * ("param" in state.kinds)
    return f"; AdamW's moments of {state.step} updates{masters} too"


def compare_scales(scales: Scales, written: Source) -> str:
    """Check that the scales of delayed scaling are the same to the bit; return a report. Raises
    Unlike.
    """
    found = written.scaling
    if found.keys() != scales.keys():
        raise Unlike(f"{written.where} has scales of {len(found)} weights, not of {len(scales)}")
    for name, one in scales.items():
        if not all(_same(a, b) for a, b in zip(one, found[name], strict=True)):
            raise Unlike(f"scales of {name} read back otherwise from {written.where}")
    return f"; scales of {len(scales)} weights too" if scales else ""


def compare_logits(source: Source, written: Source, room: int = ROOM) -> str:
    """How they were compared, in words. Raises Unlike naming the first layer whose hidden vectors
    differ.
    """
    tree = source.tree
    if tree.has_prefix_mask or tree.streams > 1:
        return "logits not compared: their positions follow from special tokens"
    need = 8 * sum(leaf.elements for leaf in tree.leaves.values())
    step = tree.layers if need <= room else 1
    length = min(TOKENS, tree.longest or TOKENS)
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(tree.vocab_size, (1, length), generator=draw)
    dtypes = {name: spec.dtype for name, spec in written.specs.items()}
    one = other = None
    for start in range(0, tree.layers, step):
        layers = range(start, min(start + step, tree.layers))
        one = _run(source, layers, dtypes, tokens, one)
        other = _run(written, layers, dtypes, tokens, other)
        if not _same(one, other):
            last = layers.stop == tree.layers
            raise Unlike(
                f"{'logits' if last else f'hidden vectors behind layer {start}'} of "
                f"{written.where} are not those of {source.where}: largest difference "
                f"{float((one - other).abs().max()):.1e}"
            )
    return "logits equal" + (" block by block" if step == 1 and tree.layers > 1 else "")


def _run(
    source: Source, layers: range, dtypes: dict[str, torch.dtype], tokens: Tensor, x: Tensor | None
) -> Tensor:
    """Run some layers on x, the first of them on tokens; the last layer returns logits."""
    tree = source.tree
    part = PipelinePart(layers, layers.start == 0, layers.stop == tree.layers)
    with torch.device("meta"):
        model = Decoder(tree, replace(single_process(tree.layers), parts=(part,)))
    model = model.to(torch.float32).to_empty(device="cpu").eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(source.read(name).to(dtypes[name]))
        end: Any = head.compute_logits if part.last else None
        return model(tokens, end, x=x)


def _same(one: Tensor, other: Tensor) -> bool:
    """To the bit, so that what is no number equals itself."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8),
        other.contiguous().reshape(-1).view(torch.uint8),
    )
