"""A run of torchrun's agents, of which one dies and one joins: the bits of an undisturbed run."""

import subprocess
import sys

import pytest
import torch

from benchmarks.agents import Cluster, disturb
from benchmarks.chaos import ELASTIC, SNAPSHOTS, corpus, losses, tensors

pytestmark = pytest.mark.full  # 2 minutes of CPU time; dolmen's own launcher: test_survive.py


@pytest.mark.spawn
def test_one_dies_and_one_joins(tmp_path):
    file, calm, wild = corpus(tmp_path), tmp_path / "calm", tmp_path / "wild"
    words = [*ELASTIC, "--train.steps", "800", "--checkpoint.every", "200"]
    command = [sys.executable, "-m", "dolmen", "train", str(file), "--out", str(calm), *words]
    subprocess.run(command, check=True, capture_output=True)
    logs = tmp_path / "logs"
    logs.mkdir()
    argv = [str(file), "--out", str(wild), "--resume", "--spares", *words, *SNAPSHOTS]
    with Cluster(argv, wild, logs) as cluster:
        events = disturb(cluster, 2, seed=0)
    assert {event.kind for event in events} == {"worker", "join"}, cluster.said()
    assert losses(wild) == losses(calm)
    expected, found = tensors(calm), tensors(wild)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
