"""Real processes: two ranks under our launcher, signals to it, kills of it and of a rank, and ranks
that another launcher started. A rank costs seconds of imports, so this process is the launcher
where it can be, and the workers of tests that are about the launcher alone do not train:
`sitecustomize`, which Python imports at start, says what becomes of them when they are forked.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tinyrun
from tinyrun import dolmen, losses, rows, steps

from benchmarks.killing import workers as ranks
from dolmen.cli import command, main
from dolmen.core.config import to_dict
from dolmen.core.environment import Launch
from dolmen.core.messages import BadInput
from dolmen.launch import launcher, process
from dolmen.training import worker

material, one_thread = tinyrun.material, tinyrun.one_thread

PATIENCE = 90  # seconds until a test gives up waiting, on a busy machine
# With eps 1e-8 Adam turns the rounding of a gradient element of 1e-9 into a step of lr, so no two
# layouts agree for long: tests/golden/table.py says more.
ENDLESS = (
    "--train.steps",
    100_000,
    "--train.dtype",  # in fp32 AdamW makes 2e-5 of rounding within 13 steps
    "float64",
    "--optimizer.schedule",
    "constant",
    "--optimizer.eps",
    1e-3,
    "--log.validate-every",
    0,
)
TWO = ("--layout.tp", 2)


def in_workers(code: str) -> str:
    """A `sitecustomize` that runs `code` in each worker, which knows its rank, before all else."""
    return (
        "import os, sys\n"
        f"def run(code={code!r}):\n"
        "    if 'RANK' in os.environ: exec(code, {})\n"
        "os.register_at_fork(after_in_child=run)\n"
    )


def parent(pid: int) -> int | None:
    """Of a living process: the dead that nobody has waited for do not count."""
    try:
        state, ppid = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(ppid)


def wait(done, seconds: float = PATIENCE) -> bool:
    """Whether done() came true in time."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(done())


def at_step(out: Path, step: int) -> bool:
    """Whether the run has logged that step."""
    return (out / "metrics.jsonl").exists() and f'{{"step": {step},' in (
        out / "metrics.jsonl"
    ).read_text()


def meanwhile(ready, act) -> None:
    """In a thread: act() as soon as ready()."""
    threading.Thread(target=lambda: wait(ready) and act(), daemon=True).start()


@pytest.fixture(scope="module")
def alone(material, tmp_path_factory):
    """Steps of one process: what every other layout has to find again."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert dolmen("train", material.file, "--out", out, *ENDLESS, "--train.steps", 30).code == 0
    return losses(out)


def agree(out: Path, alone) -> bool:
    """Losses and norms within 1e-10 of one process, no step missing and none told twice."""
    found = losses(out)
    assert [row[0] for row in found] == list(range(1, len(found) + 1)) and len(found) > 8
    return all(
        abs(a[1] / b[1] - 1) < 1e-10 and abs(a[2] / b[2] - 1) < 1e-10
        for a, b in zip(found, alone, strict=False)
    )


# ---- runs that train


STOPS = (
    ((), signal.SIGTERM, 143),
    (("--resume", "--layout.sequence-parallel"), signal.SIGINT, 130),
)


def told(sent: int) -> set[int]:
    """The launcher, which is this process, and for SIGTERM the server and the ranks it forked."""
    workers = ranks(os.getpid()).values() if sent == signal.SIGTERM else ()
    return {os.getpid(), *workers, *filter(None, map(parent, workers))}


@pytest.mark.spawn
@pytest.mark.parametrize("stops", [STOPS[:1], pytest.param(STOPS, marks=pytest.mark.full)], ids=len)
def test_two_ranks_stopped_save_and_go_on_at_another_layout(
    material, alone, tmp_path, capfd, stops
):
    """SIGTERM to every process of tp 2, as a cluster ends a job, then Ctrl-C to the launcher of tp
    2 with sequence parallelism, then one process.
    """
    out, last = tmp_path / "run", 0
    for words, sent, code in stops:
        meanwhile(
            lambda last=last: at_step(out, last + 8),
            lambda sent=sent: [os.kill(pid, sent) for pid in told(sent)],
        )
        assert dolmen("train", material.file, "--out", out, *ENDLESS, *TWO, *words).code == code
        said, complained = capfd.readouterr()
        resumed, last = last, steps(out)[-1]
        assert (
            f"stopped by signal {int(sent)} after step {last}, checkpoint saved" in said
            and complained == ""
        )
        assert (f"resuming from step {resumed}\n" in said) == bool(resumed) and said.count(
            f"\nstep {resumed + 2}/"
        ) == 1
        assert len(rows(out)) == last >= resumed + 8
    if len(stops) == 2:
        assert "changed: layout.sequence_parallel: False -> True" in said
    one = dolmen(
        "train", material.file, "--out", out, "--resume", *ENDLESS, "--train.steps", last + 2
    )
    assert (
        one.code == 0
        and f"resuming from step {last}" in one.out
        and "changed: layout.tp: 2 -> 1" in one.out
    )
    assert len(rows(out)) == last + 2 and agree(out, alone)


BROKEN = """
import os
if os.environ.get("RANK") == "1":
    import dolmen.training.loop as loop
    step = loop.optimizer_step
    def broken(state, *args):
        if state.step == 2: raise ArithmeticError("broken on purpose")
        return step(state, *args)
    loop.optimizer_step = broken
