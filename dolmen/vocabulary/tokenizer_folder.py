"""Reads the files of a tokenizer as a vocabulary that tokens can be added to: which of three forms
it has, and what text each of its tokens stands for.

    sentencepiece   tokenizer.model: pieces of text, with SPACE for a space
    bytes           tokenizer.json: BPE over bytes, each written as a letter (GPT-2, Llama 3, Qwen)
    letters         tokenizer.json: BPE over characters, with SPACE for a space (Mistral, Gemma)

A sentencepiece model is also written as a tokenizer.json, which `transformers` reads as it is: its
own conversion of a bare tokenizer.model treats every model as BPE, and may give no tokens at all.
"""

import base64
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

from tokenizers import Tokenizer

from dolmen.conversion.hf import tokenizer_files, tokens_by_name
from dolmen.conversion.source import open_source
from dolmen.core.filesystem import expand
from dolmen.core.messages import brief
from dolmen.data.tokenizer import BYTES, LETTERS, PreTrainedTokenizer, load_tokenizer
from dolmen.files import gate, kinds, sentencepiece_model
from dolmen.files.sentencepiece_model import (
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    SentencePieceModel,
    VocabularyPiece,
)

Form = Literal["sentencepiece", "bytes", "letters"]


MODELS = ("tokenizer.model", "spiece.model")


JSON = "tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """Content of a tokenizer's files; read-only."""

    where: Path
    """Its folder, or its tokenizer.model."""
    form: Form
    model: SentencePieceModel | None
    """Model of the form sentencepiece; None for others."""
    content: dict[str, Any] | None
    """Content of tokenizer.json; for a sentencepiece model only if there is one."""

    @property
    def kind(self) -> str:
        """Algorithm of the tokenizer: "unigram" or "bpe"."""
        return "bpe" if self.model is None else self.model.kind

    @cached_property
    def added(self) -> dict[int, str]:
        """Id -> token for the `added_tokens` of tokenizer.json (special tokens, for example), which
        are matched in a text before the rest of it is tokenised.
        """
        added = [] if self.content is None else self.content.get("added_tokens", [])
        return {token["id"]: token["content"] for token in added}

    @cached_property
    def learned(self) -> dict[str, float | None]:
        """Learned token -> its score (None for a BPE of `tokenizers`), in order of id, each token
        as the vocabulary writes it. Special, unknown and byte-fallback tokens are left out.
        """
        if self.model is not None:
            pieces = self.model.pieces
            return {p.text: p.score for p in pieces if p.kind == sentencepiece_model.NORMAL}
        assert self.content is not None
        vocab, added = self.content["model"]["vocab"], {*self.added.values()}
        unknown = self.content["model"].get("unk_token")
        ordered = sorted(vocab, key=vocab.__getitem__)
        # byte fallback tokens stand for bytes, not for text
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256)} if self.form == "letters" else set()
        return dict.fromkeys(t for t in ordered if t not in added | bytes_ and t != unknown)

    def meaning(self, token: str) -> bytes | None:
        """Return the UTF-8 bytes that a learned token stands for, which may be a part of a
        character; None for a token that is not text.
        """
        # tokens are text, with SPACE for a space
        if self.form != "bytes":
            return token.replace(SPACE, " ").encode()
        if any(letter not in BYTES for letter in token):
            return None
        return bytes(BYTES[letter] for letter in token)

    def token_from_bytes(self, meaning: bytes) -> str | None:
        """Return how this vocabulary writes a token that stands for the UTF-8 bytes `meaning`,
        whether it has that token or not; None for a part of a character, unless its tokens are over
        bytes.
        """
        if self.form == "bytes":
            return "".join(LETTERS[byte] for byte in meaning)
        try:
            return meaning.decode().replace(" ", SPACE)
        # a part of a character
        except UnicodeDecodeError:
            return None


def open_vocabulary(name: str, option: str) -> Vocabulary:
    """Read the files of the tokenizer `name`, a folder, a tokenizer.model, or a model, run or hub
    id whose tokenizer is meant, and return its vocabulary. Raises ValueError, naming the
    command-line `option`, if there is none, or it is neither a sentencepiece model nor a BPE.
    """
    place = expand(name)
    if place.is_file() and place.suffix == ".model":
        return Vocabulary(place, "sentencepiece", sentencepiece_model.read(place), None)
    if not (place.is_dir() and tokenizer_files(place)):
        # a run or a hub id: the tokenizer of its model
        folder = open_source(name).tokenizer
        if folder is None:
            raise ValueError(f"{option} {name} has no tokenizer")
        place = folder
    model = next((place / name for name in MODELS if (place / name).is_file()), None)
    if model is not None and not (place / JSON).is_file():
        # added tokens stand in other files: put them into the model as pieces
        bare, named = sentencepiece_model.read(model), tokens_by_name(place)
        pieces = filler_pieces(bare, {number: token for token, number in named.items()})
        full = sentencepiece_model.add_pieces(bare, pieces)
        read = sentencepiece_model.parse(full, model)
        return Vocabulary(place, "sentencepiece", read, None)
    content = _content(place, load_tokenizer(str(place), option))
    form = None if content is None else tokenizer_form(content)
    if form != "bytes" and model is not None:
        return Vocabulary(place, "sentencepiece", sentencepiece_model.read(model), content)
    if form is None:
        raise ValueError(
            f"{option} {name} is neither a sentencepiece model nor a BPE of `tokenizers`: give a "
            "folder with a tokenizer.model, or with a tokenizer.json of type BPE"
        )
    return Vocabulary(place, form, None, content)


