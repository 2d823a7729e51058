"""Which documents are held out for validation.

A document is held out when the hash of its text falls below the fraction. So neither seed,
tokenizer, file order nor later additions move a document from one side to the other, and copies of
one text are never on both sides.
"""

import hashlib

import numpy as np


def text_hash(text: bytes) -> int:
    """64 bits that are the same on every machine and in every version of Python."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def held_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> np.ndarray:
    """Mask of the held-out documents, from each one's hash [documents] and size in bytes
    [documents].

    A document with more than a quarter of the bytes is never held out whole. If chance picks none,
    the eligible one with the smallest hash is; if none is eligible (one document, or a few large
    ones), the mask is empty.
    """
    eligible = sizes * 4 <= sizes.sum()
    mask = eligible & (hashes < np.uint64(int(fraction * 2**64)))
    if fraction and not mask.any() and eligible.any():
        mask = eligible & (hashes == hashes[eligible].min())
    return mask
