"""Running a recipe: profile, then per student allocate, linearise, distil, evaluate; all into one folder.

The folder is the state of the run: whatever is finished in it is not done again, so an interrupted run goes on.
"""

from __future__ import annotations

import importlib.util
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import dofla
from dofla.allocate import allocate
from dofla.data import TokenWindows, token_windows
from dofla.demo import teacher_path
from dofla.demo.data import demo_windows
from dofla.distill import distill
from dofla.errors import DoflaError
from dofla.evaluate import evaluate
from dofla.evaluate.samples import continuations
from dofla.files import new_folder, read_json, replacing, write_json
from dofla.integration.checkpoint import WEIGHTS, load_feature_map_tensors, load_model, read_tensors, save_adapter
from dofla.integration.profiler import profile
from dofla.integration.surgery import linearize, restore
from dofla.profile import Profile
from dofla.recipe import DataSpec, Recipe, StudentSpec
from dofla.view import View, loss_range

RECIPE, MACHINE, RESULTS = "recipe.yaml", "run.json", "results.json"


def run(recipe: Recipe, folder: str | Path, view: View | None = None) -> dict[str, Any]:
    """Execute a recipe into ``folder`` and return the results (also written there as results.json).

    Args:
        recipe: what to do.
        folder: new, or that of an earlier run of the same recipe, which then goes on.
        view: where progress and tables go; silent by default.

    Raises:
        DoflaError: bad input of any kind, or a folder that holds something else.
    """
    folder, view = Path(folder), view or View(quiet=True)
    _claim(folder, recipe)
    model, tokenizer = load_teacher(recipe.model, recipe.dtype)
    source = Source(recipe, model, tokenizer)

    if not (folder / "profile").exists():
        with view.progress("profile") as progress:
            measured = profile(
                model,
                source.training().take(recipe.profile.windows),
                samples=recipe.profile.samples,
                batch_size=recipe.profile.batch_size,
                normalization=recipe.profile.normalization,
                keep_softmax=sorted(_kept_by_all(recipe)),
                seed=recipe.seeds[0],
                progress=lambda stage, done, total: progress(done, total, stage),
            )
        measured.save(folder / "profile")
    measured = Profile.load(folder / "profile")
    view.profile(measured, recipe.lam)

    rows = []
    for student in recipe.students:
        runs = [_one_student(student, seed, recipe, folder, model, source, measured, view) for seed in recipe.seeds]
        rows.append({"name": student.name, "runs": runs, **_summary(runs)})
    results = {"model": recipe.model, "budget": recipe.budget, "seeds": recipe.seeds, "students": rows}
    write_json(folder / RESULTS, results)
    view.results(results)
    return results


class Source:
    """Windows of a recipe, made when they are first needed."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.recipe, self.model, self.tokenizer = recipe, model, tokenizer
        self._made: dict[str, TokenWindows] = {}

    def training(self) -> TokenWindows:
        return self._get("training", self.recipe.data)

    def validation(self) -> TokenWindows:
        return self._get("validation", self.recipe.validation)

    def _get(self, name: str, spec: DataSpec) -> TokenWindows:
        if name not in self._made:
            self._made[name] = windows_of(spec, self.model, self.tokenizer, seed=self.recipe.seeds[0])
        return self._made[name]


def windows_of(
    spec: DataSpec, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0
) -> TokenWindows:
    """The windows a DataSpec asks for; the source ``demo`` is the bundled teacher's own mixture."""
    if spec.source == "demo":
        return demo_windows(model, tokenizer, spec.windows or 256, spec.length, split=spec.split, seed=seed)
    options = {k: getattr(spec, k) for k in ("length", "windows", "split", "holdout", "padded", "text_field")}
    return token_windows(spec.source, tokenizer, model=model, seed=seed, **options)


