"""The objective of answers that were drawn, beside a plain loop over logits in float64."""

import math

import pytest
import torch
from models import build, initialize
from table import FAMILIES

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model import head
from dolmen.model.layout import Layout
from dolmen.objectives.drawn import ADVANTAGE, OLD, REFERENCE, Group
from dolmen.ops.loss import IGNORED


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_is_grpo_written_from_the_paper(temperature):
    """2402.03300, equation 3, token by token."""
    config = FAMILIES["llama"]
    model = build(config, SINGLE, Layout(), None, dtype=torch.float64)
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 50, (3, 8), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[:, :2], labels[:, 6:] = IGNORED, IGNORED
    old, reference = -4 + torch.rand(2, 3, 8, generator=generator).double()
    advantages = torch.tensor([1.0, -2.0, 0.5]).double()
    batch = Batch(
        tokens,
        labels,
        numbers={OLD: old, ADVANTAGE: advantages[:, None].expand(3, 8), REFERENCE: reference},
    )
    group = Group(beta=0.3, temperature=temperature)
    found = model(tokens, lambda hidden, end: group(hidden, end, batch))
    logits = model(tokens, head.logits)
    total = 0.0
    for row in range(3):
        losses = []
        for place in range(2, 6):
            p = (logits[row, place] / temperature).log_softmax(-1)[labels[row, place]].item()
            r, a = math.exp(p - old[row, place].item()), advantages[row].item()
            d = reference[row, place].item() - p
            losses.append(-min(r * a, min(max(r, 0.8), 1.2) * a) + 0.3 * (math.exp(d) - d - 1))
        total += sum(losses) / len(losses)
    assert found.total.item() == pytest.approx(total, rel=1e-12)
    assert group.count(batch) == 3
