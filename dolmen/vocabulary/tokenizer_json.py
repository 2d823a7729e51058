"""A model of sentencepiece as a tokenizer.json, which `transformers` reads as it is: its own
conversion of a bare tokenizer.model takes every one for a BPE, and may give no tokens at all.
"""

import base64
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from dolmen.files.sentencepiece_model import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    SentencePieceModel,
    VocabularyPiece,
)

SPECIAL = (UNKNOWN, CONTROL)
CLASS = "PreTrainedTokenizerFast"
"""Of `transformers`: takes a tokenizer.json as it is, where classes of a family build their own."""


def of_sentencepiece(model: SentencePieceModel) -> dict[str, Any]:
    """The whole of it."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(number, piece.text, piece.kind in SPECIAL)
            for number, piece in enumerate(model.pieces)
            if piece.kind in (*SPECIAL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model)},
        "model": {
            **_EMPTY[model.kind],
            **vocabulary(model.pieces, model.kind == "bpe"),
            **_unknown(model),
            "byte_fallback": model.byte_fallback,
        },
    }


def vocabulary(pieces: Sequence[VocabularyPiece], bpe: bool) -> dict[str, Any]:
    """The fields of its model that change with the pieces."""
    if not bpe:
        return {"vocab": [[piece.text, piece.score] for piece in pieces]}
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    return {"vocab": vocab, "merges": merges(pieces)}


def merges(pieces: Sequence[VocabularyPiece]) -> list[list[str]]:
    """Every pair of pieces that makes a piece, those of the highest score first: sentencepiece
    joins the pair whose piece has the highest, wherever it comes from.
    """
    normal = {piece.text for piece in pieces if piece.kind == NORMAL}
    found: dict[float, list[list[str]]] = defaultdict(list)
    for piece in pieces:
        if piece.kind == NORMAL:
            text = piece.text
            pairs = ([text[:at], text[at:]] for at in range(1, len(text)))
            found[piece.score] += [pair for pair in pairs if normal.issuperset(pair)]
    return [pair for score in sorted(found, reverse=True) for pair in found[score]]


def special(pieces: Sequence[VocabularyPiece]) -> dict[str, str]:
    """Which pieces stand for what, by the names that sentencepiece gives them."""
    known = {"<s>": "bos_token", "</s>": "eos_token", "<pad>": "pad_token"}
    found = {known[p.text]: p.text for p in pieces if p.kind == CONTROL and p.text in known}
    (unknown,) = (piece.text for piece in pieces if piece.kind == UNKNOWN)
    return {**found, "unk_token": unknown}


_EMPTY: dict[str, dict[str, Any]] = {
    "bpe": {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "ignore_merges": False,
    },
    "unigram": {"type": "Unigram"},
}


def _unknown(model: SentencePieceModel) -> dict[str, Any]:
    if model.kind == "bpe":
        return {"unk_token": model.pieces[model.unknown].text}
    return {"unk_id": model.unknown}


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    spaces: list[dict[str, Any]] = []
    if model.charsmap:
        packed = base64.b64encode(model.charsmap).decode()
        spaces.append({"type": "Precompiled", "precompiled_charsmap": packed})
    if model.remove_spaces:
        spaces.append({"type": "Strip", "strip_left": True, "strip_right": True})
        spaces.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.dummy_prefix:
        spaces.append({"type": "Prepend", "prepend": SPACE})
    return [*spaces, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _added(number: int, text: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}
