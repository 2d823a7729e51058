"""Tokenizers of `transformers`: text to token ids, and the bytes that a token stands for.

Bytes as the tokens of two kinds of tokenizers write them: by letters, a byte each (GPT-2's
bytes_to_unicode), and by number, <0xE4>, where others are characters (sentencepiece).

Any `transformers` tokenizer, used for one thing: text to token ids, with the end of a document
marked by us.

Text is encoded as `tokenizer(text, add_special_tokens=False)` would. A special token that is
spelled out in the text is therefore recognised, which is what corpora that spell `<|endoftext|>`
between their documents rely on.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from dolmen.core.filesystem import expand
from dolmen.core.log import say
from dolmen.files import storage, tokenizer_files

NUMBERED = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[int, str]:
    """Return byte -> the letter that stands for it in byte-level BPE: itself where it is printable,
    else the next code point from 256 on, as in GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(unprintable)
    }


LETTERS = _alphabet()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def bytes_of(token: str) -> bytes | None:
    """Return the bytes that a token stands for: the one of <0xE4>, or one for each of the letters
    by which GPT-2's tokenizer writes bytes ("abc" is b"abc"). None if any character is not such a
    letter.
    """
    if numbered := NUMBERED.fullmatch(token):
        return bytes([int(numbered[1], 16)])
    if any(letter not in BYTES for letter in token):
        return None
    return bytes(BYTES[letter] for letter in token)


END_OF_TEXT = "<|endoftext|>"

# Words with the character before them, up to three digits, punctuation, a newline with the
# indentation after it. On the standard library with 4,096 tokens: 3.57 bytes per token, where
# GPT-2's pattern gives 3.48 and Llama 3's 3.47.
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+[ \t]*(?=[^\s])|\s+"


class PreTrainedTokenizer(Protocol):
    """Interface that is used of a tokenizer of `transformers`, which takes seconds to import."""

    eos_token: str | None
    eos_token_id: int | None
    bos_token_id: int | None
    unk_token_id: int | None
    cls_token_id: int | None
    sep_token_id: int | None
    mask_token_id: int | None
    pad_token_id: int | None
    all_special_tokens: list[str]
    special_tokens_map: dict[str, Any]
    name_or_path: str
    init_kwargs: dict[str, Any]
    chat_template: str | dict[str, str] | None

    @property
    def is_fast(self) -> bool:
        """True if it has a backend in Rust."""
        ...

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The tokenizer of `tokenizers` (Rust), if `is_fast`."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return token -> id, added tokens included."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""
        ...

    def decode(
        self,
        token_ids: list[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        """Return the text of token ids."""
        ...

    def convert_tokens_to_ids(self, tokens: str) -> int:
        """Return the id of one token; that of the unknown token for others."""
        ...

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, list[int]]:
        """Tokenize a text; the entry `input_ids` of the result has the token ids."""
        ...

    def get_chat_template(self) -> str:
        """Return the default chat template. Raises ValueError where there is none."""
        ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        chat_template: str,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tools: list[dict[str, Any]] | None = None,
    ) -> Any:
        """Render a chat: text if not `tokenize`, else `input_ids`, with `assistant_masks` if
        requested.
        """
        ...

    def save_pretrained(self, save_directory: str) -> object:
        """Write the tokenizer's files into a folder."""
        ...


def load_tokenizer(
    name: str | None, option: str = "--data.tokenizer", probe: bool = True
) -> PreTrainedTokenizer:
    """Load the tokenizer in folder `name`, or of that id on the hub, without running code of the
    repository. `option` named it, for errors. `probe`: try its regular expressions in a process
    with limits first. Raises FileNotFoundError for a path that does not exist, ValueError where
    there is no tokenizer.
    """
    from transformers import AutoTokenizer  # 2.4 s to import: not owed by `--help`

    if name is None:
        raise ValueError(
            "no tokenizer: use --data.tokenizer FOLDER (or a hub id, or bpe:N to train one), or "
            "--init a model that has one"
        )
    where = f"{option} {name}".strip()
    if name.startswith(("/", ".", "~")) and not expand(name).exists():
        raise FileNotFoundError(f"{where}: no such folder")
    # a local folder wins over a hub id of that name
    folder = expand(storage.pull(name))
    if folder.is_dir():
        tokenizer_files.check_files(folder, probe)
    try:
        with tokenizer_files.refused_by_name(where):
            tokenizer = AutoTokenizer.from_pretrained(
                str(folder), use_fast=True, trust_remote_code=False
            )
    except Exception as error:  # `tokenizers` raises Exception itself, protobuf its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{where}: no tokenizer could be loaded ({reason})") from error
    # made by `transformers` from a model's configuration alone: of Gemma it has 5 special tokens
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise ValueError(f"{where}: no tokenizer files there ({vocabulary_size(tokenizer)} tokens)")
    return tokenizer


