"""What of a run is uploaded with its checkpoints, and what a resume takes from a URL."""

from pathlib import Path

import faulty
import pytest
from faulty import Faulty

from dolmen.checkpoint.remote import Superseded
from dolmen.training import mirror
from dolmen.training.folder import Unusable

URL = "faulty://bucket/run"
FILES = {
    "config.yaml": b"options",
    "metrics.jsonl": b"{}\n",
    "tokenizer/tokenizer.json": b"{}",
    "tokenizer/other.model": b"x",
    "rollouts/00000002.safetensors": b"x",
    "hang/rank-0.json": b"local",
    "tensorboard/events.out.tfevents.1": b"local",
    "checkpoints/step-00000002.partial/__0_0.distcp": b"local",
    ".dolmen": b"config.yaml\n",
    "config.yaml.part": b"local",
}


@pytest.fixture
def system(monkeypatch, tmp_path):
    return faulty.install(monkeypatch, tmp_path)


@pytest.fixture
def out(tmp_path) -> Path:
    for name, content in FILES.items():
        file = tmp_path / "out" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return tmp_path / "out"


def stored(system) -> dict[str, bytes]:
    names = system.find("/bucket/run")
    return {name.removeprefix("/bucket/run/"): system.cat_file(name) for name in names}


def test_what_has_changed_is_uploaded(system, out):
    push = mirror.RunUploader(out, URL)
    push()
    assert stored(system) == {n: c for n, c in FILES.items() if c != b"local"}
    Faulty.requests.clear()
    push()
    assert Faulty.requests == []
    (out / "metrics.jsonl").write_bytes(b"{}\n{}\n")
    (out / "rollouts/00000002.safetensors").unlink()
    push()
    assert stored(system)["metrics.jsonl"] == b"{}\n{}\n"
    assert "rollouts/00000002.safetensors" not in stored(system)


def test_what_changes_during_the_upload(system, out, monkeypatch):
    """Training goes on: goodput.json is replaced each second, old rollouts are deleted."""
    (out / "goodput.json").write_bytes(b"{}")
    put_file, old = Faulty.put_file, out / "rollouts/00000002.safetensors"

    def replaced_first(self, lpath, rpath, **kwargs):
        if lpath.endswith("goodput.json") and Path(lpath).stat().st_size == 2:
            Path(lpath).write_bytes(b"{     }")
        old.unlink(missing_ok=True)
        put_file(self, lpath, rpath, **kwargs)

    monkeypatch.setattr(Faulty, "put_file", replaced_first)
    mirror.RunUploader(out, URL)()
    assert stored(system)["goodput.json"] == b"{     }"
    assert "rollouts/00000002.safetensors" not in stored(system)


def test_what_a_resume_takes(system, out, tmp_path):
    """Nothing that a run does not write, and nothing where there is no complete checkpoint."""
    mirror.RunUploader(out, URL)()
    system.pipe_file("/bucket/run/config.yaml.sh", b"foreign")
    system.pipe_file("/bucket/run/rollouts/x.py", b"foreign")
    system.pipe_file("/bucket/run/hang/rank-0.json", b"foreign")
    there = tmp_path / "there"
    mirror.pull_run(URL, there)
    assert not there.exists()
    mirror._pull_files(URL, there)
    files = {str(p.relative_to(there)): p for p in there.rglob("*") if p.is_file()}
    assert {n: p.read_bytes() for n, p in files.items()} == {
        name: content for name, content in FILES.items() if content != b"local"
    }


def test_what_is_at_the_url_is_not_overwritten(system):
    mirror.check_url(URL, resume=False, overwrite=False)
    system.pipe_file("/bucket/run/checkpoints/writers", b"id job")  # of a run that failed at once
    mirror.check_url(URL, resume=False, overwrite=False)
    system.pipe_file("/bucket/run/x", b"")
    with pytest.raises(Unusable, match="already contains 1 object: use --resume"):
        mirror.check_url(URL, resume=False, overwrite=False)
    with pytest.raises(Unusable, match="--overwrite deletes no objects"):
        mirror.check_url(URL, resume=False, overwrite=True)
    mirror.check_url(URL, resume=True, overwrite=False)
    system.pipe_file("/bucket/run/tokenizer/x", b"")
    with pytest.raises(Unusable, match="overwrite tokenizer/x, which dolmen did not write"):
        mirror.check_url(URL, resume=True, overwrite=False)
    system.pipe_file("/bucket/run/.dolmen", b"")
    mirror.check_url(URL, resume=True, overwrite=False)


def test_the_list_is_at_the_url_before_all_else(system, out):
    """So that a run whose first upload was killed can be resumed."""
    for request in range(1, 8):
        with faulty.killed_at(request) as ended:
            mirror.RunUploader(out, URL)()
        assert ended.killed
        mirror.check_url(URL, resume=True, overwrite=False)
    assert len(stored(system)) > 1


def test_files_are_uploaded_in_order(system, out, monkeypatch):
    """The list, which says whose the others are, first; of a folder in order of the names, so that
    rollouts that a killed upload lacks are the newest.
    """
    # in no order on disk, whichever way the file system lists them
    for step in (7, 3, 9, 1, 8):
        (out / f"rollouts/{step:08}.jsonl").write_bytes(b"{}")
    names: list[str] = []
    put = Faulty._put

    def record(self, request, path, content):
        names.append(path.removeprefix("/bucket/run/"))
        put(self, request, path, content)

    monkeypatch.setattr(Faulty, "_put", record)
    mirror.RunUploader(out, URL)()
    first = [name.partition("/")[0] for name in names]
    assert first[0] == ".dolmen" and first == sorted(first, key=mirror.MIRRORED.index)
    rollouts = [int(name[9:17]) for name in names if name.startswith("rollouts/")]
    assert rollouts == [1, 2, 3, 7, 8, 9]


def test_a_superseded_run_uploads_nothing_at_its_end(system, out, monkeypatch):
    claims = [mirror.open_checkpoints(URL, out) for _ in "ab"]
    first, second = claims
    first.claim("a", restarted=False)
    mirror.push_result(URL, out, None, first.writer)
    second.claim("b", restarted=False)
    (out / "metrics.jsonl").write_bytes(b"{}\n{}\n")
    before = stored(system)
    with pytest.raises(Superseded, match=r"another run \(b\) has started"):
        mirror.push_result(URL, out, out / "tokenizer", first.writer)
    assert stored(system) == before
    # within the upload: not the model
    monkeypatch.setattr(mirror.RunUploader, "__call__", lambda _: first.claim("a", False))
    with pytest.raises(Superseded):
        mirror.push_result(URL, out, out / "tokenizer", second.writer)
    assert "tokenizer/.dolmen-sums" not in stored(system)


def test_files_of_a_user_are_not_replaced_by_those_at_the_url(system, out, tmp_path):
    mirror.RunUploader(out, URL)()
    there = tmp_path / "there"
    there.mkdir()
    (there / "config.yaml").write_text("mine")
    with pytest.raises(Unusable, match="would overwrite config.yaml, which dolmen did not write"):
        mirror._pull_files(URL, there)
    assert {p.name: p.read_text() for p in there.iterdir()} == {"config.yaml": "mine"}
    (there / ".dolmen").write_text("config.yaml\n")
    mirror._pull_files(URL, there)
    assert (there / "config.yaml").read_bytes() == FILES["config.yaml"]
