"""Each kind of difference, made of random numbers, is told as that kind."""

import math
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from dolmen.comparison.classify import classify
from dolmen.comparison.compare import Side, TensorComparison, compare_recordings
from dolmen.comparison.compare import _compare_weights as compare_weights
from dolmen.comparison.diff import DiffReport
from dolmen.comparison.recording import Recorded, RecordedShard, Recording
from dolmen.core.topology import Topology
from dolmen.families.model import model_from_fields

LENGTH, SIZE = 6, 8
FIELDS = dict(
    vocab_size=16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=16,
)
TREE = model_from_fields("llama", FIELDS).spec


def side(tensors, **axes) -> Side:
    topology = Topology(**axes)
    found = {
        key: Recorded(
            tuple(pieces[0].shape),
            pieces=[
                RecordedShard(rank, tuple(slice(0, n) for n in one.shape), one)
                for rank, one in enumerate(pieces)
            ],
        )
        for key, pieces in tensors.items()
    }
    recording = Recording("", topology, torch.float32, torch.float32, found)
    return Side(recording, TREE, LENGTH)


def reported_cause(stage, name, a, b, beside=(), **axes):
    """Of `a`, what each rank holds, where B holds `b`; `beside`: other tensors, of both."""
    more = {(stage, other): [t] for other, t in beside}
    x, y = side({(stage, name): a, **more}, **axes), side({(stage, name): [b], **more})
    return classify(x, y, TensorComparison(stage, name, 1.0, 0.0))


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, W = random(2 * LENGTH, 32), random(32, 32)


@pytest.mark.parametrize(
    "kind, stage, name, a, b",
    [
        ("swapped halves", "weights", "layers.0.mlp.up.weight", W.roll(16, 0), W),
        ("permuted heads", "weights", "layers.0.attn.q.weight", W.roll(8, 0), W),
        ("transposed", "weights", "layers.0.attn.o.weight", W.t(), W),
        ("missing", "weights", "layers.0.attn.q.bias", 0 * X[0], X[0]),
        ("a scale", "gradients", "layers.0.mlp.up.weight", 3 * W, W),
        ("a scale", "gradients", "layers.0.mlp.up.weight", -W, W),
        ("an offset", "weights", "final_norm.weight", X[0] - 1, X[0]),
        ("an offset", "forward", "layers.0.mlp.up", X + X[0], X),
        ("a scale by row", "forward", "layers.0.mlp_norm", X * (1 + X[:, :1].abs()), X),
        ("a scale by column", "forward", "layers.0.mlp_norm", X * (1 + X[:1].abs()), X),
        ("rounding", "weights", "layers.0.mlp.up.weight", W.bfloat16().float(), W),
        ("rounding", "weights", "layers.0.mlp.up.weight", W, W.half().float()),
        ("other values", "weights", "layers.0.mlp.up.weight", W.sin(), W),
        ("other values", "forward", "layers.0.mlp.act", X.sin(), X),
        ("not finite", "forward", "layers.0.mlp.act", X / 0, X),
    ],
)
def test_a_kind(kind, stage, name, a, b):
    found = reported_cause(stage, name, [a.contiguous()], b)
    assert found.kind == kind and found.axis is None, found


def test_tokens_that_are_off():
    later = X.unflatten(0, (-1, LENGTH)).roll(1, 1).flatten(0, 1)
    assert reported_cause("forward", "embed", [later], X).kind == "shifted"
    late = torch.where(torch.arange(2 * LENGTH)[:, None] % LENGTH >= 4, X.sin(), X)
    assert reported_cause("forward", "layers.0.attn.sums", [late], X).text == (
        "tokens differ from position 4 on"
    )


def test_terms_of_a_sum():
    middle = random(2 * LENGTH, 32) + 1
    extra = [("layers.0.middle", middle)]
    for a, kind in ((X - middle, "missing term"), (X + middle, "added twice")):
        found = reported_cause("forward", "layers.0", [a], X, extra)
        assert found.kind == kind and "layers.0.middle" in found.text


def test_another_tensor():
    other = random(48, 32)
    x, y = other + 0, random(48, 32) * 2
    found = reported_cause(
        "weights", "layers.0.mlp.up.weight", [x], y, [("layers.0.mlp.gate.weight", other)]
    )
    assert (found.kind, found.text) == ("swapped", "A's equals B's layers.0.mlp.gate.weight")


