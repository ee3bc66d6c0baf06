"""Running a recipe: profile, then per student allocate, linearize, distill, evaluate; all into one folder.

The folder is the state of the run: whatever is finished in it is not done again, so an interrupted run goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dofla.compression.plan import STRATEGY as COMPRESSED
from dofla.evaluation import Evaluation, evaluate
from dofla.evaluation.samples import continuations
from dofla.integration.sharing import note
from dofla.runs.comparison import closing, samples, student_row
from dofla.runs.recipe import Recipe, StudentSpec
from dofla.runs.view import View
from dofla.runs.workshop import Workshop, claim
from dofla.storage.files import read_json, write_json
from dofla.storage.lock import locked

RECIPE, RESULTS = "recipe.yaml", "results.json"


def run(recipe: Recipe, folder: str | Path, view: View | None = None) -> dict[str, Any]:
    """Execute a recipe into ``folder`` and return the results (also written there as results.json).

    Args:
        recipe: what to do.
        folder: new, or that of an earlier run of the same recipe, which then goes on.
        view: where progress and tables go; silent by default.

    Raises:
        DoflaError: bad input of any kind, or a folder that holds something else or that another process works in.
    """
    with locked(folder):
        return _run(recipe, Path(folder), view or View(quiet=True))


def _run(recipe: Recipe, folder: Path, view: View) -> dict[str, Any]:
    claim(folder, RECIPE, recipe.to_dict())
    workshop = Workshop(recipe, folder, view)
    rows: list[dict[str, Any]] = []
    names, profiled = [x.name for x in recipe.students], False
    for student in recipe.students:
        if student.strategy != COMPRESSED and not profiled:  # the first that degrees of freedom say something of
            view.say("\nFeature maps need as many features as a head has degrees of freedom:\n")
            view.profile(workshop.profile(), recipe.lam)
            profiled = True
        begins = not rows
        runs = [_one_student(workshop, student, seed, begins and seed == recipe.seeds[0]) for seed in recipe.seeds]
        rows.append({"name": student.name, "runs": runs, **_summary(runs)})
        if begins:
            view.show("", *Evaluation.from_dict(runs[0]).parts())
        if len(names) > 1:
            view.show(*student_row(rows[-1], names, recipe.seeds))
    results = {"model": recipe.model, "budget": recipe.budget, "seeds": recipe.seeds, "students": rows}
    write_json(folder / RESULTS, results)
    view.show(*closing(results))
    return results


def _one_student(workshop: Workshop, spec: StudentSpec, seed: int, shows_samples: bool) -> dict[str, Any]:
    """Figures of a student and what it writes, which is known long before them and so shown before them."""
    path, options = workshop.home(spec, seed) / "evaluation.json", workshop.recipe.evaluate
    if path.exists():
        figures = read_json(path, "an evaluation")
        if shows_samples:
            workshop.view.show(*samples(spec.name, figures.get("samples", [])))
        return figures
    windows, written = workshop.validation(), []
    with workshop.student(spec, seed) as model:
        if options.prompts and model.can_generate():
            written = continuations(model, workshop.tokenizer, workshop.prompts(**options.samples))
        if shows_samples:
            workshop.view.show(*samples(spec.name, written))
        with workshop.view.progress(f"evaluate {spec.name}, seed {seed}") as progress:
            figures = evaluate(model, windows, **options.sizes, seed=seed, progress=progress).to_dict()
        figures |= {"name": spec.name, "seed": seed, "distill_seconds": workshop.seconds(spec, seed)}
        if written:
            figures["samples"] = written
        note(workshop.adapter(spec, seed), figures=figures)
        write_json(path, figures)
    return figures


def layer_mean(run: dict[str, Any], key: str) -> float:
    """A figure of an evaluation's layers, mean over them."""
    return statistics.fmean(layer[key] for layer in run["layers"].values())


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean and spread, which is half the range."""
    return {"mean": statistics.fmean(values), "spread": (max(values) - min(values)) / 2}


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (half the range) over seeds of the figures that are compared."""
    summary: dict[str, Any] = {"state_bytes": runs[0]["state_bytes"]}
    section = "language" if "language" in runs[0] else "embeddings"
    keys = (
        ("student_loss", "loss_increase", "kl", "top1_agreement") if section == "language" else ("cosine", "spearman")
    )
    series = {key: [run[section][key] for run in runs] for key in keys}
    for key in ("kl", "output_error"):
        series[f"attention_{key}"] = [layer_mean(run, key) for run in runs]
    summary |= {key: over_seeds(values) for key, values in series.items()}
    if section == "language":
        summary["teacher_loss"] = runs[0]["language"]["teacher_loss"]
    return summary
