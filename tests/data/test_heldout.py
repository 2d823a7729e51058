"""What is held out is not trained on: by content, over all sources, with exact counts."""

import json
import os
import random
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from dolmen.data import validation_split
from dolmen.data.tokenise import DOCUMENT, TextHash
from dolmen.data.tokenizer import train_bpe
from dolmen.data.validation_split import choose_held_out, cuts

WORDS = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi".split()
)


def prose(seed, words):
    """Text of `words` words that no other seed gives."""
    draw = random.Random(seed)
    return "".join(
        f"{draw.choice(WORDS)}{draw.randrange(1000)}" + (" ", "\n")[i % 9 == 8]
        for i in range(words)
    )


def rows(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sides(loader):
    """(training text of each source, held-out text)."""

    def read(stream):
        return loader.tokenizer.decode(stream.read(0, len(stream)) if len(stream) else [])

    return [read(part.stream) for part in loader.mixture.parts], read(loader.validation.stream)


def table(texts):
    found = np.zeros(len(texts), DOCUMENT)
    for record, text in zip(found, texts, strict=True):
        hashed = TextHash()
        hashed.update(text.encode())
        record["bytes"], record["hash"], record["words"] = hashed.size, hashed.exact, hashed.words
    return found


def variants(text):
    """Three texts with the same words."""
    return [text, text.replace("\n", "\r\n"), f"  {text}\n"]


def test_the_rule():
    texts = [prose(i, 20) for i in range(1000)]
    chosen = choose_held_out([table(texts)], 0.05)
    assert 30 <= len(chosen.whole) <= 70 and not chosen.cut
    again = choose_held_out([table(texts[::-1])], 0.05).whole
    assert np.array_equal(again, chosen.whole), "the order of files does not matter"
    assert len(choose_held_out([table(texts)], 0).whole) == 0
    assert len(choose_held_out([table(texts)], 1e-9).whole) == 1, "at least one"


def test_additions_move_no_document():
    """Neither others, nor copies of those that are there, in one source or another."""
    texts = [prose(i, 20) for i in range(700)]
    here = table(texts)
    chosen = set(choose_held_out([here], 0.05).whole)
    more = table([prose(f"more {i}", 20) for i in range(300)])
    copies = table([copy for text in texts for copy in variants(text)])
    for sources in ([np.append(here, more)], [np.append(here, copies)], [copies], [more, copies]):
        assert set(choose_held_out(sources, 0.05).whole) & set(here["words"]) == chosen


def test_additions_move_what_the_docs_say():
    """The two exceptions: a quarter, and the one that stands in where none is drawn."""
    texts = [prose(i, 20) for i in range(40)]
    words = table(texts)["words"]
    low, high = np.argmin(words), np.argsort(words)[4:]  # `low`: of all the first to be drawn
    fraction = (float(words[low]) + 1e6) / 2**64
    few, many = table([texts[i] for i in high[:3]]), table([texts[i] for i in high])
    assert words[low] not in choose_held_out([np.append(few, table([texts[low]]))], fraction).whole
    held = choose_held_out([np.append(many, table([texts[low]]))], fraction).whole
    assert held.tolist() == [words[low]], "no longer a quarter"
    (stood_in,) = choose_held_out([many], fraction).whole
    assert stood_in == words[high].min() and stood_in not in held


def test_the_fraction_is_the_one_asked_for():
    """Of 40,000 documents in three sources that share some, with one to five copies of each that
    differ in white space: within five standard deviations.
    """
    draw = np.random.default_rng(5)
    different = draw.integers(0, 2**63, 40_000).astype(np.uint64) * 2
    found = np.zeros(120_000, DOCUMENT)
    found["words"] = np.append(different, draw.choice(different, 80_000))
    found["hash"] = draw.integers(0, 2**63, 120_000).astype(np.uint64) * 2
    found["bytes"] = 100
    sources = [found[:50_000], found[30_000:90_000], found[85_000:]]
    for fraction in (0.01, 0.05, 0.2, 0.5):
        held = np.isin(different, choose_held_out(sources, fraction).whole).mean()
        assert abs(held - fraction) < 5 * (fraction * (1 - fraction) / 40_000) ** 0.5


def test_the_fraction_of_text_with_copies_in_other_white_space():
    """The hashes themselves: of 4,000 texts, each there three times."""
    texts = [prose(i, 10) for i in range(4000)]
    found = table([copy for text in texts for copy in variants(text)])
    assert len(set(found["hash"])) > 11_900 and len(set(found["words"])) == 4000
    held = len(choose_held_out([found], 0.05).whole) / 4000
    assert abs(held - 0.05) < 5 * (0.05 * 0.95 / 4000) ** 0.5


def test_a_large_document_is_held_out_in_no_source():
    large, small = prose("large", 2000), [prose(i, 30) for i in range(8)]
    many = [large, *(prose(f"many {i}", 2000) for i in range(20))]
    choice = choose_held_out([table([large, *small]), table(many)], 0.5)
    assert table([large])["words"][0] not in choice.whole
    copies = choose_held_out([table([large] * 500)], 0.03)
    assert not len(copies.whole) and list(copies.cut) == [table([large])["hash"][0]]
    equal = ["a" * 1000, "b" * 1000]
    one, other = (choose_held_out([table(texts)], 0.1) for texts in (equal, equal[::-1]))
    assert one.cut == other.cut, "nor does order matter"
    wide = large.replace(" ", "    ")
    for texts in ([large, wide, *small], [wide, large, *small]):
        assert table([large])["words"][0] not in choose_held_out([table(texts)], 0.999).whole, (
            "nor which copy"
        )
    one, other = (
        choose_held_out([table([text]) for text in texts], 0.1)
        for texts in ((large, wide), (wide, large))
    )
    assert one.cut == other.cut and len(one.cut) == 1


def test_up_to_a_quarter_of_a_source_is_held_out_whole():
    """Documents by their bytes; all have the smallest hash, so all that may be are chosen."""

    def records(*sizes):
        found = np.zeros(len(sizes), DOCUMENT)
        found["bytes"], found["words"] = sizes, np.arange(len(sizes))
        return found

    assert choose_held_out([records(25, 25, 25, 25)], 0.1).whole.tolist() == [0, 1, 2, 3]
    here, there = records(26, 25, 24, 25), records(26, *[25] * 9)
    assert choose_held_out([here], 0.1).whole.tolist() == [1, 2, 3]
    assert choose_held_out([there], 0.1).whole.tolist() == list(range(10))
    assert choose_held_out([here, there], 0.1).whole.tolist() == list(range(1, 10))


def test_one_document_in_two_weighted_sources(tmp_path, load):
    shared = [prose(i, 40) for i in range(60)]
    a = rows(tmp_path / "a.jsonl", *shared, *(prose(f"a{i}", 40) for i in range(20)))
    b = rows(tmp_path / "b.jsonl", *(prose(f"b{i}", 40) for i in range(20)), *shared[::-1])
    loader = load(f"0.5:{a}", f"0.5:{b}", validation_fraction=0.1)
    training, held = sides(loader)
    scored = [text for text in held.split("<|endoftext|>") if text]
    assert len(scored) == len(set(scored)) > 3 and set(scored) & set(shared)
    for text in scored:
        assert not any(text in side for side in training), "trained on"
    assert loader.validation_bytes == sum(len(text.encode()) for text in scored)
    copies = sum(text in shared for text in scored)
    (metrics,) = [line for line in loader.description.changes if "not trained on" in line]
    assert f"{copies} of 80 documents of {b}" in metrics and "copies of held-out text" in metrics


@pytest.mark.parametrize("copies", [3, 500])
def test_copies_of_one_text_are_cut_at_one_place(tmp_path, load, copies):
    text = prose("one", 400)
    loader = load(rows(tmp_path / "a.jsonl", *[text] * copies), validation_fraction=0.1)
    (training,), held = sides(loader)
    tail = held.removesuffix("<|endoftext|>")
    assert training == text.removesuffix(tail) * copies and text.endswith(tail)
    assert 0.05 < len(tail) / len(text) < 0.15 and loader.validation_bytes == len(tail)
    assert f"{copies - 1} copies of others" in loader.description.training


def test_a_document_that_is_cut_in_one_source_is_cut_in_all(tmp_path, load):
    text = prose("long", 600)
    crlf = text.replace("\n", "\r\n")
    alone = tmp_path / "alone.txt"
    alone.write_text(text)
    many = rows(tmp_path / "b.jsonl", *(prose(i, 600) for i in range(30)), text, crlf)
    loader = load(f"1:{alone}", f"3:{many}", validation_fraction=0.1)
    training, held = sides(loader)
    tail = held.split("<|endoftext|>")[0]
    assert text.endswith(tail) and len(tail) > 100
    head = text.removesuffix(tail)
    assert training[0] == head and head in training[1]
    assert tail not in training[1] and crlf[-50:] not in training[1], "the same words"
    assert loader.validation_bytes == len(held.replace("<|endoftext|>", "").encode())


@pytest.mark.parametrize(
    "how", ["spelling", "symlink", "hard link", "copy", "crlf", "mark", "spaces", "rows"]
)
def test_validation_that_is_training_text_is_kept_out_of_training(tmp_path, load, documents, how):
    judge, third = tmp_path / "judge.txt", documents / "03.txt"
    if how == "spelling":
        judge = documents / ".." / documents.name / "03.txt"
    elif how == "symlink":
        judge.symlink_to(third)
    elif how == "hard link":
        os.link(third, judge)
    elif how == "copy":
        shutil.copy(third, judge)
    elif how == "crlf":
        judge.write_bytes(third.read_bytes().replace(b"\n", b"\r\n"))
    elif how == "mark":
        judge.write_text(f"\ufeff{third.read_text()}")
    elif how == "spaces":
        signs = "\u00a0\u0085\u1680\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000"
        judge.write_text(third.read_text().replace(" ", signs))
    else:
        judge = rows(tmp_path / "judge.jsonl", third.read_text(), "another")
    loader = load(documents, validation=str(judge))
    (training,), _ = sides(loader)
    assert "of document 3\n" not in training and "of document 4\n" in training
    (metrics,) = [line for line in loader.description.changes if "not trained on" in line]
    assert (
        "1 of 40 documents" in metrics and "also in --data.validation" in metrics and "%" in metrics
    )
    assert loader.validation_tokens == len(loader.validation.stream)


def test_validation_that_is_all_of_training_is_refused(tmp_path, load, documents):
    shutil.copytree(documents, tmp_path / "copy")
    with pytest.raises(ValueError, match="^all of --data.path .*documents is also in"):
        load(documents, validation=str(tmp_path / "copy"))


def test_too_little_left_tells_where_it_went(tmp_path, load):
    path = rows(tmp_path / "a.jsonl", *["a word or two"] * 5)
    with pytest.raises(ValueError) as refused:
        load(path, sequence_length=256, validation_fraction=0.5)
    reported = str(refused.value)
    assert "5 documents, of which 4 are copies of others" in reported and "are held out" in reported
    assert "sequence-length 1" not in reported and "more data" in reported


def byte_tokens(**parts):
    """A tokenizer of 256 single bytes, so that most cuts fall inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    for name, part in parts.items():
        setattr(bpe, name, part)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def test_cuts_are_between_characters():
    text = "aé漢😀 b\n"
    size = [len(text[:i].encode()) for i in range(len(text))]
    expected = [size.index(i) if i in size else None for i in range(len(text.encode()))]
    assert cuts(byte_tokens(), text, 3) == expected
    slow = cuts(ByT5Tokenizer(), text, 6)
    assert slow == expected
    lower = byte_tokens(normalizer=normalizers.Lowercase())
    assert cuts(lower, "ABé c", 0) == [0, 1, 2, None, 3, 4]


def test_bytes_of_a_held_out_end_are_exact(tmp_path, load):
    """Of a text whose characters have several tokens each, and where pieces are many."""
    text = "".join(random.Random(1).choices("é漢😀a \n", k=4000))
    (tmp_path / "a.txt").write_text(text)
    for fraction in (0.02, 0.1, 0.33):
        loader = load(tmp_path / "a.txt", validation_fraction=fraction)
        (training,), held = sides(loader)
        held = held.removesuffix("<|endoftext|>")
        assert training + held == text and loader.validation_bytes == len(held.encode())
        assert (
            abs(
                loader.validation_tokens / len(loader.mixture.parts[0].stream)
                - fraction / (1 - fraction)
            )
            < 0.01
        )


def test_a_document_of_many_pieces_is_cut_between_two(tmp_path, load, monkeypatch):
    monkeypatch.setattr("dolmen.data.tokenise.cut.__defaults__", (400,))
    text = prose("pieces", 6000)
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(validation_split, "cuts", None)
    loader = load(tmp_path / "a.txt", validation_fraction=0.1)
    (training,), held = sides(loader)
    held = held.removesuffix("<|endoftext|>")
    assert training + held == text and loader.validation_bytes == len(held.encode())
    assert 0.09 < len(held) / len(text) < 0.11


def test_a_file_that_was_changed_under_the_cache(tmp_path, load, monkeypatch):
    (tmp_path / "a.txt").write_text(prose("a", 300))
    monkeypatch.setattr(validation_split, "document", lambda *_: iter(["other text"]))
    with pytest.raises(ValueError, match="the text changed after it was tokenised"):
        load(tmp_path / "a.txt")


def test_a_tokenizer_of_the_data_has_not_seen_what_is_held_out(tmp_path, load, monkeypatch):
    seen = []
    monkeypatch.setattr(
        "dolmen.data.bpe.train_bpe",
        lambda texts, size, folder, progress: seen.extend(texts) or train_bpe(seen, size, folder),
    )
    shared = [prose(i, 30) for i in range(60)]
    path = rows(tmp_path / "a.jsonl", *shared), rows(tmp_path / "b.jsonl", *shared[::-1])
    options = dict(tokenizer="bpe:300", validation_fraction=0.1)
    _, held = sides(load(f"1:{path[0]}", f"1:{path[1]}", **options))
    scored = set(filter(None, held.split("<|endoftext|>")))
    assert scored and scored | set(seen) == set(shared) and not scored & set(seen)
    seen.clear()
    judge = rows(tmp_path / "judge.jsonl", shared[3])
    load(path[0], **options, validation=str(judge))
    assert set(seen) == set(shared) - {shared[3]}


def test_a_tokenizer_of_the_data_is_made_again_when_what_is_held_out_changes(
    tmp_path, load, monkeypatch
):
    seen = []
    monkeypatch.setattr(
        "dolmen.data.bpe.train_bpe",
        lambda texts, size, folder, progress: (
            seen.append(list(texts)) or train_bpe(seen[-1], size, folder)
        ),
    )
    texts = [prose(i, 30) for i in range(10)]
    path, judge = rows(tmp_path / "a.jsonl", *texts), rows(tmp_path / "judge.jsonl", texts[3])

    def again():
        load(path, tokenizer="bpe:300", validation=str(judge))

    again(), again()
    assert len(seen) == 1
    rows(judge, texts[4])
    again()
    assert len(seen) == 2 and texts[3] in seen[1] and texts[4] not in seen[1]
    for file in tmp_path.glob("cache/tokenizers/*/tokenizer.json"):
        file.write_bytes(file.read_bytes() + b" ")
    again()
    assert len(seen) == 3, "its files are not what was written"