@pytest.mark.parametrize("axis", ("tp", "dp", "cp"))
def test_sums_over_ranks(axis):
    parts, axes = [X / 3, 2 * X / 3 + 0.1 * X.flip(0), X.flip(0) * -0.1], {axis: 3}
    name = "gradients", "final_norm.weight"
    found = reported_cause(*name, [p[0] for p in parts], sum(parts)[0], **axes)
    assert (found.kind, found.axis) == ("a missing sum", axis)
    found = reported_cause(*name, [X[0] / 3] * 3, X[0], **axes)
    assert (found.kind, found.axis) == ("a missing sum", axis)
    found = reported_cause(*name, [3 * X[0]] * 3, X[0], **axes)
    assert (found.kind, found.axis) == ("a doubled sum", axis)


def test_angles_and_positions():
    angle = torch.arange(2 * LENGTH)[:, None] % LENGTH * torch.ones(16)

    def turned(by):
        one, other = X.unflatten(1, (4, 2, 4)).unbind(2)
        by = by.unflatten(1, (4, 4))
        out = (one * by.cos() - other * by.sin(), other * by.cos() + one * by.sin())
        return torch.stack(out, 2).flatten(1)

    name = "forward", "layers.0.attn.query"
    assert reported_cause(*name, [turned(angle)], turned(1.2 * angle)).kind == "other angles"
    assert reported_cause(*name, [turned(angle)], turned(angle + 1)).kind == "other positions"


@pytest.mark.parametrize(
    "a, b, said",
    [
        (W.half().float(), W, "A holds B's numbers, rounded to float16"),
        (W, W.bfloat16().float(), "B holds A's numbers, rounded to bfloat16"),
        (W.sin(), W, "other values, which no known fault explains"),
    ],
)
def test_of_weights_it_is_no_function_that_differs(a, b, said):
    assert reported_cause("weights", "layers.0.mlp.up.weight", [a], b).text == said


def test_the_table_fits_a_narrow_terminal():
    rows = (
        TensorComparison("weights", "embed.weight", 0, 0, note="the worst of 39"),
        TensorComparison("gradients", "layers.31.attn_norm.weight", 1.25e-7, 1.94e-6),
        TensorComparison("exp_avg_sq", "layers.31.mlp.down.weight", 1.25e-7, 1.94e-6),
    )
    screen = Console(width=80, file=StringIO())
    screen.print(DiffReport("two programs", rows, None).table())
    shown = screen.file.getvalue()
    assert all(row.name in shown for row in rows) and "the worst of 39" in shown, shown


