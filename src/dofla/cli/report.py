"""The verb ``dofla report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.verb import current_view


def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that dofla run or dofla frontier has written.")],
    out: Annotated[
        Path | None, typer.Option(help="HTML file; default report.html in the run's folder, or here for several runs.")
    ] = None,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time reading and writing as well: ten seconds per student, kept.")
    ] = False,
) -> dict[str, Any]:
    """Write a page about one or more runs, one HTML file that needs no network."""
    from dofla.display import size
    from dofla.report import REPORT, write_report

    view = current_view()
    path = write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT)), view=view, speed=speed)
    view.say(f"{path} ({size(path.stat().st_size)})")
    return {"report": path, "bytes": path.stat().st_size}
