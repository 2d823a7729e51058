"""Ray Train: `dolmen train --launch ray` and examples/ray_train.py with the real Ray, two workers
on this machine. Skipped where Ray is not installed.
"""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
import tinyrun
from tinyrun import dolmen, losses

material, one_thread = tinyrun.material, tinyrun.one_thread
pytestmark = [
    pytest.mark.full,  # Ray takes 12 s to start
    pytest.mark.spawn,
    # Ray's own, of its own
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def ray():
    """Ray on this machine, with four CPUs, of which each worker takes one."""
    module = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    here = Path(__file__).parents[2]
    paths = [str(here), str(here / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    module.init(
        num_cpus=4,
        include_dashboard=False,
        runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}},
    )
    yield module
    module.shutdown()


@pytest.mark.command
def test_a_killed_worker_is_restarted(ray, material, tmp_path):
    """Rank 1 is killed with -9 after the first checkpoint. Ray starts both again, and the run
    resumes: no step is missing, none is told twice, and Ray has its metrics and checkpoints.
    """
    out = tmp_path / "run"

    def kill():
        while not list((out / "checkpoints").glob("step-*[0-9]")):
            time.sleep(0.1)
        pid = json.loads((out / "hang" / "rank-1.json").read_text())["pid"]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    words = ("--train.steps", 200, "--checkpoint.every", 20, "--log.validate-every", 0)
    words += ("--train.device", "cpu", "--train.hang-seconds", 4, "--nproc", 2)
    done = dolmen(
        "train", material.file, "--out", out, *words, "--launch", "ray", "--max-restarts", 2
    )
    assert done.code == 0, done.err
    assert not thread.is_alive()
    assert [step for step, *_ in losses(out)] == list(range(1, 201))
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["begun"] for row in history if "begun" in row] == ["new", "restarted"]
    (job,) = tmp_path.glob("run.ray-*")
    pointers = [json.loads(file.read_text()) for file in job.glob("**/dolmen.json")]
    assert {"run": str(out), "step": 200} in pointers
    assert json.loads((out / "summary.json").read_text())["steps"] == 200


def test_the_example(ray, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    run = import_module("ray_train").train(docs, tmp_path / "run", steps=3)
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
