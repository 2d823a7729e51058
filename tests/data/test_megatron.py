"""Megatron's order of samples beside a plain loop over its published code (gpt_dataset.py,
blended_dataset.py and helpers.cpp of megatron/core/datasets): one index at a time, token by token.
"""

import math
from itertools import groupby

import numpy as np
import pytest

from dolmen.data import order, validation_split
from dolmen.data.config import DataConfig
from dolmen.data.loader import changes

SPLITS = {"969,30,1": (0.969, 0.999), "80,10,10": (0.8, 0.9), "1": (1.0, 1.0)}


def plain_samples(lengths, first, last, length, requested, seed):
    """Samples of sequences first .. last - 1, in order, each as (sequence, token in it) pairs."""
    tokens, epochs = sum(lengths[first:last]), 1
    while requested is not None and epochs * tokens < requested * length + 1:
        epochs += 1
    separate = False
    if epochs > 1:
        before = ((epochs - 1) * tokens - 1) // length
        separate = requested - before < int(0.80 * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    order = []
    for count in [epochs - 1, 1] if separate else [epochs]:
        documents = np.array([*range(first, last)] * count, np.int32)
        random.shuffle(documents)
        order += documents.tolist()
    total = (epochs * tokens - 1) // length
    stream = [(document, at) for document in order for at in range(lengths[document])]
    cut = [stream[i * length : i * length + length + 1] for i in range(total)]
    shuffled = []
    for low, high in [(0, before), (before, total)] if separate else [(0, total)]:
        part = np.arange(low, high, dtype=np.uint32)
        random.shuffle(part)
        shuffled += part.tolist()
    return [cut[i] for i in shuffled], epochs, separate


def plain_blend(weights, count):
    taken, out = [0] * len(weights), []
    for sample in range(count):
        best, most = 0, weights[0] * max(sample, 1.0) - taken[0]
        for i in range(1, len(weights)):
            error = weights[i] * max(sample, 1.0) - taken[i]
            if error > most:
                best, most = i, error
        out.append((best, taken[best]))
        taken[best] += 1
    return out


def corpus(count, seed=1, least=3, most=40):
    """Documents of one sequence each, no two alike, the last token 0."""
    random = np.random.default_rng(seed)
    return [
        [[*random.integers(1, 290, random.integers(least, most)).tolist(), 0]] for _ in range(count)
    ]


def windows(loader, count):
    return loader.mixture.windows(0, count).tolist()


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    "steps, epochs, separate", [(5, 1, False), (20, 2, True), (26, 2, False), (66, 5, False)]
)
def test_one_data_set(data_set, load, split, steps, epochs, separate):
    """At 80 % of the last epoch it is shuffled with the others."""
    documents = corpus(40)
    file = data_set("a.bin", documents)
    loader = load(file, order="megatron", split=split, steps=steps, seed=1234)
    lengths = [len(one) for (one,) in documents]
    train, judge = (round(mark * 40) for mark in SPLITS[split])
    plain, count, is_apart = plain_samples(lengths, 0, train, 16, steps * 4, 1234)
    if split == "1":
        assert (count, is_apart) == (epochs, separate)
    (order,) = loader.mixture.orders
    assert (order.epochs.times, order.epochs.last_separate) == (count, is_apart)
    assert len(order) == len(plain) >= steps * 4
    expected = [[documents[d][0][at] for d, at in sample] for sample in plain]
    assert windows(loader, len(plain)) == expected
    batch = loader.batch(2, 1, 2)
    assert batch.tokens.tolist() == [row[:-1] for row in expected[10:12]]
    held = (
        loader.validation.stream.read(0, loader.validation_tokens).tolist() if judge > train else []
    )
    assert held == [token for (one,) in documents[train:judge] for token in one]


