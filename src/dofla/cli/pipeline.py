"""The verbs of the paper, one step each: profile, curves, allocate, distill; and run and demo for all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    OUTPUT,
    BatchSize,
    Data,
    Device,
    Dtype,
    KeepSoftmax,
    Lambda,
    Length,
    ModelArgument,
    Offload,
    Out,
    Padded,
    Seed,
    TokenDtype,
    Track,
    Windows,
    existing,
    new_file,
)
from dofla.cli.verb import current_view
from dofla.errors import DoflaError
from dofla.profiles.tolerance import DEFAULT_LAMBDA

RECIPES = Path(__file__).parent.parent / "runs" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
Change = Annotated[
    list[str] | None, typer.Option("--set", help="Change to the recipe: field=value; repeatable; default none.")
]


def profile(
    model: ModelArgument,
    data: Data,
    out: Out,
    samples: Annotated[
        int | None,
        typer.Option(help="Attention rows per KV head (J); default 4096; 1024 vectors with --estimator paper."),
    ] = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 4,
    estimator: Annotated[
        str, typer.Option(help="Estimator: attention, or paper (the kernel's Gram matrix).")
    ] = "attention",
    normalization: Annotated[
        str | None, typer.Option(help="Gram matrix scale: trace, top, mean, none; default by estimator.")
    ] = None,
    lam: Lambda = DEFAULT_LAMBDA,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    device: Device = None,
    offload: Offload = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Measure the degrees of freedom of every attention head."""
    from dofla.integration.profiler import profile as make_profile
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder

    view = current_view()
    with new_folder(out) as folder:
        teacher, tokenizer = load_teacher(model, dtype, device, offload)
        tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed, view=view)
        with view.progress("profile") as bar:
            result = make_profile(
                teacher,
                tokens,
                samples=samples,
                batch_size=batch_size,
                estimator=estimator,
                normalization=normalization,
                keep_softmax=keep_softmax or (),
                seed=seed,
                progress=bar.stage,
            )
        view.profile(result, lam)
        result.write(folder)
    view.say(f"\nwritten to {out}")
    names = [layer.name for layer in result.layers]
    errors = [[None if math.isnan(error) else error for error in row] for row in result.dof_errors(lam)]
    found = {"profile": out, "model": result.model, "estimator": estimator, "lambda": lam}
    found["degrees_of_freedom"] = dict(zip(names, result.dof(lam), strict=True))
    return found | {"standard_errors": dict(zip(names, errors, strict=True))}


def allocate(
    profile: Annotated[
        Path, typer.Argument(metavar="PROFILE", help="Folder written by dofla profile.", callback=existing("a profile"))
    ],
    out: Annotated[
        Path, typer.Option(help="Plan to write (JSON); it must be new.", rich_help_panel=OUTPUT, callback=new_file)
    ] = Path("plan.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head, averaged over layers.")] = 64,
    strategy: Annotated[
        str, typer.Option(help="Strategy: hybrid, measured (with --curves), or the paper's fixed, dof, dof_clip.")
    ] = "hybrid",
    feature_map: Annotated[
        str | None, typer.Option(help="Feature map of linear layers; default mlp, prf with the paper's strategies.")
    ] = None,
    curves: Annotated[
        Path | None,
        typer.Option(
            help="Error curves (JSON) from dofla curves.", callback=existing("error curves, from dofla curves")
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Context length at which a layer may keep softmax, in tokens (measured); default: none may."),
    ] = None,
    lam: Lambda = DEFAULT_LAMBDA,
    over_heads: Annotated[
        str, typer.Option(help="Reduction of per-head values to one per layer: max, mean, q75, ...")
    ] = "max",
    per_head: Annotated[
        bool | None, typer.Option(help="Sizes by KV head instead of by layer; default: only with measured.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Local window, in tokens; default: chosen by the strategy.")
    ] = None,
    sinks: Annotated[
        int | None, typer.Option(help="Attention sinks, in tokens; default: chosen by the strategy.")
    ] = None,
    token_dtype: TokenDtype = None,
    keep_softmax: KeepSoftmax = None,
) -> dict[str, Any]:
    """Give each layer its features, local window and attention sinks."""
    from dofla.plans.allocate import allocate as make_plan
    from dofla.plans.curves import Curves
    from dofla.profiles.profile import Profile

    error_curves = None if curves is None else Curves.load(curves)
    measured = Profile.load(profile)
    plan = make_plan(
        measured,
        budget,
        strategy,
        feature_map,
        curves=error_curves,
        context=context,
        lam=lam,
        over_heads=over_heads,
        per_head=per_head,
        window=window,
        sinks=sinks,
        token_dtype=token_dtype,
        keep_softmax=keep_softmax or (),
    )
    view = current_view()
    view.show(plan)
    plan.save(out)
    view.say(f"written to {out}")
    return {"plan": out, "state_bytes": plan.state_bytes(), **plan.to_dict()}


