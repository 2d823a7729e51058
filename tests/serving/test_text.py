"""Text while its tokens come: whole characters, nothing of a stop string, and together what all
tokens at once are decoded to.
"""

import random

import pytest
import tinyrun
from tokenizers import Tokenizer, decoders, models

from dolmen.data.tokenizer import load_tokenizer
from dolmen.serving.config import GenerateConfig
from dolmen.serving.generation import Detokenizer

material = tinyrun.material


@pytest.fixture(scope="module")
def byte_level(material):
    return load_tokenizer(str(material.tokenizer))


@pytest.fixture(scope="module")
def spaced():
    """As sentencepiece has it: a space belongs to the word behind it, and is none at the
    beginning; what is no piece is bytes.
    """
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [f"▁{word}" for word in "the a cat sat".split()] + list("abcst")
    backend = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def shown(tokenizer, tokens: list[int], stop=()) -> tuple[list[str], Detokenizer]:
    text = Detokenizer(tokenizer, stop)
    parts = [text.add(token) for token in tokens]
    return [*parts, text.end()], text


@pytest.mark.parametrize("kind", ["byte_level", "spaced"])
def test_the_parts_are_the_whole(kind, request):
    """Words, characters of several bytes, tokens that are not shown, in any order."""
    tokenizer, chance = request.getfixturevalue(kind), random.Random(0)
    units = ["the", " cat", "猫", "sat", "é", " 🙂", "a", " ", ".", tokenizer.eos_token]
    for _ in range(50):
        text = "".join(chance.choices(units, k=20))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        parts, found = shown(tokenizer, tokens)
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert "".join(parts) == found.whole == whole and "\ufffd" not in whole


def test_half_a_character_waits_and_is_shown_at_the_end(byte_level):
    tokens = byte_level("a🙂", add_special_tokens=False)["input_ids"]
    assert len(tokens) == 5
    assert shown(byte_level, tokens)[0] == ["a", "", "", "", "🙂", ""]
    assert shown(byte_level, tokens[:3])[0] == ["a", "", "", "\ufffd"]
    # bytes that never become one do not wait for ever
    parts, _ = shown(byte_level, tokens[1:2] * 20)
    assert any(parts[:-1])


@pytest.mark.parametrize(
    "text, stop, whole, which",
    [
        ("abc def ghi", ["def"], "abc ", "def"),
        ("abc def ghi", ["c d", "ef"], "ab", "c d"),
        ("abc def ghi", ["xyz"], "abc def ghi", None),
        ("abc de", ["def"], "abc de", None),  # begun, and not ended
        ("aaab", ["aab"], "a", "aab"),
        ("abab abac", ["abac"], "abab ", "abac"),
        ("🙂 a🙂b", ["🙂b"], "🙂 a", "🙂b"),
        ("abc", ["a"], "", "a"),
        ("é🙂cdef", ["cd", "🙂cde"], "é🙂", "cd"),  # the one that ends first
    ],
)
def test_stop_strings(byte_level, text, stop, whole, which):
    tokens = byte_level(text, add_special_tokens=False)["input_ids"]
    by_character = [i for c in text for i in byte_level(c, add_special_tokens=False)["input_ids"]]
    for one in (tokens, by_character):
        parts, found = shown(byte_level, one, stop)
        assert (found.whole, found.stopped) == (whole, which)
        assert "".join(parts) == whole  # nothing was shown that is not of the text


def test_what_may_begin_a_stop_string_waits(byte_level):
    tokens = [i for c in "ab-c" for i in byte_level(c, add_special_tokens=False)["input_ids"]]
    assert shown(byte_level, tokens, ["b--", "-c-"])[0] == ["a", "", "", "b", "-c"]


def test_an_empty_stop_string_is_refused():
    assert GenerateConfig(folder="model", stop=("a", " ")).stop == ("a", " ")
    with pytest.raises(ValueError, match="--stop is '': it must be a text of at least one"):
        GenerateConfig(folder="model", stop=("a", ""))
