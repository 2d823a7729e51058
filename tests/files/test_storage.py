"""Files at URLs: whatever fails, what arrives is what was stored, or an error says why; a kill
leaves nothing that looks whole.
"""

import errno
import os
import time
from pathlib import Path

import faulty
import pytest
from faulty import Faulty

from dolmen.files import storage
from dolmen.files.gate import Refused
from dolmen.files.storage import RemoteFolder, StorageError, StoredFile

URL = "faulty://bucket/model"


@pytest.fixture(autouse=True)
def system(monkeypatch, tmp_path):
    monkeypatch.setattr(storage, "BLOCK", 1000)  # several requests per file
    return faulty.install(monkeypatch, tmp_path)


@pytest.fixture
def folder(tmp_path) -> Path:
    made = tmp_path / "model"
    (made / "sub").mkdir(parents=True)
    (made / "weights").write_bytes(os.urandom(2500))
    (made / "sub" / "x.json").write_text("{}")
    (made / "empty").touch()
    return made


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.name != storage.SUMS}


@pytest.mark.parametrize("url", [URL, "memory://test-storage/model", "file"])
def test_a_folder_comes_back(folder, url, tmp_path):
    url = f"file://{tmp_path}/there" if url == "file" else url
    storage.push_folder(folder, url)
    copy = storage.pull_folder(url)
    assert content(copy) == content(folder)
    assert str(copy).startswith(storage.COPIES)


def test_a_model_in_the_memory_of_a_process_is_refused():
    """It would end with the command that says it wrote it."""
    url = "memory://test-storage/lost"
    with pytest.raises(ValueError, match=f"^{url} is in the memory of one process .* another URL"):
        with storage.output_folder(url) as folder:
            folder.mkdir()


def test_a_copy_is_reused_until_the_object_changes(folder, system):
    storage.push_folder(folder, URL)
    copy = storage.pull_folder(URL)
    Faulty.requests.clear()
    storage.pull_folder(URL)
    assert Faulty.requests == ["find", "cat_file"]  # the listing, and the checksums
    (folder / "weights").write_bytes(b"other")
    (folder / "empty").unlink()
    system.rm_file("/bucket/model/empty")
    time.sleep(0.001)
    storage.push_folder(folder, URL)
    assert storage.pull_folder(URL) == copy
    assert content(copy) == content(folder)  # and what is gone at the URL is gone here


def test_without_times_the_etag_says_what_has_changed(folder, monkeypatch):
    """As over http."""
    tags = {"/bucket/model/weights": '"one"'}
    info = Faulty.info

    def without_time(self, path, **kwargs):
        known = info(self, path, **kwargs)
        return {n: known[n] for n in ("name", "size", "type")} | {"ETag": tags.get(path, "")}

    monkeypatch.setattr(Faulty, "info", without_time)
    remote = RemoteFolder(URL)
    for content, tag in ((b"a", "one"), (b"b", "two"), (b"c", "two")):
        tags["/bucket/model/weights"] = f'"{tag}"'
        remote.write("weights", content)
        copy = storage.pull_file(f"{URL}/weights")
        assert copy is not None
        assert copy.read_bytes() == (b"b" if tag == "two" else b"a")


def test_what_another_process_makes_in_a_copy_stays(folder, system):
    storage.push_folder(folder, URL)
    copy = storage.pull_folder(URL)
    making = ["step-00000001.lock", "step-00000001.partial/seal", "step-00000001.partial/seal.part"]
    (copy / "step-00000001.partial").mkdir()
    for name in (*making, "weights.part", "gone", "gone.part"):
        (copy / name).touch()
    storage.pull_folder(URL)
    assert content(copy).keys() == {*content(folder), *making, "weights.part"}


def test_every_fault_and_nothing_is_lost(folder):
    faults = ["error", "slow", "cut", "error"]
    with faulty.plan(put_file=[*faults], pipe_file=[*faults, "wrong"], info=["error"]):
        storage.push_folder(folder, URL)
    with faulty.plan(find=["error", "slow"], cat_file=[*faults, "wrong", "cut", "wrong", "wrong"]):
        copy = storage.pull_folder(URL)
    assert content(copy) == content(folder)


def test_an_upload_of_other_length_is_repeated(folder):
    with faulty.plan(put_file=["slow", "slow", "short"]):
        storage.push_folder(folder, URL)
    assert content(storage.pull_folder(URL)) == content(folder)


