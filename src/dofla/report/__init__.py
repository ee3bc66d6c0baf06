"""The report: one HTML page on what ``dofla run`` or ``dofla frontier`` has left in a folder."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from dofla.report.runs import read_run
from dofla.runs.view import View
from dofla.storage.extras import MissingExtra

REPORT = "report.html"


def write_report(
    folders: Sequence[str | Path], out: str | Path, *, view: View | None = None, speed: bool = False
) -> Path:
    """Write the page on one or more folders; runs are compared. It is one file and needs no network.

    Args:
        folders: written by ``dofla run``, ``dofla reproduce`` or ``dofla frontier``.
        out: HTML file, which is replaced.
        view: where progress goes.
        speed: time the three models of each run that lost least first, some ten seconds each, on a machine that should
            be idle. What was measured is kept in their folders.

    Raises:
        DoflaError: altair or vl-convert is not installed; a folder that is none of these, or damaged; with ``speed``, a
            model that cannot be opened; a page that would be too large, or cannot be written.
    """
    from dofla.report.comparison import section_of
    from dofla.report.frontier import frontier_section, is_frontier
    from dofla.report.page import write_page
    from dofla.report.speed import measure_speed

    frontiers = [folder for folder in folders if is_frontier(folder)]
    runs = [read_run(folder) for folder in folders if folder not in frontiers]
    for run in runs if speed else ():
        measure_speed(run, view or View(quiet=True))
    sections = [frontier_section(folder) for folder in frontiers]
    kinds = dict.fromkeys(run.section for run in runs)
    sections += [section_of([run for run in runs if run.section == kind]) for kind in kinds]
    return write_page(out, sections)


def write_page_beside(folder: str | Path, view: View, runs: Sequence[str | Path] = ()) -> None:
    """Write the page into a finished folder, on it or on the ``runs`` in it; or say what is missing for that."""
    runs = runs or [folder]
    try:
        view.show(f"report: {write_report(runs, Path(folder) / REPORT, view=view)}")
    except MissingExtra as error:
        view.show(f"no report: {error}, then dofla report {shlex.join(map(str, runs))}")
