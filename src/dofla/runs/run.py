"""Running a recipe: the models of a compression or a distillation, made and evaluated; all into one folder.

The folder is the state of the run: whatever is finished in it is not done again, so an interrupted run goes on.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dofla.evaluation import Evaluation, evaluate
from dofla.evaluation.samples import continuations
from dofla.integration.sharing import note
from dofla.runs.comparison import closing, model_row, samples
from dofla.runs.compression import CompressedModels
from dofla.runs.distillation import Students
from dofla.runs.folder import claim
from dofla.runs.models import Models
from dofla.runs.recipe import Compression, Distillation, ModelSpec, Recipe
from dofla.runs.view import View
from dofla.storage.files import read_json, write_json
from dofla.storage.lock import locked

RECIPE, RESULTS, EVALUATION = "recipe.yaml", "results.json", "evaluation.json"


def run(recipe: Recipe, folder: str | Path, view: View | None = None) -> dict[str, Any]:
    """Execute a recipe into ``folder`` and return the results (also written there as results.json).

    Args:
        recipe: what to do.
        folder: new, or that of an earlier run of the same recipe, which then goes on.
        view: where progress and tables go; silent by default.

    Raises:
        DoflaError: bad input of any kind, or a folder that holds something else or that another process works in.
    """
    folder, view = Path(folder), view or View(quiet=True)
    with locked(folder):
        claim(folder, RECIPE, recipe.to_dict())
        models, rows = _models(recipe, folder, view), list[dict[str, Any]]()
        names, first = [spec.name for spec in recipe.models], recipe.seeds[0]
        for spec in recipe.models:
            runs = [_evaluated(models, spec, seed, len(names) == 1 and seed == first) for seed in recipe.seeds]
            rows.append({"name": spec.name, "runs": runs, **_summary(runs)})
            if len(names) == 1:
                view.show("", *Evaluation.from_dict(runs[0]).parts())
            else:
                view.show(*model_row(rows[-1], names, recipe.seeds))
        results = {"model": recipe.model, "seeds": recipe.seeds, "models": rows}
        write_json(folder / RESULTS, results)
    view.show(*closing(results))
    return results


def _models(recipe: Recipe, folder: Path, view: View) -> Models:
    if isinstance(recipe, Compression):
        return CompressedModels(recipe, folder, view)
    assert isinstance(recipe, Distillation)
    students = Students(recipe, folder, view)
    view.show("\nFeature maps need as many features as a head has degrees of freedom:\n")
    view.show(*students.profile().parts(recipe.lam))
    return students


def _evaluated(models: Models, spec: ModelSpec, seed: int, shows_samples: bool) -> dict[str, Any]:
    """Figures of a model and what it writes, which is known long before them and so shown before them."""
    path, opened = models.home(spec, seed) / EVALUATION, models.opened
    if path.exists():
        figures = read_json(path, "an evaluation")
        if shows_samples:
            models.view.show(*samples(spec.name, figures.get("samples", [])))
        return figures
    windows, prompts = opened.validation, opened.prompts
    with models.made(spec, seed) as model:
        written = continuations(model, opened.tokenizer, prompts)
        if shows_samples:
            models.view.show(*samples(spec.name, written))
        with models.view.progress(f"evaluate {spec.name}, seed {seed}") as progress:
            sizes = opened.recipe.evaluate.sizes
            figures = evaluate(model, windows, **sizes, seed=seed, progress=progress).to_dict()
        figures |= {"name": spec.name, "seed": seed, "distill_seconds": models.seconds(spec, seed)}
        if written:
            figures["samples"] = written
        note(models.adapter(spec, seed), figures=figures)
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
    section, keys = "embeddings", ["cosine", "spearman"]
    if "language" in runs[0]:
        section, keys = "language", ["loss", "loss_increase", "kl", "top1_agreement"]
    series = {key: [run[section][key] for run in runs] for key in keys}
    series["attention_output_error"] = [layer_mean(run, "output_error") for run in runs]
    summary = {"state_bytes": runs[0]["state_bytes"], **{key: over_seeds(values) for key, values in series.items()}}
    if section == "language":
        summary["original_loss"] = runs[0]["language"]["original_loss"]
    return summary
