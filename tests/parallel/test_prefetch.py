"""Where a layer of experts stops the host, its weights and the next layer's are under way before.

The order in which units are gathered is read off a step of a rank of two, in which nothing is sent.
"""

import pytest
import tiny_models
import torch
import torch.distributed as dist
from fakes import join_fake
from tiny_models import Flat
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from dolmen.core import mesh as meshes
from dolmen.model.head import cross_entropy_function
from dolmen.model.layout import Layout
from dolmen.ops.kernels import CPU, H100, Kernels
from dolmen.parallel import data

CONFIG = Flat(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
)


@pytest.fixture
def mesh():
    join_fake(2)
    yield meshes.build_mesh(2, 1, torch.device("cpu"))
    dist.destroy_process_group()


def built(mesh, hardware, zero: int = 3, kernels: Kernels = Kernels(), monkeypatch=None):
    monkeypatch.setattr(tiny_models.building, "choose_kernels", lambda *_: kernels)
    model = tiny_models.build(CONFIG, mesh, Layout(zero=zero), hardware=hardware)
    tiny_models.initialize(model, 0)
    return model.train()


def order(model, monkeypatch) -> list[str]:
    """Units gathered and attentions begun, in order, of a forward and its backward."""
    events, unshard = [], FSDPParamGroup.unshard

    def gathering(group, async_op=False):
        if not group.is_unsharded and group._all_gather_result is None:
            events.append(group._module_fqn)
        return unshard(group, async_op)

    monkeypatch.setattr(FSDPParamGroup, "unshard", gathering)
    for i, block in model.layers.items():
        block.attn.register_forward_pre_hook(lambda *_, i=i: events.append(f"attention {i}"))
    tokens = torch.arange(16).view(2, 8)
    loss = model(tokens, cross_entropy_function(tokens))
    events.append("backward")
    loss.backward()
    return [event for event in events if event and not event.startswith("Decoder")]


def units(layer: int) -> list[str]:
    return [f"layers.{layer}{name}" for name in ("", ".mlp.router", ".mlp.experts")]


def test_a_block_ahead(mesh, monkeypatch):
    model = built(mesh, H100, monkeypatch=monkeypatch)
    events = order(model, monkeypatch)
    forward, backward = events[: events.index("backward")], events[events.index("backward") + 1 :]
    assert [e for e in forward if e] == [
        *units(0)[:1], *units(1), "attention 0", *units(0)[1:],
        *units(2), "attention 1", "attention 2",
    ]  # fmt: skip
    # the last block's own come when its backward is there; then always a block ahead
    at = {name: backward.index(name) for layer in range(3) for name in units(layer)}
    assert max(at[name] for name in units(1)) < min(at[name] for name in units(0))
    assert at["layers.1.mlp.experts"] < at["layers.2.mlp.experts"]


def test_not_where_nothing_is_read_or_on_a_cpu(mesh, monkeypatch):
    kernel, calls = Kernels(grouped="grouped_mm"), []
    monkeypatch.setattr(data, "prefetch", calls.append)
    built(mesh, CPU, monkeypatch=monkeypatch)
    built(mesh, H100, kernels=kernel, monkeypatch=monkeypatch)
    built(mesh, H100, zero=1, monkeypatch=monkeypatch)
    assert calls == []
    built(mesh, H100, monkeypatch=monkeypatch)
    assert [len(blocks) for blocks in calls] == [3]


def test_a_stage_without_layers_has_nothing_to_gather():
    """The first or the last of more stages than layers."""
    data.prefetch([])
