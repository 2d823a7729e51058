"""What a run's folder loses by --overwrite: what dolmen wrote there, and nothing else."""

import os
import shutil
from pathlib import Path

import pytest
import tinyrun
from tinyrun import dolmen, losses, rows, steps

from dolmen.training import folder
from dolmen.training.folder import Unusable

material, one_thread = tinyrun.material, tinyrun.one_thread


@pytest.fixture(scope="module")
def done(material, tmp_path_factory):
    """A run with everything that runs write."""
    out = tmp_path_factory.mktemp("folder") / "run"
    words = ("--checkpoint.every", 2, "--checkpoint.keep", 0, "--finish.export")
    words += ("--train.hang-seconds", 60)
    assert dolmen("train", material.file, "--out", out, *words).code == 0
    (out / "hang").mkdir()
    (out / "hang" / "rank-0.txt").write_text("a stack")
    for name in ("metrics.damaged.jsonl", "metrics.damaged-2.jsonl"):
        (out / name).write_text("a damaged record")
    assert not (out / folder.LOCK).exists()
    return out


@pytest.fixture
def run(done, tmp_path):
    shutil.copytree(done, tmp_path / "run")
    return tmp_path / "run"


def content(out: Path) -> dict[str, bytes | None]:
    return {
        str(p.relative_to(out)): p.read_bytes() if p.is_file() else None for p in out.rglob("*")
    }


def old(run: Path) -> Path:
    """As runs were before they kept a list, without what only a list says to be ours."""
    (run / folder.LIST).unlink()
    shutil.rmtree(run / "hf")
    shutil.rmtree(run / "tokenizer")
    return run


def test_all_that_a_run_writes_is_known(run):
    assert not folder.foreign_entries(run)
    folder.clear_run(run, "me")
    assert os.listdir(run) == [folder.OWNER] and (run / folder.OWNER).read_text() == "me"


def test_a_run_of_before_is_known_by_its_forms(run):
    """Its profile has a picture too, which is no longer drawn."""
    (run / "profile" / "step-2").mkdir(parents=True, exist_ok=True)
    (run / "profile" / "step-2" / "picture-rank-0.png").write_text("a picture")
    assert not folder.foreign_entries(old(run))
    folder.clear_run(run)
    assert not os.listdir(run)


def test_without_a_list_a_model_and_a_tokenizer_may_be_anybodys(run, material):
    """As after `cp -r run/* copy`. A resume makes the tokenizer again, and exports to nowhere."""
    (run / folder.LIST).unlink()
    before = content(run)
    words = ("train", material.file, "--out", run)
    result = dolmen(*words, "--overwrite")
    assert result.code == 2 and "also contains hf, hf/config.json" in result.words
    assert (
        "(not listed as written by dolmen: there is no .dolmen): move or delete it" in result.words
    )
    result = dolmen(*words, "--resume", "--train.steps", 8, "--finish.export")
    assert result.code == 2 and "would overwrite hf, hf/config.json" in result.words
    assert content(run) == before
    shutil.rmtree(run / "hf")
    with pytest.raises(Unusable, match="also contains tokenizer, tokenizer/"):
        folder.clear_run(run)
    assert dolmen(*words, "--resume", "--train.steps", 8).code == 0 and steps(run)[-1] == 8


OTHERS = (
    "mydata/a.txt",
    "notes.txt",
    "checkpoints/notes.txt",
    "checkpoints/step-00000002/notes.txt",
    "checkpoints/mine/state.json",
    "checkpoints/step-1/state.json",
    "hang/data.txt",
    "hf/training.txt",
    "tokenizer/corpus.jsonl",
    "tensorboard/mine",
    "tensorboard/events.out.tfevents.1/mine.txt",
    "config.yaml.bak",
    "metrics.jsonl.gz",
    "corpora/0123/tokens.bin",
    ".git/config",
)


