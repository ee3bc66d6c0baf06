"""The verbs that make a student, one step each: profile, allocate, distill; and run and demo for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dofla.allocate import allocate as make_plan
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
    Windows,
    refuse_existing,
)
from dofla.curves import Curves
from dofla.distill import distill as train
from dofla.distill import measure_curves
from dofla.errors import DoflaError
from dofla.files import new_folder
from dofla.integration.checkpoint import write_adapter
from dofla.integration.profiler import profile as make_profile
from dofla.integration.surgery import linearize
from dofla.plan import Plan
from dofla.profile import Profile
from dofla.recipe import DataSpec, Recipe
from dofla.run import run as run_recipe
from dofla.spectrum import DEFAULT_LAMBDA
from dofla.teacher import load_teacher, windows_of
from dofla.view import View, loss_range

RECIPES = Path(__file__).parent.parent / "recipes"


def profile(
    model: ModelArgument,
    data: Data,
    out: Out,
    samples: Annotated[int, typer.Option(help="Vectors per KV head (J).")] = 1024,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 4,
    normalization: Annotated[str, typer.Option(help="Scale of the Gram matrix: trace, top, mean, none.")] = "trace",
    lam: Lambda = DEFAULT_LAMBDA,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Measure the degrees of freedom of every attention head."""
    view = View()
    with new_folder(out) as folder:
        teacher, tokenizer = load_teacher(model, dtype)
        tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed)
        with view.progress("profile") as progress:
            result = make_profile(
                teacher,
                tokens,
                samples=samples,
                batch_size=batch_size,
                normalization=normalization,
                keep_softmax=keep_softmax or (),
                seed=seed,
                progress=lambda stage, done, total: progress(done, total, stage),
            )
        view.profile(result, lam)
        result.write(folder)
    view.say(f"\nwritten to {out}")


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
    per_head: Annotated[bool, typer.Option("--per-head", help="A number for each KV head instead.")] = False,
    window: Annotated[
        int | None, typer.Option(help="Last tokens with exact scores; default: what the strategy finds.")
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens with exact scores, likewise.")] = None,
    keep_softmax: KeepSoftmax = None,
) -> None:
    """Give each layer its state: features, a window, sinks."""
    refuse_existing(out)
    options = {"lam": lam, "over_heads": over_heads, "per_head": per_head, "window": window, "sinks": sinks}
    options |= {"context": context, "curves": None if curves is None else Curves.load(curves)}
    plan = make_plan(Profile.load(profile), budget, strategy, feature_map, keep_softmax=keep_softmax or (), **options)
    view = View()
    view.plan(plan)
    plan.save(out)
    view.say(f"written to {out}")


def curves(
    model: ModelArgument,
    data: Data,
    out: Annotated[Path, typer.Option(help="Error curves to write (JSON).")] = Path("curves.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head: the middle of the sizes tried.")] = 64,
    feature_map: Annotated[str, typer.Option(help="Feature map of the linear layers.")] = "mlp",
    windows: Windows = 64,
    length: Length = 512,
    steps: Annotated[int, typer.Option(help="Of each of the eleven short trainings.")] = 25,
    batch_size: BatchSize = 2,
    keep_softmax: KeepSoftmax = None,
    padded: Padded = False,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Measure what each layer loses at several sizes, and what that does to the model."""
    refuse_existing(out)
    view = View()
    teacher, tokenizer = load_teacher(model, dtype)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), teacher, tokenizer, seed=seed)
    with view.progress("curves") as progress:
        result = measure_curves(
            teacher,
            tokens,
            budget,
            feature_map=feature_map,
            keep_softmax=keep_softmax or (),
            steps=steps,
            batch_size=batch_size,
            seed=seed,
            progress=lambda stage, done, total: progress(done, total, stage),
        )
    view.curves(result)
    result.save(out)
    view.say(f"written to {out}")


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
    reach: Annotated[int | None, typer.Option(help="Read windows anywhere among so many (rotary) positions.")] = None,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
    padded: Padded = False,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Train the feature maps, layer by layer, against the model's own softmax attention."""
    adapter = out / "adapter"
    if adapter.exists():
        raise DoflaError(f"{adapter} exists already: this distillation is finished; choose another folder")
    view = View()
    wanted = Plan.load(plan)
    student, tokenizer = load_teacher(model, dtype)
    linearize(student, wanted, seed=seed)
    tokens = windows_of(DataSpec(data, length, windows, padded=padded), student, tokenizer, seed=seed)
    with view.progress("distill") as progress:
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
            reach=reach,
            seed=seed,
            folder=out,
            checkpoint_every=checkpoint_every,
            progress=lambda step, total, losses: progress(step, total, loss_range(losses)),
        )
    view.losses(history)
    with new_folder(adapter) as folder:
        write_adapter(student, folder)
        tokenizer.save_pretrained(folder)
    view.say(f"\nadapter written to {adapter}")


def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file; or default, or paper, with --set model=...")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME. An interrupted run goes on.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
) -> None:
    """Execute a recipe from profile to evaluation, into one folder."""
    bundled = RECIPES / f"{recipe}.yaml"
    given = bundled if bundled.exists() and not recipe.exists() else recipe
    _run(Recipe.load(given, change), out or Path("runs") / recipe.stem)


def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
) -> None:
    """Run the whole pipeline on the bundled teacher: some minutes on a CPU."""
    _run(Recipe.load(RECIPES / "demo.yaml", change), out)


def _run(recipe: Recipe, out: Path) -> None:
    view = View()
    run_recipe(recipe, out, view)
    view.say(f"\neverything is in {out}")
