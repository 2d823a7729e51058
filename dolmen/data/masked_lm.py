"""Sequences for an encoder to fill in (Devlin et al., 1810.04805, sections 3.1 and A.1): of some
words the tokens are masked, and of two texts the second may be one of elsewhere.

    pairs     [CLS] a a a a a [SEP] b b b b b [SEP]      types 0 up to the first [SEP], then 1
    no pairs  [CLS] a a a a a a a a a a a [SEP]          type 0

Words are masked whole, as in BERT's later models (Cui et al., 1906.08101). Of the tokens of a
masked word 8 of 10 become the mask, one a random token, and one stays; all are to be filled in.
What is drawn follows from (seed, name of the sequence) alone, so an epoch masks other words than
the one before it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Int64

from dolmen.core.determinism import seed_of
from dolmen.data.batch import FOLLOWS, Batch
from dolmen.data.tokenizer import PreTrainedTokenizer, vocabulary_size
from dolmen.ops.attention import Documents
from dolmen.ops.loss import IGNORED
from dolmen.ops.rope import PositionIds

BEGINNINGS = ("Ġ", "▁")  # what a token of a new word begins with: byte-level BPE, sentencepiece
CONTINUES = "##"  # what one within a word begins with: WordPiece
MASKED, RANDOM = 0.8, 0.9  # below the first a token is masked, below the second it is a random one

Text = Int64[np.ndarray, " _"]


@dataclass(frozen=True, eq=False)
class Cloze:
    """How sequences of `sequence_length` tokens for a masked LM are made of text."""

    sequence_length: int
    begin: int
    """[CLS], or <s>."""
    between: int
    """[SEP], or </s>."""
    mask: int
    padding: int
    begins: Bool[np.ndarray, " vocabulary"]
    """True for tokens that begin a word."""
    ordinary: Int64[np.ndarray, " ids"]
    """Ids that are not special tokens: they may be masked, and random replacements are taken from
    them.
    """
    fraction: float
    """Share of a text's tokens that are masked."""
    pairs: bool
    seed: int

    @property
    def text(self) -> int:
        """Number of tokens of text in a sequence: its length without [CLS] and one or, for pairs,
        two [SEP].
        """
        return self.sequence_length - (3 if self.pairs else 2)

    def batch(
        self,
        texts: Int64[np.ndarray, "rows tokens"],
        names: Sequence[Hashable],
        other: Callable[[int], Text],
    ) -> Batch:
        """Make a batch for masked language modelling of `texts`, each [text] tokens with IGNORED
        behind its end: special tokens are added, tokens masked, and the masked ones are the labels.
        Masking is seeded by each row's name. `other(row)` returns an unrelated text, the second one
        of half of the pairs.
        """
        encoded = [self._row(row, text, names[row], other) for row, text in enumerate(texts)]
        tokens, labels, types, ends, following = (
            np.stack(column) for column in zip(*encoded, strict=True)
        )
        index = np.broadcast_to(np.arange(self.sequence_length), tokens.shape)
        # padding is a document of its own, which no text sees
        starts = np.where(index < ends[:, None], 0, ends[:, None])
        follows = np.zeros(tokens.shape, np.float32)
        follows[:, 0] = following
        return Batch(
            torch.from_numpy(tokens),
            torch.from_numpy(labels),
            Documents.from_starts(torch.from_numpy(starts)) if starts.any() else None,
            PositionIds.from_ids(torch.from_numpy(np.stack((index, types), 1))),
            numbers={FOLLOWS: torch.from_numpy(follows)} if self.pairs else {},
        )

    def _row(
        self, row: int, text: Text, name: Hashable, other: Callable[[int], Text]
    ) -> tuple[Text, Text, Text, np.integer, np.floating]:
        """Encode the text of one row, seeded by `name`. Return (tokens with some masked, labels,
        token types, index where padding begins, 1 / -1 / 0: the second text follows / does not /
        there is none).
        """
        # by name: the same masks on any rank and after a resume
        chance = np.random.default_rng(seed_of(self.seed, "cloze", str(name)))
        first, following = text[text != IGNORED], np.float32(0)
        parts = [first]
        if self.pairs and len(first) > 1:
            # between a quarter and three quarters of the text
            cut = int(chance.integers(1 + len(first) // 4, 2 + len(first) * 3 // 4))
            follows = chance.random() < 0.5
            # a negative has the same length: its length does not give it away
            second = first[cut:] if follows else other(row)[cut : len(first)]
            parts, following = [first[:cut], second], np.float32(1 if follows else -1)
        tokens, labels = (np.full(self.sequence_length, fill) for fill in (self.padding, IGNORED))
        # `end`: where the next text goes, and at last where padding begins
        types, end = np.zeros(self.sequence_length, np.int64), 1
        tokens[0] = self.begin
        for kind, part in enumerate(parts):
            stop = end + len(part)
            tokens[end:stop], tokens[stop], types[end : stop + 1] = part, self.between, kind
            end = stop + 1
        chosen = self._choose_tokens(tokens[:end], chance)
        labels[chosen] = tokens[chosen]
        chances, random = chance.random(len(chosen)), chance.choice(self.ordinary, len(chosen))
        # 80 % mask, 10 % random, 10 % unchanged
        tokens[chosen] = np.select(
            [chances < MASKED, chances < RANDOM], [self.mask, random], tokens[chosen]
        )
        return tokens, labels, types, np.int64(end), following

    def _choose_tokens(self, tokens: Text, chance: np.random.Generator) -> Text:
        """Return the sorted indices of the tokens to predict: whole words, chosen in random order,
        with at most max(1, `fraction` of the ordinary tokens) tokens together. A word that would
        exceed this is skipped, so there may be none. Special tokens are never chosen.
        """
        masked = np.isin(tokens, self.ordinary)
        # a word begins here: by its form, at a special token, or after one
        word_starts = self.begins[tokens] | ~masked | ~np.append(False, masked[:-1])
        words = np.split(np.arange(len(tokens)), np.flatnonzero(word_starts)[1:])
        # not special tokens
        words = [word for word in words if masked[word[0]]]
        left, chosen = max(1, round(self.fraction * int(masked.sum()))), []
        for i in chance.permutation(len(words)):
            if len(words[i]) <= left:
                chosen.append(words[i])
                left -= len(words[i])
        return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64)


def cloze_for_tokenizer(
    tokenizer: PreTrainedTokenizer, sequence_length: int, fraction: float, pairs: bool, seed: int
) -> Cloze:
    """Return a `Cloze` for a tokenizer: from its cls, sep, mask and pad tokens and the form of its
    pieces, by which words begin (unmarked pieces: each one). Raises ValueError where it lacks such
    a token, or for a sequence_length under 8, which is too short for two texts.
    """
    if sequence_length < 8:
        raise ValueError(
            f"train.sequence-length is {sequence_length}: it must be at least 8, for two segments "
            "and their special tokens"
        )
    size, vocabulary = vocabulary_size(tokenizer), tokenizer.get_vocab()
    word_starts = np.ones(size, bool)
    pieces = vocabulary.keys() - {*tokenizer.all_special_tokens}
    marked = any(piece.startswith(CONTINUES) for piece in pieces)
    spaced = any(piece.startswith(BEGINNINGS) for piece in pieces)
    for piece, token in vocabulary.items():
        if marked:
            # WordPiece marks what continues a word, the others what begins one
            word_starts[token] = not piece.startswith(CONTINUES)
        elif spaced:
            word_starts[token] = piece.startswith(BEGINNINGS)
    ordinary = np.array(sorted(vocabulary[piece] for piece in pieces), np.int64)
    return Cloze(
        sequence_length,
        _require_token("cls", tokenizer.cls_token_id),
        _require_token("sep", tokenizer.sep_token_id),
        _require_token("mask", tokenizer.mask_token_id),
        _require_token("pad", tokenizer.pad_token_id),
        word_starts,
        ordinary,
        fraction,
        pairs,
        seed,
    )


def _require_token(kind: str, token: int | None) -> int:
    """Return the special token id. Raises ValueError, naming the `kind`, where it is None."""
    if token is None:
        raise ValueError(
            f"a masked language model needs a {kind} token, which the tokenizer does not define: "
            "use --data.tokenizer with one for such models"
        )
    return token