def _content(place: Path, tokenizer: PreTrainedTokenizer) -> dict[str, Any] | None:
    """Return the content of the folder's tokenizer.json; without that file, what it would be for
    the opened `tokenizer`, or None if that is not one of the library `tokenizers` (not fast).
    """
    if (place / JSON).is_file():
        return gate.read_json(place / JSON, kinds.TOKENIZER)
    if not tokenizer.is_fast:
        return None
    return gate.parse_json(tokenizer.backend_tokenizer.to_str().encode(), place, kinds.TOKENIZER)


def filler_pieces(model: SentencePieceModel, added: Mapping[int, str]) -> list[VocabularyPiece]:
    """Return pieces to be appended to a sentencepiece model, for all ids after its last up to the
    last of the `added` tokens (id -> token): control pieces for added tokens, and unused ones for
    gaps, as the id of a piece is its position. Raises ValueError for an id that is too large.
    """
    end = max(added, default=-1) + 1
    if end > kinds.LARGEST_VOCABULARY:
        raise ValueError(f"an added token has id {end - 1:,}: {brief(added[end - 1])}")
    return [
        VocabularyPiece(added[n], 0.0, CONTROL)
        if n in added
        else VocabularyPiece(f"<unused_{n}>", 0.0, UNUSED)
        for n in range(len(model.pieces), end)
    ]


def transformers_tokenizer(vocabulary: Vocabulary, option: str) -> PreTrainedTokenizer:
    """Return the vocabulary's tokenizer opened with transformers; a bare sentencepiece model is
    converted to a tokenizer.json in memory first. `option`: names it in errors. Raises ValueError.
    """
    if vocabulary.content is not None or vocabulary.model is None:
        return load_tokenizer(str(vocabulary.where), option, probe=False)
    from transformers import PreTrainedTokenizerFast

    full = json.dumps(sentencepiece_as_json(vocabulary.model))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(full))
    return cast(PreTrainedTokenizer, tokenizer)  # whose stubs say less of its special tokens


def part_counter(vocabulary: Vocabulary) -> Callable[[str], int]:
    """Return a function that counts the parts into which the vocabulary's normalizer and
    pre-tokenizer split a text; it always returns 1 for sentencepiece, which does not split.
    """
    if vocabulary.form == "sentencepiece" or vocabulary.content is None:
        return lambda text: 1
    steps = {name: vocabulary.content.get(name) for name in ("normalizer", "pre_tokenizer")}
    # only the steps before the model: an empty BPE
    bare = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}
    pre_tokenizer = Tokenizer.from_str(json.dumps(bare))

    def parts(text: str) -> int:
        """Return the number of parts of a text after the normalizer and the pre-tokenizer."""
        if pre_tokenizer.normalizer is not None:
            text = pre_tokenizer.normalizer.normalize_str(text)
        return (
            1
            if pre_tokenizer.pre_tokenizer is None
            else len(pre_tokenizer.pre_tokenizer.pre_tokenize_str(text))
        )

    return parts


