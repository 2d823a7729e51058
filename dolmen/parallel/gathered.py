"""What ZeRO gathers of a matrix that is multiplied in eight bits: its payloads and their scales, in
place of values of two bytes each.

    a rank's shard    fp32 -> bf16 -> payloads [rows / n, in], scales [rows / n / 128, in / 128]
    sent              both: 1 + 4 / 128^2 bytes per number
    a rank's copy     payload times scale, in bf16

Products know nothing of it: they round the copy once more, and to round what is rounded gives the
same payloads and scales, so the answer has the same bits (tests/parallel/test_gathered.py). Of a
block whose largest number is a, itself one of bf16, the scale s is a / 448, and

    the largest     448 s in fp32 is within 2^-23 of a, whose nearest in bf16 is a: so s is the same
    any other       p s is within 2^-9 of itself in bf16, and neighbours of a payload p are at least
                    2^-4 of it apart: so it is rounded to p

That takes one payload for both products of a weight, and scales that no other rank has a part in:
blocks of 128 x 128 (fp8-blockwise) that no shard cuts. By rows, and by MX, a weight is rounded
along each of its dims, and two payloads are as many bytes; a scale of a whole tensor would have to
be known before it is gathered, and one of the steps before is not that of the copy's largest.

Products of a model that does not train round nothing, and it gathers values.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dolmen.core.torch_private import sharding
from dolmen.ops import fp8
from dolmen.ops.recipe import Fp8
from dolmen.parallel.data import units

GRANULARITY = "128x128"
BLOCK = fp8.BLOCKS[GRANULARITY]


def gather_payloads(model: nn.Module, recipes: Mapping[str, Fp8]) -> list[str]:
    """Let `model`, allocated and split by `data.shard_model`, gather payloads of the weights that
    `recipes` (by name) rounds, where both products take the same one and no shard cuts a block; the
    names of those.
    """
    names = {p: name for name, p in model.named_parameters()}
    found = []
    for record in (record for unit in units(model) for record in sharding.records(unit)):
        name = names[record.sharded_param]
        if name in recipes and one_payload(recipes[name]) and whole_blocks(record):
            sharding.gather_as(record, sent, received)
            found.append(name)
    return found


def one_payload(recipe: Fp8) -> bool:
    """Whether all products of a weight take it rounded, and rounded alike."""
    rounds = recipe.rounds("output") and recipe.rounds("input-gradient")
    return rounds and recipe.granularity("weight") == GRANULARITY


def whole_blocks(record: sharding.Record) -> bool:
    """Whether a parameter is gathered in bf16, of several ranks with as many whole blocks each."""
    ranks, whole = sharding.ranks(record), sharding.gathered_shape(record)
    if (
        ranks == 1
        or record.fsdp_placement.dim != 0
        or record.mp_policy.param_dtype != torch.bfloat16
    ):
        return False
    # of stacked matrices a shard has whole ones
    return whole[0] % (ranks if len(whole) > 2 else ranks * BLOCK) == 0


def sent(shard: Tensor, module: nn.Module) -> tuple[Tensor, ...]:
    """Of one rank: payloads [..., rows, in] and scales [..., rows / 128, in / 128], or values."""
    values = shard.to(torch.bfloat16)
    if not module.training:
        return (values,)
    return fp8.quantise(values, format="e4m3", granularity=GRANULARITY)


def received(parts: Sequence[Tensor]) -> Tensor:
    """The copy of what all ranks have sent, in bf16."""
    if len(parts) == 1:
        return parts[0]
    payload, scale = parts
    return fp8.dequantise(payload, scale, granularity=GRANULARITY, dtype=torch.bfloat16)
