"""Random streams are derived from names, never consumed: what is drawn for (seed, name, step) is
the same in any order, on any rank, and after a resume.
"""

import hashlib


def seed_of(*names: int | str) -> int:
    """A seed of 63 bits from a run's seed and what it is for; no relation between the seeds of
    different names.
    """
    return (
        int.from_bytes(
            hashlib.blake2b("/".join(map(str, names)).encode(), digest_size=8).digest(), "little"
        )
        >> 1
    )
