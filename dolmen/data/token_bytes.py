"""Bytes as the tokens of two kinds of tokenizers write them: by letters, a byte each (GPT-2's
bytes_to_unicode), and by number, <0xE4>, where others are characters (sentencepiece).
"""

import re

NUMBERED = re.compile("<0x([0-9A-F]{2})>")


def _alphabet() -> dict[int, str]:
    """Byte -> the letter that stands for it: itself where it is printable, and else the next of
    those behind Latin-1, as GPT-2 has it.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


LETTERS = _alphabet()
BYTES = {letter: byte for byte, letter in LETTERS.items()}


def bytes_of(token: str) -> bytes | None:
    """Those that a token of bytes stands for; None of one that is of characters."""
    if numbered := NUMBERED.fullmatch(token):
        return bytes([int(numbered[1], 16)])
    if any(letter not in BYTES for letter in token):
        return None
    return bytes(BYTES[letter] for letter in token)
