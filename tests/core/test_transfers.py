"""What ranks send each other over gloo from a GPU: by way of host memory, with the same values. No
GPU: a stand-in says that a CPU's tensors have to cross so.
"""

import pytest
import torch
from spawning import run_spawned

from dolmen.core import collectives, transfers
from dolmen.core.mesh import Axis
from dolmen.model.layout import Layout


def test_a_gpus_tensor_crosses_the_host_over_gloo_alone():
    gpu, cpu = torch.empty(1, device="meta"), torch.empty(1)
    gloo, nccl = Axis("tp", 2, gloo=True), Axis("tp", 2)
    crosses = [transfers._crosses_host(x, axis) for axis in (gloo, nccl) for x in (gpu, cpu)]
    assert crosses == [True, False, False, False]


def exchanges(axis: Axis) -> list[torch.Tensor]:
    """Each kind of transfer once; x is neither contiguous nor equal on the ranks."""
    x = (torch.arange(24.0).view(6, 4) + 100 * axis.rank).t()
    send, receive = ([1, 3], [1, 2]) if axis.rank == 0 else ([2, 2], [3, 2])
    out = [
        collectives.all_gather(x, 1, axis),
        collectives.reduce_scatter(x, 1, axis),
        collectives.all_to_all(x, send, receive, axis),
        collectives.reduce_scalar(x, axis),
    ]
    rotation = transfers.start_rotate([x, x[:1]], axis)
    out += rotation.wait()
    into = torch.zeros(4, 6)
    sent = transfers.start_send(x.contiguous(), axis, 1 - axis.rank)
    arriving = transfers.start_receive(into, axis, 1 - axis.rank)
    arriving.wait()
    sent.wait()
    assert sent.is_completed() and arriving.is_completed()
    return [*out, into]


def both_ways() -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """What arrives as it is, and by way of the host, and how many tensors were copied there."""
    axis, copied = Layout(tp=2, dp=1).mesh(torch.device("cpu")).tp, []

    def copy_to_host(x):
        copied.append(x)
        assert x.is_contiguous()
        return x.clone()

    straight = exchanges(axis)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "_crosses_host", lambda x, axis: axis.gloo)
        patch.setattr(torch.Tensor, "cpu", copy_to_host)
        return straight, exchanges(axis), len(copied)


@pytest.mark.spawn
def test_what_crosses_the_host_arrives_the_same():
    straight, crossing, copied = run_spawned(2, both_ways)
    for one, other in zip(straight, crossing, strict=True):
        assert torch.equal(one, other)
    assert copied == 6  # a gather, two exchanges, two of a rotation and a message
    assert straight[-1][0].tolist() == [100.0, 104.0, 108.0, 112.0, 116.0, 120.0]
