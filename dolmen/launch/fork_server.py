"""The fork server: a process that imports what workers need, once, and then forks each of them. Its
imports take 2 s of CPU time, which otherwise every worker and every restart would take.

    launcher -- socket -- fork server -- fork --> rank 0, rank 1, ...

It does nothing else, so a fork is safe: it has no OpenMP pool, no CUDA context and no threads
(NumPy's OpenBLAS starts some on import, and ends them before a fork).

A message of the launcher is the environment of a worker to fork, as in /proc/PID/environ. Messages
back are "RANK PID" when it is forked and "RANK PID CODE", with its exit code, when it has ended.
When the launcher ends, the kernel kills the server, and with it the workers.
"""

import ctypes
import gc
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

from dolmen.launch import process

PR_SET_NAME = 15
MESSAGE_BYTES = 2**20  # an environment of a worker, or more


class ForkServer:
    """The launcher's side of a fork server, which runs until `close`."""

    def __init__(self, words: Sequence[str], imports: str, environment: Mapping[str, str]):
        """Start a server that imports the module `imports`; its workers run `dolmen *words`.
        `environment`: variables beside those of this process.
        """
        self.connection, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            options = [str(server_end.fileno()), str(os.getpid()), imports, *words]
            self.server = subprocess.Popen(
                [sys.executable, *process.isolated_python_options(), "-m", __name__, *options],
                env={**os.environ, **environment},
                pass_fds=[server_end.fileno()],
                start_new_session=True,  # Ctrl-C at the terminal reaches the launcher alone
            )

    def fork(self, environment: Mapping[str, str]) -> None:
        """Ask for one more worker, with these environment variables, RANK among them. No-op if the
        server has ended.
        """
        self.connection.settimeout(None)  # a full socket is waited for, whatever `receive` has set
        try:
            self.connection.send(
                b"\0".join(os.fsencode(f"{n}={v}") for n, v in environment.items())
            )
        except ConnectionError:
            pass  # `receive` reports it

    def receive(self, seconds: float | None = None) -> tuple[int, int, int | None] | None:
        """Wait for the next message: the rank of a worker, its pid, and its exit code if it has
        ended (negative: the signal that killed it). Return None after `seconds`. Raises EOFError
        if the server has ended.
        """
        self.connection.settimeout(seconds)
        try:
            message = self.connection.recv(MESSAGE_BYTES)
        except (TimeoutError, BlockingIOError):  # the second for 0 seconds
            return None
        except ConnectionError:
            message = b""
        if not message:
            raise EOFError
        rank, pid, *code = map(int, message.split())
        return rank, pid, code[0] if code else None

    def close(self) -> int:
        """End the server and with it any worker that is left. Return its exit code."""
        self.connection.close()
        return self.server.wait()


def main() -> None:
    """Serve one launcher; in each worker, run its command line. The arguments of this process:
    descriptor of the socket, pid of the launcher, module to import, words of the command line.
    """
    descriptor, launcher, imports, *words = sys.argv[1:]
    process.die_with(int(launcher))
    # where the launcher was started with SIGCHLD ignored, the kernel would keep no exit codes
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # a cluster sends it to every process of a job: workers save, then the launcher ends this one
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.set_threshold(100_000)  # as in dolmen/__main__.py
    import_module(imports)
    gc.freeze()  # a collection in a worker would copy the pages of all these objects
    with socket.socket(fileno=int(descriptor)) as connection:
        _fork_workers(connection)
    sys.argv = ["dolmen", *words]
    runpy.run_module("dolmen", run_name="__main__", alter_sys=True)


def _fork_workers(connection: socket.socket) -> None:
    """Fork a worker per message, and report forks and ends. Returns in the workers, each with its
    environment; the server itself exits here, when the launcher has closed the connection.
    """
    server = os.getpid()
    workers: dict[int, tuple[str, int]] = {}  # descriptor of the process -> its rank and pid
    while True:
        for ready in select.select([connection, *workers], [], [])[0]:
            if isinstance(ready, int):
                rank, pid = workers.pop(ready)
                os.close(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                connection.send(f"{rank} {pid} {code}".encode())
                continue
            message = connection.recv(MESSAGE_BYTES)
            if not message:
                os._exit(0)  # the kernel kills the workers that are left
            for variable in message.split(b"\0"):
                name, _, value = os.fsdecode(variable).partition("=")
                os.environ[name] = value
            rank, pid = os.environ["RANK"], os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                process.die_with(server)
                for other in workers:
                    os.close(other)
                # what `top` and `ps -o comm` show, at most 15 characters
                ctypes.CDLL(None).prctl(PR_SET_NAME, f"dolmen rank {rank}".encode())
                return
            workers[os.pidfd_open(pid)] = rank, pid
            connection.send(f"{rank} {pid}".encode())


if __name__ == "__main__":
    main()
