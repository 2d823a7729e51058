"""A process group in which nothing is sent: one process plays any rank of any world."""

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def join_fake(world: int, rank: int = 0) -> None:
    """Be `rank` of a default group of `world` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