def test_what_is_shuffled_are_sequences(data_set, load):
    documents = corpus(12, least=20)
    cut = [[one[:9], one[9:9], one[9:]] for (one,) in documents]
    loader = load(data_set("a.bin", cut), order="megatron", split="1", steps=30)
    sequences = [one for document in cut for one in document]
    plain, *_ = plain_samples([*map(len, sequences)], 0, 36, 16, 120, 0)
    assert windows(loader, 120) == [[sequences[d][at] for d, at in row] for row in plain[:120]]


@pytest.mark.parametrize("weights", [(3, 1), (0.5, 0.25, 0.25), (1, 1, 1), (0.7, 0.2, 0.1, 0.01)])
def test_a_blend(data_set, load, weights):
    sets = [corpus(20 + i, seed=i) for i in range(len(weights))]
    files = [data_set(f"{i}.bin", documents) for i, documents in enumerate(sets)]
    paths = [f"{weight}:{file}" for weight, file in zip(weights, files, strict=True)]
    loader = load(*paths, order="megatron", split="9,1", steps=50, seed=5)
    shares = (np.array(weights, float) / np.sum(np.array(weights, float))).tolist()
    wanted = [math.ceil(math.ceil(200 * share) * 1.005) for share in shares]
    plain = [
        plain_samples([len(d[0]) for d in documents], 0, round(0.9 * len(documents)), 16, n, 5)[0]
        for documents, n in zip(sets, wanted, strict=True)
    ]
    shares = (np.array(shares) / np.sum(np.array(shares))).tolist()
    expected = [
        [sets[which][d][0][at] for d, at in plain[which][i]]
        for which, i in plain_blend(shares, 200)
    ]
    assert windows(loader, 200) == expected
    assert loader.mixture.windows(77, 30).tolist() == expected[77:107], "begun anywhere"
    taken = loader.mixture.counts(137)
    assert taken == [[w for w, _ in plain_blend(shares, 137)].count(i) for i in range(len(sets))]
    with pytest.raises(ValueError, match="is 2 data sets, but .* needs a weight for each"):
        load(f"1:{files[0].parent}/[01].bin", order="megatron", steps=1)


def test_without_weights_each_is_read_once(data_set, load):
    sets = [corpus(20), corpus(30, seed=2)]
    files = [data_set(f"{i}.bin", documents) for i, documents in enumerate(sets)]
    plain = [
        plain_samples([len(d[0]) for d in documents], 0, len(documents), 16, None, 3)[0]
        for documents in sets
    ]
    sizes = [len(samples) for samples in plain]
    shares = (np.array(sizes, float) / sum(sizes)).tolist()
    steps = sum(sizes) // 4
    loader = load(*files, order="megatron", split="1", steps=steps, seed=3)
    expected = [
        [sets[which][d][0][at] for d, at in plain[which][i]]
        for which, i in plain_blend(shares, 4 * steps)
    ]
    assert windows(loader, 4 * steps) == expected
    with pytest.raises(
        ValueError, match=rf"once, {sum(sizes)} samples, and the run {4 * steps + 4}:"
    ):
        load(*files, order="megatron", split="1", steps=steps + 1, seed=3)


def test_text_is_a_data_set_of_its_documents(documents, load, tmp_path):
    loader = load(documents, order="megatron", steps=10, split="8,2")
    texts = [file.read_text() for file in sorted(documents.iterdir())]
    ids = [[*loader.tokenizer.encode(text), 0] for text in texts]
    plain, *_ = plain_samples([*map(len, ids)], 0, 32, 16, 40, 0)
    assert windows(loader, 40) == [[ids[d][at] for d, at in row] for row in plain[:40]]
    read = [[d for d, _ in groupby(d for d, _ in row)] for row in plain[:40]]
    named = [line for step in range(10) for line in loader.documents(step)]
    assert named == [f"{documents}: sequences {', '.join(map(str, row))}" for row in read]
    assert loader.validation_bytes == sum(len(text.encode()) for text in texts[32:])
    assert [file.name for file in loader.validation_files] == [f"{n}.txt" for n in range(32, 40)]
    scored = load(documents, order="megatron", steps=10, validation=str(documents / "39.txt"))
    assert scored.mixture.epochs(1) and "validation" in scored.fingerprint()
    assert len(scored.mixture.parts[0].stream) == sum(map(len, ids)), "copies are trained on"


