"""Merged tokenizers: beside both inputs, sentencepiece itself, and `transformers`."""

import json
import random
import shutil
from itertools import accumulate
from operator import concat
from pathlib import Path

import pytest
import sentencepiece
from texts import CHINESE, ENGLISH
from tokenizers.models import BPE
from transformers import AutoTokenizer

from dolmen.data.tokenizer import load_tokenizer, vocabulary_size
from dolmen.files import sentencepiece_model
from dolmen.vocabulary.config import VocabMergeConfig, VocabText
from dolmen.vocabulary.merge import Merges, apply_bpe, extend_bpe, merge
from dolmen.vocabulary.tokenizer_folder import Vocabulary

PAIRS = (
    ("bpe", "bpe"),
    ("unigram", "unigram"),
    ("bpe", "unigram"),
    ("bpe", "byte-bpe"),
    ("byte-bpe", "byte-bpe"),
    ("byte-bpe", "bpe"),
    ("byte-bpe", "unigram"),
)
LINES = [line for line in (CHINESE + ENGLISH).splitlines() if line]


@pytest.fixture(scope="module")
def merged(vocabularies, tmp_path_factory):
    """(kind of English, kind of Chinese) -> (folder, base, new, what the merge says)."""
    folder, made = tmp_path_factory.mktemp("merged"), {}

    def get(base, new):
        if (base, new) not in made:
            to = folder / f"{base}-{new}"
            a, b = vocabularies("en", base), vocabularies("zh", new)
            done = merge(VocabMergeConfig(str(a), str(b), str(to)), progress=False)
            made[base, new] = to, a, b, done
        return made[base, new]

    return get


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("kinds", PAIRS)
def test_a_merged_tokenizer_is_the_base_with_tokens_behind(merged, kinds):
    to, base, new, done = merged(*kinds)
    old, made = load_tokenizer(str(base)), AutoTokenizer.from_pretrained(to)
    before, after = old.get_vocab(), made.get_vocab()
    assert {token: after[token] for token in before} == before
    assert sorted(after.values()) == [*range(done.size)] and vocabulary_size(old) == done.base
    assert (made.eos_token, made.bos_token) == (old.eos_token, old.bos_token)
    for line in LINES:
        tokens = ids(made, line)
        assert made.decode(tokens) == line and tokens
        # English as before, or joined further: each token is a run of old ones
        if kinds[0] != "unigram":
            spans = [made.convert_ids_to_tokens(one) for one in (ids(old, line), tokens)]
            ends = [{sum(map(len, span[: i + 1])) for i in range(len(span))} for span in spans]
            if all(not token.startswith("<0x") for span in spans for token in span):
                assert ends[1] <= ends[0]
    chinese = CHINESE.splitlines()[0]
    assert len(ids(made, chinese)) < 0.6 * len(ids(old, chinese))


@pytest.mark.parametrize("kinds", [k for k in PAIRS if k[0] != "byte-bpe"])
def test_sentencepiece_itself_cuts_texts_alike(merged, kinds):
    """And the base's pieces, their scores and types are in the file as they were, to the byte."""
    to, base, new, done = merged(*kinds)
    content = (to / "tokenizer.model").read_bytes()
    assert content.startswith((base / "tokenizer.model").read_bytes())
    theirs = sentencepiece.SentencePieceProcessor(model_proto=content)
    made = AutoTokenizer.from_pretrained(to)
    assert theirs.get_piece_size() == len(made) == done.size
    for line in LINES:
        assert theirs.encode(line) == ids(made, line) and theirs.decode(ids(made, line)) == line
    model = sentencepiece_model.read(to / "tokenizer.model")
    assert model.byte_fallback and made.decode(ids(made, "\U0001f600\t")) == "\U0001f600\t"
    odd = "of\n\tthe\0"  # bytes of the base, which a new piece would take the place of
    assert ids(made, odd) == ids(load_tokenizer(str(base)), odd)
    added = model.pieces[done.base :]
    if kinds == ("unigram", "unigram"):
        scores = {p.text: p.score for p in sentencepiece_model.read(new / "tokenizer.model").pieces}
        assert all(piece.score == scores[piece.text] for piece in added)
    else:
        lowest = min(piece.score for piece in model.pieces[: done.base])
        scores = [lowest - 1 - i for i in range(len(added))]
        assert sorted((piece.score for piece in added), reverse=True) == scores