def test_wrong_bytes_that_stay_are_refused(folder, system):
    storage.push_folder(folder, URL)
    damaged = bytearray(system.cat_file("/bucket/model/weights"))
    damaged[7] ^= 1
    system.pipe_file("/bucket/model/weights", bytes(damaged))
    with pytest.raises(Refused, match="faulty://bucket/model/weights: is not what was uploaded"):
        storage.pull_folder(URL)
    assert not list(Path(storage.COPIES).rglob("weights*"))
    system.pipe_file("/bucket/model/.dolmen-sums", b'{"files": {}, "digest": "0"}')
    with pytest.raises(Refused, match="its own digest is wrong"):
        storage.pull_folder(URL)


def test_without_checksums_sizes_are_compared(folder, system):
    storage.push_folder(folder, URL)
    system.rm_file("/bucket/model/.dolmen-sums")
    system.pipe_file("/bucket/model/weights", b"changed")
    assert content(storage.pull_folder(URL))["weights"] == b"changed"


def test_killed_in_the_middle_of_an_upload(folder, system):
    """At every request: what is there then is refused, or is all that was uploaded."""
    request, killed = 1, True
    while killed:
        system.store.clear()
        with faulty.killed_at(request) as ended:
            storage.push_folder(folder, URL)
        killed = ended.killed
        try:
            assert content(storage.pull_folder(URL)) == content(folder)
            assert request > 4
        except ValueError as error:
            assert killed and ("not uploaded to the end" in str(error) or "no such" in str(error))
        request += 1
    assert request > 10


def test_killed_in_the_middle_of_a_download(folder):
    storage.push_folder(folder, URL)
    with faulty.killed_at(4) as ended:
        storage.pull_folder(URL)
    assert ended.killed and list(Path(storage.COPIES).rglob("*.part"))
    assert content(storage.pull_folder(URL)) == content(folder)


def test_storage_that_does_not_come_back(folder, monkeypatch):
    monkeypatch.setattr(storage, "PATIENCE", 0.01)
    with faulty.plan(), pytest.raises(StorageError, match=r"bucket/model: .* cannot be .*500"):
        Faulty.planned.update(pipe_file=["error"] * 100)
        try:
            storage.push_folder(folder, URL)
        finally:
            Faulty.planned.clear()


def test_what_is_missing_or_not_permitted_is_not_repeated(monkeypatch):
    def refuse(self, *args, **kwargs):
        calls.append(args)
        raise PermissionError("403 Forbidden")

    calls: list = []
    monkeypatch.setattr(Faulty, "find", refuse)
    with pytest.raises(StorageError, match="cannot be listed .PermissionError: 403"):
        storage.pull_folder(URL)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["../../escaped", "sub//x", "sub/./x", "a\0b", "d/" * 2000 + "x"])
def test_names_that_lead_outside(system, monkeypatch, name):
    info = {"type": "file", "size": 1}
    monkeypatch.setattr(Faulty, "find", lambda *a, **k: {f"/bucket/model/{name}": info})
    with pytest.raises(StorageError, match="has a name that no local file can have"):
        storage.pull_folder(URL)


@pytest.mark.parametrize(
    "url, reason",
    [
        ("nope://bucket/x", "Protocol not known: nope"),
        ("faulty://bucket/../x", r"without empty parts and '\.\.'"),
        ("faulty://bucket//x", "without empty parts"),
        ("faulty://bucket/none", "there is no such folder, or it is empty"),
        ("file://runs/a", "file://runs/a: write the whole path of a local folder, file:///"),
    ],
)
def test_urls_that_cannot_be_used(url, reason):
    with pytest.raises(ValueError, match=reason):
        storage.pull_folder(url)


def test_a_listing_without_sizes_is_refused(system, monkeypatch):
    """As that of links on a page of http, of which each would be downloaded as empty."""
    info = {"type": "file", "size": None}
    monkeypatch.setattr(Faulty, "find", lambda *a, **k: {"/bucket/model/x": info})
    with pytest.raises(StorageError, match=f"{URL} does not state how large x is: give a file"):
        storage.pull_folder(URL)


def test_two_processes_download_once(folder):
    """The second finds the file that the first has made while it waited."""
    storage.push_folder(folder, URL)
    remote, file = RemoteFolder(URL), Path(storage.COPIES) / "weights"
    stored = remote.files()["weights"]
    with storage.lock_file(file):
        file.write_bytes((folder / "weights").read_bytes())
        os.utime(file, ns=(stored.stamp, stored.stamp))
    Faulty.requests.clear()
    remote.download("weights", stored, file)
    assert Faulty.requests == []