def curves(
    model: ModelArgument,
    data: Data,
    out: Annotated[
        Path,
        typer.Option(
            help="Error curves to write (JSON); the file must be new.", rich_help_panel=OUTPUT, callback=new_file
        ),
    ] = Path("curves.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head: the middle of the sizes tried.")] = 64,
    feature_map: Annotated[str, typer.Option(help="Feature map of the linear layers.")] = "mlp",
    token_dtype: TokenDtype = None,
    windows: Windows = 64,
    length: Length = 512,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each of the eleven short trainings.")] = 25,
    batch_size: BatchSize = 2,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Measure the error of each layer at several sizes.

    The effect of these errors on the model is measured as well.
    """
    from dofla.distillation import measure_curves
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of

    view = current_view()
    teacher, tokenizer = load_teacher(model, dtype, device)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed, view=view)
    with view.progress("curves") as bar:
        result = measure_curves(
            teacher,
            tokens,
            budget,
            feature_map=feature_map,
            token_dtype=token_dtype,
            keep_softmax=keep_softmax or (),
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            progress=bar.stage,
        )
    view.show(result)
    result.save(out)
    view.say(f"written to {out}")
    return {"curves": out, **result.to_dict()}


def distill(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="Plan (JSON) from dofla allocate.", callback=existing("a plan"))],
    data: Data,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder for checkpoints and the adapter, where an interrupted run resumes.", rich_help_panel=OUTPUT
        ),
    ],
    loss: Annotated[str, typer.Option(help="Loss: output, softmax, l2, or direct (next-token).")] = "output",
    windows: Windows = 1000,
    length: Length = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the windows.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of --epochs.")] = None,
    batch_size: BatchSize = 2,
    accumulate: Annotated[int, typer.Option(help="Forward passes per step.")] = 1,
    rows: Annotated[int, typer.Option(help="Random query rows of each window in the loss.")] = 64,
    own_inputs: Annotated[float, typer.Option(help="Fraction of steps on the student's own inputs.")] = 0.0,
    context: Annotated[
        int | None, typer.Option(help="Context length: windows are read anywhere in it; default: at its start.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.", rich_help_panel=OUTPUT)] = 50,
    track: Track = None,
    padded: Padded = False,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Distill feature maps from softmax attention, layer by layer."""
    from dofla.distillation import distill as train
    from dofla.distillation import tracked
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.surgery import linearize
    from dofla.plans.plan import Plan
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder
    from dofla.storage.lock import locked

    adapter = out / "adapter"
    if adapter.exists():
        raise DoflaError(f"{adapter} exists already: this distillation is finished; choose another folder")
    view = current_view()
    wanted = Plan.load(plan)
    student, tokenizer = load_teacher(model, dtype, device)
    linearize(student, wanted, seed=seed)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), student, tokenizer, seed=seed, view=view)
    with locked(out):
        with view.progress("distill") as bar, tracked(track or (), out, "track", bar.losses) as progress:
            history = train(
                student,
                tokens,
                loss=loss,
                epochs=epochs,
                steps=steps,
                batch_size=batch_size,
                accumulate=accumulate,
                rows=rows,
                own_inputs=own_inputs,
                context=context,
                seed=seed,
                folder=out,
                checkpoint_every=checkpoint_every,
                progress=progress,
            )
        with new_folder(adapter) as folder:
            write_adapter(student, folder)
            tokenizer.save_pretrained(folder)
    warn_of_local_base(student, adapter)
    view.show(history)
    view.say(f"\nadapter written to {adapter}")
    last = dict(zip(history.layers, history.losses[-1].tolist(), strict=True))
    return {"adapter": adapter, "seconds": history.seconds, "settings": history.settings, "last_losses": last}


def _recipe(given: Path) -> Path:
    bundled = RECIPES / f"{given}.yaml"
    if given.exists() or bundled.exists():
        return given if given.exists() else bundled
    raise DoflaError(f"recipe {given} does not exist: give a YAML file, or one of {', '.join(NAMES)}")


def run(
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE", help=f"YAML file, or a bundled recipe: {', '.join(NAMES)}.", callback=_recipe),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder, where an interrupted run resumes; default runs/RECIPE.", rich_help_panel=OUTPUT),
    ] = None,
    change: Change = None,
    track: Track = None,
    device: Device = None,
) -> dict[str, Any]:
    """Run a recipe: compress, evaluate and report."""
    from dofla.runs.recipe import Recipe

    return _run({"": Recipe.load(recipe, change)}, track, out or Path("runs") / recipe.stem, device)


def demo(
    out: Annotated[Path, typer.Option(help="Folder, where an interrupted run resumes.", rich_help_panel=OUTPUT)] = Path(
        "runs/demo"
    ),
    change: Change = None,
    track: Track = None,
    device: Device = None,
) -> dict[str, Any]:
    """Compress and distill the bundled model: 3 min on a CPU core."""
    from dofla.runs.recipe import demo_recipes

    return _run(demo_recipes(change), track, out, device)


def _run(recipes: dict[str, Any], track: list[str] | None, out: Path, device: str | None) -> dict[str, Any]:
    """Run recipes by the name of their subfolder, and write one page on them."""
    from dofla.report import write_page_beside
    from dofla.runs.run import run as run_recipe
    from dofla.storage.rank import is_main_process

    results, view = dict[str, Any](), current_view()
    for name, recipe in recipes.items():
        recipe.track += track or []
        recipe.device = device or recipe.device
        if name:
            view.say(f"\n{name}")
        results[name] = run_recipe(recipe, out / name, view)
    view.say(f"\neverything is in {out}")
    if is_main_process():
        write_page_beside(out, view, [out / name for name in recipes])
    return {"folder": out, **results.get("", results)}
