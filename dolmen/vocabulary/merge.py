"""`dolmen vocab merge`: appends the tokens of one tokenizer to another. Ids, scores and merges of
the base stay as they are; tokens that it already has are left out.

    base            new tokens get
    unigram         the scores that they were learned with (both are log-probabilities)
    bpe             scores below all others, in order, so that the base's pieces are joined first
    tokenizers      merges after all others, and ids after special tokens too

A text is first cut as by the base BPE, then joined further. The result is opened again by
`transformers` and compared with sentencepiece itself before it is moved to its destination.

Which merges lead to a new token. A BPE begins with single characters and joins the pair that was
learned first, until no neighbouring pair is known. Appending tokens leaves the base's pairs first,
so every new token is a run of the base's tokens, and the merges that it was learned with may never
apply:

    new   (e5 a4) (a4a9 e6) ...      base   (a9 e6)      e5 a4 [a9 e6] b0 94

Here the base joins a9 e6 before the new pair a4a9 e6 could be seen. So `extend_bpe` lets the base
cut the token's own text, and adds a merge for each join from there on; an intermediate result
that has no token yet becomes a token too.
"""

import json
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from operator import concat
from pathlib import Path
from typing import Any

from dolmen.conversion import hf_export, writing
from dolmen.core.log import bar, say
from dolmen.core.messages import plural
from dolmen.data.tokenizer import load_tokenizer
from dolmen.files import gate, kinds, sentencepiece_model
from dolmen.files.sentencepiece_model import VocabularyPiece
from dolmen.vocabulary.check import Counts, check_base, check_merged, count, open_text
from dolmen.vocabulary.config import VocabMergeConfig
from dolmen.vocabulary.tokenizer_folder import (
    JSON,
    MODELS,
    TOKENIZER_CLASS,
    Vocabulary,
    filler_pieces,
    model_fields,
    open_vocabulary,
    part_counter,
    sentencepiece_as_json,
    size,
    special_tokens,
    transformers_tokenizer,
)

SIDECARS = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
)


CONFIG = "tokenizer_config.json"


@dataclass
class Wanted:
    """Tokens of the new vocabulary that the base lacks, as the base writes them."""

    tokens: dict[str, float | None] = field(default_factory=dict)
    """Tokens in order, with their scores."""
    had: int = 0
    """Number of tokens that the base already has."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Reason -> number of tokens left out for it."""

    def leave_out(self, why: str) -> None:
        """Count one more token that cannot be added, under the reason `why`."""
        self.left_out[why] = self.left_out.get(why, 0) + 1


@dataclass(frozen=True)
class Merged:
    """Result of a merge."""

    base: int
    """Number of tokens before: the first new id."""
    added: int
    between: int
    """Number of added tokens that only extend_bpe to others, which neither vocabulary had."""
    had: int
    left_out: Mapping[str, int]
    before: Counts | None
    after: Counts | None
    """Counts of the held-out text, where one is given."""

    @property
    def size(self) -> int:
        """Number of tokens of the merged tokenizer."""
        return self.base + self.added

    def lines(self) -> list[str]:
        """Return the lines of a report: tokens added, already there and left out (with reasons),
        and, if there was held-out text, characters and bytes per token before and after.
        """
        report = [
            f"{self.base:,} tokens of the base, unchanged; {self.added:,} new, from id "
            f"{self.base}; {self.size:,} in total"
        ]
        if self.between:
            report.append(f"{self.between:,} of the new ones are intermediate results of merges")
        report.append(f"{plural(self.had, 'token')} of the new vocabulary are in the base already")
        report += [f"skipped: {plural(n, 'token')} that {why}" for why, n in self.left_out.items()]
        if self.before and self.after:
            report += [f"before: {self.before}", f"after:  {self.after}"]
        return report


def merge(config: VocabMergeConfig, progress: bool = True) -> Merged:
    """Append the tokens of the tokenizer config.new to the tokenizer config.base, and write the
    result as the new folder config.to once transformers and sentencepiece agree on it. Return a
    report, with the compression of held-out text before and after if config.data names some.
    `progress`: bars on stderr. Raises ValueError or OSError, with nothing written, for vocabularies
    that cannot be merged, and where the result does not decode texts to themselves.
    """
    to = Path(config.to).expanduser()
    hf_export.check_target(to)
    text = open_text(config.data)
    base = open_vocabulary(config.base, "BASE")
    new = open_vocabulary(config.new, "NEW")
    check_base(base, new)
    wanted = select_new_tokens(base, new)
    first = size(base)
    with bar("finding merges", len(wanted.tokens), progress) as reach:
        grown, files = FORMS[base.form](base, wanted, reach)
    if not grown.tokens:
        raise ValueError(f"NEW {config.new} has no token that is not in BASE {config.base}")
    with writing.replace_when_complete(to) as (part, words):
        write_files(part, files)
        _copy_sidecars(base.where, part)
        check_merged(base, part, first, grown.tokens, text)
        before = after = None
        if text is not None:
            say(f"counting tokens of {text.name}", progress)
            before = count(transformers_tokenizer(base, "BASE"), text.pieces(), text.name)
            after = count(load_tokenizer(str(part), "--to"), text.pieces(), text.name)
    return Merged(
        first, len(grown.tokens), grown.between, wanted.had, wanted.left_out, before, after
    )


