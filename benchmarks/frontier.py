"""Quality against bytes of state as a picture: gap, recall and tasks of the rows that benchmarks/quality.py measured.

    python benchmarks/frontier.py runs/quality-smollm2-135m --out docs/quality-smollm2-135m.svg

Needs matplotlib (`pip install matplotlib`). Tasks are shown of students that `dofla evaluate --tasks` was asked about
with `--out RUN/tasks-NAME.json`, NAME being that of the student's folder.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, whose profile.py would hide the standard library's

from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

from dofla.errors import DoflaError
from dofla.files import read_json

METHODS = {"Measured": "#0b6e99", "Window and sinks": "#b3541e"}
"""Those with rows at several budgets; their colours."""


def main(
    run: Annotated[Path, typer.Argument(help="Run folder of benchmarks/quality.py.")],
    out: Annotated[Path, typer.Option(help="SVG file to write.")] = Path("frontier.svg"),
) -> None:
    table = read_json(run / "quality.json", "a table of benchmarks/quality.py")
    original, *rows = table["rows"]
    # Names become those of the students' folders, as dofla.workshop makes them.
    tasks = {path.stem.removeprefix("tasks-"): _accuracies(path) for path in run.glob("tasks-*.json")}
    panels = ["gap", "recall, written"] + (["tasks"] if tasks else [])
    titles = {
        "gap": "gap, nats per token",
        "recall, written": "facts recalled, written",
        "tasks": "tasks, mean accuracy",
    }
    plt.rcParams |= {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figure, axes = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.0), layout="constrained")
    for panel, axis in zip(panels, axes, strict=True):
        for method, colour in METHODS.items():
            points = sorted(_points(rows, method, panel, tasks))
            if points:
                sizes, means, spreads = zip(*points, strict=True)
                axis.errorbar(sizes, means, spreads, marker="o", ms=4, capsize=2, color=colour, label=method)
        teacher = (
            tasks and next(iter(tasks.values()))["teacher"] if panel == "tasks" else (original[panel] or {}).get("mean")
        )
        if teacher:
            axis.axhline(teacher, ls=":", color="#555", label="the original")
        axis.set(xscale="log", xlabel="state per sequence, KiB", title=titles[panel])
        if panel == "gap":
            axis.set_yscale("log")
        axis.grid(True, which="both", lw=0.3, color="#ccc")
    axes[-1].legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})
    print(f"written to {out}")


def _points(rows: list[dict[str, Any]], method: str, panel: str, tasks: dict[str, Any]):
    """(KiB, mean, spread) of the method's rows."""
    for row in rows:
        if row["student"] != method and not row["student"].startswith(f"{method} at "):
            continue
        size = float(row["state"].removesuffix(" KiB"))
        if panel != "tasks":
            yield size, row[panel]["mean"], row[panel]["spread"]
        elif (name := row["student"].lower().replace(" ", "-") + "-seed0") in tasks:
            yield size, tasks[name]["student"], 0.0


def _accuracies(path: Path) -> dict[str, float]:
    """Mean accuracy over tasks of student and teacher, from what `dofla evaluate --tasks` wrote."""
    found = read_json(path, "an evaluation of tasks")["tasks"]["tasks"]
    return {who: sum(task["acc"][who] for task in found) / len(found) for who in ("student", "teacher")}


if __name__ == "__main__":
    try:
        typer.run(main)
    except DoflaError as error:
        sys.exit(f"dofla: {error}")