@pytest.mark.parametrize("kinds", PAIRS)
def test_every_new_token_comes_out_of_its_own_text_in_the_order_it_was_learned(merged, kinds):
    to, base, new, done = merged(*kinds)
    made = AutoTokenizer.from_pretrained(to)
    tokens = made.convert_ids_to_tokens(list(range(done.base, done.size)))
    model = made.backend_tokenizer.model
    if kinds[0] != "unigram":  # there a token may be less likely than its parts
        assert all([one.value for one in model.tokenize(token)] == [token] for token in tokens)
    if kinds[0] == kinds[1]:
        ordered = [
            t
            for t, _ in sorted(
                AutoTokenizer.from_pretrained(new).get_vocab().items(), key=lambda one: one[1]
            )
        ]
        learned = [token for token in ordered if token in {*tokens}]
        assert [token for token in tokens if token in {*ordered}] == learned
        assert len(tokens) - len(learned) == done.between < 0.05 * len(tokens)
        assert done.had + len(learned) + sum(done.left_out.values()) == len(ordered) - (
            1 if kinds[0] == "byte-bpe" else 259
        )


def test_merges_are_found_where_the_base_has_joined_otherwise():
    """The base joins b c first, so a b c d is out of reach by (a b) (c d)."""
    for key in (lambda left, right: (left, right), concat):
        pairs = Merges({key("b", "c"): 0}, key)
        added = extend_bpe(["ab", "cd", "abcd"], {*"abcd", "bc"}, pairs)
        assert added.tokens == ["ab", "cd", "abc", "abcd"] and added.between == 1
        again = extend_bpe(["xyz", "yz", "z"], {*"abcd"}, pairs)
        assert again.tokens == ["x", "y", "xyz", "yz", "z"], "its own are added in their order"
        assert apply_bpe("abcd", pairs) == ["abcd"] and apply_bpe("bcd", pairs) == ["bc", "d"]


@pytest.mark.parametrize("seed", range(5))
def test_merges_are_those_of_tokenizers_and_refine_no_text_of_the_base(seed):
    """Texts at random: cut as by the library `tokenizers`; a text's pieces after an extension are
    runs of its pieces before; each wanted token is one piece.
    """
    chance = random.Random(seed)

    def text(most):
        return "".join(chance.choices("abcd", k=chance.randint(1, most)))

    def cuts(pieces):
        return {*accumulate(map(len, pieces))}

    known, ranks = dict.fromkeys("abcd"), {}
    for _ in range(12):
        pair = chance.choice([*known]), chance.choice([*known])
        known[concat(*pair)] = ranks[pair] = ranks.get(pair, len(ranks))
    texts, wanted = [text(30) for _ in range(30)], [*dict.fromkeys(text(9) for _ in range(9))]
    pairs = Merges(ranks, lambda left, right: (left, right))
    before = [apply_bpe(line, pairs) for line in texts]
    base = {**ranks}
    added = extend_bpe(wanted, known, pairs)
    tokens = [*known, *added.tokens]
    assert [*pairs.ranks][: len(base)] == [*base] and len({*tokens}) == len(tokens)
    new = [token for token in wanted if token not in known]
    assert [token for token in added.tokens if token in new] == new
    assert added.between == len(added.tokens) - len(new)
    assert all(apply_bpe(token, pairs) == [token] for token in wanted)
    library = BPE({token: i for i, token in enumerate(tokens)}, [*pairs.ranks])
    for line, old in zip(texts, before, strict=True):
        pieces = apply_bpe(line, pairs)
        assert cuts(pieces) <= cuts(old)
        assert pieces == [token.value for token in library.tokenize(line)]


