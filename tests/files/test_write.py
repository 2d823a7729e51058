"""Files are written whole, and into nobody else's."""

import os
from pathlib import Path

import pytest

from dolmen.files import write


@pytest.mark.parametrize("name", ["a.txt", "a.txt.part"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_nothing_is_written_through_a_link(tmp_path, link, name):
    (tmp_path / "precious").write_text("mine")
    link(tmp_path / "precious", tmp_path / name)
    write.replace(tmp_path / "a.txt", "ours")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "a.txt").read_text() == "ours" and not (tmp_path / "a.txt").is_symlink()
    assert not (tmp_path / "a.txt.part").exists()


def test_lines_are_added_to_no_file_of_another_name(tmp_path):
    (tmp_path / "precious").write_text("mine\n")
    os.link(tmp_path / "precious", tmp_path / "a.txt")
    with write.append(tmp_path / "a.txt") as file:
        file.write("ours\n")
    assert (tmp_path / "precious").read_text() == "mine\n"
    assert (tmp_path / "a.txt").read_text() == "mine\nours\n"
    (tmp_path / "b.txt").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        write.append(tmp_path / "b.txt")
    assert (tmp_path / "precious").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_a_device_is_not_replaced_by_a_file(name):
    with pytest.raises(OSError, match="Invalid argument"):
        write.replace(Path(name), "{}")
    assert not Path(name).is_file()


def test_an_output_is_never_written_over_what_exists(tmp_path):
    """One rule for all outputs: files, folders, links without a target and devices are refused."""
    for name in ("file", "folder", "link"):
        {"file": Path.touch, "folder": Path.mkdir}.get(
            name, lambda path: path.symlink_to("nothing")
        )(tmp_path / name)
        with pytest.raises(ValueError, match=f"^--json .*{name} exists: give another name"):
            write.check_new("--json", tmp_path / name)
    with pytest.raises(ValueError, match="^--json /dev/null exists"):
        write.check_new("--json", "/dev/null")
    with pytest.raises(ValueError, match="the folder .*none does not exist"):
        write.check_new("--json", tmp_path / "none" / "a.json")
    with pytest.raises(ValueError, match="file is not a folder"):
        write.check_new("--json", tmp_path / "file" / "a.json")
    new = tmp_path / "none" / "a.json"
    assert write.check_new("--json", new, parents=True) == new
    assert write.check_new_folder(tmp_path / "folder") == tmp_path / "folder"
    (tmp_path / "folder" / "a").touch()
    for name, words in (("folder", "is not empty"), ("file", "is not a folder")):
        with pytest.raises(ValueError, match=f"{name} exists and {words}"):
            write.check_new_folder(tmp_path / name)
    assert write.check_new("--json", "~nobody-of-this-name") == Path("~nobody-of-this-name")
