"""Tasks on the terminal, in 80 columns."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

_WIDTH = 24  # of the bars of the curve


def tasks_table(figures: dict[str, Any], metric: str = "acc") -> Table:
    """One row per task, accuracies in percent, from what :func:`dofla.tasks.evaluate_tasks` returns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(metric, max_width=16, overflow="ellipsis", no_wrap=True)
    for title in ("n", "teacher", "student", "difference (95 %)", "same"):
        table.add_column(title, justify="right", no_wrap=True)
    for task in figures["tasks"]:
        row = task[metric]
        low, high = (100 * end for end in row["difference_interval"])
        table.add_row(
            task["task"],
            str(task["items"]),
            *(f"{100 * row[who]:.1f} ±{100 * row[f'{who}_stderr']:.1f}" for who in ("teacher", "student")),
            f"{100 * row['difference']:+.1f} [{low:+.1f}, {high:+.1f}]",
            f"{100 * row['agreement']:.0f} %",
        )
    return table


def curve_table(rates: dict[str, Any], places: int = 7) -> Table:
    """The win-and-tie rate at some of the tolerances, the last one where nothing changes any more."""
    curve = list(zip(rates["tolerances"], rates["rate"], strict=True))
    last = next((n for n, (_, rate) in enumerate(curve) if rate == curve[-1][1]), 0)
    shown = sorted({round(n * last / max(1, places - 1)) for n in range(places)})
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tolerance", justify="right")
    table.add_column("won or tied", justify="right")
    table.add_column("")
    for tolerance, rate in (curve[n] for n in shown):
        table.add_row(f"{100 * tolerance:.1f}", f"{100 * rate:.0f} %", Text("━" * round(_WIDTH * rate), style="cyan"))
    return table


def critical_line(rates: dict[str, Any]) -> str:
    """The smallest tolerance at which half the tasks are won or tied, in points of accuracy."""
    low, high = (100 * end for end in rates["critical_interval"])
    many = "the task is" if rates["tasks"] == 1 else f"half of {rates['tasks']} tasks are"
    return f"{many} won or tied at a tolerance of {100 * rates['critical']:.1f} points [{low:.1f}, {high:.1f}]"
