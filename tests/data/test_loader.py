"""From options to batches: a function of (seed, step), validation of each token once, early
refusals.
"""

import itertools
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from loading import prepare_loader

from dolmen.data import corpus as corpora
from dolmen.data.batch import IGNORED, Batch
from dolmen.data.config import DataConfig
from dolmen.data.inputs import check_inputs
from dolmen.data.loader import changes


def same(a, b):
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.labels, b.labels)


def test_labels_are_the_next_tokens(documents, load):
    loader = load(documents)
    batch = loader.batch(0)
    assert batch.tokens.shape == batch.labels.shape == (4, 16)
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    stream = loader.mixture.parts[0].stream
    text = stream.read(0, len(stream)).tolist() * 2
    for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
        assert any(text[i : i + 17] == [*tokens, labels[-1]] for i in range(len(stream)))
    assert batch.real_tokens == 64


def test_batches_do_not_depend_on_ranks_or_on_where_one_starts(documents, load):
    loader = load(documents, global_batch_size=12)
    whole = [loader.batch(step) for step in range(5)]
    for ranks in (2, 3, 4, 12):
        rows = [loader.batch(3, rank, ranks) for rank in range(ranks)]
        assert same(
            Batch(torch.cat([b.tokens for b in rows]), torch.cat([b.labels for b in rows])),
            whole[3],
        )
    resumed = list(itertools.islice(load(documents, global_batch_size=12).starting_at(2), 3))
    assert [step for step, _ in resumed] == [2, 3, 4]
    assert all(same(batch, whole[step]) for step, batch in resumed)
    assert not same(load(documents, global_batch_size=12, seed=1).batch(0), whole[0])
    assert not same(whole[0], whole[1])
    with pytest.raises(
        ValueError,
        match=r"global_batch_size \(12\) is not divisible by the 5 .*global-batch-size 15",
    ):
        loader.batch(0, 0, 5)


def test_prefetching_thread_ends_with_its_iterator(documents, load):
    batches = load(documents).starting_at(0)
    next(batches)
    assert any(thread.name.startswith("batches") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("batches") for thread in threading.enumerate())


def test_data_repeats_and_epochs_are_counted(documents, load):
    loader = load(documents)
    (windows,) = loader.mixture.sizes
    assert loader.epochs(windows)[str(documents)] == 4.0
    assert loader.batch(10 * windows).real_tokens == 64


