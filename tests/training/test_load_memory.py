"""Loading streams: the peak memory of a rank is its shard plus about one tensor, never the model.
Rank 0 of 8, on a fake group, in a process of its own.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from dolmen.conversion import hf_export
from dolmen.conversion.source import load_weights, open_source
from torch.testing._internal.distributed.fake_pg import FakeStore
from dolmen.core import mesh, state
from dolmen.families import ModelConfig
from dolmen.model import build

def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
llama = dict(model_type="llama", num_attention_heads=8, num_key_value_heads=8)
config = ModelConfig(dict(llama, vocab_size=8192, hidden_size=1024, intermediate_size=4096,
                    num_hidden_layers=6, head_dim=128))
if sys.argv[2] == "write":
    hf_export.save(sys.argv[1], config, lambda name: torch.full(config.spec.shapes[name], 0.5))
else:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    grid = mesh.build_mesh(1, 8, torch.device("cpu"))
    model = build.build(config.spec, grid)
    small = ModelConfig(
        dict(llama, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8)
    )
    build.initialize(build.build(small.spec, grid), 0)
    before = peak()
    build.load(model, lambda write: load_weights(open_source(sys.argv[1]), write))
    shard = sum(state.local_elements(p) for p in model.parameters()) * 4 / 2**20
    largest = max(torch.Size(s).numel() for s in config.spec.shapes.values()) * 4 / 2**20
    whole = sum(torch.Size(s).numel() for s in config.spec.shapes.values()) * 4 / 2**20
    assert all((state.local_view(p) == 0.5).all() for p in model.parameters())
    print(peak() - before, shard, largest, whole)
"""


@pytest.mark.full
def test_a_rank_holds_its_shard_and_one_tensor(tmp_path):
    def run(mode):
        return subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), mode],
            capture_output=True,
            text=True,
            check=True,
        )

    run("write")
    grown, shard, largest, whole = map(float, run("read").stdout.split())
    # a second tensor for the copy of a column slice and the allocator's slack; the whole model
    # would be 464 MiB
    print(f"grew {grown:.0f} MiB, shard {shard:.0f}, largest {largest:.0f}, whole {whole:.0f}")
    assert grown <= shard + 2 * largest + 16, (
        f"grew by {grown:.0f} MiB: shard {shard:.0f}, largest tensor {largest:.0f}, whole "
        f"{whole:.0f}"
    )
    assert whole > 4 * (shard + 2 * largest + 16) * 0.8
