"""Quality against bytes of state as a picture: gap and tasks of the rows that at_equal_bytes.py measured.

    python benchmarks/quality/frontier.py runs/quality-smollm2-135m --out docs/quality-smollm2-135m.svg

Needs matplotlib (`pip install matplotlib`). Tasks are shown of students that `dofla evaluate --tasks` was asked about
with `--out RUN/tasks-NAME.json`, NAME being that of the student's folder.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

from dofla.errors import DoflaError
from dofla.storage.files import read_json

METHODS = {
    "Measured": "#0b6e99",
    "Measured, end to end": "#0a3d5c",
    "Window and sinks": "#b3541e",
    "Features only": "#7a5fa8",
    "Paper: prf, Fix": "#777777",
}
"""Their colors. Rows at other budgets join the line of their method."""


def main(
    run: Annotated[Path, typer.Argument(help="Run folder of benchmarks/quality/at_equal_bytes.py.")],
    out: Annotated[Path, typer.Option(help="SVG file to write.")] = Path("frontier.svg"),
) -> None:
    table = read_json(run / "quality.json", "a table of benchmarks/quality/at_equal_bytes.py")
    rows = table["rows"][1:]
    # Names become those of the students' folders, as dofla.runs.models makes them.
    tasks = {path.stem.removeprefix("tasks-"): _agreement(path) for path in run.glob("tasks-*.json")}
    panels = ["loss increase", *(["tasks"] if tasks else [])]
    titles = {"loss increase": "loss increase, nats per token", "tasks": "tasks, the original's answer"}
    plt.rcParams |= {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    sizes_of_all = sorted(size for size, *_ in _points(rows, "Measured", "loss increase", tasks))
    size = (3.4 * len(panels), 3.3)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for panel, axis in zip(panels, axes[0], strict=True):
        for method, color in METHODS.items():
            points = sorted(_points(rows, method, panel, tasks))
            if points:
                sizes, means, spreads = zip(*points, strict=True)
                axis.errorbar(sizes, means, spreads, marker="o", ms=4, capsize=2, color=color, label=method)
        if panel == "tasks":
            axis.axhline(1.0, ls=":", color="#555")
            axis.annotate("the original", (sizes_of_all[0], 1.0), va="bottom", color="#555")
        axis.set(xscale="log", xlabel="size per sequence, KiB", title=titles[panel])
        axis.set_xticks(sizes_of_all, [f"{size:.0f}" for size in sizes_of_all])
        axis.set_xlim(sizes_of_all[0] / 1.3, sizes_of_all[-1] * 1.3)
        axis.minorticks_off()
        if panel == "loss increase":
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter("{x:g}")
        axis.grid(True, lw=0.3, color="#ccc")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
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
        elif (name := "-".join(re.findall("[a-z0-9]+", row["student"].lower())) + "-seed0") in tasks:
            yield size, tasks[name], 0.0


def _agreement(path: Path) -> float:
    """Share of items that student and teacher answer alike, mean over the tasks of `dofla evaluate --tasks`.

    Accuracy says little of a small teacher, near chance on most tasks: it moves either way when answers change.
    """
    found = read_json(path, "an evaluation of tasks")["tasks"]["tasks"]
    return sum(task["agreement"] for task in found) / len(found)


if __name__ == "__main__":
    try:
        typer.run(main)
    except DoflaError as error:
        sys.exit(f"dofla: {error}")
