"""The rows of one process on each device there is, in fp32 and bf16, against one process on the CPU
in fp32. The CPU's bf16 rows say what rounding alone does; a GPU may differ no more.
"""

import pytest
import torch
import torch.distributed as dist
from table import FAMILIES, LAYOUTS, SINGLE, Layout, differences, run

from dolmen.core import mesh as meshes

ROWS = [layout for layout in LAYOUTS if layout.world == 1]
# fp32: as on many processes. bf16 has 8 bits: 2^-8 a product, and gradients of a dozen layers'
# products in a row; measured on a CPU at most 0.039 of a tensor's largest element, 2.4e-3 of the
# norm, 1.4e-4 of the loss
TOLERANCE = {
    torch.float32: {"gradient": 1e-5, "norms": 1e-5, "losses": 1e-6},
    torch.bfloat16: {"gradient": 0.1, "norms": 1e-2, "losses": 5e-4},
}
GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.fixture(scope="module", params=["cpu", GPU])
def device(request):
    device = torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
    torch.backends.cuda.matmul.allow_tf32 = False
    with meshes.process_group_context(None, device):
        yield device


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layout", ROWS, ids=str)
def test_one_process(device, layout, family, dtype):
    if device.type == "cpu" and dtype == torch.float32:
        pytest.skip("tests/golden/test_golden.py has these")
    want = run(FAMILIES[family], SINGLE, Layout(), steps=1)
    mesh = layout.mesh(device)
    got = run(FAMILIES[family], mesh, layout, steps=1, compute=dtype)
    for kind, (difference, where) in differences(got, want).items():
        assert difference <= TOLERANCE[dtype][kind], (
            f"{kind} of {family} on {layout}, {device}, differ by {difference:.1e} at {where}"
        )
    assert dist.get_world_size() == 1
