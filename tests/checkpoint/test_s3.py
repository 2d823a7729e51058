"""moto's S3 server behind a proxy that fails: nothing is lost, and wrong bytes are found by the
seal. Needs s3fs and moto, which the test suite does not install.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import tinyrun
import torch
from fault_proxy import FaultProxy
from tinyrun import dolmen, losses, same, tensors

from dolmen.checkpoint.folders import Damaged
from dolmen.checkpoint.remote import RemoteCheckpoints
from dolmen.checkpoint.store import Checkpoints
from dolmen.core.mesh import SINGLE
from dolmen.files import storage

pytestmark = pytest.mark.full
s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")
material, one_thread = tinyrun.material, tinyrun.one_thread
URL = "s3://bucket/run/checkpoints"
MIB = 2**20


@pytest.fixture
def s3(monkeypatch, tmp_path):
    """The proxy in front of a server that has an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with contextlib.redirect_stdout(None):
        server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        server.start()
    host, port = server.get_host_and_port()
    # its state is the process's
    urlopen(Request(f"http://{host}:{port}/moto-api/reset", method="POST")).close()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "COPIES", str(tmp_path / "copies"))
    monkeypatch.setattr(storage, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(storage, "PATIENCE", 60.0)
    with FaultProxy(f"http://{host}:{port}") as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield proxy
    s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def state(step: int) -> dict:
    values = torch.Generator().manual_seed(step)
    return {f"model/{n}": torch.randn(256, 1024, generator=values) for n in range(4)}


def open_store(folder: Path) -> Checkpoints:
    return Checkpoints(folder, SINGLE, 3, remote=RemoteCheckpoints(URL, folder))


def open_elsewhere(folder: Path) -> Checkpoints:
    store = open_store(folder)
    assert store.remote is not None
    for step in store.remote.list_complete():
        store.remote.pull_step(step)
    return store


def check(store: Checkpoints, step: int) -> None:
    out = {name: torch.zeros_like(tensor) for name, tensor in state(step).items()}
    store.load(step, out)
    assert all(torch.equal(tensor, state(step)[name]) for name, tensor in out.items())


def test_checkpoints_through_faults(s3, tmp_path):
    store = open_store(tmp_path / "here")
    s3.share = 0.3
    for step in range(1, 6):
        store.save(step, state(step), {"step": step}, wait=True)
    elsewhere = open_elsewhere(tmp_path / "there")
    assert elsewhere.steps() == [3, 4, 5]
    for step in (5, 4, 3):
        check(elsewhere, step)
    assert set(s3.counts) == set(s3.kinds) and s3.counts["cut"] > 2, s3.counts


def test_wrong_bytes_on_the_way_are_found(s3, tmp_path):
    store = open_store(tmp_path / "here")
    for step in (1, 2):
        store.save(step, state(step), {"step": step}, wait=True)
    elsewhere = open_elsewhere(tmp_path / "there")
    s3.next = {"GET": ["wrong", "wrong"]}
    check(elsewhere, 2)
    assert s3.counts["wrong"] == 2
    # what is stored wrongly is found too, and the step before is intact
    path = f"{URL}/step-00000002/__0_0.distcp"
    content = bytearray(s3fs.S3FileSystem().cat_file(path))
    content[len(content) // 3] ^= 1
    s3fs.S3FileSystem().pipe_file(path, bytes(content))
    third = open_elsewhere(tmp_path / "third")
    with pytest.raises(Damaged, match="checksum of the part"):
        check(third, 2)
    check(third, 1)


def test_wrong_bytes_of_an_upload(s3, tmp_path):
    """Refused by the server by the client's checksum, and sent again; else found by the seal."""
    store = open_store(tmp_path / "here")
    store.save(1, state(1), {"step": 1}, wait=True)
    s3.next = {"PUT": ["wrong"]}
    store.save(2, state(2), {"step": 2}, wait=True)
    assert s3.counts["wrong"] == 1
    elsewhere = open_elsewhere(tmp_path / "there")
    try:
        check(elsewhere, 2)
    except Damaged:
        elsewhere.put_aside(2)
    check(open_elsewhere(tmp_path / "third"), 1)


def test_a_large_file_in_parts(s3, tmp_path):
    """Two uploads of parts that are cut, and blocks of a download."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(130 * MIB))
    s3.next = {"PUT": ["cut", "error", "cut"]}
    storage.push_folder(folder, "s3://bucket/model")
    s3.next["GET"] = ["cut", "slow", "error", "cut"]
    copy = storage.pull_folder("s3://bucket/model")
    assert storage.file_sum(copy / "weights") == storage.file_sum(folder / "weights")
    assert s3.counts == {"cut": 4, "error": 2, "slow": 1}
    assert not s3fs.S3FileSystem().list_multipart_uploads("bucket")


def test_a_bucket_that_is_not_there(s3):
    with pytest.raises(storage.StorageError, match="The specified bucket does not exist"):
        storage.pull_folder("s3://none/model")


def test_killed_and_resumed_on_another_machine(s3, material, tmp_path, monkeypatch):
    """kill -9 in the middle of a run at a URL, through faults; text and model are at URLs too. The
    resumed run is bitwise one that was never disturbed.
    """
    storage.push_folder(material.model, "s3://bucket/model")
    for file in material.docs.iterdir():
        s3fs.S3FileSystem().put_file(str(file), f"bucket/text/{file.name}")
    words = (
        *("train", "pretrain", "--init", "s3://bucket/model", "--data.path", "s3://bucket/text"),
        *("--data.cache", tmp_path / "cache", "--train.steps", 30, "--checkpoint.every", 3),
        *("--train.sequence-length", 16, "--train.global-batch-size", 4),
        *("--log.validate-every", 0, "--train.device", "cpu"),
    )
    calm = tmp_path / "calm"
    assert dolmen(*words, "--out", calm).code == 0
    s3.share = 0.1
    (tmp_path / "first").mkdir()
    command = [sys.executable, "-m", "dolmen", *map(str, words), "--out", "s3://bucket/run"]
    environment = {**os.environ, "HOME": str(tmp_path / "first"), "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, env=environment)
    end = time.monotonic() + 120
    while not s3fs.S3FileSystem(use_listings_cache=False).glob("bucket/run/checkpoints/*6/seal"):
        assert run.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    monkeypatch.setattr(storage, "RUNS", str(tmp_path / "second"))
    result = dolmen("train", "s3://bucket/run/config.yaml", "--resume")
    assert result.code == 0 and "resuming from step " in result.out, result.err
    assert "resuming from step 30" not in result.out
    working = storage.working_folder("s3://bucket/run")
    assert losses(working) == losses(calm)
    assert same(tensors(working, 30), tensors(calm, 30))
