"""The page: what became of a model, what it cost, and everything needed to repeat it, in one HTML file.

Reads the folders that ``runs`` leaves, and measures what a reader wants to see and they do not hold.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import dofla
from dofla.errors import DoflaError
from dofla.plans.plan import Plan
from dofla.profiles.profile import Profile
from dofla.report.html import write_page
from dofla.report.look import look_closer, missing
from dofla.report.page import degrees_of_freedom, layers_of, model_title, run_data
from dofla.report.runs import RunRecord, read_run
from dofla.report.sizes import is_frontier, sizes_data
from dofla.report.verdict import RULE
from dofla.runs.view import View
from dofla.runs.workshop import Workshop
from dofla.storage.lock import locked

REPORT = "report.html"


def write_report(
    folders: Sequence[str | Path],
    out: str | Path,
    *,
    workshop: Workshop | None = None,
    view: View | None = None,
    speed: bool = False,
) -> Path:
    """Write the page of one or more runs, and of what ``dofla frontier`` found.

    What the page needs and a run does not hold yet (attention maps, continuations, recall, errors before training) is
    measured first and kept in the run's folder, if the model can be opened; otherwise the page says what is missing.

    Args:
        folders: of the runs; those of ``dofla frontier`` too, whose figures stand as they are.
        out: HTML file, which is replaced.
        workshop: of the one run, if it is at hand; otherwise the model is loaded where something is missing.
        view: where progress goes.
        speed: time reading and writing as well, which takes some ten seconds per student and wants an idle machine.

    Raises:
        DoflaError: a folder that is no run's, or damaged; a page that would be too large, or cannot be written.
    """
    view = view or View(quiet=True)
    found = [sizes_data(folder) if is_frontier(folder) else read_run(folder) for folder in folders]
    for run in found:
        if isinstance(run, RunRecord) and missing(run, speed):
            _look(run, workshop, view, speed)
    return write_page(out, _page([run_data(run) if isinstance(run, RunRecord) else run for run in found]))


def report_on(workshop: Workshop, *, speed: bool = False) -> Path:
    """Write ``report.html`` beside what the workshop has made; see :func:`write_report`."""
    folder = workshop.folder
    return write_report([folder], folder / REPORT, workshop=workshop, view=workshop.view, speed=speed)


def _look(run: RunRecord, workshop: Workshop | None, view: View, speed: bool) -> None:
    try:
        # Whoever brings a workshop holds the folder already.
        with nullcontext() if workshop else locked(run.folder), view.progress("report") as bar:
            look_closer(run, workshop or Workshop(run.recipe, run.folder, view), bar, speed=speed)
    except DoflaError as error:
        run.unread.append(f"not everything could be measured: {error}")
        view.say(f"the report lacks what needs the model: {error}")


def write_profile_page(profile: Profile, out: str | Path, *, folder: str | Path, lam: float) -> Path:
    """Write the page of a profile: the degrees of freedom of every head.

    Args:
        profile: of the teacher.
        out: HTML file, which is replaced.
        folder: of the profile, which the page names.
        lam: tolerance.

    Raises:
        DoflaError: the file cannot be written.
    """
    return write_page(out, _page([_profiled(profile, folder, lam)]))


def write_plan_page(profile: Profile, plan: Plan, out: str | Path, *, folder: str | Path, lam: float) -> Path:
    """Write the page of a plan: as :func:`write_profile_page`, and what each layer becomes."""
    return write_page(
        out, _page([_profiled(profile, folder, lam) | {"plan": layers_of(plan.layers, profile.itemsize)}])
    )


def _profiled(profile: Profile, folder: str | Path, lam: float) -> dict[str, Any]:
    known = {"name": str(folder), "model": {"title": model_title(profile.model)}}
    return known | {"profile": degrees_of_freedom(profile, lam), "students": []}


def _page(runs: list[dict[str, Any]]) -> dict[str, Any]:
    titles = list(dict.fromkeys(run["model"]["title"] for run in runs))
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    return {"title": ", ".join(titles), "version": dofla.__version__, "made": today, "rule": RULE, "runs": runs}
