"""What a process sets up when it joins the others, as it would be with a GPU: which there is not
here.
"""

import pytest
import torch
import torch.distributed as dist

from dolmen.core import mesh as meshes

PRODUCTS = torch.backends.cuda.matmul
SETTINGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@pytest.fixture
def joined(monkeypatch):
    """`join_world` of a lone process on a device, and what it called."""
    before, called = [getattr(PRODUCTS, name) for name in SETTINGS], []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: called.append(device))
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: called.append(backend)
    )

    def join(device: torch.device) -> list:
        meshes.join_world(None, device)
        return called

    yield join
    for name, value in zip(SETTINGS, before, strict=True):
        setattr(PRODUCTS, name, value)


def test_products_of_half_precision_add_up_in_fp32_on_a_gpu(joined):
    for name in SETTINGS:
        setattr(PRODUCTS, name, True)  # torch's default
    gpu = torch.device("cuda", 1)
    assert joined(gpu) == [gpu, "cpu:gloo,cuda:nccl"]
    assert not any(getattr(PRODUCTS, name) for name in SETTINGS)


def test_a_cpu_leaves_cuda_alone(joined):
    for name in SETTINGS:
        setattr(PRODUCTS, name, True)
    assert joined(torch.device("cpu")) == ["gloo"]
    assert all(getattr(PRODUCTS, name) for name in SETTINGS)
