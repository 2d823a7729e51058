"""Two hosts: two network namespaces of this machine with a virtual link between them, torchrun in
each, nothing shared but the file system. Needs root and `ip` (iproute2); skipped, with the reason,
where namespaces cannot be made.

    namespace a, hostname host-a, 10.77.0.1  <--- veth --->  10.77.0.2, hostname host-b, namespace b
      torchrun, ranks 0 and 1                                 torchrun, ranks 2 and 3
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
import tinyrun
from test_processes import meanwhile, ranks
from tinyrun import dolmen, losses

from dolmen.checkpoint import folders

material, one_thread = tinyrun.material, tinyrun.one_thread

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# eps: tests/cli/test_processes.py says why layouts agree only with a larger one
WORDS = (
    "--train.steps",
    "24",
    "--checkpoint.every",
    "4",
    "--optimizer.schedule",
    "constant",
    "--optimizer.lr",
    "1e-3",
    "--optimizer.eps",
    "1e-3",
    "--log.validate-every",
    "0",
)

pytestmark = pytest.mark.full  # 60 s; tests/cli/test_processes.py has several ranks on one host


def ip(*words: str) -> None:
    """`ip WORDS`. Raises OSError or CalledProcessError where it cannot."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


@pytest.fixture(scope="module")
def hosts():
    """Names of two namespaces that reach each other as 10.77.0.1 and 10.77.0.2."""
    names = [f"dolmen-{os.getpid()}-{end}" for end in "ab"]
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` to give a host its name")
    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            "veth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "veth0",
            "netns",
            names[1],
        )
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "veth0")
            for device in ("veth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(
            "network namespaces cannot be made here: "
            f"{getattr(error, 'stderr', '') or error}".strip()
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def torchrun(
    hosts: list[str],
    file,
    out,
    *words: str,
    each: tuple[tuple[str, ...], ...] = ((), ()),
    restarts: int = 0,
    started: Callable[[list[int]], None] = lambda pids: None,
) -> list[tuple[int, str, str]]:
    """`torchrun --nnodes 2 ... -m dolmen train` on both hosts at once, with `each`'s own options:
    (code, stdout, stderr) of each. `started` is given the pids of the two torchruns.
    """
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "veth0", "OMP_NUM_THREADS": "1"}
    tasks = []
    for number, name in enumerate(hosts):
        inside = [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            f"host-{'ab'[number]}",
        ]
        way = [
            "--nnodes",
            "2",
            "--max-restarts",
            str(restarts),
            "--nproc-per-node",
            "2",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "10.77.0.1:29411",
            "--rdzv-id",
            "two-hosts",
            "--rdzv-conf",
            f"is_host={1 - number},join_timeout=60",
            "--local-addr",
            f"10.77.0.{number + 1}",
        ]
        argv = [
            *inside,
            *TORCHRUN,
            *way,
            "-m",
            "dolmen",
            "train",
            str(file),
            "--out",
            str(out),
            *words,
            *each[number],
        ]
        tasks.append(
            subprocess.Popen(
                argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    started([task.pid for task in tasks])
    try:
        return [
            (task.wait() if said is None else task.returncode, *said)
            for task in tasks
            for said in [task.communicate(timeout=90)]
        ]
    finally:
        for task in tasks:
            task.kill()


@pytest.fixture(scope="module")
def alone(material, tmp_path_factory):
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert dolmen("train", material.file, "--out", out, *WORDS).code == 0
    return losses(out)


@pytest.mark.parametrize(
    "across, kill",
    [pytest.param(*case, marks=pytest.mark.full) for case in (("dp", False), ("pp", True))],
)
def test_tp_inside_a_host_and_another_axis_across(hosts, material, alone, tmp_path, across, kill):
    """`kill`: rank 2, on host-b, with signal 9; both hosts start again, and go on from the newest
    whole checkpoint.
    """
    out = tmp_path / "run"

    def started(pids):
        meanwhile(
            lambda: folders.list_checkpoints(out / "checkpoints"),
            lambda: os.kill(ranks(pids[1])[2], signal.SIGKILL),
        )

    said = torchrun(
        hosts,
        material.file,
        out,
        *WORDS,
        "--layout.tp",
        "2",
        f"--layout.{across}",
        "2",
        restarts=int(kill),
        **({"started": started} if kill else {}),
    )
    assert [code for code, *_ in said] == [0, 0], said
    assert any("resuming from step " in output for _, output, _ in said) == kill, said
    found = losses(out)
    assert [row[0] for row in found] == list(range(1, 25))
    assert all(
        abs(a[1] / b[1] - 1) < 1e-5 and abs(a[2] / b[2] - 1) < 1e-5
        for a, b in zip(found, alone, strict=True)
    ), (found, alone)


def test_hosts_that_differ_are_refused(hosts, material, tmp_path):
    """Another learning rate on host-b: both say so, end with 2, and leave nothing."""
    said = torchrun(
        hosts,
        material.file,
        tmp_path / "run",
        *WORDS,
        "--layout.tp",
        "2",
        each=((), ("--optimizer.lr", "0.2")),
    )
    for code, _, complained in said:
        words = " ".join(complained.split())
        assert code != 0 and "exitcode : 2" in words, said
        assert (
            "the ranks do not agree on what to do; compared with rank 0 on host-a, rank 2, 3 on "
            "host-b: optimizer.lr 0.2, here 0.001" in words
        ), said
        assert 'Traceback (most recent call last): File "dolmen' not in words
    assert not (tmp_path / "run").exists()
