"""Scales of delayed scaling as Transformer Engine keeps them.

The `_extra_state` beside the weights of a module is bytes with these tensors
(transformer_engine/pytorch/module/base.py, get_extra_state):

    amax_history_fwd [steps, 3 n]    input, weight and output of each of n products
    scale_fwd [3 n]                  what each is multiplied by before it is rounded
    amax_history_bwd [steps, 2 n]    the gradients of output and input of each
    scale_bwd [2 n]

The first step of a history is the one under way, as in ours. Theirs has places for what is never
rounded: outputs, gradients of inputs. Where one product of theirs is several of ours (q, k and v
with the same input), each has the scales of the whole, and the whole the largest of each.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from dolmen.conversion.weights import Scaling
from dolmen.files.gate import refuse
from dolmen.files.torch_files import dump_bytes, load_bytes

TENSORS = ("amax_history_fwd", "scale_fwd", "amax_history_bwd", "scale_bwd")


def read(state: bytes, where: Path) -> list[Scaling]:
    """Scales of each product of a module; none where it has multiplied by no delayed scales.
    `where`: the file that the bytes were found in. Raises Refused.
    """
    if not state:
        return []
    value = load_bytes(state, where)
    if not set(TENSORS) & value.keys():  # of another recipe
        return []
    kept = [value.get(name) for name in TENSORS]
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else None for one in kept]
    forward, backward = shapes[0] or (0, 0), shapes[2] or (0, 0)
    number = forward[-1] // 3
    steps = forward[0]
    want = [(steps, 3 * number), (3 * number,), (steps, 2 * number), (2 * number,)]
    if not number or shapes != want:
        raise refuse(
            where,
            f"holds a state of delayed scaling whose {', '.join(TENSORS)} have the shapes "
            f"{', '.join(map(str, shapes))}, which are not those of {max(1, number)} products",
        )
    assert backward == want[2]
    histories, scales, back, back_scales = (torch.as_tensor(one).float() for one in kept)
    for name, one in zip(TENSORS[1::2], (scales, back_scales), strict=True):
        if not ((one > 0) & one.isfinite()).all():
            raise refuse(where, f"holds a state whose {name} is not positive and finite: no scale")
    return [
        Scaling(
            torch.cat((histories[:, 3 * i : 3 * i + 2], back[:, 2 * i : 2 * i + 1]), 1),
            torch.cat((scales[3 * i : 3 * i + 2], back_scales[2 * i : 2 * i + 1])),
        )
        for i in range(number)
    ]


def write(products: Iterable[Scaling]) -> bytes:
    """The inverse, as Transformer Engine 1.x wrote it and every later one reads it: without its
    recipe, which it then takes for DelayedScaling.
    """
    products = list(products)
    steps = products[0].history.shape[0]
    none, one = torch.zeros(steps, 1), torch.ones(1)
    tensors = (
        torch.cat([part for p in products for part in (p.history[:, :2].cpu(), none)], 1),
        torch.cat([part for p in products for part in (p.scale[:2].cpu(), one)]),
        torch.cat([part for p in products for part in (p.history[:, 2:].cpu(), none)], 1),
        torch.cat([part for p in products for part in (p.scale[2:].cpu(), one)]),
    )
    named = dict(zip(TENSORS, tensors, strict=True))
    return dump_bytes({**named, "extra_fp8_variables": {"num_gemms": len(products)}})