def test_a_base_of_a_family_keeps_its_class_and_its_added_tokens(vocabularies, tmp_path):
    """A class that builds its own tokenizer of vocab and merges, as Llama's and GPT-2's; tokens
    behind the pieces keep their ids.
    """
    for kind, cls in (("bpe", "LlamaTokenizer"), ("byte-bpe", "GPT2Tokenizer")):
        base, to = tmp_path / f"base-{kind}", tmp_path / f"to-{kind}"
        shutil.copytree(vocabularies("en", kind), base)
        config = json.loads((base / "tokenizer_config.json").read_text())
        (base / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": cls}))
        old = AutoTokenizer.from_pretrained(base)
        old.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|end|>"]})
        old.save_pretrained(base)
        done = merge(VocabMergeConfig(str(base), str(vocabularies("zh", kind)), str(to)), False)
        made = AutoTokenizer.from_pretrained(to)
        assert type(made).__name__ == type(old).__name__ == cls
        assert done.base == 452 and made.convert_tokens_to_ids("<|user|>") == 450
        assert made.convert_tokens_to_ids("<|end|>") == old.convert_tokens_to_ids("<|end|>") == 451
        text = "<|user|>All men 天下皆知<|end|>"
        assert ids(made, text)[0] == 450 and ids(made, text)[-1] == 451
        assert made.decode(ids(made, text)) == old.decode(ids(old, text))
        assert min(i for i in ids(made, "天下皆知美之为美") if i != ids(made, "天")[0]) > 451
        if kind == "bpe":
            theirs = sentencepiece.SentencePieceProcessor(model_file=str(to / "tokenizer.model"))
            assert theirs.id_to_piece(450) == "<|user|>" and theirs.is_control(450)
            assert theirs.encode(LINES[0]) == ids(made, LINES[0])


def test_a_tokenizer_json_of_letters_and_older_files_beside_one(vocabularies, tmp_path):
    """BPE over characters without a tokenizer.model, and vocab.json with merges.txt."""
    for kind in ("bpe", "byte-bpe"):
        base, to = tmp_path / f"base-{kind}", tmp_path / f"to-{kind}"
        shutil.copytree(vocabularies("en", kind), base)
        (base / "tokenizer.model").unlink(missing_ok=True)
        old = AutoTokenizer.from_pretrained(base)
        if kind == "byte-bpe":
            old.backend_tokenizer.model.save(str(base))
        done = merge(VocabMergeConfig(str(base), str(vocabularies("zh", kind)), str(to)), False)
        made = AutoTokenizer.from_pretrained(to)
        assert len(made) == done.size and not (to / "tokenizer.model").exists()
        for line in LINES:
            assert made.decode(ids(made, line)) == line
        english = "government of the people, by the people"
        assert ids(made, english) == ids(old, english)
        assert len(ids(made, "天气")) <= 2 < len(ids(old, "天气"))
        content = json.loads((to / "tokenizer.json").read_text())["model"]
        before = json.loads((base / "tokenizer.json").read_text())["model"]["merges"]
        assert content["merges"][: len(before)] == before
        if kind == "byte-bpe":
            assert json.loads((to / "vocab.json").read_text()) == content["vocab"]
            lines = (to / "merges.txt").read_text().splitlines()[1:]
            assert [line.split(" ") for line in lines] == content["merges"]


def test_added_tokens_beside_a_bare_model_keep_their_ids(vocabularies, tmp_path):
    """As folders from before tokenizer.json have them; an id that nobody has stays empty."""
    base = tmp_path / "base"
    base.mkdir()
    shutil.copy(vocabularies("en", "bpe") / "tokenizer.model", base)
    (base / "added_tokens.json").write_text('{"<pad>": 450, "<|im_end|>": 452}')
    new, to = str(vocabularies("zh", "bpe")), tmp_path / "to"
    done = merge(VocabMergeConfig(str(base), new, str(to)), progress=False)
    made = AutoTokenizer.from_pretrained(to)
    assert done.base == 453 and len(made) == done.size
    assert ids(made, "<pad>天下<|im_end|>")[0] == 450 and ids(made, "天<|im_end|>")[-1] == 452
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(to / "tokenizer.model"))
    assert theirs.id_to_piece(450) == "<pad>" and theirs.is_unused(451)
    assert theirs.encode(LINES[0]) == ids(made, LINES[0])
    (base / "added_tokens.json").write_text('{"<far>": 2000000000}')
    with pytest.raises(ValueError, match="an added token has id 2,000,000,000: '<far>'"):
        merge(VocabMergeConfig(str(base), new, str(tmp_path / "no")), progress=False)


