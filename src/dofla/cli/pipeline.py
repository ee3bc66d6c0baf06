"""The verbs that make a student, one step each: profile, allocate, distill; and run and demo for all of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    BatchSize,
    Data,
    Dtype,
    KeepSoftmax,
    Lambda,
    Length,
    ModelArgument,
    Out,
    Padded,
    Seed,
    Stream,
    TokenDtype,
    Track,
    Windows,
    refuse_existing,
)
from dofla.cli.verb import current_view
from dofla.errors import DoflaError
from dofla.profiles.tolerance import DEFAULT_LAMBDA

RECIPES = Path(__file__).parent.parent / "runs" / "recipes"
Html = Annotated[Path | None, typer.Option(help="Page to write as well, with sliders for tolerance and budget.")]


def profile(
    model: ModelArgument,
    data: Data,
    out: Out,
    samples: Annotated[
        int | None, typer.Option(help="Rows of attention per KV head (J), 4096; of the paper's: vectors, 1024.")
    ] = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 4,
    estimator: Annotated[
        str, typer.Option(help="Of what: attention, or the kernel's Gram matrix: paper.")
    ] = "attention",
    normalization: Annotated[
        str | None, typer.Option(help="Scale of the Gram matrix: trace, top, mean, none; default by estimator.")
    ] = None,
    lam: Lambda = DEFAULT_LAMBDA,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    stream: Stream = False,
    seed: Seed = 0,
    html: Html = None,
) -> dict[str, Any]:
    """Measure the degrees of freedom of every attention head."""
    from dofla.integration.profiler import profile as make_profile
    from dofla.report import write_profile_page
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of
    from dofla.storage.files import new_folder

    refuse_existing(html)
    view = current_view()
    with new_folder(out) as folder:
        teacher, tokenizer = load_teacher(model, dtype, stream)
        tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed)
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
    if html is not None:
        write_profile_page(result, html, folder=out, lam=lam)
    view.say(f"\nwritten to {out}")
    names = [layer.name for layer in result.layers]
    errors = [[None if math.isnan(error) else error for error in row] for row in result.dof_errors(lam)]
    found = {"profile": out, "model": result.model, "estimator": estimator, "lambda": lam}
    found["degrees_of_freedom"] = dict(zip(names, result.dof(lam), strict=True))
    return found | {"standard_errors": dict(zip(names, errors, strict=True))}


def allocate(
    profile: Annotated[Path, typer.Argument(help="Folder written by dofla profile.")],
    out: Annotated[Path, typer.Option(help="Plan to write (JSON).")] = Path("plan.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head, averaged over layers.")] = 64,
    strategy: Annotated[
        str, typer.Option(help="hybrid, or measured (with --curves); fixed, dof, dof_clip: the paper's.")
    ] = "hybrid",
    feature_map: Annotated[
        str | None, typer.Option(help="Of the linear layers; default mlp, prf with the paper's strategies.")
    ] = None,
    curves: Annotated[Path | None, typer.Option(help="Error curves (JSON) from dofla curves.")] = None,
    context: Annotated[
        int | None,
        typer.Option(help="measured: layers may stay softmax, at the price of a cache of so many tokens."),
    ] = None,
    lam: Lambda = DEFAULT_LAMBDA,
    over_heads: Annotated[str, typer.Option(help="A layer's number from its heads': max, mean, q75, ...")] = "max",
    per_head: Annotated[
        bool | None, typer.Option(help="Whether KV heads of a layer may differ; default: measured yes, others no.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Last tokens with exact scores; default: what the strategy finds.")
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens with exact scores, likewise.")] = None,
    token_dtype: TokenDtype = None,
    keep_softmax: KeepSoftmax = None,
    html: Html = None,
) -> dict[str, Any]:
    """Give each layer its state: features, a window, sinks."""
    from dofla.plans.allocate import allocate as make_plan
    from dofla.plans.curves import Curves
    from dofla.profiles.profile import Profile
    from dofla.report import write_plan_page

    refuse_existing(out)
    refuse_existing(html)
    options = {"lam": lam, "over_heads": over_heads, "per_head": per_head, "window": window, "sinks": sinks}
    options |= {"context": context, "curves": None if curves is None else Curves.load(curves)}
    options |= {"token_dtype": token_dtype}
    measured = Profile.load(profile)
    plan = make_plan(measured, budget, strategy, feature_map, keep_softmax=keep_softmax or (), **options)
    view = current_view()
    view.show(plan)
    plan.save(out)
    if html is not None:
        known = {} if curves is None else {curves: options["curves"]}
        write_plan_page(measured, plan, html, folder=profile, lam=lam, curves=known)
    view.say(f"written to {out}")
    return {"plan": out, "state_bytes": plan.state_bytes(), **plan.to_dict()}


def curves(
    model: ModelArgument,
    data: Data,
    out: Annotated[Path, typer.Option(help="Error curves to write (JSON).")] = Path("curves.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head: the middle of the sizes tried.")] = 64,
    feature_map: Annotated[str, typer.Option(help="Feature map of the linear layers.")] = "mlp",
    token_dtype: TokenDtype = None,
    windows: Windows = 64,
    length: Length = 512,
    steps: Annotated[int, typer.Option(help="Of each of the eleven short trainings.")] = 25,
    batch_size: BatchSize = 2,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Measure what each layer loses at several sizes, and what that does to the model."""
    from dofla.distillation import measure_curves
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of

    refuse_existing(out)
    view = current_view()
    teacher, tokenizer = load_teacher(model, dtype)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed)
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
    plan: Annotated[Path, typer.Option(help="Plan (JSON) from dofla allocate.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, curves and the adapter; goes on if interrupted.")],
    loss: Annotated[str, typer.Option(help="output, softmax, l2, or direct (next-token).")] = "output",
    windows: Windows = 1000,
    length: Length = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the windows.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: BatchSize = 2,
    accumulate: Annotated[int, typer.Option(help="Forward passes per step.")] = 1,
    rows: Annotated[int, typer.Option(help="Random query rows per window that the loss looks at.")] = 64,
    own_inputs: Annotated[float, typer.Option(help="Share of the steps on the student's own inputs.")] = 0.0,
    context: Annotated[int | None, typer.Option(help="Read windows anywhere among so many (rotary) positions.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    track: Track = None,
    padded: Padded = False,
    dtype: Dtype = None,
    stream: Stream = False,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Train the feature maps, layer by layer, against the model's own softmax attention."""
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
    student, tokenizer = load_teacher(model, dtype, stream)
    linearize(student, wanted, seed=seed)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), student, tokenizer, seed=seed)
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


def run(
    recipe: Annotated[
        Path, typer.Argument(help="YAML file; or default, instant, features, paper, with --set model=...")
    ],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME. An interrupted run goes on.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
    track: Track = None,
) -> dict[str, Any]:
    """Execute a recipe from profile to evaluation, into one folder."""
    bundled = RECIPES / f"{recipe}.yaml"
    given = bundled if bundled.exists() and not recipe.exists() else recipe
    return _run(given, change, track, out or Path("runs") / recipe.stem)


def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
    track: Track = None,
) -> dict[str, Any]:
    """Run the whole pipeline on the bundled teacher: three minutes of a CPU core."""
    return _run(RECIPES / "demo.yaml", change, track, out)


def _run(path: Path, change: list[str] | None, track: list[str] | None, out: Path) -> dict[str, Any]:
    from dofla.report import report_on
    from dofla.runs.recipe import Recipe
    from dofla.runs.run import run as run_recipe

    recipe, view = Recipe.load(path, change), current_view()
    recipe.track += track or []
    results = run_recipe(recipe, out, view, report_on)
    view.say(f"\neverything is in {out}")
    return {"folder": out, **results}
