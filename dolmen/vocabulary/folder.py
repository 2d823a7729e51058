"""A tokenizer's folder, as far as a vocabulary can be added to it: which of three forms it has, and
what each of its tokens stands for.

    sentencepiece   tokenizer.model: pieces of text, with SPACE for a space
    bytes           tokenizer.json: BPE over bytes, each written as a letter (GPT-2, Llama 3, Qwen)
    letters         tokenizer.json: BPE over characters, with SPACE for a space (Mistral, Gemma)
"""

import json
from collections.abc import Callable, Mapping
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
    SPACE,
    UNUSED,
    SentencePieceModel,
    VocabularyPiece,
)
from dolmen.vocabulary import tokenizer_json

Form = Literal["sentencepiece", "bytes", "letters"]
MODELS = ("tokenizer.model", "spiece.model")
JSON = "tokenizer.json"


@dataclass(frozen=True)
class Vocabulary:
    """What the files of a tokenizer say. Values are not to be written into."""

    where: Path
    """Its folder, or its tokenizer.model."""
    form: Form
    model: SentencePieceModel | None
    """Of the form sentencepiece."""
    content: dict[str, Any] | None
    """Of the others: the tokenizer.json; of sentencepiece, if it has one."""

    @property
    def kind(self) -> str:
        """How it cuts text: unigram or bpe."""
        return "bpe" if self.model is None else self.model.kind

    @cached_property
    def added(self) -> dict[int, str]:
        """Id -> token, of those that are found in a text before it is cut."""
        found = [] if self.content is None else self.content.get("added_tokens") or []
        return {one["id"]: one["content"] for one in found}

    @cached_property
    def learned(self) -> dict[str, float | None]:
        """Tokens that text is cut into, in order, as they are written: not special ones, nor single
        bytes where others are characters; and their scores, where they have any.
        """
        if self.model is not None:
            pieces = self.model.pieces
            return {p.text: p.score for p in pieces if p.kind == sentencepiece_model.NORMAL}
        assert self.content is not None
        vocab, added = self.content["model"]["vocab"], {*self.added.values()}
        unknown = self.content["model"].get("unk_token")
        ordered = sorted(vocab, key=vocab.__getitem__)
        bytes_ = {f"<0x{byte:02X}>" for byte in range(256)} if self.form == "letters" else set()
        return dict.fromkeys(t for t in ordered if t not in added | bytes_ and t != unknown)

    def meaning(self, token: str) -> bytes | None:
        """The UTF-8, whole or a part, that a token stands for; None where it is none."""
        if self.form != "bytes":
            return token.replace(SPACE, " ").encode()
        if any(letter not in BYTES for letter in token):
            return None
        return bytes(BYTES[letter] for letter in token)

    def written(self, meaning: bytes) -> str | None:
        """The token that stands for it; None where this form has none: a part of a character."""
        if self.form == "bytes":
            return "".join(LETTERS[byte] for byte in meaning)
        try:
            return meaning.decode().replace(" ", SPACE)
        except UnicodeDecodeError:
            return None


def open_vocabulary(name: str, option: str) -> Vocabulary:
    """The tokenizer in a folder, a tokenizer.model, or that of a model of any format. Raises
    ValueError naming `option` where there is none, or of a form that is not read.
    """
    place = expand(name)
    if place.is_file() and place.suffix == ".model":
        return Vocabulary(place, "sentencepiece", sentencepiece_model.read(place), None)
    if not (place.is_dir() and tokenizer_files(place)):
        folder = open_source(name).tokenizer
        if folder is None:
            raise ValueError(f"{option} {name} has no tokenizer")
        place = folder
    model = next((place / name for name in MODELS if (place / name).is_file()), None)
    if model is not None and not (place / JSON).is_file():
        bare, named = sentencepiece_model.read(model), tokens_by_name(place)
        pieces = fillers(bare, {number: token for token, number in named.items()})
        whole = sentencepiece_model.add_pieces(bare, pieces)
        read = sentencepiece_model.parse(whole, model)
        return Vocabulary(place, "sentencepiece", read, None)
    content = _content(place, load_tokenizer(str(place), option))
    form = None if content is None else form_of(content)
    if form != "bytes" and model is not None:
        return Vocabulary(place, "sentencepiece", sentencepiece_model.read(model), content)
    if form is None:
        raise ValueError(
            f"{option} {name} is neither a model of sentencepiece nor a BPE of `tokenizers`: give "
            "a folder with a tokenizer.model, or with a tokenizer.json of type BPE"
        )
    return Vocabulary(place, form, None, content)


