"""Position ids of a batch: as written out token by token; rope of two streams against complex
numbers in float64; and what a model does with them.
"""

import numpy as np
import pytest
import torch
from tiny_models import Flat, build, initialize, with_mixer_fields

from dolmen.core.mesh import SINGLE
from dolmen.data.batch import Batch
from dolmen.model.component import PositionInputs
from dolmen.model.head import compute_logits
from dolmen.model.positions import tables
from dolmen.model.spec import RopeSpec
from dolmen.ops import rope
from dolmen.ops.attention import Documents
from dolmen.ops.rope import PositionIds

SIZES = dict(
    vocab_size=71,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=8,
    initializer_range=0.3,
)
LEARNED = dict(position="learned", norm="layernorm", mlp="plain", activation="gelu_tanh")
CONFIGS = {
    "rope": Flat(**SIZES),
    "two streams": with_mixer_fields(Flat(**SIZES), positions=RopeSpec(8, 100.0, streams=2)),
    "learned": Flat(**SIZES, **LEARNED, attention_bias=True, output_bias=True, mlp_bias=True),
}


def decoder(name: str):
    model = build(CONFIGS[name], SINGLE)
    initialize(model, 0)
    return model.eval()


def test_positions_begin_anew_in_each_document():
    batch = Batch.from_windows(np.array([[1, 2, 9, 3, 4, 5, 6], [9, 9, 1, 2, 3, 9, 4]]), 9)
    one = batch.add_positions(1).positions
    assert one.ids.tolist() == [[[0, 1, 2, 0, 1, 2]], [[0, 0, 0, 1, 2, 3]]] and one.longest == 4
    two = batch.add_prefixes(torch.tensor([[2], [3]])).add_positions(2).positions
    assert two.ids[0].tolist() == [[0, 1, 1, 0, 1, 1], [0, 0, 1, 0, 0, 1]]
    assert two.ids[1].tolist() == [[0, 0, 0, 1, 2, 2], [0, 0, 0, 0, 0, 1]]
    assert batch.add_positions(2).positions.ids.tolist() == [
        [[0] * 6, [1, 2, 3, 1, 2, 3]],
        [[0] * 6, [1, 1, 1, 2, 3, 4]],
    ]
    whole = Batch(batch.tokens, batch.labels).add_positions(1)
    assert whole.positions.ids.tolist() == [[list(range(6))]] * 2
    assert whole.split(2)[1].positions.ids.tolist() == [[list(range(6))]]
    assert whole.to(torch.device("meta")).positions.ids.is_meta


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("size", [16, 8], ids=["the head", "a part of it"])
def test_each_stream_turns_its_half(interleaved, size):
    """A pair as a complex number, times exp(i position theta^(-2i / (size / 2)))."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 16, generator=g, dtype=torch.float64)
    ids = torch.randint(100, (2, 2, 5), generator=g)
    form = RopeSpec(size, 50.0, interleaved=interleaved, streams=2)
    where = tables(form, 3, ids, torch.float64)
    assert isinstance(where, PositionInputs) and where.cos.shape == (2, 5, 1, size // 2)
    got = rope.rotate(x, where.cos, where.sin, interleaved, 2)
    want, half = x.clone(), size // 2
    for stream in range(2):
        for i in range(half // 2):
            first = stream * half + (2 * i if interleaved else i)
            second = first + (1 if interleaved else half // 2)
            angle = ids[stream].double() * 50.0 ** (-2 * i / half)
            turn = torch.polar(torch.ones_like(angle), angle)[..., None]
            turned = torch.complex(x[..., first], x[..., second]) * turn
            want[..., first], want[..., second] = turned.real, turned.imag
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


def test_halves_that_are_not_pairs_are_refused():
    for size, streams in ((6, 2), (8, 3)):
        with pytest.raises(ValueError, match=f"rope with {streams} position streams over {size}"):
            RopeSpec(size, streams=streams)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_document_in_a_batch_is_as_if_alone(name):
    """Of documents that begin anew at 0; learned positions too, which else would go on."""
    model, streams = decoder(name), 2 if name == "two streams" else 1
    windows = torch.randint(71, (1, 25), generator=torch.Generator().manual_seed(0)).numpy()
    alone = Batch.from_windows(windows[:, 9:]).add_positions(streams)
    started = Batch.from_windows(windows)
    starts = torch.tensor([[0] * 9 + [9] * 15])
    packed = Batch(started.tokens, started.labels, Documents.from_starts(starts)).add_positions(
        streams
    )
    got, want = (
        model(b.tokens, compute_logits, documents=b.documents, positions=b.positions)
        for b in (packed, alone)
    )
    torch.testing.assert_close(got[:, 9:], want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_what_positions_a_model_takes():
    """A table needs rows for the longest document alone, and streams are as many as the model's."""
    learned = decoder("learned")
    most = learned.spec.longest
    tokens = torch.zeros(1, 2 * most, dtype=torch.int64)
    ids = torch.arange(2 * most)[None, None]
    learned(tokens, compute_logits, positions=PositionIds.from_ids(ids % most))
    with pytest.raises(ValueError, match=f"{2 * most} tokens, but max_position_embeddings is"):
        learned(tokens, compute_logits, positions=PositionIds.from_ids(ids))
    with pytest.raises(ValueError, match="needs 2 position streams, but the batch has 1"):
        decoder("two streams")(tokens[:, :8], compute_logits)
    with pytest.raises(ValueError, match=r"needs 1 .* has 2: add them with Batch.add_positions"):
        decoder("rope")(
            tokens[:, :8],
            compute_logits,
            positions=PositionIds.from_ids(ids[..., :8].repeat(1, 2, 1)),
        )
