"""What is freed is not faulted in a second time; in processes of their own, as this cannot be
undone.
"""

import subprocess
import sys

PROGRAM = """
import ctypes, resource
from dolmen.core import device
{keep}
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc({size})
    libc.memset(block, 1, {size})
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SIZE = 64 << 20


def faults(keep: str) -> int:
    """Page faults of the second time that a block is taken, filled and freed."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(keep=keep, size=SIZE)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def test_a_block_is_faulted_in_once():
    # without: a fault a page of 4 KiB, or 32 where all pages are of 2 MiB
    assert faults("device.keep_freed_memory()") < 16 < faults("")
