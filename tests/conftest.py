"""spawn(n)(fn, *args): run fn(*args) on n gloo processes."""

import pytest
import torch
from spawning import run_spawned

torch.set_num_threads(1)  # tiny models: a second thread waits more than it works


@pytest.fixture
def spawn():
    return lambda world: lambda fn, *args: run_spawned(world, fn, *args)