def select_new_tokens(base: Vocabulary, new: Vocabulary) -> Wanted:
    """Select the learned tokens of the vocabulary `new` that are to be added to `base`, written as
    `base` writes tokens. Tokens that `base` has are only counted. Left out, with counts by reason:
    parts of characters, control characters (unless `base` is over bytes), tokens over 512
    characters, and tokens that the pre-tokenizer of `base` would split.
    """
    wanted, have, parts = Wanted(), {*base.learned, *base.added.values()}, part_counter(base)
    for token, score in new.learned.items():
        # UTF-8 bytes: what both vocabularies have in common
        meaning = new.meaning(token)
        ours = None if meaning is None else base.token_from_bytes(meaning)
        if meaning is None or ours is None:
            wanted.leave_out("are a part of a character, which the base has as bytes")
        elif ours in have:
            wanted.had += 1
        elif base.form != "bytes" and any(byte < 0x20 for byte in meaning):
            wanted.leave_out("contain control characters, which the base has as bytes")
        elif len(ours) > LONGEST:
            wanted.leave_out(f"have more than {LONGEST} characters")
        # the base would never see such a token as one
        elif parts(meaning.decode(errors="ignore")) > 1:
            wanted.leave_out("cross a boundary of the base's pre-tokenizer")
        else:
            wanted.tokens[ours] = score
    return wanted


Files = dict[str, bytes | str | Mapping[str, Any]]
"""Files to write: name -> content; a mapping is written as JSON."""


LONGEST = 512  # characters of a token: finding its merges takes the square of it


@dataclass
class Merges:
    """Merges of a BPE: the pairs of neighbours that it joins, in order."""

    ranks: dict[Any, int]
    """Key of a pair -> its rank; the pair with the lowest is joined first."""
    key: Callable[[str, str], Any]
    """Key of the pair of its two arguments: the pair itself in a tokenizer.json; in sentencepiece,
    which joins any two neighbours whose concatenation is a piece, the concatenation.
    """

    def rank(self, left: str, right: str) -> int | None:
        """Return the rank of a pair of neighbours; None if the pair is never joined."""
        return self.ranks.get(self.key(left, right))

    def join(self, left: str, right: str) -> None:
        """Append a pair as the last merge, so that it is joined after all others."""
        self.ranks[self.key(left, right)] = len(self.ranks)


def apply_bpe(parts: Iterable[str], pairs: Merges) -> list[str]:
    """Return `parts` (characters, or pieces of a token) after BPE: repeatedly join the neighbours
    whose pair has the lowest rank, the leftmost of several, until no pair has a merge.
    """
    pieces = list(parts)
    while len(pieces) > 1:
        ranked = [(pairs.rank(a, b), i) for i, (a, b) in enumerate(pairwise(pieces))]
        known = [(rank, i) for rank, i in ranked if rank is not None]
        # no pair of neighbours has a merge
        if not known:
            break
        _, at = min(known)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return pieces


@dataclass
class Added:
    """Tokens that were added to a vocabulary."""

    tokens: list[str] = field(default_factory=list)
    """Added tokens in order, intermediate ones included."""
    between: int = 0
    """Number of intermediate tokens, which were not requested."""


def extend_bpe(
    wanted: Collection[str],
    known: Collection[str],
    pairs: Merges,
    reach: Callable[[int], None] = lambda done: None,
) -> Added:
    """Extend a BPE, with the tokens `known` and the merges `pairs`, so that its merges build each
    of the `wanted` tokens, in order: tokenize the token's text with the merges there are, then
    append merges to `pairs` (in place) until it is one token. Return the tokens to add, those for
    the results of intermediate merges included. `reach(n)`: called after n tokens, for progress.
    """
    have, left, added = set(known), set(wanted), Added()

    def add(token: str) -> None:
        """Add a token to the result unless the BPE has it."""
        if token not in have:
            have.add(token)
            added.tokens.append(token)
            added.between += token not in left

    def add_between(token: str) -> None:
        """Add the result of an intermediate merge as a token, unless the BPE has it or it is a
        wanted token, which is added in its turn.
        """
        if token not in left:  # or its turn comes, in order
            add(token)

    for done, token in enumerate(wanted, 1):
        # a BPE starts from single characters: each needs a token
        for character in token:
            add_between(character)
        # its own merges may never apply: begin where the base ends
        parts = apply_bpe(token, pairs)
        while len(parts) > 1:
            named = [
                i for i, (a, b) in enumerate(pairwise(parts)) if a + b in have or a + b in left
            ]
            # prefer a join that is a token already: fewer intermediate tokens
            at = named[0] if named else 0
            # after all merges there are: the base's texts are cut as before
            pairs.join(parts[at], parts[at + 1])
            # a merge needs a token for its result
            add_between(parts[at] + parts[at + 1])
            # the new merge may enable others that the base has
            parts = apply_bpe(parts, pairs)
        add(token)
        reach(done)
    return added


