"""Experts of one rank as GroupedMLP of Megatron-Core keeps them: all in two tensors, whose numbers
lie as its products want them, whatever their shapes say.

    mlp.experts.weight1   [hidden, experts x 2 width]   of each expert [hidden, gate and up]
    mlp.experts.weight2   [experts x width, hidden]     of each expert [width, hidden]
"""

import math
import re
from collections.abc import Iterator, Mapping

from dolmen.files.gate import refuse
from dolmen.files.safetensors import Spec, Stored
from dolmen.files.torch_files import Strided

TENSOR = re.compile(r"(.*mlp\.experts\.)weight([12])")


def apart(held: Mapping[str, Stored], hidden: int, experts: int) -> dict[str, Stored]:
    """A rank's tensors, those of `experts` each by itself, [out, in], by the names that they have
    in other classes. Raises Refused for a tensor of another size.
    """
    found: dict[str, Stored] = {}
    for name, stored in held.items():
        if matched := TENSOR.fullmatch(name):
            start, which = matched.groups()
            parts = _apart(stored, which == "1", hidden, experts)
            found |= {f"{start}local_experts.{e}.linear_fc{which}.weight": p for e, p in parts}
        else:
            found[name] = stored
    return found


def _apart(stored: Stored, first: bool, hidden: int, experts: int) -> Iterator[tuple[int, Stored]]:
    """(expert, its matrix), where it lies."""
    width, left = divmod(math.prod(stored.spec.shape), max(1, experts * hidden))
    if left or not experts or isinstance(stored, Strided):
        raise refuse(
            stored.file,
            f"{stored.name} is {stored.spec.shape}, not {experts} experts of {hidden} numbers in",
        )
    shape, strides = ((width, hidden), (1, width)) if first else ((hidden, width), (1, hidden))
    size = hidden * width
    for e in range(experts):
        at = stored.offset + e * size * stored.spec.dtype.itemsize
        spec = Spec(shape, stored.spec.dtype)
        yield e, Strided(stored.name, spec, stored.file, at, strides, size)
