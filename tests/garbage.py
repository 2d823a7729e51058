"""Imported before torch: what imports and collection make is never garbage, and looking through it
at Python's threshold of 700 objects takes a test process two seconds of CPU time.
"""

import gc

gc.set_threshold(100_000)