def load_teacher(name: str, dtype: str | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by folder, hub name, ``demo``, or ``package:NAME/FOLDER`` (inside an installed package)."""
    path = resolve_model(name)
    options = {} if dtype is None else {"dtype": dtype_of(dtype)}
    return load_model(path, **options), load_tokenizer(path)


def load_tokenizer(*places: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer from the first of the folders or hub names that has one."""
    for place in places:
        try:
            return AutoTokenizer.from_pretrained(place)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise DoflaError(f"no tokenizer in {' or '.join(map(str, places))}: {reason}")


def resolve_model(name: str) -> str:
    """The folder or hub name that a recipe's ``model`` stands for."""
    if name == "demo":
        return str(teacher_path())
    if not name.startswith("package:"):
        return name
    package, _, inside = name.removeprefix("package:").partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        project = package.replace("_", "-")
        raise DoflaError(f"model {name!r}: the package {package} is not installed: pip install {project}")
    return str(Path(spec.origin).parent / inside)


def dtype_of(name: str) -> torch.dtype:
    """``float32``, ``bfloat16`` or ``float16`` as a torch dtype."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise DoflaError(f"unknown dtype {name!r}: choose one of {', '.join(known)}")
    return known[name]


def _claim(folder: Path, recipe: Recipe) -> None:
    """Make the folder, or see that it belongs to the same recipe."""
    data = recipe.to_dict()
    if (folder / RECIPE).exists():
        if yaml.safe_load((folder / RECIPE).read_text(encoding="utf-8")) != data:
            raise DoflaError(f"{folder} exists already, with another recipe: choose another folder or remove it")
        return
    with new_folder(folder) as out:
        write_json(out / MACHINE, machine())
        with replacing(out / RECIPE) as partial:
            partial.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")


def machine() -> dict[str, Any]:
    """Versions and hardware, for the record."""
    return {
        "dofla": dofla.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _kept_by_all(recipe: Recipe) -> set[str]:
    return set.intersection(*(set(student.keep_softmax) for student in recipe.students))


def _one_student(
    spec: StudentSpec,
    seed: int,
    recipe: Recipe,
    folder: Path,
    model: PreTrainedModel,
    source: Source,
    measured: Profile,
    view: View,
) -> dict[str, Any]:
    home = folder / "students" / f"{'-'.join(spec.name.lower().replace('+', ' ').split())}-seed{seed}"
    if (home / "evaluation.json").exists():
        return read_json(home / "evaluation.json", "an evaluation")
    home.mkdir(parents=True, exist_ok=True)
    options = {k: getattr(spec, k) for k in ("over_heads", "per_head", "window", "sinks")} | {"lam": recipe.lam}
    kept = [name for name in spec.keep_softmax if name not in {x.name for x in measured.skipped}]
    plan = allocate(measured, recipe.budget, spec.strategy, spec.feature_map, keep_softmax=kept, **options)
    plan.save(home / "plan.json")
    linearize(model, plan, seed=seed)
    try:
        seconds = 0.0
        if (home / "adapter").exists():
            load_feature_map_tensors(model, read_tensors(home / "adapter" / WEIGHTS), str(home / "adapter"))
        else:
            if spec.trained:
                with view.progress(f"distill {spec.name}, seed {seed}") as progress:
                    seconds = distill(
                        model,
                        source.training(),
                        seed=seed,
                        folder=home / "distill",
                        progress=lambda step, steps, losses: progress(step, steps, loss_range(losses)),
                        **vars(recipe.distill),
                    ).seconds
            save_adapter(model, home / "adapter")
        with view.progress(f"evaluate {spec.name}, seed {seed}") as progress:
            figures = evaluate(
                model, source.validation(), batch_size=recipe.evaluate.batch_size, seed=seed, progress=progress
            )
        figures |= {"name": spec.name, "seed": seed, "distill_seconds": round(seconds, 1)}
        if recipe.evaluate.prompts and model.can_generate():
            figures["samples"] = continuations(model, source.tokenizer, source.validation(), recipe.evaluate)
        write_json(home / "evaluation.json", figures)
    finally:
        restore(model)
    return figures


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and spread (half the range) over seeds of the figures that are compared."""
    summary: dict[str, Any] = {"state_bytes": runs[0]["state_bytes"]}
    section = "language" if "language" in runs[0] else "embeddings"
    keys = ("student_loss", "gap", "kl", "top1_agreement") if section == "language" else ("cosine", "spearman")
    series = {key: [run[section][key] for run in runs] for key in keys}
    for key in ("kl", "output_error"):
        series[f"attention_{key}"] = [statistics.fmean(x[key] for x in run["layers"].values()) for run in runs]
    for key, values in series.items():
        summary[key] = {"mean": statistics.fmean(values), "spread": (max(values) - min(values)) / 2}
    if section == "language":
        summary["teacher_loss"] = runs[0]["language"]["teacher_loss"]
    return summary
