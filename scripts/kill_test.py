"""Kills `dofla run` again and again and looks at what is left.

Each time the run goes on in the same folder. Half of the kills come at random moments, half into the writing of a file:
cut short before it takes its name, or just after. After each of them everything that bears its own name must be whole
and the same as in a run that nobody disturbed; at the end all weights must be the same bit for bit.

    python scripts/kill_test.py --kills 20
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}  # a graphics card does not repeat itself bit for bit

import psutil
import torch

import dofla.report.page
import dofla.runs.run  # noqa: F401 (before there are processes, each of which would import it for itself)
from dofla.cli import main
from dofla.storage.files import read_json
from dofla.storage.tensors import read_tensors

RECIPE = """
model: demo
budget: 16
data: {source: demo, length: 64, windows: 16}
validation: {source: demo, length: 64, windows: 4, split: validation}
profile: {samples: 64, windows: 4}
curves: {windows: 4, steps: 1, rows: 16, held_out: 2}
students:
  - {name: Fix, strategy: fixed}
  - {name: Measured, end_to_end: true}
distill: {steps: 16, batch_size: 1, rows: 16, checkpoint_every: 1}
end_to_end: {steps: 8, batch_size: 1, lora_rank: 2, checkpoint_every: 1}
evaluate: {batch_size: 4, fidelity_windows: 4, prompts: 1, prompt_tokens: 16, new_tokens: 4}
"""
TIMINGS = ("seconds", "distill_seconds", "speed")
_WRITTEN_TWICE = ("record.json", "README.md")  # what an evaluation found is added to a student's card
WAYS = ("moment", "cut short", "partial seen", "renamed")


@dataclass
class Kill:
    """When a process is killed: when it has worked for ``after`` seconds of processor time; or, in one of the other
    ways, at the next file it then writes: with half of it there, as its partial folder is seen from outside, or when it
    has just got its name."""

    way: str
    after: float

    def __str__(self) -> str:
        return f"{self.way}, at {self.after:.2f} s"


@dataclass
class Attempt:
    """A process that ended: its exit status (-9: killed), and after how many seconds of work each file was there."""

    status: int
    files: dict[str, float]


def attempt(recipe: Path, folder: Path, kill: Kill | None = None) -> Attempt:
    """`dofla run` in a process of its own."""
    folder.parent.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        log = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        torch.set_num_threads(1)
        if kill is not None:
            lie_in_wait(kill)
        sys.argv = ["dofla", "run", str(recipe), "--out", str(folder)]
        try:
            main()
        except SystemExit as stop:
            os._exit(stop.code or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    process, files = psutil.Process(child), {}
    while True:
        times = process.cpu_times()
        work = times.user + times.system
        files = dict.fromkeys(finished(folder), work) | files
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return Attempt(os.waitstatus_to_exitcode(status), files)
        due = kill is not None and work >= kill.after
        seen = due and kill.way == "partial seen" and _has_partial(folder, child)
        if seen or (due and kill.way == "moment"):
            os.kill(child, signal.SIGKILL)
        time.sleep(0.001 if due else 0.01)


def lie_in_wait(kill: Kill) -> None:
    """Make this process kill itself in the middle of a write, or right after one."""
    started = time.process_time()

    def strike() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def due() -> bool:
        return time.process_time() - started >= kill.after

    def cut_short(file: int) -> None:
        if due():
            os.ftruncate(file, os.fstat(file).st_size // 2)
            strike()

    def renamed(function: Callable) -> Callable:
        def rename(source: Any, target: Any, **options: Any) -> None:
            function(source, target, **options)
            if due():
                strike()

        return rename

    if kill.way == "cut short":
        os.fsync = cut_short
    elif kill.way == "renamed":
        os.replace, os.rename = renamed(os.replace), renamed(os.rename)


def _has_partial(folder: Path, process: int) -> bool:
    places = os.walk(folder)  # which bears folders that vanish meanwhile
    return any(name.endswith(f".partial-{process}") for _, inner, names in places for name in (*inner, *names))


def finished(folder: Path) -> dict[str, Path]:
    """Everything in a run folder that bears its own name."""
    found = (Path(place) / name for place, _, names in os.walk(folder) for name in names)
    names = {str(path.relative_to(folder)): path for path in found}
    return {name: path for name, path in names.items() if ".partial-" not in name and ".dofla." not in name}


def without_timings(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: without_timings(value) for key, value in data.items() if key not in TIMINGS}
    return [without_timings(value) for value in data] if isinstance(data, list) else data


def faults(folder: Path, reference: Path, ended: bool = False) -> list[str]:
    """What is there and not as it should be: a file that does not load, is another than it will be, or is of a folder
    of which others are missing. Of two files earlier versions will do until the run has ended."""
    found, whole, wrong = finished(folder), finished(reference), []
    for name, path in found.items():
        try:
            if name not in whole:
                wrong.append(f"{name} is none of the run's files")
            elif path.name == "distill.safetensors":
                begun, done = (read_tensors(x)[0]["curve"].tolist() for x in (path, whole[name]))
                if begun != done[: len(begun)]:
                    wrong.append(f"{name}: other losses")
            elif path.suffix == ".safetensors":
                ours, theirs = read_tensors(path)[0], read_tensors(whole[name])[0]
                if ours.keys() != theirs.keys() or not all(torch.equal(ours[key], theirs[key]) for key in ours):
                    wrong.append(f"{name}: other numbers")
            elif path.name == "losses.json":
                ours, theirs = (read_json(x, "losses")["layers"] for x in (path, whole[name]))
                if any(theirs[key][: len(ours[key])] != ours[key] for key in theirs):
                    wrong.append(f"{name}: other losses")
            elif path.name in _WRITTEN_TWICE and not ended:
                if not path.read_text(encoding="utf-8").endswith("\n"):
                    wrong.append(f"{name}: no end")
            elif path.suffix == ".json":
                ours, theirs = (without_timings(read_json(x, "a record")) for x in (path, whole[name]))
                if ours != theirs:
                    wrong.append(f"{name}: other content")
            elif path.suffix == ".html":
                if not path.read_text(encoding="utf-8").rstrip().endswith("</html>"):
                    wrong.append(f"{name}: no end")
            elif path.read_bytes() != whole[name].read_bytes():
                wrong.append(f"{name}: other content")
        except Exception as error:  # whatever it is, it is the answer
            wrong.append(f"{name}: {error}")
    for name, path in whole.items():  # folders that get their name at once
        if path.parent.name in ("adapter", "profile") and (folder / name).parent.exists() and name not in found:
            wrong.append(f"{name} is missing")
    return wrong


def weights(folder: Path) -> dict[str, bytes]:
    """Every number of every safetensors file."""
    tensors = {name: read_tensors(path)[0] for name, path in finished(folder).items() if path.suffix == ".safetensors"}
    return {
        f"{name}: {key}": bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, held in tensors.items()
        for key, tensor in held.items()
    }


def complete(recipe: Path, folder: Path, reference: Path) -> list[str]:
    """Let the run end, and compare it with the one that nobody disturbed."""
    status = attempt(recipe, folder).status
    wrong = faults(folder, reference, ended=True) + [f"exit status {status}"] * (status != 0)
    wrong += [f"left behind: {path}" for path in folder.rglob(".*.partial-*")]
    if weights(folder) != weights(reference):
        wrong.append("weights differ")
    return wrong


def kill_test(kills: int, seed: int, place: Path) -> bool:
    """Print a line per kill and how many of them the run got over; whether all."""
    chance, recipe, reference = random.Random(seed), place / "recipe.yaml", place / "0" / "run"
    recipe.write_text(RECIPE)
    undisturbed = attempt(recipe, reference)
    if undisturbed.status:
        print((reference.with_suffix(".log")).read_text())
        raise SystemExit(f"the undisturbed run ended with {undisturbed.status}")
    begun, ended = undisturbed.files["recipe.yaml"], max(undisturbed.files.values())
    print(f"undisturbed: {ended:.1f} s of work, {len(undisturbed.files)} files, {len(weights(reference))} tensors")
    print(f"{'kill':>4}  {'of what the process did':<27}{'run at':>7}{'files':>7}  verdict", flush=True)
    folder, good, runs = place / "1" / "run", 0, 1
    # Places in the undisturbed run, in order; each process starts from where the last one was killed.
    for number, goal in enumerate(sorted(chance.uniform(begun, ended) for _ in range(kills)), start=1):
        reached = max((undisturbed.files[name] for name in finished(folder)), default=begun)
        way = "moment" if number % 2 else WAYS[1 + number // 2 % 3]
        kill, wrong = Kill(way, begun + max(goal - reached, 0.05)), []
        while (status := attempt(recipe, folder, kill).status) == 0 and not wrong:
            wrong = complete(recipe, folder, reference)  # it was faster than the kill, which now meets a new run
            runs, folder = runs + 1, place / str(runs + 1) / "run"
        wrong += faults(folder, reference) if status == -signal.SIGKILL else [f"exit status {status}, not killed"]
        print(
            f"{number:>4}  {kill!s:<27}{goal:>6.1f}s{len(finished(folder)):>7}  {'; '.join(wrong) or 'good'}",
            flush=True,
        )
        good += not wrong
    wrong = complete(recipe, folder, reference)
    print(f"gone on to the end: {'; '.join(wrong) or 'the same weights, bit for bit'}")
    print(f"{good if not wrong else 0} of {kills}" + (f", in {runs} runs" if runs > 1 else ""))
    return good == kills and not wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--out", type=Path, help="folder for the runs; default a temporary one")
    given = parser.parse_args()
    where = given.out or Path(tempfile.mkdtemp(prefix="dofla-kill-"))
    where.mkdir(parents=True, exist_ok=True)
    ended_well = kill_test(given.kills, given.seed, where)
    if given.out is None:
        shutil.rmtree(where)
    sys.exit(0 if ended_well else 1)