def test_held_out_text_is_counted(vocabularies, corpora, tmp_path):
    text = VocabText((str(corpora / "zh.txt"),))
    base, new = vocabularies("en", "bpe"), vocabularies("zh", "bpe")
    config = VocabMergeConfig(str(base / "tokenizer.model"), str(new), str(tmp_path / "to"), text)
    done = merge(config, progress=False)
    assert done.before and done.after
    assert done.before.characters == done.after.characters == len(CHINESE)
    assert done.before.bytes == len(CHINESE.encode())
    made = AutoTokenizer.from_pretrained(tmp_path / "to")
    assert done.after.tokens == len(ids(made, CHINESE)) < done.before.tokens / 3
    assert f"{len(CHINESE) / done.after.tokens:.3f} characters" in done.lines()[-1]


def without_a_letter(folder, to):
    """A tokenizer of the folder's that makes every capital letter small."""
    shutil.copytree(folder, to)
    content = json.loads((to / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (to / "tokenizer.json").write_text(json.dumps(content))
    return to


def test_what_cannot_be_merged_is_refused(vocabularies, tmp_path):
    en, zh, to = vocabularies("en", "bpe"), vocabularies("zh", "bpe"), tmp_path / "to"

    def refused(base, new):
        with pytest.raises(ValueError) as error:
            merge(VocabMergeConfig(str(base), str(new), str(to)), progress=False)
        assert not to.exists()
        return str(error.value)

    assert "is unigram, whose tokens have prob" in refused(vocabularies("en", "unigram"), zh)
    assert "has no token that is not in BASE" in refused(en, en)
    lower = without_a_letter(vocabularies("en", "byte-bpe"), tmp_path / "lower")
    assert "is not reversible: 'All happy" in refused(lower, zh)
    other = tmp_path / "other"
    shutil.copytree(en, other)
    shutil.copy(vocabularies("zh", "bpe") / "tokenizer.model", other / "tokenizer.model")
    assert "tokenizer.json and tokenizer.model differ in" in refused(other, zh)
    (tmp_path / "empty").mkdir()
    assert "it is empty" in refused(tmp_path / "empty", zh)
    (tmp_path / "bad.model").write_bytes((en / "tokenizer.model").read_bytes()[:-40])
    assert "bad.model: is not a sentencepiece model: it is truncated" in refused(
        tmp_path / "bad.model", zh
    )
    to.mkdir()
    (to / "mine").touch()
    with pytest.raises(ValueError, match="exists and is not empty"):
        merge(VocabMergeConfig(str(en), str(zh), str(to)), progress=False)


@pytest.mark.parametrize(
    "form, token", [("sentencepiece", "▁tä"), ("letters", "▁tä"), ("bytes", "ĠtÃ¤")]
)
def test_a_token_stands_for_the_same_bytes_in_every_form(form, token):
    vocabulary = Vocabulary(Path("a"), form, None, None)
    assert vocabulary.meaning(token) == " tä".encode()
    assert vocabulary.token_from_bytes(" tä".encode()) == token
    assert vocabulary.token_from_bytes(b"\xc3") == ("Ã" if form == "bytes" else None)