def tokenizer_form(content: dict[str, Any]) -> Form | None:
    """Return the form of the content of a tokenizer.json: "bytes" for a byte-level BPE, "letters"
    for a BPE over characters, None for other models and for a BPE with subword prefixes or
    suffixes.
    """
    model = content["model"]
    marks = ("continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(mark) for mark in marks):
        return None
    steps = [content.get(name) for name in ("pre_tokenizer", "decoder")]
    return "bytes" if any(_has(step, "ByteLevel") for step in steps) else "letters"


def _has(step: Any, kind: str) -> bool:
    """Return whether a step of a tokenizer.json (pre_tokenizer, decoder, ...) or any part of it has
    the type `kind`, such as ByteLevel.
    """
    if isinstance(step, list):
        return any(_has(item, kind) for item in step)
    if not isinstance(step, dict):
        return False
    return step.get("type") == kind or any(_has(item, kind) for item in step.values())


def size(vocabulary: Vocabulary) -> int:
    """Return the number of ids of the vocabulary: the largest one plus 1, added tokens included."""
    # added tokens may have ids behind a gap
    ids = [-1, *vocabulary.added]
    if vocabulary.model is not None:
        ids.append(len(vocabulary.model.pieces) - 1)
    elif vocabulary.content is not None:
        ids += vocabulary.content["model"]["vocab"].values()
    return max(ids) + 1


SPECIAL = (UNKNOWN, CONTROL)
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class of `transformers` that takes a tokenizer.json as it is; those of a family build their own.
"""


def sentencepiece_as_json(model: SentencePieceModel) -> dict[str, Any]:
    """Return the content of a tokenizer.json with which `tokenizers` tokenizes as the sentencepiece
    model does.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(number, piece.text, piece.kind in SPECIAL)
            for number, piece in enumerate(model.pieces)
            if piece.kind in (*SPECIAL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(model)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": _decoders(model)},
        "model": {
            **_EMPTY[model.kind],
            **model_fields(model.pieces, model.kind == "bpe"),
            **_unknown(model),
            "byte_fallback": model.byte_fallback,
        },
    }


def model_fields(pieces: Sequence[VocabularyPiece], bpe: bool) -> dict[str, Any]:
    """Return those fields of the `model` section of tokenizer.json that follow from the pieces of a
    sentencepiece model: vocab, and for `bpe` merges.
    """
    if not bpe:
        return {"vocab": [[piece.text, piece.score] for piece in pieces]}
    vocab = {piece.text: number for number, piece in enumerate(pieces)}
    return {"vocab": vocab, "merges": merges_of_pieces(pieces)}


def merges_of_pieces(pieces: Sequence[VocabularyPiece]) -> list[list[str]]:
    """Return the list of BPE merges that does what a sentencepiece BPE model with these pieces
    does: every pair of pieces that concatenates to a piece, by falling score of that piece, as
    sentencepiece joins the pair whose piece has the highest score.
    """
    normal = {piece.text for piece in pieces if piece.kind == NORMAL}
    merges: dict[float, list[list[str]]] = defaultdict(list)
    for piece in pieces:
        if piece.kind == NORMAL:
            text = piece.text
            # every way to cut the piece in two
            pairs = ([text[:at], text[at:]] for at in range(1, len(text)))
            # several ways to make a piece share its rank
            merges[piece.score] += [pair for pair in pairs if normal.issuperset(pair)]
    return [pair for score in sorted(merges, reverse=True) for pair in merges[score]]


def special_tokens(pieces: Sequence[VocabularyPiece]) -> dict[str, str]:
    """Return the special tokens of a sentencepiece model (BOS, EOS, padding if it has them, and
    unknown) as fields of tokenizer_config.json.
    """
    known = {"<s>": "bos_token", "</s>": "eos_token", "<pad>": "pad_token"}
    special = {known[p.text]: p.text for p in pieces if p.kind == CONTROL and p.text in known}
    (unknown,) = (piece.text for piece in pieces if piece.kind == UNKNOWN)
    return {**special, "unk_token": unknown}


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
    """Return the field of the `model` section of tokenizer.json that names the unknown token of a
    sentencepiece model: unk_token for BPE, unk_id for unigram.
    """
    if model.kind == "bpe":
        return {"unk_token": model.pieces[model.unknown].text}
    return {"unk_id": model.unknown}


def _normalizers(model: SentencePieceModel) -> list[dict[str, Any]]:
    """Return the normalizers of a tokenizer.json that do what the sentencepiece model does: its
    character map, stripping and collapsing of spaces, a leading space (each if the model has it),
    and sentencepiece's symbol for each space.
    """
    spaces: list[dict[str, Any]] = []
    if model.charsmap:
        packed = base64.b64encode(model.charsmap).decode()
        spaces.append({"type": "Precompiled", "precompiled_charsmap": packed})
    if model.remove_spaces:
        spaces.append({"type": "Strip", "strip_left": True, "strip_right": True})
        # sentencepiece collapses runs of spaces
        spaces.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if model.dummy_prefix:
        spaces.append({"type": "Prepend", "prepend": SPACE})
    return [*spaces, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _decoders(model: SentencePieceModel) -> list[dict[str, Any]]:
    """Return the decoders of a tokenizer.json for a sentencepiece model: its symbol for a space to
    " ", byte tokens to bytes, and the leading space removed if the model adds one.
    """
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if model.dummy_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return steps


def _added_token(number: int, text: str, special: bool) -> dict[str, Any]:
    """Return an entry of the added_tokens of a tokenizer.json: the token `text` with the id
    `number`, matched anywhere in a text, unchanged.
    """
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}
