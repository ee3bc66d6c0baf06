"""The verb ``dofla report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.endings import written
from dofla.cli.verb import current_view


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Folders written by dofla run or dofla frontier.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write; default: report.html in the run's folder, here for several runs."),
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure speed as well: 10 s per model; results are kept.")
    ] = False,
) -> dict[str, Any]:
    """Write an HTML report on one or more runs.

    It is one file, and needs no network.
    """
    from dofla.report import REPORT, write_report

    view = current_view()
    path = write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT)), view=view, speed=speed)
    written("report", path)
    return {"report": path, "bytes": path.stat().st_size}