def test_pieces_of_a_tensor_join_where_they_lie():
    """Whole and partial, regions that overlap and one that nobody has, rows out of order."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(4, 6, generator=generator)
    one, other = torch.randn(4, 2, generator=generator), torch.tensor([3, 1])
    pieces = [
        RecordedShard(0, (slice(0, 4), slice(0, 2)), one),
        RecordedShard(1, (slice(0, 4), slice(0, 2)), whole[:, :2] - one),
        RecordedShard(2, (slice(0, 0), slice(2, 5)), whole[other, 2:5], rows=other),
    ]
    covered = torch.zeros(4, 6, dtype=torch.bool)
    covered[:, :2] = covered[1, 2:5] = covered[3, 2:5] = True
    want = whole.masked_fill(~covered, torch.nan)
    joined = Recorded((4, 6), partial=True, pieces=pieces).join()
    torch.testing.assert_close(joined, want, equal_nan=True)
    last = Recorded((4, 6), pieces=pieces).join()
    torch.testing.assert_close(last[:, :2], whole[:, :2] - one, rtol=0, atol=0)
    torch.testing.assert_close(last[:, 2:], want[:, 2:], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "ours, theirs, difference", [(3.0, 4.0, 0.25), (-6.0, 4.0, 2.5), (0.0, -0.5, 1.0)]
)
@pytest.mark.parametrize("name", ["loss", "gradient norm"])
def test_numbers_differ_by_their_relative_difference(name, ours, theirs, difference):
    sides = [side({("numbers", name): [torch.tensor(x)]}) for x in (ours, theirs)]
    (row,) = compare_recordings(*sides)
    assert (row.stage, row.name, row.difference) == ("numbers", name, difference) and not row.ok
    (row,) = compare_recordings(sides[1], sides[1])
    assert row.difference == 0 and row.ok


def test_a_number_is_not_compared_with_zero():
    zero = side({("numbers", "loss"): [torch.tensor(0.0)]})
    (row,) = compare_recordings(zero, zero)
    assert math.isnan(row.difference) and not row.ok


def heads(generator, *, scale: float = 1.0):
    return scale * torch.randn(2 * LENGTH, 32, generator=generator)


def scores_cause(a: dict, b: dict, spec=TREE):
    """Of attention probabilities where A holds queries and keys `a`, and B `b`."""
    sides = []
    for held, tree in ((a, spec), (b, TREE)):
        one = side({("forward", f"layers.1.attn.{word}"): [t] for word, t in held.items()})
        sides.append(Side(one.recording, tree, LENGTH))
    return classify(*sides, TensorComparison("forward", "layers.1.attn.scores", 1.0, 0.0))


def test_attention_probabilities_that_differ():
    generator = torch.Generator().manual_seed(0)
    plain = {"query": heads(generator), "key": heads(generator)}
    scaled = scores_cause(plain | {"query": 1.5 * plain["query"]}, plain)
    assert (scaled.kind, scaled.text) == ("a scale", "A's scores are 1.5 times B's")
    other = scores_cause(plain | {"key": plain["key"] + heads(generator, scale=0.3)}, plain)
    assert other.kind == "other values" and "from equal queries and keys" in other.text
    narrow = model_from_fields(
        "mistral", {**FIELDS, "num_key_value_heads": 4, "sliding_window": 2}
    ).spec
    masked = scores_cause(plain, plain, narrow)
    assert masked.kind == "another mask"
    assert masked.text == "only in B does token 2 attend to token 0"


def of_heads(t, change):
    """Rows of a weight as [heads, size, columns], changed."""
    return change(t.unflatten(0, (4, 8))).reshape(t.shape).contiguous()


Y = X.unflatten(0, (-1, LENGTH))
Q, UP = ("weights", "layers.0.attn.q.weight"), ("forward", "layers.0.mlp.act")
SHIFTS = {1: "1 position", -1: "1 position", 2: "2 positions", -2: "2 positions"}


@pytest.mark.parametrize(
    "place, a, b, text",
    [
        (Q, W.roll(16, 1), W, "the halves of dim 1 are exchanged"),
        (Q, W.roll(16, 0), W, "the halves of dim 0 are exchanged"),
        (Q, of_heads(W, lambda t: t[[2, 0, 1, 3]]), W, "A's heads are B's [2, 0, 1, 3]"),
        (Q, of_heads(W, lambda t: t.roll(4, 1)), W, "the halves of each head are exchanged"),
        (
            Q,
            of_heads(W, lambda t: t.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)),
            W,
            "A's pairs of rope are adjacent elements, B's are halves",
        ),
        (
            Q,
            of_heads(W, lambda t: t.unflatten(1, (4, 2)).transpose(1, 2).flatten(1, 2)),
            W,
            "A's pairs of rope are halves, B's are adjacent elements",
        ),
        *(
            (UP, Y.roll(by, 1).flatten(0, 1), X, f"A's tokens are shifted by {words}")
            for by, words in SHIFTS.items()
        ),
        (
            ("forward", "layers.0.mlp_norm"),
            (Y + Y[:1]).flatten(0, 1),
            X,
            "the same is added in every sequence",
        ),
        (
            ("forward", "layers.0.mlp_norm"),
            X + X[0],
            X,
            "the same vector is added to every token: a bias",
        ),
        (("weights", "final_norm.weight"), X[0] - 0.5, X[0], "-0.5 everywhere"),
        (("gradients", "layers.0.mlp.up.weight"), -2.5 * W, W, "A is -2.5 times B"),
        (
            UP,
            X * (1 + X[:, :1].abs()),
            X,
            "another factor for each token, such as a norm's",
        ),
        (UP, X * (1 + X[:1].abs()), X, "another factor for each column, as a weight does"),
        (
            UP,
            torch.where(torch.arange(2 * LENGTH)[:, None] % LENGTH < 3, X.sin(), X),
            X,
            "only tokens up to position 2 differ",
        ),
        (
            UP,
            torch.where(torch.arange(32) >= 16, X.sin(), X),
            X,
            "16 of 32 columns differ, from 16 on",
        ),
        (
            Q,
            torch.where(torch.arange(32)[:, None] % 8 == 5, W.sin(), W),
            W,
            "4 of 32 rows differ, from 5 on",
        ),
        (
            UP,
            torch.where(torch.arange(32) == 3, torch.inf, X),
            X,
            f"{2 * LENGTH} elements of A are not finite",
        ),
        (("forward", "layers.0.attn.sums"), 0 * X, X, "A has zeros"),
    ],
)
def test_a_cause_in_words(place, a, b, text):
    found = reported_cause(*place, [a.contiguous()], b)
    assert found.text == text and found.axis is None


def test_what_is_on_one_side_alone_or_of_another_shape():
    name = "forward", "layers.0.mlp.act"
    one, other = side({name: [X]}), side({})
    row = TensorComparison(*name, 1.0, 0.0)
    assert classify(one, other, row).text == "only A has it"
    assert classify(other, one, row).text == "only B has it"
    cut = side({name: [X[:, :16]]})
    assert classify(one, cut, row).text == "[12, 32] in A, [12, 16] in B"
    number = TensorComparison("numbers", "loss", 1.0, 0.0, note="2 and 3")
    assert classify(one, other, number).text == "loss: 2 and 3"


def test_two_tensors_that_were_exchanged_and_one_that_was_taken():
    gate, up = random(48, 32), random(48, 32).flip(0).sin()
    names = [("weights", f"layers.0.mlp.{word}.weight") for word in ("gate", "up")]
    a = side(dict(zip(names, ([up], [gate]), strict=True)))
    b = side(dict(zip(names, ([gate], [up]), strict=True)))
    found = classify(a, b, TensorComparison(*names[0], 1.0, 0.0))
    assert found.text == "exchanged with layers.0.mlp.up.weight"
    # of another layer nothing is taken
    far = ("weights", "layers.1.mlp.up.weight")
    a, b = side({names[0]: [up], far: [gate]}), side({names[0]: [gate], far: [up]})
    found = classify(a, b, TensorComparison(*names[0], 1.0, 0.0))
    assert found.kind == "other values"


@pytest.mark.parametrize("axis", ("tp", "dp"))
def test_parts_and_sums_of_ranks_in_words(axis):
    name = "weights", "layers.0.attn.q.weight"
    row = TensorComparison(*name, 1.0, 0.0)

    def cause(pieces: list) -> str:
        shards = [
            RecordedShard(rank, (slice(begin, begin + len(values)), slice(0, 32)), values)
            for rank, (begin, values) in enumerate(pieces)
        ]
        recording = Recording(
            "",
            Topology(**{axis: 2}),
            torch.float32,
            torch.float32,
            {name: Recorded((32, 32), pieces=shards)},
        )
        return classify(Side(recording, TREE, LENGTH), side({name: [W]}), row).text

    assert cause([(0, W[16:]), (16, W[:16])]) == f"rank 0 holds the shard of rank 1 along {axis}"
    half = f"rank 0 of {axis} holds 1/2 of the right value"
    assert cause([(0, W[:16] / 2), (16, W[16:] / 2)]) == half
    assert (
        cause([(0, 2 * W[:16]), (16, W[16:])]) == f"rank 0 of {axis} holds 2 times the right value"
    )
    parts = W / 3, W * 2 / 3 + 0
    said = f"the sum of the {axis} ranks' values is right: they were not all-reduced"
    assert cause([(0, parts[0]), (0, parts[1])]) == said


@pytest.mark.parametrize("other, unit", [(torch.float32, 0.0), (torch.bfloat16, 2 * 2.0**-8)])
def test_weights_differ_by_rounding_where_their_dtypes_differ(other, unit):
    """Two units of the coarser dtype are allowed, and none where both are stored alike."""

    def compared(moved: float) -> TensorComparison:
        a, b = (side({("weights", "w"): [weights]}) for weights in (W, W * (1 + moved)))
        b = replace(b, recording=replace(b.recording, rest=other))
        (row,) = compare_weights(a, b)
        return row

    assert compared(0.0).allowed == unit and compared(0.0).ok
    for moved in (0.9 * unit, 1.1 * unit + 1e-6):
        assert compared(moved).ok == (moved <= unit)
    only = side({})
    (row,) = compare_weights(side({("weights", "w"): [W]}), only)
    assert row.difference == math.inf and row.note == "only A has it"
    (row,) = compare_weights(only, side({("weights", "w"): [W]}))
    assert row.note == "only B has it"