"""


@pytest.mark.spawn
@pytest.mark.full  # short tier: test_what_a_worker_raises_is_told_once
def test_a_rank_that_raises_ends_the_run_and_is_told_once(material, tmp_path, monkeypatch, capfd):
    """Rank 1 raises in its third step; rank 0, which waits for it, has a traceback too, as a
    consequence; gloo alone would have it wait for half an hour.
    """
    (tmp_path / "sitecustomize.py").write_text(in_workers(BROKEN))
    monkeypatch.setenv("PYTHONPATH", tinyrun.path_of(tmp_path))
    ended = []
    meanwhile(
        lambda: at_step(tmp_path / "run", 2),
        lambda: (wait(lambda: not ranks(os.getpid())), ended.append(time.time())),
    )
    result = dolmen("train", material.file, "--out", tmp_path / "run", *ENDLESS, *TWO)
    complained = result.err + capfd.readouterr().err
    assert result.code == 1 and complained.count("Traceback (most recent call last)") == 1, (
        complained
    )
    assert complained.count("broken on purpose") == 1
    assert complained.rstrip().endswith(
        "dolmen: rank 1 failed (exit code 1); all ranks were stopped"
    )
    assert (
        wait(lambda: ended)
        and ended[0] - rows(tmp_path / "run")[-1]["time"] < PATIENCE
        and len(rows(tmp_path / "run")) == 2
    )


LIGHT = "import sys; from dolmen.launch.launcher import launch; sys.exit(launch(2, sys.argv[1:]))"
TRAINER = """
import json, sys
from dolmen.launch.launcher import launch
sys.exit(launch(2, ["train"], handed=json.loads(sys.argv[1])))
"""


def trainer(*words: object) -> list[str]:
    """A command that is the launcher of `dolmen train words` over two processes, once that has been
    checked here, and imports nothing else.
    """
    request = command.read("train", list(map(str, words)))
    request = replace(request, config=worker.prepare(request, 2).resolved.config)
    return [sys.executable, "-c", TRAINER, json.dumps(to_dict(request))]


@pytest.mark.full  # the kernel ends them, trained or not: ..._while_workers_start_leaves_none
def test_a_launcher_killed_while_two_ranks_train_leaves_none(material, tmp_path):
    """kill -9: both are gone, of a run that would have gone on for hours."""
    out = tmp_path / "run"
    argv = trainer(material.file, "--out", out, *ENDLESS, *TWO)
    launcher = subprocess.Popen(argv, stderr=subprocess.PIPE)
    assert wait(lambda: at_step(out, 3)), launcher.communicate()
    workers = ranks(launcher.pid)
    launcher.kill()
    assert sorted(workers) == [0, 1] and wait(
        lambda: all(parent(pid) is None for pid in workers.values())
    )
    launcher.communicate()


def test_workers_import_nothing_of_the_folder_they_run_in(tmp_path, monkeypatch, capfd):
    """It may be a model's, downloaded; where this process imports from there, so do they."""
    (tmp_path / "rich.py").write_text("raise SystemExit(9)")
    monkeypatch.setenv("PYTHONPATH", tinyrun.path_of())
    monkeypatch.chdir(tmp_path)
    assert launcher.launch(1, ["recipes"]) == 0 and "quickstart" in capfd.readouterr().out
    monkeypatch.syspath_prepend("")
    assert launcher.launch(1, ["recipes"]) == 1