Reach = Callable[[int], None]


def _grow_sentencepiece(base: Vocabulary, wanted: Wanted, reach: Reach) -> tuple[Added, Files]:
    """Add the wanted tokens to the sentencepiece model of `base`. Return the added tokens and the
    content of the merged tokenizer's files; nothing is written. Tokens of a unigram model keep the
    scores that they were learned with, tokens of a BPE get scores below all others. `reach(n)`:
    called for progress.
    """
    model = base.model
    assert model is not None
    # ids of added tokens must not be given to new pieces
    filled = filler_pieces(model, base.added)
    if model.kind == "unigram":
        grown = Added(list(wanted.tokens))
        # log-probabilities: comparable with the base's
        scores = [score for score in wanted.tokens.values() if score is not None]
    else:
        normal = [p for p in model.pieces if p.kind == sentencepiece_model.NORMAL]
        ordered = sorted(normal, key=lambda piece: -piece.score)
        ranks = {piece.text: number for number, piece in enumerate(ordered)}
        grown = extend_bpe(wanted.tokens, ranks, Merges(ranks, concat), reach)
        # below all scores: the base's merges come first, its texts are cut as before
        lowest, new = min((piece.score for piece in normal), default=0.0), {*grown.tokens}
        # characters are joined of nothing
        order = dict.fromkeys([*(text for text in ranks if text in new), *grown.tokens])
        place = {text: number for number, text in enumerate(order, 1)}
        scores = [lowest - place[text] for text in grown.tokens]
    pieces = [
        VocabularyPiece(text, score) for text, score in zip(grown.tokens, scores, strict=True)
    ]
    content = sentencepiece_model.add_pieces(model, [*filled, *pieces])
    merged = sentencepiece_model.parse(content, "the merged model")
    name = (
        base.where.name
        if base.where.is_file()
        else next(name for name in MODELS if (base.where / name).is_file())
    )
    files: Files = {name if name in MODELS else MODELS[0]: content}
    if base.content is None:
        files[JSON] = sentencepiece_as_json(merged)
        files[CONFIG] = {
            **special_tokens(merged.pieces),
            **_config(base.where),
            "tokenizer_class": TOKENIZER_CLASS,
        }
    else:
        full = deepcopy(base.content)
        full["model"] |= model_fields(merged.pieces, merged.kind == "bpe")
        files[JSON] = full
        files[CONFIG] = _config(base.where)
    return grown, files


def _grow_bpe(base: Vocabulary, wanted: Wanted, reach: Reach) -> tuple[Added, Files]:
    """Add the wanted tokens, with merges that build them, to the tokenizer.json of `base`, a BPE.
    Return the added tokens and the content of the merged tokenizer's files; nothing is written. New
    ids follow the last one taken, special tokens included. `reach(n)`: called for progress.
    """
    assert base.content is not None
    full = deepcopy(base.content)
    model = full["model"]
    pairs = [
        tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]
    ]
    ranks = {(pair[0], pair[1]): number for number, pair in enumerate(pairs)}
    known = Merges(ranks, lambda left, right: (left, right))
    before = len(known.ranks)
    grown = extend_bpe(wanted.tokens, model["vocab"], known, reach)
    vocab = {**model["vocab"], **{token: number for number, token in base.added.items()}}
    first = size(base)
    vocab |= {token: first + number for number, token in enumerate(grown.tokens)}
    joined = [list(pair) for pair in list(known.ranks)[before:]]
    model["vocab"], model["merges"] = vocab, [list(pair) for pair in pairs] + joined
    files: Files = {JSON: full, CONFIG: _config(base.where)}
    if (base.where / "vocab.json").is_file():
        files["vocab.json"] = vocab
    if (base.where / "merges.txt").is_file():
        lines = [" ".join(pair) for pair in model["merges"]]
        files["merges.txt"] = "\n".join(["#version: 0.2", *lines]) + "\n"
    return grown, files


FORMS: dict[str, Callable[[Vocabulary, Wanted, Reach], tuple[Added, Files]]] = {
    "sentencepiece": _grow_sentencepiece,
    "bytes": _grow_bpe,
    "letters": _grow_bpe,
}


def write_files(folder: Path, files: Files) -> None:
    """Write files (name -> content) into a folder: bytes and text as is, mappings as JSON."""
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            (folder / name).write_text(text, encoding="utf-8")


def _config(place: Path) -> dict[str, Any]:
    """Return the content of the tokenizer_config.json in the folder `place`, or a minimal one, with
    which transformers opens any tokenizer.json, if there is none.
    """
    file = place / CONFIG
    if place.is_dir() and file.is_file():
        return gate.read_json(file, kinds.TOKENIZER_CONFIG)
    return {"tokenizer_class": TOKENIZER_CLASS}


def _copy_sidecars(place: Path, to: Path) -> None:
    """Copy the tokenizer's files that a merge does not change (chat template, special tokens) from
    `place` to the folder `to`; nothing if `place` is a single file.
    """
    for name in SIDECARS if place.is_dir() else ():
        if (place / name).is_file():
            shutil.copyfile(place / name, to / name)
