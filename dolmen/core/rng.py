"""Random streams are derived from names, never consumed: what is drawn for (seed, name, step) is
the same in any order, on any rank, and after a resume.
"""

import hashlib


def seed_of(*names: int | str) -> int:
    """Return a seed of 63 bits, a hash of `names`: a run's seed and what it is for. Seeds of
    different names are unrelated.
    """
    return (
        int.from_bytes(
            hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )
