"""The verbs of the paper, one step each: profile, curves, allocate, distill; and run, demo and report for all steps."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from dofla.cli.common import following, windows_from, written
from dofla.cli.options import (
    IN_MEMORY,
    ORIGINAL,
    Data,
    Device,
    Given,
    Lambda,
    Length,
    ModelArgument,
    Out,
    Windows,
    existing,
    new_file,
    text_of,
)
from dofla.cli.settings import Function, Sections
from dofla.cli.verb import current_view
from dofla.errors import DoflaError
from dofla.profiles.tolerance import DEFAULT_LAMBDA
from dofla.runs import DEMO, RECIPES
from dofla.runs.recipe import Compression, Distillation, Recipe, demo_recipes

NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
RECIPE = Sections([Compression, Distillation])
ONE_OF_DEMO = replace(RECIPE, before=DEMO)


def profile(
    model: ModelArgument,
    data: Data,
    out: Out,
    windows: Windows = 64,
    length: Length = 512,
    lam: Lambda = DEFAULT_LAMBDA,
    device: Device = None,
    opening: Given = ORIGINAL,
    text: Given = text_of(),
    settings: Given = Function("integration/profiler.py", "profile", ("progress",)),
) -> dict[str, Any]:
    """Measure the degrees of freedom of every attention head."""
    from dofla.integration.profiler import profile as make_profile
    from dofla.runs.opening import open_original
    from dofla.storage.files import new_folder

    view = current_view()
    with new_folder(out) as folder:
        opened, tokenizer = open_original(model, device=device, **opening)
        tokens = windows_from(data, opened, tokenizer, {**text, "length": length, "windows": windows})
        with view.progress("profile") as bar:
            result = make_profile(opened, tokens, progress=bar.stage, **settings)
        view.show(*result.parts(lam))
        result.write(folder)
    written("profile", out)
    following("allocate", out)
    names = [layer.name for layer in result.layers]
    errors = [[None if math.isnan(error) else error for error in row] for row in result.dof_errors(lam)]
    found = {"profile": out, "model": result.model, "estimator": result.estimator, "lambda": lam}
    found["degrees_of_freedom"] = dict(zip(names, result.dof(lam), strict=True))
    return found | {"standard_errors": dict(zip(names, errors, strict=True))}


def allocate(
    profile: Annotated[
        Path, Argument(metavar="PROFILE", help="Folder written by dofla profile.", callback=existing("a profile"))
    ],
    out: Annotated[Path, Option(help="Plan to write (JSON); it must be new.", callback=new_file)] = Path("plan.json"),
    budget: Annotated[int, Option(help="Features per KV head, averaged over layers.")] = 64,
    strategy: Annotated[
        str, Option(help="Strategy: hybrid, measured (with --curves), or the paper's fixed, dof, dof_clip.")
    ] = "hybrid",
    feature_map: Annotated[
        str | None, Option(help="Feature map of linear layers; default mlp, prf with the paper's strategies.")
    ] = None,
    curves: Annotated[
        Path | None,
        Option(help="Error curves (JSON) from dofla curves.", callback=existing("error curves, from dofla curves")),
    ] = None,
    context: Annotated[
        int | None,
        Option(help="Context length at which a layer may keep softmax, in tokens (measured); default: none may."),
    ] = None,
    settings: Given = Function("plans/allocate.py", "allocate", (), {"lam": DEFAULT_LAMBDA}),
) -> dict[str, Any]:
    """Give each layer its features, local window and attention sinks."""
    from dofla.plans.allocate import allocate as make_plan
    from dofla.plans.curves import Curves
    from dofla.profiles.profile import Profile

    error_curves = None if curves is None else Curves.load(curves)
    measured = Profile.load(profile)
    plan = make_plan(measured, budget, strategy, feature_map, curves=error_curves, context=context, **settings)
    current_view().show(plan)
    plan.save(out)
    written("plan", out)
    following("distill", measured.model or "MODEL", "--plan", out, "--data", "sample", "--out", "distilled")
    return {"plan": out, "state_bytes": plan.state_bytes(), **plan.to_dict()}


def curves(
    model: ModelArgument,
    data: Data,
    out: Annotated[Path, Option(help="Error curves to write (JSON); the file must be new.", callback=new_file)] = Path(
        "curves.json"
    ),
    budget: Annotated[int, Option(help="Features per KV head: the middle of the sizes tried.")] = 64,
    windows: Windows = 64,
    length: Length = 512,
    device: Device = None,
    opening: Given = IN_MEMORY,
    text: Given = text_of(),
    settings: Given = Function("distillation/trials.py", "measure_curves", ("progress",)),
) -> dict[str, Any]:
    """Measure the error of each layer at several sizes.

    The effect of these errors on the model is measured as well.
    """
    from dofla.distillation import measure_curves
    from dofla.runs.opening import open_original

    view = current_view()
    opened, tokenizer = open_original(model, device=device, **opening)
    tokens = windows_from(data, opened, tokenizer, {**text, "length": length, "windows": windows})
    with view.progress("curves") as bar:
        result = measure_curves(opened, tokens, budget, progress=bar.stage, **settings)
    view.show(result)
    result.save(out)
    written("error curves", out)
    following("allocate", "PROFILE", "--strategy", "measured", "--curves", out, "--budget", budget)
    return {"curves": out, **result.to_dict()}


def distill(
    model: ModelArgument,
    plan: Annotated[Path, Option(help="Plan (JSON) from dofla allocate.", callback=existing("a plan"))],
    data: Data,
    out: Annotated[Path, Option(help="Folder for checkpoints and the adapter, where an interrupted run resumes.")],
    windows: Windows = 1000,
    length: Length = 512,
    epochs: Annotated[int, Option(help="Passes over the windows.")] = 1,
    device: Device = None,
    opening: Given = IN_MEMORY,
    text: Given = text_of(),
    settings: Given = Function("distillation/loop.py", "distill", ("folder", "progress")),
    tracking: Given = Function("cli/pipeline.py", "tracking_of"),
) -> dict[str, Any]:
    """Distill feature maps from softmax attention, layer by layer."""
    from dofla.distillation import distill as train
    from dofla.distillation import tracked
    from dofla.integration.checkpoint import feature_map_tensors, warn_of_local_base, write_adapter
    from dofla.integration.room import check_disk
    from dofla.integration.surgery import linearize
    from dofla.plans.plan import Plan
    from dofla.runs.opening import open_original
    from dofla.storage.files import new_folder
    from dofla.storage.lock import locked

    adapter = out / "adapter"
    if adapter.exists():
        raise DoflaError(f"{adapter} exists already: this distillation is finished; choose another folder")
    view = current_view()
    view.resumes = out
    wanted = Plan.load(plan)
    opened, tokenizer = open_original(model, device=device, **opening)
    linearize(opened, wanted, seed=settings.get("seed", 0))
    # A checkpoint has two moments beside each parameter, and is written beside the one before; then comes the adapter.
    maps = sum(tensor.nbytes for tensor in feature_map_tensors(opened).values())
    check_disk(out, (2 * 3 + 1) * maps, "the training")
    tokens = windows_from(data, opened, tokenizer, {**text, "length": length, "windows": windows})
    with locked(out):
        trackers = tracking_of(**tracking)
        with view.progress("distill") as bar, tracked(trackers, out, "track", bar.losses) as progress:
            history = train(opened, tokens, epochs=epochs, folder=out, progress=progress, **settings)
        with new_folder(adapter) as folder:
            write_adapter(opened, folder)
            tokenizer.save_pretrained(folder)
    warn_of_local_base(opened, adapter)
    view.show(history)
    written("adapter", adapter)
    following("evaluate", adapter, "--data", data)
    last = dict(zip(history.layers, history.losses[-1].tolist(), strict=True))
    return {"adapter": adapter, "seconds": history.seconds, "settings": history.settings, "last_losses": last}


def tracking_of(track: Sequence[str] = ()) -> Sequence[str]:
    """Where losses are logged as well.

    Args:
        track: loss trackers, through accelerate: tensorboard, wandb, and others, separated by commas.
    """
    return track


def _recipe(given: Path) -> Path:
    bundled = RECIPES / f"{given}.yaml"
    if given.exists() or bundled.exists():
        return given if given.exists() else bundled
    raise DoflaError(f"recipe {given} does not exist: give a YAML file, or one of {', '.join(NAMES)}")


def run(
    recipe: Annotated[
        Path,
        Argument(metavar="RECIPE", help=f"YAML file, or a bundled recipe: {', '.join(NAMES)}.", callback=_recipe),
    ],
    out: Annotated[Path | None, Option(help="Folder, where an interrupted run resumes; default runs/RECIPE.")] = None,
    device: Device = None,
    changes: Given = RECIPE,
) -> dict[str, Any]:
    """Run a recipe: compress, evaluate and report."""
    return _run({"": Recipe.load(recipe, changes)}, out or Path("runs") / recipe.stem, device)


def demo(
    out: Annotated[Path, Option(help="Folder, where an interrupted run resumes.")] = Path("runs/demo"),
    device: Device = None,
    changes: Given = ONE_OF_DEMO,
) -> dict[str, Any]:
    """Compress and distill the bundled model: 3 min on a CPU core."""
    return _run(demo_recipes(changes), out, device)


def _run(recipes: dict[str, Any], out: Path, device: str | None) -> dict[str, Any]:
    """Run recipes by the name of their subfolder, and write one page on them."""
    from dofla.report import write_page_beside
    from dofla.runs.run import run as run_recipe
    from dofla.storage.rank import is_main_process

    results, view = dict[str, Any](), current_view()
    view.resumes = out
    for name, recipe in recipes.items():
        recipe.device = device or recipe.device
        if name:
            view.show(f"\n{name}")
        results[name] = run_recipe(recipe, out / name, view)
    written("run", out)
    folders = [out / name for name in recipes]
    if is_main_process():
        write_page_beside(out, view, folders)
    following("report", *folders, "--speed")
    return {"folder": out, **results.get("", results)}


def report(
    runs: Annotated[list[Path], Argument(metavar="FOLDER", help="Folders written by dofla run or dofla frontier.")],
    out: Annotated[
        Path | None,
        Option(help="HTML file to write; default: report.html in the run's folder, here for several runs."),
    ] = None,
    speed: Annotated[bool, Option("--speed", help="Measure speed as well: 10 s per model; results are kept.")] = False,
) -> dict[str, Any]:
    """Write an HTML report on one or more runs.

    It is one file, and needs no network.
    """
    from dofla.report import REPORT, write_report

    view = current_view()
    path = write_report(runs, out or (runs[0] / REPORT if len(runs) == 1 else Path(REPORT)), view=view, speed=speed)
    written("report", path)
    return {"report": path, "bytes": path.stat().st_size}
