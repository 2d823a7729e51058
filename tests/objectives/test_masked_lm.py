"""Filling in masked tokens and judging pairs of texts, against BertForPreTraining of transformers
in float64: the loss that it computes from its own labels, and all gradients. Sequences are padded:
there by a mask of attention, here padding is a document of its own.
"""

import contextlib
import io
from dataclasses import replace

import pytest
import torch
import transformers
from stored import exported_trained

from dolmen.conversion.source import load_weights, open_source
from dolmen.core import state
from dolmen.data.batch import FOLLOWS, IGNORED, Batch
from dolmen.model.decoder import Decoder
from dolmen.objectives.objective import MaskedLM
from dolmen.ops.attention import Documents
from dolmen.ops.rope import PositionIds

ROWS, LENGTH, PADDED = 4, 14, (0, 3, 5, 0)  # of each row, tokens of padding at its end
TOLERANCE = 1e-12  # float64, sums of 14 tokens in another order


def bert(folder):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        pad_token_id=None,
    )
    model = transformers.BertForPreTraining(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.2 + (p.ndim == 1))
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    return model.double()


def inputs():
    """Theirs, and ours."""
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(61, (ROWS, LENGTH), generator=chance)
    places = torch.arange(LENGTH).expand(ROWS, -1)
    end = LENGTH - torch.tensor(PADDED)[:, None]
    types = ((places >= 6) & (places < end)).long()
    masked = (torch.rand(ROWS, LENGTH, generator=chance) < 0.3) & (places < end)
    labels = torch.where(masked, tokens.flip(0), IGNORED)
    elsewhere = torch.tensor([0, 1, 1, 0])  # as transformers says it
    theirs = dict(
        input_ids=tokens,
        token_type_ids=types,
        attention_mask=(places < end).long(),
        labels=labels,
        next_sentence_label=elsewhere,
    )
    said = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    said[:, 0] = 1 - 2 * elsewhere
    ours = Batch(
        tokens,
        labels,
        Documents.from_starts(torch.where(places < end, 0, end)),
        PositionIds.from_ids(torch.stack((places, types), 1)),
        numbers={FOLLOWS: said},
    )
    return theirs, ours


def test_the_loss_of_bert(tmp_path):
    theirs, (given, batch) = bert(tmp_path), inputs()
    source = open_source(tmp_path)
    ours = Decoder(source.spec).double()
    parameters = dict(ours.named_parameters())
    load_weights(source, lambda name, w: state.write_region(parameters[name], w.double()))
    wanted = theirs(**given).loss
    wanted.backward()
    objective = MaskedLM(follows=batch.real_tokens / ROWS)
    scored = ours(
        batch.tokens,
        lambda hidden, head: objective(hidden, head, batch),
        documents=batch.documents,
        positions=batch.positions,
    )
    loss = scored.total / objective.count(batch)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(sum(scored.metrics), scored.total.detach(), rtol=TOLERANCE, atol=0)
    got = dict(exported_trained(source.model, lambda name: parameters[name].grad))
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert got.keys() == expected.keys()
    largest = max(g.abs().max() for g in expected.values())
    for name, g in expected.items():
        off = (got[name] - g).abs().max() / max(g.abs().max(), 1e-3 * largest)
        assert off < TOLERANCE, f"{name}: {off:.1e}"


def test_what_is_refused(tmp_path):
    _, batch = inputs()
    with pytest.raises(ValueError, match="numbers\\['follows'\\]"):
        MaskedLM(1.0).count(Batch(batch.tokens, batch.labels))
    bert(tmp_path)
    spec = open_source(tmp_path).spec
    alone = Decoder(replace(spec, head=replace(spec.head, follows=False)))
    with pytest.raises(ValueError, match="no next-sentence head"):
        alone(batch.tokens, lambda hidden, head: head.follows(hidden))
