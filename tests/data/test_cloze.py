"""Sequences for an encoder: where texts lie, what is masked and how often, and that all of it
follows from seed and name.
"""

import numpy as np
import pytest
import torch
import transformers

from dolmen.data.batch import FOLLOWS, IGNORED
from dolmen.data.masked_lm import Cloze, cloze_for_tokenizer

CLS, SEP, MASK, PAD, FIRST, SIZE = 0, 1, 2, 3, 4, 104
BEGINS = np.arange(SIZE) % 2 == 0  # words are an even token and the odd ones behind it


def cloze(**options) -> Cloze:
    given = dict(
        sequence_length=63,
        begin=CLS,
        between=SEP,
        mask=MASK,
        padding=PAD,
        begins=BEGINS,
        ordinary=np.arange(FIRST, SIZE),
        fraction=0.15,
        pairs=True,
        seed=0,
    )
    return Cloze(**{**given, **options})


def texts(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(FIRST, SIZE, (rows, length))


def made(one: Cloze, given: np.ndarray):
    return one.batch(given, range(len(given)), lambda row: given[row - 1])


def test_where_texts_lie():
    one = cloze()
    given = texts(200, one.text)
    batch = made(one, given)
    filled = torch.where(batch.labels == IGNORED, batch.tokens, batch.labels).numpy()
    types, said = batch.positions.ids[:, 1].numpy(), batch.numbers[FOLLOWS].numpy()
    assert (filled[:, 0] == CLS).all() and (filled[:, -1] == SEP).all() and batch.documents is None
    assert (batch.positions.ids[:, 0] == torch.arange(63)).all()
    assert not said[:, 1:].any() and 0.4 < (said[:, 0] == 1).mean() < 0.6
    for row in range(200):
        cut = int((types[row] == 0).sum()) - 2
        assert 15 <= cut <= 46 and filled[row, cut + 1] == SEP and types[row, cut + 2 :].all()
        second = given[row if said[row, 0] == 1 else row - 1]
        assert (filled[row, 1 : cut + 1] == given[row, :cut]).all()
        assert (filled[row, cut + 2 : -1] == second[cut:]).all()


def test_whole_words_and_how_often():
    """Of 200 rows of 60 tokens; five standard errors."""
    one = cloze(pairs=False)
    given = texts(200, one.text)
    batch = made(one, given)
    tokens, labels = batch.tokens.numpy(), batch.labels.numpy()
    chosen = labels != IGNORED
    assert batch.numbers == {} and not batch.positions.ids[:, 1].any()
    words = BEGINS[given].cumsum(1)  # the first token of a text begins one too
    for row in range(200):
        own = chosen[row, 1:-1]
        assert all(own[words[row] == word].all() for word in set(words[row][own]))
        assert 4 <= own.sum() <= 9  # 15 % of 61 are 9; words of 4 may not fit at the end
    total = int(chosen.sum())
    shares = [(tokens == MASK)[chosen].mean(), (tokens == labels)[chosen].mean()]
    for share, wanted in zip(shares, (0.8, 0.1 + 0.1 / 100), strict=True):
        assert abs(share - wanted) < 5 * (wanted * (1 - wanted) / total) ** 0.5


def test_by_seed_and_name_alone():
    given = texts(6, cloze().text)
    whole, again = made(cloze(), given), made(cloze(), given)
    assert torch.equal(whole.tokens, again.tokens)
    part = cloze().batch(given[2:4], range(2, 4), lambda row: given[row + 1])
    assert torch.equal(part.tokens, whole.tokens[2:4])
    assert not torch.equal(made(cloze(seed=1), given).tokens, whole.tokens)


def test_the_end_of_the_text():
    """Padding is a document of its own, and nothing of it is to be filled in."""
    one = cloze()
    given = texts(3, one.text)
    given[1, 20:], given[2] = IGNORED, IGNORED
    batch = made(one, given)
    ends = [63, 23, 2]
    for row, end in enumerate(ends):
        assert (batch.tokens[row, end:] == PAD).all() and batch.tokens[row, end - 1] == SEP
        assert (batch.labels[row, end:] == IGNORED).all()
        assert (batch.documents.starts[row, end:] == end).all()
        assert (batch.documents.starts[row, :end] == 0).all()
    assert (batch.labels[2] == IGNORED).all() and batch.numbers[FOLLOWS][2, 0] == 0


def test_of_a_tokenizer(tmp_path):
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "walk", "##ing", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    found = cloze_for_tokenizer(tokenizer, 16, 0.15, True, 0)
    assert (found.begin, found.between, found.mask, found.padding) == (2, 3, 4, 0)
    assert found.ordinary.tolist() == [5, 6, 7] and not found.begins[6] and found.begins[7]
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="needs a mask token"):
        cloze_for_tokenizer(tokenizer, 16, 0.15, True, 0)
    with pytest.raises(ValueError, match="train.sequence-length is 7"):
        cloze_for_tokenizer(tokenizer, 7, 0.15, True, 0)
