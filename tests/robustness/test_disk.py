"""A disk that is full or not to be written to, and two processes at one folder: one line, and what was there stays."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command_line import call, refused

from dofla import DoflaError
from dofla.display import size
from dofla.integration import room
from dofla.integration.checkpoint import load_model
from dofla.storage.files import new_folder, read_json, replacing, write_json
from dofla.storage.lock import locked
from dofla.storage.tensors import read_tensors, write_tensors


@contextmanager
def largest_file(size: int):
    """No file may become longer than this, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted(folder: Path, options: str):
    """A small file system of its own; only root can make one."""
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]).returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def full(tmp_path):
    """A folder on a disk of 64 KiB that has no room left but for a few entries."""
    with mounted(tmp_path, "size=64k") as folder:
        (folder / "old.json").write_text("{}")
        with open(folder / "filler", "wb", buffering=0) as file:
            try:
                while file.write(bytes(1024)):
                    pass
            except OSError:
                yield folder


@pytest.fixture
def read_only(tmp_path):
    """A folder nobody can write to, not even root."""
    with mounted(tmp_path, "size=64k") as folder:
        (folder / "old.json").write_text("{}")
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        yield folder


def writers(folder: Path):
    """The ways in which files are made."""

    def whole_folder():
        with new_folder(folder / "new") as out:
            (out / "a.txt").write_text("a" * 50_000)

    def tensors_in_a_folder():
        with new_folder(folder / "new") as out:
            write_tensors(out / "a.safetensors", {"a": torch.zeros(20_000)})

    def lines():
        with replacing(folder / "old.json") as partial:
            partial.write_text("a" * 50_000)

    return [
        (whole_folder, "new"),
        (tensors_in_a_folder, "(new|a.safetensors)"),
        (lines, "old.json"),
        (lambda: write_json(folder / "old.json", {"a": "a" * 50_000}), "old.json"),
        (lambda: write_tensors(folder / "old.json", {"a": torch.zeros(20_000)}), "old.json"),
    ]


def assert_refused(folder: Path, reason: str) -> None:
    before = sorted(folder.iterdir())
    for write, name in writers(folder):
        with pytest.raises(DoflaError, match=rf"cannot write .*{name}: {reason}: ") as caught:
            write()
        assert "\n" not in str(caught.value)
        assert sorted(folder.iterdir()) == before
        assert (folder / "old.json").read_text() == "{}"


def test_a_full_disk_is_one_line_and_keeps_what_was_there(full):
    assert_refused(full, "No space left on device")


def test_a_folder_that_is_read_only_is_one_line(read_only):
    assert_refused(read_only, "Read-only file system")