def test_validation_covers_each_token_once(documents, load, tokenizer):
    loader = load(documents, validation_fraction=0.1)
    for ranks in (1, 2, 4):
        batches = [list(loader.validation_batches(rank=rank, ranks=ranks)) for rank in range(ranks)]
        assert {len(b) for b in batches} == {len(batches[0])}
        assert all(len(x.tokens) == 4 // ranks for b in batches for x in b)
        tokens, labels = (
            torch.cat(
                [getattr(b, side) for turn in zip(*batches, strict=True) for b in turn]
            ).flatten()
            for side in ("tokens", "labels")
        )
        real = labels != IGNORED
        held = loader.validation.stream.read(0, len(loader.validation.stream))
        assert (
            np.array_equal(labels[real].numpy(), held)
            and int(real.sum()) == loader.validation_tokens
        )
        assert tokens[0] == loader.end_of_text and np.array_equal(
            tokens[real][1:].numpy(), held[:-1]
        )
        assert (tokens >= 0).all(), "padding can be embedded"
    assert tokenizer.decode(held).replace("<|endoftext|>", "").encode() == b"".join(
        file.read_bytes() for file in loader.validation_files
    )
    assert loader.validation_bytes == sum(file.stat().st_size for file in loader.validation_files)


def test_validation_of_some_windows_spreads_them(documents, load):
    loader = load(documents, validation_fraction=0.2)
    every = torch.cat([batch.labels for batch in loader.validation_batches()])
    some = torch.cat([batch.labels for batch in loader.validation_batches(max_sequences=6)])
    assert len(some) == 8 and (some[6:] == IGNORED).all()
    windows = -(-loader.validation_tokens // 16)
    assert windows > 12 and torch.equal(
        some[:6], every[[index * windows // 6 for index in range(6)]]
    )


def test_validation_given_and_shorter_than_a_window(documents, tmp_path, load):
    (tmp_path / "judge.jsonl").write_text('{"text": "a word"}\n{"text": "and a line"}\n')
    loader = load(documents, validation=str(tmp_path / "judge.jsonl"), sequence_length=64)
    (batch,) = loader.validation_batches()
    assert batch.real_tokens == loader.validation_tokens < 64 and batch.tokens.shape == (4, 64)
    assert loader.validation_bytes == len("a word" + "and a line") and loader.validation_files == ()
    assert (
        batch.labels[1:] == IGNORED
    ).all() and "2 of 2 documents" in loader.description.validation
    (tmp_path / "both").mkdir()
    (tmp_path / "judge.jsonl").rename(tmp_path / "both" / "judge.jsonl")
    (tmp_path / "both" / "whole.txt").write_text("a file")
    both = load(documents, validation=str(tmp_path / "both"))
    assert both.validation_bytes == loader.validation_bytes + 6 and both.validation_files == (), (
        "rows are no files"
    )
    everything = load(documents, validation_fraction=0.0).mixture.parts[0].stream
    assert len(loader.mixture.parts[0].stream) == len(everything), (
        "nothing is held out of --data.path"
    )


def test_validation_of_one_file_is_its_end(documents, load):
    loader = load(documents / "39.txt", validation_fraction=0.1)
    text = (documents / "39.txt").read_text()
    assert 0.05 * len(text) < loader.validation_bytes < 0.2 * len(text)
    assert text.endswith(
        loader.tokenizer.decode(loader.validation.stream.read(0, len(loader.validation.stream) - 1))
    )
    assert "10.0%" in loader.description.validation and "39.txt" in loader.description.validation


def test_no_validation(documents, load):
    loader = load(documents, validation_fraction=0.0)
    assert (
        loader.validation_tokens == loader.validation_bytes == 0
        and "none" in loader.description.validation
    )
    with pytest.raises(ValueError, match="--data.validation-fraction .* is 0"):
        next(loader.validation_batches())


def test_mixture_of_files(documents, load):
    a, b = documents / "38.txt", documents / "39.txt"
    loader = load(f"3:{a}", f"1:{b}", global_batch_size=8, sequence_length=64)
    text = loader.tokenizer.batch_decode(loader.batch(0).tokens)
    assert [sum(f"document {number}" in row for row in text) for number in (38, 39)] == [6, 2]
    assert list(loader.epochs(1)) == [str(a), str(b)] and len(loader.held_out) == 2
    assert load(f"1:{documents}").validation_files
    assert load(f"1:{documents}", f"1:{b}").validation_files == (), (
        "the end of a document is no file"
    )
    assert [line.split(":")[0] for line in loader.description.details] == [
        "75.0% of the batches",
        "25.0% of the batches",
    ]


def test_fingerprint_says_what_changed(documents, load, tmp_path):
    before = load(documents).fingerprint()
    moved = documents.rename(tmp_path / "moved")
    assert changes(before, load(moved).fingerprint()) == [], "by content, not by place"
    other = load(moved, seed=1, sequence_length=8).fingerprint()
    assert changes(before, other) == ["seed: 0 -> 1", "sequence_length: 16 -> 8"]
    (moved / "00.txt").write_text("new\n")
    (line,) = changes(before, json.loads(json.dumps(load(moved).fingerprint())))
    assert line.startswith("data 1: 40 documents")


def test_second_prepare_does_not_tokenise(documents, load, monkeypatch):
    first = load(documents)
    monkeypatch.setattr(corpora, "build_corpus", None)
    assert same(load(documents).batch(0), first.batch(0))


def test_progress_is_plain_lines_where_nobody_watches(
    documents, tmp_path, tokenizer_folder, capsys
):
    config = DataConfig((str(documents),), cache=str(tmp_path / "cache"))
    prepare_loader(config, tokenizer_folder, None, 16, 4, 0, progress=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "\x1b" not in shown.err
    size = sum(file.stat().st_size for file in documents.iterdir())
    assert f"tokenising {documents}: {size:,} bytes in 40 files" in shown.err
    assert "tokens of 40 documents" in shown.err
    prepare_loader(config, tokenizer_folder, None, 16, 4, 0, progress=True)
    assert capsys.readouterr().err == "", "nothing to build"


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(vocab_size=299),
            "tokenizer has 300 tokens, but the model's vocab_size is 299: use --model.vocab-size",
        ),
        (dict(end_of_text="<none>"), "--data.end-of-text '<none>'"),
        (
            dict(sequence_length=10**6),
            r"fewer than one window .*\(1,000,001\).* --train.sequence-length",
        ),
        (dict(validation="/nothing"), "--data.validation /nothing: no such file"),
        (dict(validation_fraction=0.7), "data.validation-fraction is 0.7"),
    ],
)
def test_refused_before_anything_is_written(documents, load, tmp_path, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(documents, **options)
    assert not (tmp_path / "cache").exists()


def test_check_reads_the_first_document(tmp_path, tokenizer_folder):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(ValueError, match="line 1: no 'text' but keys body"):
        check_inputs(DataConfig((str(tmp_path),)), tokenizer_folder, 300, 16)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(ValueError, match="no text in 1 file$"):
        check_inputs(DataConfig((str(tmp_path),)), tokenizer_folder, 300, 16)
    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(ValueError, match="fewer than one window of.* in 1 document;"):
        config = DataConfig((str(tmp_path),), cache=str(tmp_path / "c"))
        prepare_loader(config, tokenizer_folder, 300, 16, 4, 0, progress=False)


def test_batch_parts():
    batch = Batch.from_windows(np.arange(6 * 5).reshape(6, 5))
    assert [len(part.tokens) for part in batch.split(3)] == [2, 2, 2]
    assert (
        same(batch.microbatches(2)[1], batch.split(3)[1]) and batch.split(3)[1].tokens[0, 0] == 10
    )
    ended = Batch.from_windows(np.arange(6 * 5).reshape(6, 5) % 7, 0)
    reported = torch.arange(24.0).view(6, 4)
    ended = replace(ended, weights=reported, numbers={"reference": -reported})
    for name in ("tokens", "labels", "weights"):
        parts = torch.cat([vars(part)[name] for part in ended.split(3)])
        assert torch.equal(parts, vars(ended)[name]), name
    assert torch.equal(ended.split(3)[1].numbers["reference"], -reported[2:4])
    moved = ended.split(3)[1].to(torch.device("meta"))
    assert moved.weights.is_meta and moved.numbers["reference"].is_meta
    assert batch.to(torch.device("meta")).documents is None
    given = ended.add_prefixes(torch.arange(6)[:, None] % 3)
    starts, reach = given.documents.starts, given.documents.reach
    parts = [part.documents for part in given.split(3)]
    tensors = dict(starts=starts, host_starts=starts, reach=reach, host_reach=reach)
    for name, want in tensors.items():
        assert torch.equal(torch.cat([vars(part)[name] for part in parts]), want), name
    moved = given.split(3)[1].to(torch.device("meta")).documents
    assert moved.starts.is_meta and torch.equal(moved.host_starts, starts[2:4])
    assert moved.reach.is_meta and torch.equal(moved.host_reach, reach[2:4])
    with pytest.raises(ValueError, match="6 sequences is not divisible into 4"):
        batch.split(4)
    with pytest.raises(
        ValueError, match=r"6 sequences per rank are not divisible by the microbatch size \(4\)"
    ):
        batch.microbatches(4)
    padded = Batch.from_windows(np.array([[3, 4, IGNORED, IGNORED]]))
    assert padded.labels.tolist() == [[4, IGNORED, IGNORED]] and padded.tokens.tolist() == [
        [3, 4, 0]
    ]
    assert padded.real_tokens == 1


def test_weight_of_a_batch():
    """1 for each real token, or the sum of their weights; what is no weight is refused."""
    batch = Batch.from_windows(np.array([[3, 4, 5, IGNORED]]))
    assert batch.weight == 2
    assert replace(batch, weights=torch.tensor([[0.25, 2.0, 7.0]])).weight == 2.25
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"weights of tokens are .*{wrong}.*not negative"):
            assert replace(batch, weights=torch.tensor([[1.0, wrong, 1.0]])).weight


def test_documents_of_a_window():
    """An end of text (9) is the last token of its document; the window's first token begins one
    wherever it was cut.
    """
    windows = np.array(
        [
            [1, 2, 9, 3, 4, 5, 6],
            [9, 9, 1, 2, 3, 9, 4],
            [1, 2, 3, 4, 5, 6, 9],
            [1, 9, IGNORED, IGNORED, IGNORED, IGNORED, IGNORED],
        ]
    )
    batch = Batch.from_windows(windows, 9)
    assert batch.documents.starts.tolist() == [
        [0, 0, 0, 3, 3, 3],
        [0, 1, 2, 2, 2, 2],
        [0] * 6,
        [0, 0, 2, 2, 2, 2],
    ]
    assert (
        batch.documents.starts.dtype == torch.int64
        and same(batch, Batch.from_windows(windows))
        and Batch.from_windows(windows).documents is None
    )
    assert [b.documents.starts.tolist() for b in batch.microbatches(2)] == [
        batch.documents.starts[:2].tolist(),
        batch.documents.starts[2:].tolist(),
    ]
    assert all(b.documents is None for b in Batch.from_windows(windows).split(2))


def test_prefixes_end_with_their_documents():
    """Lengths by sequence, and by document."""
    windows = np.array([[1, 2, 9, 3, 4, 5, 6], [9, 9, 1, 2, 3, 9, 4]])
    one, packed = Batch.from_windows(windows), Batch.from_windows(windows, 9)
    alone = one.add_prefixes(torch.tensor([[4], [9]])).documents
    assert alone.starts.tolist() == [[0] * 6] * 2
    assert alone.reach.tolist() == [[4] * 6, [6] * 6]
    assert packed.add_prefixes(torch.tensor([[2]])).documents.reach.tolist() == [
        [2, 2, 2, 5, 5, 5],
        [1, 2, 4, 4, 4, 4],
    ]
    of_documents = torch.tensor([[5, 5, 5, 1, 1, 1], [0, 1, 2, 2, 2, 2]])
    assert packed.add_prefixes(of_documents).documents.reach.tolist() == [
        [3, 3, 3, 4, 4, 4],
        [0, 2, 4, 4, 4, 4],
    ]
    ignored = packed.add_prefixes(of_documents).labels == IGNORED
    assert ignored.tolist() == [
        [True, True, False, False, False, False],
        [False, False, True, False, False, False],
    ]
    again = packed.add_prefixes(of_documents).add_prefixes(torch.tensor([[0]])).documents
    assert torch.equal(again.reach, again.starts)


def test_document_mask_reaches_training_and_validation(documents, load):
    # held out is more than one batch: what fills up the last one would look like ends of text
    plain, masked = (
        load(documents, validation_fraction=0.4, sequence_length=512, document_mask=mask)
        for mask in (False, True)
    )
    assert plain.batch(0).documents is None and next(plain.validation_batches()).documents is None
    for a, b in (
        (plain.batch(3), masked.batch(3)),
        (next(plain.validation_batches()), next(masked.validation_batches())),
    ):
        # labels say where the text ends, tokens are filled up with 0, which is an end of text here
        real = b.labels[:, 0] != IGNORED
        windows = np.concatenate([b.tokens[:, :1], b.labels], 1)[real]
        assert same(a, b) and torch.equal(
            b.documents.starts[real],
            Batch.from_windows(windows, masked.end_of_text).documents.starts,
        )
        assert b.documents.starts.any(), "some window has two documents"
    assert changes(plain.fingerprint(), masked.fingerprint()) == ["document_mask: none -> True"]


def test_document_starts_are_those_of_a_plain_loop():
    draw = np.random.default_rng(3)
    windows = draw.integers(0, 5, (64, 33))  # 0 ends a text: documents of five tokens
    starts = Batch.from_windows(windows, 0).documents.starts.numpy()
    for window, row in zip(windows.tolist(), starts.tolist(), strict=True):
        begin = 0
        for place in range(32):
            if place and window[place - 1] == 0:
                begin = place
            assert row[place] == begin
