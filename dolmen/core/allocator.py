"""Memory that a step frees is kept for the next one, on CPU.

glibc takes every block over 32 MiB from the kernel and gives it back when it is freed, and the top
of the heap too: a training step then touches gigabytes of fresh pages, each a fault and a page of
zeros. Kept, they cost nothing the second time.
"""

import contextlib
import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # <malloc.h>
PAD = 64 << 20  # bytes by which the heap grows at least


def keep_freed_memory() -> None:
    """From here on, this process keeps what it frees. Does nothing where the C library is not
    glibc.
    """
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for what, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, PAD)):
            mallopt(what, value)
