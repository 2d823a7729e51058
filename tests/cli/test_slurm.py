"""SLURM: a controller and two nodes on this machine, to which `dolmen launch slurm` submits. Needs
root and Debian's slurm-wlm (22.05); skipped, with the reason, where it is not installed.

    slurmctld --- slurmd, node 127.0.0.1      torchrun, rank 0
             `--- slurmd, node 127.0.0.2      torchrun, rank 1
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tinyrun
import yaml
from tinyrun import dolmen, losses

material, one_thread = tinyrun.material, tinyrun.one_thread
pytestmark = pytest.mark.full  # 60 s, most of it the imports of four processes

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "scancel", "runuser")
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={ports[0]}
AuthInfo=socket={folder}/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ReturnToService=2
NodeName=127.0.0.1 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=127.0.0.2 NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=127.0.0.1,127.0.0.2 Default=YES OverSubscribe=YES
"""


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_for(what, seconds: float):
    """What `what()` returns, once that is true."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, f"{what.__name__} took longer than {seconds} s"
        time.sleep(0.3)
    return value


@pytest.fixture
def slurm(monkeypatch):
    """A cluster of two nodes, for the commands of this process; the function runs one of them."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(f"SLURM is not installed here: no {', '.join(missing)}")
    if os.getuid():
        pytest.skip("slurmd starts jobs as root only")
    # the user munge must reach its folder, which pytest's own folders do not allow
    folder, host = Path(tempfile.mkdtemp(prefix="dolmen-slurm-")), socket.gethostname()
    folder.chmod(0o755)
    for name in ("munge", "state"):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(128))
    (folder / "munge" / "key").chmod(0o400)
    for path in (folder / "munge" / "key", folder / "munge"):
        shutil.chown(path, "munge", "munge")
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, ports=free_ports(3), folder=folder))
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    munge = [f"--{n}={folder}/munge/{n}" for n in ("socket", "pid-file", "log-file", "seed-file")]
    daemons = [
        ["runuser", "-u", "munge", "--", "munged", "-F", f"--key-file={folder}/munge/key", *munge],
        ["slurmctld", "-D", "-f", str(folder / "slurm.conf")],
        *(
            ["slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", name]
            for name in ("127.0.0.1", "127.0.0.2")
        ),
    ]
    started = []

    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True)
        return done.stdout + done.stderr

    def munge_answers():
        return (folder / "munge" / "socket").exists()

    def nodes_are_idle():
        return run("sinfo", "--noheader", "--Node", "--format=%T").split() == ["idle"] * 2

    try:
        for number, words in enumerate(daemons):
            with (folder / f"{number}.log").open("w") as log:
                started.append(subprocess.Popen(words, stdout=log, stderr=log))
            if number == 0:
                wait_for(munge_answers, 10)
        wait_for(nodes_are_idle, 60)
        yield run
    finally:
        run("scancel", "--full", "--state=RUNNING", "--user=root")
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(timeout=20)
        shutil.rmtree(folder)


def test_a_requeued_job_resumes(slurm, material, tmp_path, monkeypatch):
    """SLURM's signal before the time limit: the run saves, the job is requeued, and its second
    start is recognised as a restart.
    """
    # the signal comes after some 20 steps of 10 ms
    options = material.options()
    options["train"] |= {"steps": 600, "device": "cpu"}
    options |= {"log": {"validate_every": 0, "every": 1}, "layout": {"dp": 2}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = ("run.yaml", "--nodes", 2, "--nproc-per-node", 1, "--max-restarts", 0, "--submit")
    submitted = dolmen("launch", "slurm", *words, "--sbatch", "time=5")
    assert submitted.code == 0, submitted.err
    out, job = tmp_path / "runs" / "tiny", "1"

    def steps():
        return len(losses(out)) if (out / "metrics.jsonl").exists() else 0

    def state():
        return slurm("scontrol", "show", "job", job)

    try:
        wait_for(lambda: steps() > 20, 60)
        slurm("scancel", "--batch", "--signal=USR1", job)  # what SLURM sends
        wait_for(lambda: "Restarts=1" in state(), 40)
        wait_for(lambda: "JobState=COMPLETED" in state(), 120)
    except AssertionError:
        print(state(), *(path.read_text()[-3000:] for path in tmp_path.glob("*.log")))
        raise
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["begun"] for row in history if "begun" in row] == ["resumed", "restarted"]
    assert [row["ended"] for row in history if "ended" in row] == ["SIGTERM", "done"]
    assert [step for step, *_ in losses(out)] == list(range(1, 601))
