"""`dolmen vocab` and its functions in Python: what they say, and what is refused in a line."""

import pytest
from tinyrun import dolmen
from transformers import AutoTokenizer

import dolmen as package


def test_from_text_to_a_merged_tokenizer(corpora, vocabularies, tmp_path):
    zh = tmp_path / "zh"
    words = ("--size", 700, "--kind", "bpe", "--to", zh)
    done = dolmen("vocab", "train", "--data.path", corpora / "zh.txt", *words)
    assert done.code == 0 and done.out.startswith(f"wrote {zh}\n700 tokens (bpe), learned from ")
    again = dolmen("vocab", "train", "--data.path", corpora / "zh.txt", *words)
    assert again.code == 2 and "exists and is not empty" in again.err and again.err.count("\n") == 1
    base, to = vocabularies("en", "bpe"), tmp_path / "merged"
    done = dolmen("vocab", "merge", base, zh, "--to", to, "--data.path", corpora / "zh.txt")
    assert done.code == 0 and "450 tokens of the base, unchanged; " in done.out
    assert "\nbefore: " in done.out and "\nafter:  " in done.out
    other = package.merge_vocabularies(base, zh, tmp_path / "other", progress=False)
    assert other.size == len(AutoTokenizer.from_pretrained(to))
    trained = package.train_vocabulary(
        corpora / "zh.txt", 700, tmp_path / "again", kind="bpe", progress=False
    )
    assert trained.size == 700
    one, two = ((folder / "tokenizer.model").read_bytes() for folder in (zh, tmp_path / "again"))
    assert one == two
    with pytest.raises(ValueError, match="^kind is 'bep'"):
        package.train_vocabulary("x", 700, tmp_path / "no", kind="bep")
    with pytest.raises(ValueError, match="no text: use path with a file"):
        package.train_vocabulary((), 700, tmp_path / "no", progress=False)


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "name a part: dolmen vocab has train, merge, extend"),
        ("trin --size 3", "'trin' is not a part of it: dolmen vocab has train, merge, extend"),
        ("train --size 900 --kind bpe --to x", "no text: use --data.path"),
        (
            "train --size 9 --kind bpe --to x",
            "--size is 9: a vocabulary of kind bpe has 256 byte tokens",
        ),
        ("merge a b --to", "--to needs a value"),
        ("extend m --tokenizer t --to x --init men", "--init is 'men': use one of mean, random"),
        ("extend /no/m --tokenizer t --to x", "/no/m: no such folder"),
    ],
)
def test_what_is_refused(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = dolmen("vocab", *words.split())
    part = words.split(" ")[0]
    prefix = f"vocab {part}" if part in ("train", "merge", "extend") else "vocab"
    assert done.code == 2 and said in done.err and done.err.startswith(f"dolmen {prefix}: ")
    assert done.err.count("\n") == 1 and not [*tmp_path.iterdir()]


def test_help_names_the_parts():
    for word in ("--help", "-h"):
        done = dolmen("vocab", word)
        assert done.code == 0 and "usage: dolmen vocab {train,merge,extend}" in done.out