def test_times_by_any_name():
    for info in (
        {"LastModified": "2026-01-02T03:04:05+00:00"},
        {"mtime": 1767323045.0, "created": 3.0},
        {"updated": "2026-01-02T03:04:05Z"},
    ):
        assert storage._stamp(info) == 1767323045 * 10**9
    assert storage._stamp({}) == 0


def test_objects_of_one_time_are_told_apart_by_their_etags(system, monkeypatch):
    """As two at one URL of two endpoints. Some file systems have times of whole seconds only."""
    time = {"LastModified": "2026-01-02T03:04:05+00:00"}
    one, other = (storage._stamp({**time, "ETag": f'"{tag}"'}) for tag in ("one", "other"))
    assert one != other and one == storage._stamp({"etag": '"one"'})
    assert all(0 <= tag < 2**31 * 10**9 and tag % 10**9 == 0 for tag in (one, other))
    info, tag = Faulty.info, "one"
    monkeypatch.setattr(Faulty, "info", lambda *a, **k: info(*a, **k) | {"ETag": tag, "created": 1})
    for tag in ("one", "two"):
        system.pipe_file("/bucket/model/weights", tag.encode())
        copy = storage.pull_file(f"{URL}/weights")
        assert copy is not None and copy.read_text() == tag


@pytest.mark.parametrize("left", (99, 0))
def test_an_object_that_becomes_smaller_is_not_waited_for(system, left):
    system.pipe_file("/bucket/model/big", b"x" * 100)
    remote = RemoteFolder(URL)
    stored = remote.files()["big"]
    system.pipe_file("/bucket/model/big", b"x" * left)
    Faulty.requests.clear()
    with pytest.raises(Refused, match=f"{URL}/big: has become smaller while it was read"):
        remote.read("big", stored, 100)
    assert Faulty.requests == ["cat_file", "info"]
    # a transfer that was cut is not this
    system.pipe_file("/bucket/model/big", b"x" * 99)
    with faulty.plan(cat_file=["short", "error"], info=["error"]):
        assert remote.read("big", StoredFile(99, 0), 100) == b"x" * 99


def test_a_page_of_html_is_no_object(system, monkeypatch):
    """As servers have for folders: it would be read as text."""
    system.pipe_file("/bucket/model/folder", b"<html>")
    info = Faulty.info
    monkeypatch.setattr(Faulty, "info", lambda *a, **k: info(*a, **k) | {"mimetype": "text/html"})
    with pytest.raises(StorageError, match=f"{URL}/folder is a page of HTML: give the URL"):
        RemoteFolder(URL).find("folder")
    system.pipe_file("/bucket/model/page.html", b"<html>")
    assert RemoteFolder(URL).find("page.html") is not None


def test_hostile_listing_is_bounded(system):
    system.pipe_file("/bucket/model/big", b"x" * 100)
    with pytest.raises(Refused, match="has more than 10 bytes"):
        RemoteFolder(URL).read("big", StoredFile(100, 0), 10)


def test_a_file_may_become_a_folder_and_back(system):
    for names in (("a", "c"), ("a/b", "c"), ("a", "c/d/e")):
        system.store.clear()
        for name in names:
            system.pipe_file(f"/bucket/moving/{name}", name.encode())
        copy = storage.pull_folder("faulty://bucket/moving")
        assert {str(p.relative_to(copy)) for p in copy.rglob("*") if p.is_file()} - {
            "a.lock",
            "a/b.lock",
            "c.lock",
            "c/d/e.lock",
        } == {*names}


def test_a_full_disk_is_named_with_the_file(system, monkeypatch):
    system.pipe_file("/bucket/big/a", b"content")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage.os, "pwrite", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*big/a\.part'"):
        storage.pull_folder("faulty://bucket/big")


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///tmp/run", "memory://a/b c/d"])
def test_a_working_folder_has_its_url(url, tmp_path):
    folder = storage.working_folder(url)
    assert storage.working_url(folder) == url
    assert storage.working_url(folder / "checkpoints") == f"{url}/checkpoints"
    assert storage.working_url(tmp_path) is None


def test_nothing_behind_a_link_is_written_or_deleted(folder, tmp_path):
    """A copy loses the files that no object stands for."""
    storage.push_folder(folder, URL)
    user, copy = tmp_path / "user", storage.local_copy(URL)
    user.mkdir()
    (user / "notes.txt").write_text("mine")
    copy.parent.mkdir(parents=True)
    copy.symlink_to(user)
    for url in (URL, f"{URL}/sub"):
        with pytest.raises(ValueError, match=f"{copy} is a link, .* local copy of {url}: move it"):
            storage.pull_folder(url)
    assert [path.name for path in user.iterdir()] == ["notes.txt"]