def test_a_limit_on_files_is_one_line_and_keeps_what_was_there(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    with largest_file(10_000):
        assert_refused(tmp_path, "File too large")


def test_a_run_that_the_disk_stops_goes_on_when_there_is_room(made, tmp_path, capsys):
    undisturbed, stopped = made / "run", tmp_path / "stopped"
    state = "models/even-seed0/distill/distill.safetensors"
    size = (undisturbed / state).stat().st_size
    capsys.readouterr()
    with largest_file(size - 100):
        error = refused(capsys, "run", made / "recipe.yaml", "--out", stopped, "-q")
    assert error.startswith(f"dofla: cannot write {stopped / state}: File too large")
    assert read_json(stopped / "models/fix-seed0/evaluation.json", "an evaluation")
    assert call("run", made / "recipe.yaml", "--out", stopped) == 0
    weights = "models/even-seed0/adapter/dofla.safetensors"
    ours, theirs = read_tensors(stopped / weights)[0], read_tensors(undisturbed / weights)[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_file_that_cannot_be_made_is_refused_before_the_work(made, read_only, capsys):
    words = ["curves", made / "model", "--data", made / "text.txt", "--out", read_only / "curves.json"]
    assert "curves.json: " in refused(capsys, *words)
    assert call("evaluate", made / "adapter", "--data", "demo", "--out", read_only / "no" / "figures.json") == 2
    assert "make it first" in capsys.readouterr().err


@contextmanager
def another_process_in(folder: Path):
    """A process that holds the folder's lock; its number."""
    ready, say = os.pipe()
    child = os.fork()
    if child == 0:
        with locked(folder):
            os.write(say, b"!")
            signal.pause()
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(say)


@pytest.mark.parametrize("verb", ["run", "distill", "reproduce"])
def test_a_second_process_is_told_who_works_in_the_folder(made, tmp_path, capsys, verb):
    folder = tmp_path / "out"
    text = ["--data", made / "text.txt", "--length", 16, "--windows", 4, "--set", "steps=1"]
    words = {
        "run": ["run", made / "recipe.yaml"],
        "distill": ["distill", made / "model", "--plan", made / "plan.json", *text],
        "reproduce": ["reproduce", "--model", made / "model"],
    }[verb]
    with another_process_in(folder) as child:
        assert call(*words, "--out", folder, "-q") == 2
        message = f"dofla: {folder} is in use by process {child}: wait for it, stop it, or choose another folder\n"
        assert capsys.readouterr().err == message
    with locked(folder):  # the one that was killed holds it no more
        pass


def test_what_killed_processes_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as other:
        theirs = tmp_path / f".a.json.partial-{other.pid}"
        theirs.mkdir()
        write_json(tmp_path / "a.json", {})
        assert theirs.exists()
        other.kill()
    gone = subprocess.Popen(["true"])
    gone.wait()
    leftovers = [tmp_path / "a" / f".b.json.partial-{gone.pid}", tmp_path / "a" / f".c.partial-{os.getpid()}"]
    for path in leftovers:
        path.mkdir(parents=True)
        (path / "half").write_text("{")
    write_json(tmp_path / "a" / "b.json", {})
    assert [path.exists() for path in leftovers] == [False, True]
    with locked(tmp_path):
        assert not any(path.exists() for path in leftovers)
    assert read_json(tmp_path / "a" / "b.json", "an object") == {}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_ends_with_the_same_weights(tmp_path):
    """The short form of scripts/kill_test.py."""
    script = Path(__file__).parents[2] / "scripts" / "kill_test.py"
    done = subprocess.run([sys.executable, script, "--kills", "3", "--out", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().splitlines()[-1].startswith("3 of 3")


def test_a_file_has_the_rights_that_others_have(tmp_path):
    write_json(tmp_path / "a.json", {})
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "a.json").stat().st_mode


def test_a_folder_that_holds_something_else_is_no_runs(made, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "letter.txt").write_text("mine")
    assert "exists already, and is no run's" in refused(capsys, "run", made / "recipe.yaml", "--out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("a file")
    assert call("run", made / "recipe.yaml", "--out", tmp_path / "out") == 2
    assert f"cannot write {tmp_path / 'out'}: File exists" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["compress model --ratio 4", "distill model --plan plan.json"])
def test_too_little_room_is_said_before_the_work(made, tmp_path, capsys, monkeypatch, words):
    monkeypatch.setattr("dofla.runs.opening.windows_of", lambda *_, **__: pytest.fail("no text is read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=100) if place == tmp_path else None)
    monkeypatch.chdir(made)
    assert call(*words.split(), "--data", "text.txt", "--out", tmp_path / "x") == 2
    said = r"too little room on the disk of .*/x: the \w+ takes \d+\.\d KiB, 100 B are free: make room, or choose"
    assert re.search(said, capsys.readouterr().err)
    assert not any(tmp_path.iterdir())


def test_too_little_memory_is_said_before_weights_are_read(made, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(room, "_MEMORY", tmp_path / "meminfo")
    needed = 2 * load_model(made / "model").num_parameters()
    for kilobytes, options in [(needed // 1024, {}), (1, {"device_map": "cpu"}), (1, {})]:
        assert not caplog.records
        (tmp_path / "meminfo").write_text(f"MemAvailable: {kilobytes} kB\nSwapFree: 1 kB\n")
        load_model(made / "model", dtype=torch.bfloat16, **options)
    assert f"too little memory: the weights take {size(needed)} in bfloat16, 2.0 KiB are available" in caplog.text
