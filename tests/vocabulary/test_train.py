"""Vocabularies that are learned: what they are, that texts come back, and what is refused."""

import gzip
import json

import pytest
import sentencepiece
from texts import CHINESE, ENGLISH
from transformers import AutoTokenizer

from dolmen.files import sentencepiece_model
from dolmen.vocabulary.check import open_text
from dolmen.vocabulary.config import VocabText, VocabTrainConfig
from dolmen.vocabulary.train import LONGEST, sample_lines, train

KINDS = ("unigram", "bpe", "byte-bpe")
ODD = "  two  spaces,\ta tab\n\nand \U0001f600, \u00e9, 12345"


@pytest.mark.parametrize("kind", KINDS)
def test_a_vocabulary_has_the_size_asked_and_gives_texts_back(vocabularies, kind):
    folder = vocabularies("zh", kind)
    made = AutoTokenizer.from_pretrained(folder)
    assert len(made) == (600 if kind == "unigram" else 800)
    assert made.eos_token_id is not None
    for text in (CHINESE.strip(), ENGLISH.strip(), ODD):
        tokens = made(text, add_special_tokens=False)["input_ids"]
        assert made.decode(tokens) == text
    assert len(made("天气", add_special_tokens=False)["input_ids"]) <= 2
    if kind != "byte-bpe":
        model = sentencepiece_model.read(folder / "tokenizer.model")
        assert model.kind == kind and model.byte_fallback and not model.charsmap
        theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        for line in (CHINESE + ENGLISH + ODD).splitlines():
            assert theirs.encode(line) == made(line, add_special_tokens=False)["input_ids"]


def test_text_comes_from_any_source_and_is_drawn_within_bytes(tmp_path):
    """A sample of the lines in their order, the same for a seed, and without preference."""
    folder = tmp_path / "text"
    folder.mkdir()
    lines = [f"line {number:04}" for number in range(2000)]
    (folder / "a.txt").write_text("\n".join(lines[:500]))
    rows = [json.dumps({"body": line}) for line in lines[500:1000]]
    (folder / "b.jsonl").write_text("\n".join(rows))
    with gzip.open(folder / "c.txt.gz", "wt") as packed:
        packed.write("\n".join(lines[1000:]))
    text = open_text(VocabText((str(folder),), "body"))
    assert text is not None
    whole = sample_lines(text, 10**6, 0)
    assert whole.lines == lines and whole.bytes == whole.whole == 9 * 2000
    some = sample_lines(text, 3600, 0)
    assert some.bytes == 3600 and some.lines == sorted(some.lines) and some.whole == 18000
    assert sample_lines(text, 3600, 0) == some != sample_lines(text, 3600, 1)
    # of 400 of 2,000 lines a third part has 133; five standard deviations are 42
    for part in (lines[:666], lines[666:1332], lines[1332:]):
        assert abs(len({*part} & {*some.lines}) - 133) < 42
    (tmp_path / "long.txt").write_text("word " * 10_000)
    text = open_text(VocabText((str(tmp_path / "long.txt"),)))
    assert text is not None
    long = sample_lines(text, 10**6, 0).lines
    assert "".join(long) == "word " * 10_000 and max(map(len, long)) <= LONGEST


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_has_not_so_many_tokens_is_refused(corpora, tmp_path, kind):
    text, to = VocabText((str(corpora / "zh.txt"),)), tmp_path / "to"
    for size, reported in ((200_000, "bytes of text are too few for"), (2600, "use --size ")):
        with pytest.raises(ValueError, match=f"--size is {size:,}, but .*{reported}"):
            train(VocabTrainConfig(size, kind, str(to), text), progress=False)
    if kind != "byte-bpe":
        with pytest.raises(ValueError, match="single bytes and characters of the text need"):
            train(VocabTrainConfig(400, kind, str(to), text), progress=False)
    assert not to.exists()


def test_what_is_no_text_is_refused(tmp_path):
    def refused(*paths, **other):
        request = {"size": 300, "kind": "bpe", "to": str(tmp_path / "to")} | other
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            train(VocabTrainConfig(data=VocabText(paths), **request), progress=False)
        assert not (tmp_path / "to").exists()
        return str(error.value)

    (tmp_path / "blank.txt").write_text(" \n\n ")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\nno JSON\n')
    assert "no text: use --data.path" in refused()
    assert "no such file or folder" in refused("/no/such/file.txt")
    assert "contains no text" in refused(str(tmp_path / "blank.txt"))
    assert "rows.jsonl, line 2: is not JSON" in refused(str(tmp_path / "rows.jsonl"))
    assert "leave them out" in refused(f"0.5:{tmp_path / 'blank.txt'}")
    with pytest.raises(ValueError, match="--size is 256: .*use --size 258 to 16777216"):
        VocabTrainConfig(256, "byte-bpe", "to")
    with pytest.raises(ValueError, match="--max-bytes is 10: it must be at least"):
        VocabTrainConfig(300, "bpe", "to", max_bytes=10)
