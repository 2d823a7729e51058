"""A file system of fsspec that fails as object storage does: `faulty://`, in the memory of this
process. `plan` says what its next requests do.

    faulty.install(monkeypatch)
    with faulty.plan(put_file=["error", "cut"]): ...     the first two uploads
    with faulty.killed_at(3): ...                        the third request raises Killed
"""

import time
from collections import defaultdict
from contextlib import contextmanager

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from dolmen.files import storage

FAULTS = ("error", "cut", "wrong", "short", "slow")


class Killed(BaseException):
    """Of a process that ends in the middle of a request."""


class Faulty(MemoryFileSystem):
    protocol = "faulty"
    store: dict = {}
    pseudo_dirs = [""]
    planned: dict[str, list[str]] = defaultdict(list)
    requests: list[str] = []
    last: int | None = None  # the request that is not answered any more

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("faulty:/"))

    def _fault(self, request: str) -> str | None:
        """Count a request and return its fault, one of FAULTS."""
        if getattr(self, "inside", False):  # of a request that consists of others
            return None
        self.requests.append(request)
        if len(self.requests) == self.last:
            raise Killed(request)
        fault = self.planned[request].pop(0) if self.planned[request] else None
        if fault == "error":
            raise OSError("500 Internal Server Error")
        if fault == "slow":
            time.sleep(0.02)
        return fault

    def _run(self, request: str, call, *args, **kwargs):
        fault = self._fault(request)
        before, self.inside = getattr(self, "inside", False), True
        try:
            return fault, call(*args, **kwargs)
        finally:
            self.inside = before

    def find(self, *args, **kwargs):
        return self._run("find", super().find, *args, **kwargs)[1]

    def info(self, *args, **kwargs):
        return self._run("info", super().info, *args, **kwargs)[1]

    def rm_file(self, path):
        return self._run("rm_file", super().rm_file, path)[1]

    def cat_file(self, path, start=None, end=None, **kwargs):
        fault, data = self._run("cat_file", super().cat_file, path, start, end, **kwargs)
        return damaged(data, fault)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._put("pipe_file", path, value)

    def put_file(self, lpath, rpath, **kwargs):
        with open(lpath, "rb") as file:
            self._put("put_file", rpath, file.read())

    def _put(self, request: str, path: str, content: bytes) -> None:
        fault = self._fault(request)
        if fault == "cut":  # in a part of an upload: no object appears
            raise ConnectionResetError("connection reset by peer")
        self._run("put", super().pipe_file, path, damaged(content, fault))


def damaged(data: bytes, fault: str | None) -> bytes:
    """The data as they arrive with a fault."""
    if fault in ("cut", "short"):
        return data[: len(data) // 2]
    if fault == "wrong" and data:
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    return data


def install(monkeypatch, tmp_path) -> Faulty:
    """Make faulty:// a new empty storage, its copies a new folder, and pauses short."""
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    monkeypatch.setattr(Faulty, "store", {})
    monkeypatch.setattr(Faulty, "pseudo_dirs", [""])
    monkeypatch.setattr(Faulty, "planned", defaultdict(list))
    monkeypatch.setattr(Faulty, "requests", [])
    monkeypatch.setattr(storage, "COPIES", str(tmp_path / "copies"))
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(storage, "LONGEST_PAUSE", 0.002)
    monkeypatch.setattr(storage, "PATIENCE", 2.0)
    return fsspec.filesystem("faulty")


@contextmanager
def plan(**faults: list[str]):
    """The next requests of these kinds have these faults."""
    Faulty.planned.update(faults)
    yield
    left = {request: rest for request, rest in Faulty.planned.items() if rest}
    Faulty.planned.clear()
    assert not left, f"these faults did not happen: {left}"


@contextmanager
def killed_at(request: int):
    """The process ends at this request, counted from 1; `.killed` says whether it came so far."""
    Faulty.requests.clear()
    Faulty.last = request
    ended = type("Ended", (), {"killed": False})
    try:
        yield ended
    except Killed:
        ended.killed = True
    finally:
        Faulty.last = None