def test_a_run_goes_on_where_it_was(data_set, load):
    """At any number of ranks, and with batches of another size: a place is a number of samples."""
    file = data_set("a.bin", corpus(60))
    loader = load(file, order="megatron", steps=20, global_batch_size=4)
    again = load(file, order="megatron", steps=10, global_batch_size=8)
    again.resume_at(3, 12)
    both = [again.batch(3, rank, 2).tokens.tolist() for rank in range(2)]
    assert sum(both, []) == [row[:-1] for row in loader.mixture.windows(12, 8).tolist()]
    assert changes(loader.fingerprint(), again.fingerprint()) == ["global_batch_size: 4 -> 8"]
    longer = load(file, order="megatron", steps=400)
    (line,) = changes(loader.fingerprint(), longer.fingerprint())
    assert line.startswith(
        "order: Megatron, epochs: 2 with the last one separate -> Megatron, epochs: 2"
    )
    assert longer.documents(0)[0].startswith(f"{file}: sequences ")
    beyond = loader.mixture.windows(80, 1)
    assert beyond.tolist() == loader.mixture.windows(80 % len(loader.mixture.orders[0]), 1).tolist()


def test_what_the_order_cannot_have(data_set, load):
    file = data_set("a.bin", corpus(40))
    with pytest.raises(ValueError, match="--data.order megatron .*: give --train.steps"):
        load(file, order="megatron")
    for text in ("a,b", "1,2,3,4", "-1,2", "", "1e3"):
        with pytest.raises(ValueError, match="data.split is .* as 969,30,1"):
            load(file, order="megatron", split=text, steps=1)
    with pytest.raises(ValueError, match="nothing to train on: its first number is 0"):
        load(file, order="megatron", split="0,1", steps=1)
    with pytest.raises(ValueError, match=r"train.seed is 4294967296: .* 0 to 4294967295"):
        load(file, order="megatron", steps=1, seed=1 << 32)
    with pytest.raises(ValueError, match="is for --data.order megatron"):
        DataConfig(split="1")
    with pytest.raises(
        ValueError, match=r"validation-fraction \(0.1\) does not apply to --data.order"
    ):
        DataConfig(order="megatron", validation_fraction=0.1)
    with pytest.raises(
        ValueError, match="data.split 1 splits off validation data, but --data.valid"
    ):
        DataConfig(order="megatron", split="1", validation="x")
    with pytest.raises(ValueError, match="fewer than one window"):
        load(file, order="megatron", split="1,99", steps=1, sequence_length=64)


def test_an_epoch_ends_one_token_early():
    """The last of 5 samples of 4 needs token 20 of 20, which is the first of the next epoch."""
    assert order.epochs_of(20, 4, 5).times == 2 and order.epochs_of(21, 4, 5).times == 1
    assert order.epochs_of(20, 4, None) == (1, False, 4, 4)


def test_a_share_has_a_surplus():
    assert order.shares([0.7, 0.3], 1001) == [705, 303]  # 701 x 1.005, 301 x 1.005


def test_splits_are_rounded_as_theirs():
    """0.969 x 10 = 9.69 and 0.999 x 10 = 9.99 to whole sequences; 0.5 and 2.5 to even ones."""
    assert validation_split.split_of("969, 30, 1", 10) == [(0, 10), (10, 10), (10, 10)]
    assert validation_split.split_of("98 2", 1000) == [(0, 980), (980, 1000), (1000, 1000)]
    assert validation_split.split_of("1/1", 5) == [(0, 2), (2, 5), (5, 5)]
    assert validation_split.split_of(".5,.25,.25", 8) == [(0, 4), (4, 6), (6, 8)]