@pytest.mark.parametrize("has_list", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_anything_else_is_refused_by_name_and_nothing_is_deleted(run, name, has_list):
    if not has_list:
        old(run)
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_text("mine")
    before = content(run)
    with pytest.raises(
        Unusable, match="deletes only files written by dolmen, but .* also contains "
    ) as raised:
        folder.clear_run(run)
    assert any(part in str(raised.value) for part in (name, *map(str, Path(name).parents[:-1])))
    assert content(run) == before


def test_an_empty_folder_is_somebody_elses_too(run):
    (run / "mydata").mkdir()
    with pytest.raises(Unusable, match="also contains mydata:"):
        folder.clear_run(run)


@pytest.mark.parametrize("has_list", [True, False])
def test_links_are_not_followed_and_not_deleted(run, tmp_path, has_list):
    """A folder or a file moved elsewhere, a link in its place, under any name that we write."""
    if not has_list:
        old(run)
    for number, name in enumerate(
        ("checkpoints", "loss.png", "checkpoints/step-00000002", "hf", "tokenizer/tokenizer.json")[
            : None if has_list else 3
        ]
    ):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(run, copy)
        shutil.move(copy / name, tmp_path / f"elsewhere{number}")
        (copy / name).symlink_to(tmp_path / f"elsewhere{number}")
        before = content(tmp_path)
        with pytest.raises(Unusable, match=f"also contains {name}"):
            folder.clear_run(copy)
        assert content(tmp_path) == before


FORGED = ("../x", "/etc/passwd", "mydata/a.txt", "notes.txt", "hf/../mydata/a.txt", "hf/deep/a.txt")


def test_a_forged_list_adds_no_form(run):
    outside = run.parent / "x"
    outside.write_text("mine")
    with open(run / folder.LIST, "a") as file:
        file.write("".join(f"{name}\n" for name in (*FORGED, "mydata", "hf/deep", "..", "")))
    for name in ("mydata/a.txt", "notes.txt", "hf/deep/a.txt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("mine")
    with pytest.raises(Unusable, match=r"also contains hf/deep, mydata, notes.txt: move or"):
        folder.clear_run(run)
    for name in ("notes.txt", "mydata", "hf/deep"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    folder.clear_run(run)
    assert outside.read_text() == "mine" and not os.listdir(run)


def test_names_of_ours_that_dolmen_has_not_written_stay(run):
    """A model that the user has put where an export would be."""
    text = (run / folder.LIST).read_text().splitlines()
    kept = [line for line in text if not line.startswith("hf")]
    (run / folder.LIST).write_text("\n".join(kept) + "\n")
    with pytest.raises(Unusable, match="also contains hf, hf/config.json"):
        folder.clear_run(run)
    with pytest.raises(Unusable, match="model is not exported: .*/hf was not written by dolmen"):
        folder.remove_export(run)
    with pytest.raises(Unusable, match="would overwrite hf"):
        folder.check_names_free(run, "hf")
    folder.check_names_free(run)


def test_a_clearing_cut_short_goes_on(run, monkeypatch):
    """Killed at any deletion, with a list and without: the next one clears the rest."""
    for has_list in (True, False):
        for last in range(0, 60, 7):
            copy = run.parent / f"copy{has_list}{last}"
            shutil.copytree(run, copy)
            if not has_list:
                old(copy)
            left, unlink = last, Path.unlink

            def dying(path, *args, **kwargs):
                nonlocal left
                left -= 1
                if left < 0:
                    raise KeyboardInterrupt
                unlink(path, *args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(Path, "unlink", dying)
                try:
                    folder.clear_run(copy)
                except KeyboardInterrupt:
                    folder.require_own_files(copy)
            folder.clear_run(copy)
            assert not os.listdir(copy)


@pytest.mark.parametrize("name", ["mydata/a.txt", "hf/mine.txt", "hf/model.safetensors"])
def test_what_comes_while_a_folder_is_looked_at_is_kept(run, monkeypatch, name):
    """Saved right after the walk, under a name of ours or none."""
    (run / "hf" / "model.safetensors").unlink()
    walk = folder._walk

    def late(out, below=""):
        yield from list(walk(out, below))
        if not below:
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text("mine")
            monkeypatch.setattr(folder, "_walk", walk)

    for delete in (folder.remove_export, folder.clear_run):
        with monkeypatch.context() as patch:
            patch.setattr(folder, "_walk", late)
            if name.startswith("hf"):
                with pytest.raises(Unusable, match="hf could not be deleted .* added to it"):
                    delete(run)
            else:
                delete(run)
        assert (run / name).read_text() == "mine"
        (run / name).unlink()
        (run / "mydata").rmdir() if (run / "mydata").exists() else None


# ---- from the command line


def test_training_text_inside_the_folder(material, tmp_path):
    """By a glob, by the folder above, a cache and a schedule inside: all is there afterwards."""
    out = tmp_path / "ov"
    words = ("train", material.file, "--out", out, "--train.steps", 2)
    assert dolmen(*words).code == 0
    shutil.copytree(material.docs, out / "mydata")
    before = content(out)
    for more, want in (
        (("--data.path", f"{out}/mydata/*.txt"), f"would delete {out}/mydata/"),
        (("--data.path", tmp_path), str(out)),
        (("--data.cache", out / "cache"), "also contains mydata"),
        ((), "also contains mydata: move or"),
    ):
        result = dolmen(*words, "--overwrite", *more)
        assert result.code == 2 and want in result.words, result
        assert content(out) == before
    (out / "mydata").rename(tmp_path / "mydata")
    (out / "cache").mkdir()
    (out / "mine.yaml").write_text("actions: []")
    for more in (("--data.cache", out / "cache"), ("--layout.schedule", out / "mine.yaml")):
        result = dolmen(*words, "--overwrite", *more)
        assert result.code == 2 and str(out) in result.words, result
    assert (out / "cache").is_dir() and (out / "mine.yaml").is_file()


def test_resume_writes_over_nothing_of_somebody_elses(material, tmp_path):
    out = tmp_path / "project"
    out.mkdir()
    (out / "config.yaml").write_text("mine: true\n")
    (out / "notes.txt").write_text("mine")
    result = dolmen("train", material.file, "--out", out, "--resume")
    assert result.code == 2 and "would overwrite config.yaml, which dolmen" in result.words
    assert (out / "config.yaml").read_text() == "mine: true\n" and len(os.listdir(out)) == 2
    (out / "config.yaml").unlink()  # notes of theirs are in nobody's way
    result = dolmen("train", material.file, "--out", out, "--resume", "--train.steps", 2)
    assert result.code == 0 and (out / "notes.txt").read_text() == "mine"


LINKS = (
    ".dolmen",
    ".dolmen.part",
    ".overwritten-by",
    "config.yaml",
    "config.yaml.part",
    "metrics.jsonl",
    "metrics.jsonl.part",
    "history.jsonl",
    "metrics.damaged.jsonl",
    "summary.json",
    "summary.json.part",
    "goodput.json",
    "loss.png",
    "hang",
    "hang/rank-0.txt",
    "hang/rank-0.json.part",
    "tensorboard",
    "checkpoints",
    "checkpoints/step-00000007.partial",
    "tokenizer",
    "tokenizer/tokenizer.json",
    "hf",
)


@pytest.mark.parametrize("instead", ["a link", "a dangling link", "a folder", "a pipe"])
@pytest.mark.parametrize("name", LINKS)
def test_what_is_no_file_of_ours_is_refused_by_name(run, tmp_path, name, instead):
    """Under every name that a run may write: nothing is written through it, or in its place."""
    path, outside = run / name, tmp_path / "precious"
    if path.is_dir() and instead == "a folder":
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if instead == "a folder":
        path.mkdir()
    elif instead == "a pipe":
        os.mkfifo(path)
    else:
        outside.write_text("mine") if instead == "a link" else None
        path.symlink_to(outside)
    if instead == "a folder" and (folder._kind(name, "folder") or name == "hang"):
        return
    with pytest.raises(Unusable, match=f"would overwrite (.*, )?{name}[,/]"):
        folder.check_names_free(run, "hf")


def test_a_resume_through_links_is_refused(run, tmp_path):
    for number, name in enumerate(("metrics.jsonl.part", "config.yaml.part", ".dolmen.part")):
        (tmp_path / f"{number}").write_text("mine")
        (run / name).symlink_to(tmp_path / f"{number}")
    result = dolmen("train", run / "config.yaml", "--resume", "--train.steps", 8)
    assert (
        result.code == 2 and "would overwrite .dolmen.part, config.yaml.part, met" in result.words
    )
    assert all((tmp_path / f"{number}").read_text() == "mine" for number in range(3))


def test_what_has_a_second_name_elsewhere_is_not_written_into(run, tmp_path):
    """As after `cp -al`: every file of the run is also one of the copy."""
    copy = tmp_path / "copy"
    shutil.copytree(run, copy, copy_function=os.link)
    before = content(copy)
    words = ("--resume", "--train.steps", 7, "--train.hang-seconds", 60)
    assert dolmen("train", run / "config.yaml", *words).code == 0
    assert content(copy) == before and steps(run)[-1] == 7


def test_a_run_is_overwritten(done, run, material):
    result = dolmen("train", material.file, "--out", run, "--overwrite", "--train.steps", 2)
    assert result.code == 0 and steps(run) == [2] and len(rows(run)) == 2
    assert losses(run)[0] == losses(done)[0]
    assert not (run / "hf").exists() and not (run / "hang").exists()