def _content(place: Path, tokenizer: PreTrainedTokenizer) -> dict[str, Any] | None:
    """Its tokenizer.json, or what that would be where its files are older."""
    if (place / JSON).is_file():
        return gate.read_json(place / JSON, kinds.TOKENIZER)
    if not tokenizer.is_fast:
        return None
    return gate.parse_json(tokenizer.backend_tokenizer.to_str().encode(), place, kinds.TOKENIZER)


def fillers(model: SentencePieceModel, added: Mapping[int, str]) -> list[VocabularyPiece]:
    """A piece for each id behind the model's up to the last of the `added` tokens, which other
    files have: ids of pieces are their places. Raises ValueError for an id that is no vocabulary's.
    """
    end = max(added, default=-1) + 1
    if end > kinds.VOCABULARY.high:
        raise ValueError(f"an added token has id {end - 1:,}: {brief(added[end - 1])}")
    return [
        VocabularyPiece(added[n], 0.0, CONTROL)
        if n in added
        else VocabularyPiece(f"<unused_{n}>", 0.0, UNUSED)
        for n in range(len(model.pieces), end)
    ]


def opened(vocabulary: Vocabulary, option: str) -> PreTrainedTokenizer:
    """As a tokenizer of `transformers`. Raises ValueError."""
    if vocabulary.content is not None or vocabulary.model is None:
        return load_tokenizer(str(vocabulary.where), option, probe=False)
    from transformers import PreTrainedTokenizerFast

    whole = json.dumps(tokenizer_json.of_sentencepiece(vocabulary.model))
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(whole))
    return cast(PreTrainedTokenizer, made)  # whose stubs say less of its special tokens


def splits(vocabulary: Vocabulary) -> Callable[[str], int]:
    """Text -> the parts that it is cut into before tokens are looked for."""
    if vocabulary.form == "sentencepiece" or vocabulary.content is None:
        return lambda text: 1
    steps = {name: vocabulary.content.get(name) for name in ("normalizer", "pre_tokenizer")}
    bare = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}, **steps}
    made = Tokenizer.from_str(json.dumps(bare))

    def parts(text: str) -> int:
        if made.normalizer is not None:
            text = made.normalizer.normalize_str(text)
        return 1 if made.pre_tokenizer is None else len(made.pre_tokenizer.pre_tokenize_str(text))

    return parts


def form_of(content: dict[str, Any]) -> Form | None:
    """Of a tokenizer.json that is a BPE without marks at the ends of words; None of any other."""
    model = content["model"]
    marks = ("continuing_subword_prefix", "end_of_word_suffix")
    if model.get("type") != "BPE" or any(model.get(mark) for mark in marks):
        return None
    steps = [content.get(name) for name in ("pre_tokenizer", "decoder")]
    return "bytes" if any(_has(step, "ByteLevel") for step in steps) else "letters"


def _has(step: Any, kind: str) -> bool:
    """Whether a step of a tokenizer.json is of that type, or a part of it is."""
    if isinstance(step, list):
        return any(_has(one, kind) for one in step)
    if not isinstance(step, dict):
        return False
    return step.get("type") == kind or any(_has(one, kind) for one in step.values())


def size(vocabulary: Vocabulary) -> int:
    """Ids that are taken: the largest and one."""
    ids = [-1, *vocabulary.added]
    if vocabulary.model is not None:
        ids.append(len(vocabulary.model.pieces) - 1)
    elif vocabulary.content is not None:
        ids += vocabulary.content["model"]["vocab"].values()
    return max(ids) + 1