def vocabulary_size(tokenizer: PreTrainedTokenizer) -> int:
    """Return the number of rows that an embedding needs: the largest id + 1, added tokens and gaps
    included.
    """
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def check_vocabulary(
    tokenizer: PreTrainedTokenizer, vocab_size: int, trained: bool = False
) -> None:
    """Raise ValueError if the tokenizer has ids beyond the model's vocabulary; `trained`: the
    model cannot grow, so the message does not suggest it.
    """
    needed = vocabulary_size(tokenizer)
    if needed > vocab_size:
        larger = "" if trained else f"--model.vocab-size {needed} or more, or "
        raise ValueError(
            f"the tokenizer has {needed:,} tokens, but the model's vocab_size is {vocab_size:,}: "
            f"use {larger}another --data.tokenizer"
        )


def check_encodes(tokenizer: PreTrainedTokenizer, text: str, where: str) -> None:
    """Raise ValueError if `text`, not blank, has no tokens: a bare sentencepiece model that
    `transformers` converts can come out so. `where`: source of the text, for the message.
    """
    if text.strip() and not len(encoder(tokenizer)(text)):
        raise ValueError(
            f"the tokenizer gives no tokens for the text of {where} ({text[:40]!r}): its "
            "vocabulary does not cover the text, or its files are incomplete; give "
            "--data.tokenizer a folder with a tokenizer.json"
        )


def end_of_text_id(tokenizer: PreTrainedTokenizer, override: str | None = None) -> int:
    """Return the id of the token that ends a document: `override`, else the tokenizer's EOS. Raises
    ValueError where there is neither, or the vocabulary lacks `override`.
    """
    if override is not None:
        # convert_tokens_to_ids would return the unknown token
        if override not in tokenizer.get_vocab():
            raise ValueError(
                f"--data.end-of-text {override!r} is not one of the tokenizer's "
                f"{vocabulary_size(tokenizer):,} tokens"
            )
        return tokenizer.convert_tokens_to_ids(override)
    if tokenizer.eos_token_id is None:
        known = ", ".join(tokenizer.all_special_tokens[:6]) or "none"
        raise ValueError(
            "the tokenizer defines no EOS token to end documents with: use --data.end-of-text "
            f"TOKEN (its special tokens: {known})"
        )
    return tokenizer.eos_token_id


def padding(tokenizer: PreTrainedTokenizer) -> int | None:
    """Return the id of a token for padding that is not EOS: the first of pad, unknown and BOS that
    differs from it; None without one.
    """
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
    usable = [token for token in known if token is not None and token != tokenizer.eos_token_id]
    return usable[0] if usable else None


def fingerprint(tokenizer: PreTrainedTokenizer) -> str:
    """Return a hash of everything that decides the ids of a text; equal for equal tokenizers
    wherever they are stored.
    """
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # state that encoding calls leave behind
        for of_the_last_call in ("truncation", "padding"):
            del state[of_the_last_call]
    else:
        # slow tokenizers have no state to serialise
        state = [type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.init_kwargs]
    text = json.dumps([state, tokenizer.eos_token], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def encoder(tokenizer: PreTrainedTokenizer) -> Callable[[str], np.ndarray]:
    """Return a function from text to its ids (uint16 if all fit, else uint32), without special
    tokens or truncation.

    It uses `encode_batch_fast` on one text, which releases the interpreter's lock while `encode`
    does not: two threads tokenise 1.85 times as fast as one. The few tokenizers without a Rust
    backend gain nothing from threads.
    """
    dtype = token_dtype(tokenizer)
    if not tokenizer.is_fast:
        return lambda text: np.array(tokenizer.encode(text, add_special_tokens=False), dtype)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()

    def encode(text: str) -> np.ndarray:
        """Return the token ids of a text. Raises Refused if the tokenizer panics."""
        with tokenizer_files.refused_by_name("--data.tokenizer"):
            encoding = backend.encode_batch_fast([text], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype)

    return encode


def token_dtype(tokenizer: PreTrainedTokenizer) -> np.dtype:
    """Return uint16 if the vocabulary has at most 65,536 ids, else uint32 (little-endian)."""
    return np.dtype("<u2" if vocabulary_size(tokenizer) <= 1 << 16 else "<u4")


def train_bpe(
    texts: Iterable[str], vocab_size: int, folder: Path | str, progress: bool = True
) -> None:
    """Train a byte-level BPE of `vocab_size` tokens and save it in `folder`, where AutoTokenizer
    finds it.

    `<|endoftext|>` is id 0 and serves as EOS, BOS and pad. Any text decodes to itself, byte for
    byte. Raises ValueError for fewer than 257 tokens.
    """
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet) + 1:
        raise ValueError(
            "a byte-level tokenizer needs 256 byte tokens and an end-of-text token, but "
            f"vocab_size is {vocab_size}: use --model.vocab-size 257 or more"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # merges never cross these words
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    say(f"training a byte-level BPE tokenizer of {vocab_size:,} tokens", progress)
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            # all 256 bytes have a token, whether the text has them or not
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if bpe.get_vocab_size() < vocab_size:
        say(f"  the text gives only {bpe.get_vocab_size():,} tokens", progress)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(folder))
