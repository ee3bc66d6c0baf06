"""The command line: one verb per step, files in between."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers.utils import logging as transformers_logging

from dofla import __version__
from dofla.allocate import allocate as make_plan
from dofla.data import TokenWindows, read_documents
from dofla.distill import distill as train
from dofla.errors import DoflaError
from dofla.evaluate import evaluate as measure
from dofla.files import new_folder, write_json
from dofla.integration.checkpoint import load as load_student
from dofla.integration.checkpoint import write_adapter
from dofla.integration.profiler import profile as make_profile
from dofla.integration.prompt_state import load_state, read_prompt, save_state
from dofla.integration.surgery import linearize
from dofla.plan import Plan
from dofla.profile import Profile
from dofla.recipe import DataSpec, Recipe
from dofla.run import dtype_of, load_teacher, load_tokenizer, resolve_model, windows_of
from dofla.run import run as run_recipe
from dofla.spectrum import DEFAULT_LAMBDA
from dofla.view import View, loss_range

app = typer.Typer(
    help="Turn a softmax transformer into a linear-attention model: measure, allot, distil, judge.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelArgument = Annotated[str, typer.Argument(help="Folder, hub name, 'demo', or package:NAME/FOLDER.")]
StudentArgument = Annotated[Path, typer.Argument(help="Adapter folder or standalone checkpoint.")]
Data = Annotated[
    str, typer.Option(help="Text file (.gz too), JSONL, Parquet, tokens, a datasets name, 'self', or 'demo'.")
]
Length = Annotated[int, typer.Option(help="Tokens per window.")]
Windows = Annotated[int, typer.Option(help="Windows at most.")]
BatchSize = Annotated[int, typer.Option(help="Windows per forward pass.")]
Padded = Annotated[bool, typer.Option("--padded", help="One text per window, padded: for encoders.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the checkpoint's.")]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Lambda = Annotated[float, typer.Option("--lambda", help="Tolerance of the degrees of freedom.")]
KeepSoftmax = Annotated[list[str] | None, typer.Option(help="Attention module to leave as it is; repeatable.")]
Out = Annotated[Path, typer.Option(help="New folder or file to write.")]


@app.command()
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


@app.command()
def allocate(
    profile: Annotated[Path, typer.Argument(help="Folder written by dofla profile.")],
    out: Annotated[Path, typer.Option(help="Plan to write (JSON).")] = Path("plan.json"),
    budget: Annotated[int, typer.Option(help="Features per KV head, averaged over layers.")] = 64,
    strategy: Annotated[str, typer.Option(help="fixed, dof, or dof_clip.")] = "dof",
    feature_map: Annotated[str, typer.Option(help="Feature map of the linear layers.")] = "prf",
    lam: Lambda = DEFAULT_LAMBDA,
    over_heads: Annotated[str, typer.Option(help="A layer's number from its heads': max or mean.")] = "max",
    window: Annotated[int, typer.Option(help="Last tokens with exact scores.")] = 0,
    sinks: Annotated[int, typer.Option(help="First tokens with exact scores.")] = 0,
    keep_softmax: KeepSoftmax = None,
) -> None:
    """Give each layer its number of features."""
    if out.exists():
        raise DoflaError(f"{out} exists already: choose another file or remove it")
    options = {"lam": lam, "over_heads": over_heads, "window": window, "sinks": sinks}
    plan = make_plan(Profile.load(profile), budget, strategy, feature_map, keep_softmax=keep_softmax or (), **options)
    view = View()
    view.plan(plan)
    plan.save(out)
    view.say(f"written to {out}")


@app.command()
def distill(
    model: ModelArgument,
    plan: Annotated[Path, typer.Option(help="Plan (JSON) from dofla allocate.")],
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, curves and the adapter; goes on if interrupted.")],
    loss: Annotated[str, typer.Option(help="softmax or l2.")] = "softmax",
    windows: Windows = 1000,
    length: Length = 512,
    epochs: Annotated[int, typer.Option(help="Passes over the windows.")] = 1,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    batch_size: BatchSize = 4,
    accumulate: Annotated[int, typer.Option(help="Forward passes per step.")] = 1,
    rows: Annotated[int | None, typer.Option(help="Random query rows per window in the loss; default all.")] = None,
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


@app.command()
def evaluate(
    student: StudentArgument,
    data: Data,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
    windows: Windows = 64,
    length: Length = 512,
    batch_size: BatchSize = 1,
    padded: Padded = False,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Compare a student with the softmax model it was, on held-out text."""
    if out is not None and out.exists():
        raise DoflaError(f"{out} exists already: choose another file or remove it")
    view = View()
    model, tokenizer = _student(student, dtype)
    spec = DataSpec(data, length, windows, split="validation", padded=padded)
    tokens: TokenWindows = windows_of(spec, model, tokenizer, seed=seed)
    with view.progress("evaluate") as progress:
        figures = measure(model, tokens, batch_size=batch_size, seed=seed, progress=progress)
    view.evaluation(figures)
    if out is not None:
        write_json(out, figures)


