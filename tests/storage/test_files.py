"""Files are whole or not there."""

import json

import pytest

from dofla.errors import DoflaError
from dofla.storage.files import new_folder, read_json, replacing, write_json


class Broken(Exception):
    pass


@pytest.mark.parametrize("before", [None, [], ["old.txt"]])
def test_a_new_folder_appears_when_its_block_ends_well_and_all_stays_as_it_was_otherwise(tmp_path, before):
    folder = tmp_path / "some" / "where"
    if before is not None:  # an empty one may be filled
        folder.mkdir(parents=True)
    for name in before or ():
        (folder / name).write_text("old")

    def make(fail: bool) -> None:
        with new_folder(str(folder), replaced=bool(before)) as out:
            assert out.name == "where"
            (out / "a.txt").write_text("a")
            assert not (folder / "a.txt").exists()
            if fail:
                raise Broken

    with pytest.raises(Broken):
        make(fail=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == (before or [])
    make(fail=False)
    assert [p.name for p in folder.iterdir()] == ["a.txt"]
    assert [p.name for p in folder.parent.iterdir()] == ["where"]


def test_an_existing_folder_is_refused_and_kept(tmp_path):
    (tmp_path / "a.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "a.txt"):
        with pytest.raises(DoflaError, match="exists already"), new_folder(taken):
            pass
    assert (tmp_path / "a.txt").read_text() == "mine"


def test_replacing_changes_the_file_when_its_block_ends_well_and_keeps_the_old_one_otherwise(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write(fail: bool) -> None:
        with replacing(path) as partial:
            assert partial.name == "a.txt"
            partial.write_text("new")
            (partial.parent / ".tmp123").write_text("what libraries leave beside it")
            assert path.read_text() == "old"
            if fail:
                raise Broken

    with pytest.raises(Broken):
        write(fail=True)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write(fail=False)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_json_that_cannot_be_written_keeps_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert read_json(path, "numbers") == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("place", ["no/such/folder/a.json", "file/a.json", "folder"])
def test_a_place_that_cannot_be_written_is_named_in_one_line(tmp_path, place):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DoflaError, match=f"cannot write {tmp_path / place}: "):
        write_json(tmp_path / place, {})
    with pytest.raises(DoflaError, match=r"cannot write .*out: Not a directory"), new_folder(tmp_path / "file" / "out"):
        pass
    with pytest.raises(DoflaError, match="cannot read"):
        read_json(tmp_path / "file" / "plan.json", "a plan")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_json_round_trips_and_can_be_read_by_a_person(tmp_path):
    data = {"λ": 2.0**-8, "layers": {"a.b": [1, 2]}, "none": None}
    write_json(tmp_path / "a.json", data)
    assert read_json(tmp_path / "a.json", "data") == data
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert "λ" in text
    assert text.count("\n") > len(data)
    assert json.loads(text) == data
    # Keys and numbers that JSON writes otherwise.
    write_json(tmp_path / "a.json", {1: (1, 2), "x": float("inf"), "y": "\udcff"})
    assert read_json(tmp_path / "a.json", "numbers") == {"1": [1, 2], "x": float("inf"), "y": "\udcff"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: it should hold a plan"),
        (b'{"a": 1', "is not a plan"),
        (b"\xff\xfe\x00", "is not a plan"),
        (b"", "is not a plan"),
        (b"[1, 2]", "expected a JSON object, got list"),
    ],
)
def test_a_file_that_is_no_json_object_is_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DoflaError, match=f"(?=.*{path}).*{message}"):
        read_json(path, "a plan")
    path.unlink(missing_ok=True)
    path.mkdir()
    with pytest.raises(DoflaError, match="is a folder: expected a file with a plan"):
        read_json(path, "a plan")


def test_a_message_is_one_line_whatever_it_names():
    assert str(DoflaError("a name\nof two\r\nlines")) == "a name of two lines"


def test_a_folder_that_another_process_makes_meanwhile_is_kept(tmp_path):
    def make():
        with new_folder(tmp_path / "out") as out:
            (out / "a.txt").write_text("mine")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "a.txt").write_text("theirs")

    with pytest.raises(DoflaError, match=r"cannot write .*out: Directory not empty: another process"):
        make()
    assert (tmp_path / "out" / "a.txt").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", [".", "/"])
def test_a_path_without_a_name_is_one_line(path):
    with pytest.raises(DoflaError, match="give a name"), replacing(path):
        pass