@pytest.mark.full  # tests/cli/test_two_hosts.py joins torchrun in the short tier
def test_ranks_of_another_launcher_join(material, alone, tmp_path):
    """Two tasks as srun starts them: dp 2 and ZeRO-3, resuming a run of one process."""
    out = tmp_path / "run"
    assert dolmen("train", material.file, "--out", out, *ENDLESS, "--train.steps", 6).code == 0
    env = {
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_ID": str(os.getpid()),
    }
    words = ("--resume", *ENDLESS, "--train.steps", 12, "--layout.zero", 3)
    argv = [
        str(a)
        for a in (sys.executable, "-m", "dolmen", "train", material.file, "--out", out, *words)
    ]
    tasks = [
        subprocess.Popen(
            argv,
            env={
                **os.environ,
                **env,
                "SLURM_PROCID": str(r),
                "SLURM_LOCALID": str(r),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    said = [task.communicate(timeout=PATIENCE) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert (
        "tp 1 x dp 2, ZeRO 3: 2 processes" in said[0][0]
        and "resuming from step 6" in said[0][0]
        and said[1] == ("", "")
    )
    assert len(rows(out)) == 12 and agree(out, alone)


def test_generate_over_two_ranks(material, tmp_path, capfd, forked_ranks):
    """The text of one process, told by the first rank; in the cache each has its own heads."""
    words = ("generate", material.model, "--max-new-tokens", 8)
    one = dolmen(*words, "--prompt", "abc def")
    assert one.code == 0 and dolmen(*words, "--prompt", "abc def", *TWO).code == 0
    output = capfd.readouterr()
    assert (output.out, output.err) == (one.out, one.err) and not one.err
    (tmp_path / "in.txt").write_text("abc def\n")
    words = (*words, "--input", tmp_path / "in.txt", "--output")
    one = dolmen(*words, tmp_path / "one.jsonl")
    assert one.code == 0 and dolmen(*words, tmp_path / "two.jsonl", *TWO).code == 0
    output = capfd.readouterr()
    held = [float(err.split(" in use, ")[1].split()[0]) for err in (one.err, output.err)]
    assert held[0] == 2 * held[1]


# ---- the launcher alone: workers that do not train

WORKER = """
import os, signal, sys, time
RANK = os.environ.get("RANK")
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """launch() of two workers, `dolmen --version` after some Python in which RANK is "0" or "1":
    (exit code, stdout, stderr).
    """

    def run(code: str):
        (tmp_path / "sitecustomize.py").write_text(in_workers(f"{WORKER}\n{code}"))
        monkeypatch.setenv("PYTHONPATH", tinyrun.path_of(tmp_path))
        capfd.readouterr()
        return launcher.launch(2, ["--version"]), *capfd.readouterr()

    return run


def test_all_well(run):
    code, said, complained = run("")
    assert code == 0 and said.count("dolmen 0") == 2 and complained == "" and not ranks(os.getpid())


def test_threads_are_divided(run, monkeypatch):
    """Over the cores this process may use, unless the user has decided."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for want in (str(max(1, len(os.sched_getaffinity(0)) // 2)), "7"):
        assert (
            run("print('threads', os.environ['OMP_NUM_THREADS'])")[1].count(f"threads {want}\n")
            == 2
        )
        monkeypatch.setenv("OMP_NUM_THREADS", "7")


def test_a_rank_that_is_killed_is_named(run):
    began = time.monotonic()
    code, _, complained = run(
        "if RANK == '1': os.kill(os.getpid(), signal.SIGKILL)\nif RANK == '0': time.sleep(600)"
    )
    assert (
        code == 1
        and complained.startswith("dolmen: rank 1 (pid ")
        and time.monotonic() - began < PATIENCE  # rank 0 sleeps for ten minutes
    )
    assert (
        complained.endswith(") was killed by SIGKILL (out of memory?); all ranks were stopped\n")
        and complained.count("\n") == 1
    )


def test_a_rank_that_is_told_to_end_by_another_program_is_no_refusal(run):
    """As by a daemon that frees memory: a restart may mend it, so the code is not that of input."""
    code, _, complained = run(
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "if RANK == '1': os.kill(os.getpid(), signal.SIGTERM)\n"
        "if RANK == '0': time.sleep(600)"
    )
    assert code == 1 and complained.startswith("dolmen: rank 1 (pid ")
    assert complained.endswith(") was killed by SIGTERM; all ranks were stopped\n")


def test_a_rank_that_is_asked_to_end_has_all_save(run):
    """They end with 143 when they have: the launcher does too, which itself was not asked."""
    assert run("if RANK == '1': os._exit(143)\nif RANK == '0': time.sleep(600)") == (143, "", "")


def test_a_rank_that_has_to_be_killed_is_not_the_cause(run, tmp_path, monkeypatch):
    """Nothing but SIGKILL ends rank 0, as one that a debugger has stopped; rank 1 failed by
    itself.
    """
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    deaf = tmp_path / "deaf"
    code, _, complained = run(
        "if RANK == '0': signal.signal(signal.SIGRTMIN, signal.SIG_IGN)\n"
        f"if RANK == '0': open({str(deaf)!r}, 'w')\n"
        f"while RANK == '1' and not os.path.exists({str(deaf)!r}): time.sleep(0.001)\n"
        "if RANK == '1': os._exit(2)\n"
        "time.sleep(600)"
    )
    assert (code, complained) == (2, "no traceback\n")


def test_exit_codes_are_known_where_the_end_of_children_is_ignored(run):
    """A parent may have left SIGCHLD ignored, as daemons do."""
    with process.handling({signal.SIGCHLD: signal.SIG_IGN}):
        assert run("")[::2] == (0, "")
        assert "rank 1 failed (exit code 3)" in run("if RANK == '1': os._exit(3)")[2]


REFUSE = """
if RANK:
    sys.path.insert(0, {root!r})
    from dolmen.launch import process
    from dolmen.core.messages import BadInput
    def work(): raise BadInput("use --less")
    if RANK == "0": time.sleep(600)
    process.run_worker(work)
"""


def test_what_a_worker_refuses_is_told_once(run):
    """Rank 1 is first, and alone: rank 0 is stopped before it can say the same."""
    assert run(REFUSE.format(root=str(Path(launcher.__file__).parents[2]))) == (
        2,
        "",
        "dolmen: use --less\n",
    )


RAISE = """
if RANK:
    sys.path.insert(0, {root!r})
    from dolmen.launch import process
    def work():
        if RANK == "1": raise ArithmeticError("broken on purpose")
        while not os.path.exists({error!r}): time.sleep(0.001)
        raise ConnectionError("closed by peer")
    leave = os._exit
    os._exit = lambda code: (open({error!r}, "w").close(), leave(code))
    process.run_worker(work)
"""


def test_what_a_worker_raises_is_told_once(run, tmp_path):
    """Rank 0, which waited for rank 1, has a traceback too, as a consequence."""
    root = str(Path(launcher.__file__).parents[2])
    code, said, complained = run(RAISE.format(root=root, error=str(tmp_path / "raised")))
    assert (code, said) == (1, "") and "closed by peer" not in complained, complained
    assert complained.count("Traceback (most recent call last)") == 1
    assert complained.count("broken on purpose") == 1
    assert complained.endswith("dolmen: rank 1 failed (exit code 1); all ranks were stopped\n")


@pytest.mark.parametrize(
    "sent, code, heard", [(signal.SIGINT, 130, "SIGUSR1"), (signal.SIGTERM, 143, "SIGUSR2")]
)
def test_requests_are_forwarded(run, tmp_path, sent, code, heard):
    """Workers save and end with the code, or, not yet listening, die of the request: the launcher's
    answer is the same. Rank 0 takes a while to save; that rank 1 has died of the request by then
    is a reason to tell it to end once more, which it ignores.
    """
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    meanwhile(lambda: len(list(tmp_path.glob("ready*"))) == 2, lambda: os.kill(os.getpid(), sent))
    assert run(
        f"def save(*_): time.sleep(0.1); print('saved', flush=True); os._exit({code})\n"
        f"if RANK == '0': signal.signal(signal.{heard}, save)\n"
        "if RANK == '0': signal.signal(signal.SIGRTMIN, signal.SIG_IGN)\n"
        f"if RANK: open({str(tmp_path)!r} + '/ready' + RANK, 'w').close(); time.sleep(60)"
    ) == (code, "saved\n", "")
    assert {s: signal.getsignal(s) for s in before} == before


def test_nothing_is_left_in_the_temporary_folder(run, tmp_path, monkeypatch):
    """Its name may be no UTF-8."""
    import tempfile

    temporary = tmp_path / os.fsdecode(b"temporary\xff")
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    assert run("")[0] == 0 and list(temporary.iterdir()) == []


@pytest.mark.parametrize("moment", ("before", "after"))
def test_a_launcher_killed_while_workers_start_leaves_none(tmp_path, monkeypatch, moment):
    """Before a worker has asked the kernel to die with its launcher, and after: there is no moment
    between. `dolmen` asks it: else its exit would take ten minutes.
    """
    code = (
        "import atexit; atexit.register(time.sleep, 600); time.sleep(1)"
        if moment == "before"
        else "import dolmen.launch.process as p; p.die_with(os.getppid()); time.sleep(600)"
    )
    started = f"open({str(tmp_path)!r} + '/started' + RANK, 'w').write(str(os.getpid()))"
    (tmp_path / "sitecustomize.py").write_text(in_workers(f"{WORKER}\n{started}\n{code}"))
    launcher = subprocess.Popen(
        [sys.executable, "-c", LIGHT, "--version"],
        env={**os.environ, "PYTHONPATH": tinyrun.path_of(tmp_path)},
    )
    assert wait(
        lambda: all(
            (tmp_path / f"started{r}").exists() and (tmp_path / f"started{r}").read_text()
            for r in range(2)
        )
    )
    if moment == "after":
        time.sleep(0.3)
    workers = [int((tmp_path / f"started{r}").read_text()) for r in range(2)]
    assert all(parent(parent(pid)) == launcher.pid for pid in workers)
    launcher.kill()
    launcher.wait()
    assert wait(lambda: all(parent(pid) is None for pid in workers))


CLOSED = "<&- >&- 2>&-"
SEEN = """
import os, subprocess, sys
from dolmen.__main__ import process
process.open_standard_streams()
print("stdout"), print("stderr", file=sys.stderr)
child = subprocess.run([sys.executable, "-c", "import os; [os.fstat(n) for n in range(3)]"])
first = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)
os.write(first, f"{sys.stdin.read()!r} {child.returncode} {first > 2}".encode())
"""


def test_standard_streams_that_are_closed_are_those_of_no_file(tmp_path):
    """Files of a run would have their descriptors, and what is printed in them."""
    words = [sys.executable, "-c", SEEN, str(tmp_path / "first")]
    subprocess.run(["sh", "-c", f'"$@" {CLOSED}', "sh", *words], check=True)
    # stdin is at its end, the child has all three, and a file has none of them
    assert (tmp_path / "first").read_text() == "'' 0 True"


@pytest.mark.spawn
@pytest.mark.full
def test_a_run_over_two_ranks_is_started_without_standard_streams(material, tmp_path):
    words = ["train", material.file, *TWO, "--layout.dp", 1, "--out", tmp_path / "run"]
    command = [sys.executable, "-m", "dolmen", *map(str, words)]
    subprocess.run(["sh", "-c", f'"$@" {CLOSED}', "sh", *command], check=True)
    assert steps(tmp_path / "run")


def test_broken_pipe_is_no_traceback(monkeypatch, capfd):
    """`dolmen train --help | head -n 1`."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w", buffering=1))
    assert main(["train", "--help"]) == 1 and capfd.readouterr().err == ""


# ---- the launcher's parts, in this process

SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08],x1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
}
RANKS = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "x", "MASTER_PORT": "9"}
HERE = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def tasks(of_each: str, machine: int) -> dict[str, str]:
    return {"SLURM_STEP_TASKS_PER_NODE": of_each, "SLURM_NODEID": str(machine)}


@pytest.mark.parametrize(
    "env, want",
    [
        ({}, None),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
            None,
        ),  # a batch script, whose tasks srun has yet to start
        ({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}, None),
        (SLURM | {"SLURM_NTASKS": "1"}, None),
        (
            RANKS | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Launch(3, 4, 1, 2),
        ),
        (RANKS, Launch(3, 4, 3, 4)),
        (SLURM, Launch(5, 8, 1, 4, "tcp://gpu07:22390")),
        (SLURM | {"MASTER_ADDR": "x", "MASTER_PORT": "9"}, Launch(5, 8, 1, 4)),
        (
            SLURM | {"SLURM_STEP_NODELIST": "a-1,b-2", **tasks("3,5", 1)},
            Launch(5, 8, 1, 5, "tcp://a-1:22390"),
        ),
        (SLURM | tasks("4(x2),3", 0), Launch(5, 8, 1, 4, "tcp://gpu07:22390")),
        (SLURM | tasks("4(x2),3", 1), Launch(5, 8, 1, 4, "tcp://gpu07:22390")),
        (SLURM | tasks("4(x2),3", 2), Launch(5, 8, 1, 3, "tcp://gpu07:22390")),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0, 1)),
    ],
    ids=range(13),
)
def test_who_started_this_process(env, want):
    assert Launch.read(env) == want


@pytest.mark.parametrize(
    "env, said",
    [
        (RANKS | {"RANK": "x"}, "RANK is 'x': it must be a whole number of at "),
        (RANKS | {"RANK": "4"}, "RANK is '4': it must be from 0 to 3, as WORLD_"),
        (RANKS | {"WORLD_SIZE": ""}, "WORLD_SIZE is '', but RANK is '3': it must be a whole"),
        (RANKS | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but RANK is '3': it must be a whole"),
        (RANKS | {"MASTER_ADDR": ""}, "MASTER_ADDR is '', but RANK is '3': it must be the host"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set, but RANK is '0': it must be"),
        (RANKS | {"MASTER_PORT": "x"}, "MASTER_PORT is 'x', but"),
        (RANKS | {"MASTER_PORT": "65536"}, "MASTER_PORT is '65536', but"),
        (RANKS | {"LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is not set, but RANK is '3': it must be"),
        (RANKS | HERE | {"LOCAL_RANK": "2"}, "from 0 to 1, as LOCAL_WORLD_SIZE is 2; start this"),
        (RANKS | HERE | {"LOCAL_RANK": "-1"}, "LOCAL_RANK is '-1', but RANK is '3': it must be"),
        (RANKS | HERE | {"LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE is '', but RANK is '3': it"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"},
            "SLURM_NTASKS_PER_NODE is not set, but SLURM_PROCID is '0': it must be a whole number "
            "of at least 1; start this with srun, which sets it, or unset SLURM_PROCID",
        ),
        (SLURM | {"SLURM_NTASKS": "2,2"}, "SLURM_NTASKS is '2,2', but SLURM_PROCID is '5': it "),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": ""}, "SLURM_STEP_TASKS_PER_NODE is '', but"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,5"}, "SLURM_NODEID is not set, but SLURM_PROC"),
        (SLURM | tasks("4(x2),3", 3), "SLURM_NODEID is '3', but SLURM_PROCID is '5': it must be"),
        (SLURM | {"SLURM_LOCALID": "4"}, "SLURM_LOCALID is '4', but SLURM_PROCID is '5': it must"),
        (SLURM | {"SLURM_PROCID": "8"}, "SLURM_PROCID is '8': it must be"),
        (SLURM | {"SLURM_STEP_NODELIST": "[bad"}, "SLURM_STEP_NODELIST is '[bad', but"),
        (SLURM | {"SLURM_JOB_ID": "12_3"}, "SLURM_JOB_ID is '12_3', but"),
        (SLURM | {"MASTER_ADDR": "x"}, "MASTER_PORT is not set, but"),
    ],
    ids=range(22),
)
def test_half_set_variables_are_told(env, said):
    with pytest.raises(ValueError) as found:
        Launch.read(env)
    assert said in str(found.value)


@pytest.mark.parametrize(
    "words",
    [
        ("train", "quickstart"),
        ("verify", "nowhere"),
        ("evaluate", "nowhere", "--data.path", "x"),
        ("generate", "nowhere", "--prompt", "x"),
    ],
    ids=lambda words: words[0],
)
def test_every_verb_tells_half_set_variables(words, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "x"}.items():
        monkeypatch.setenv(name, value)
    result = dolmen(*words)
    assert result.code == 2 and "Traceback" not in result.err
    assert result.words.startswith(
        f"dolmen {words[0]}: WORLD_SIZE is 'x', but RANK is '0': it must be a whole"
    )


@pytest.fixture
def ended(monkeypatch):
    """os._exit, observed."""

    def leave(code):
        raise SystemExit(("at once", code))

    monkeypatch.setattr(os, "_exit", leave)
    return lambda work: pytest.raises(SystemExit, process.run_worker, work).value.code


def raiser(error):
    def work():
        raise error

    return work


def test_guarded_alone(ended, capsys):
    """No launcher of ours: a traceback on stderr, once. What the command line knows how to end goes
    through.
    """
    assert ended(raiser(ArithmeticError("x"))) == ("at once", 1)
    assert capsys.readouterr().err.count("Traceback") == 1
    for error in (BadInput("x"), KeyboardInterrupt(), BrokenPipeError()):
        with pytest.raises(type(error)):
            process.run_worker(raiser(error))
    assert process.run_worker(lambda: 7) == 7 and capsys.readouterr().err == ""


def test_guarded_worker(ended, capsys, monkeypatch, tmp_path):
    """A worker of our launcher leaves its traceback, or its refusal, to it, and prints nothing."""
    monkeypatch.setenv(process.LAUNCHER, str(os.getppid()))
    monkeypatch.setenv(process.ERROR_FILE, str(tmp_path / "error"))
    for error, code, said in (
        (ArithmeticError("x"), 1, "Traceback"),
        (BadInput("use y"), 2, "dolmen: use y"),
        (KeyboardInterrupt(), 1, "Traceback"),
        (ArithmeticError(os.fsdecode(b"no file x\xff")), 1, "Traceback"),
    ):
        assert ended(raiser(error)) == ("at once", code)
        report = launcher._failure(0, 1, code, tmp_path / "error").report
        assert report["text"].startswith(said)
    assert capsys.readouterr().err == ""