@app.command()
def generate(
    student: StudentArgument,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 100,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of taking the likeliest token.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt through the chat template.")] = False,
    prompt_state: Annotated[
        Path | None, typer.Option(help="State of a text read earlier, to go on from; made from --document if missing.")
    ] = None,
    document: Annotated[Path | None, typer.Option(help="Text to read into --prompt-state before the prompt.")] = None,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> None:
    """Continue a text with a student."""
    model, tokenizer = _student(student, dtype)
    start = _prompt_state(model, tokenizer, prompt_state, document)
    if chat:
        message = [{"role": "user", "content": prompt}]
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        inputs = tokenizer.apply_chat_template(message, **options)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    ids, options = inputs["input_ids"].to(model.device), {"max_new_tokens": new_tokens, "do_sample": sample}
    if start is not None:
        ids = torch.cat([start[0].to(model.device), ids], dim=1)
        options["past_key_values"] = start[1]
    torch.manual_seed(seed)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    View().say(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="YAML file.")],
    out: Annotated[Path | None, typer.Option(help="Run folder; default runs/NAME. An interrupted run goes on.")] = None,
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
) -> None:
    """Execute a recipe from profile to evaluation, into one folder."""
    _run(Recipe.load(recipe, change), out or Path("runs") / recipe.stem)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Run folder.")] = Path("runs/demo"),
    change: Annotated[list[str] | None, typer.Option("--set", help="field=value over the recipe; repeatable.")] = None,
) -> None:
    """Run the whole pipeline on the bundled teacher: a few minutes on two CPU cores."""
    _run(Recipe.load(Path(__file__).parent / "recipes" / "demo.yaml", change), out)


def _run(recipe: Recipe, out: Path) -> None:
    view = View()
    run_recipe(recipe, out, view)
    view.say(f"\neverything is in {out}")


def _student(path: Path, dtype: str | None) -> tuple[Any, Any]:
    options = {} if dtype is None else {"dtype": dtype_of(dtype)}
    model = load_student(path, **options)
    return model, load_tokenizer(path, resolve_model(model.config._name_or_path))


def _prompt_state(model: Any, tokenizer: Any, path: Path | None, document: Path | None) -> tuple[Any, Any] | None:
    """The tokens and the cache to go on from, read from ``path`` or, the first time, from ``document``."""
    if path is None:
        if document is not None:
            raise DoflaError(f"--document {document} needs --prompt-state FILE, where its state is kept")
        return None
    if not path.exists():
        if document is None:
            raise DoflaError(f"{path} does not exist: add --document FILE to make it")
        text = "\n\n".join(read_documents(document))
        ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        save_state(read_prompt(model, ids), ids, path, model)
    return load_state(path, model)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def main() -> None:
    """Entry point: bad input is one line on standard error and exit code 2."""
    try:
        app()
    except DoflaError as error:
        print(f"dofla: {error}", file=sys.stderr)
        sys.exit(2)
