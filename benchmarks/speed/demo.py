"""Where the seconds of ``dofla demo`` go, all of them: each line that it prints ends a stage.

    python benchmarks/speed/demo.py              # on all cores
    python benchmarks/speed/demo.py --cores 1
    python benchmarks/speed/demo.py --busy       # while another process takes a core
    python benchmarks/speed/demo.py --fresh      # and the compiled kernels are not there yet

CPU seconds are of the process, all its threads and the compiler; where they are far fewer than the cores would have
had time for, something waits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

_TIMED = re.compile(r"(?P<name>[^:]+): .*\(\d+ s\)$")
_ROW = re.compile(r"(?P<name>\S.*?)  +[-\d].* [KM]iB$")


@dataclass(frozen=True)
class Stage:
    """What went on between two lines; ``wall`` and ``cpu`` in seconds."""

    name: str
    wall: float
    cpu: float


def main(
    cores: Annotated[int | None, typer.Option(help="How many the demo may use; default: all.")] = None,
    busy: Annotated[bool, typer.Option("--busy", help="Let another process take a core meanwhile.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Let the kernels be compiled.")] = False,
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    some = sorted(os.sched_getaffinity(0))[:cores]
    with tempfile.TemporaryDirectory() as folder, _company(busy, some):
        command = [sys.executable, "-m", "dofla", "demo", "--out", f"{folder}/run"]
        command += [word for one in change or () for word in ("--set", one)]
        environment = os.environ | ({"XDG_CACHE_HOME": f"{folder}/cache"} if fresh else {})
        stages = list(_stages(command, environment, some))
    rows = [n for n, stage in enumerate(stages) if stage.name.startswith("row of ")]
    first, whole = sum(x.wall for x in stages[: rows[0] + 1]), sum(x.wall for x in stages)
    for stage in stages:
        print(f"{stage.name:<40} {stage.wall:7.1f} s {stage.cpu:7.1f} s of CPU")
    print(f"{'first row after':<40} {first:7.1f} s")
    print(f"{'in all':<40} {whole:7.1f} s {sum(x.cpu for x in stages):7.1f} s of CPU")
    if out:
        record = {"cores": len(some), "busy": busy, "first_row": first, "seconds": whole}
        Path(out).write_text(json.dumps(record | {"stages": [asdict(x) for x in stages]}, indent=2), encoding="utf-8")


def _stages(command: list[str], environment: dict[str, str], cores: list[int]) -> Iterator[Stage]:
    wall, cpu = time.perf_counter(), 0.0
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment | {"COLUMNS": "100"}
    )
    os.sched_setaffinity(process.pid, cores)
    for line in process.stdout:
        print(line, end="", file=sys.stderr)
        if timed := _TIMED.match(line.rstrip()):
            name = timed["name"]
        elif row := _ROW.match(line.rstrip()):
            name = f"row of {row['name']}"
        else:
            continue
        now, used = time.perf_counter(), _cpu_seconds(process.pid)
        yield Stage(name, now - wall, used - cpu)
        wall, cpu = now, used
    if process.wait():
        raise SystemExit(process.returncode)
    yield Stage("the end", time.perf_counter() - wall, 0.0)


def _cpu_seconds(pid: int) -> float:
    """Of the process and of those that it has waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _company(wanted: bool, cores: list[int]) -> Iterator[None]:
    """Within the block a process that does nothing takes one of the cores."""
    if not wanted:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(process.pid, cores)
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    typer.run(main)
