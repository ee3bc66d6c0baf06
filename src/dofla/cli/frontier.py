"""The verb ``dofla frontier``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import (
    OUTPUT,
    TEXT,
    BatchSize,
    Context,
    Device,
    Dtype,
    ModelArgument,
    RetrievalHeads,
    Seed,
    SelfData,
    new_folder,
    sources,
)
from dofla.cli.verb import current_view


def frontier(
    model: ModelArgument,
    data: SelfData = "self",
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation text, as --data; repeatable; default: the held-out part of --data.",
            rich_help_panel=TEXT,
            callback=sources,
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(help="Length of a window, in tokens; repeatable; default 512.", rich_help_panel=TEXT),
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option(help="Cache size to try, as 1.5MiB; repeatable; default: five sizes.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Largest acceptable loss increase, in nats per token; default: none.")
    ] = None,
    windows: Annotated[
        int, typer.Option(help="Evaluation windows of each text and length.", rich_help_panel=TEXT)
    ] = 12,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write adapters, figures and the report to; it must be new.",
            rich_help_panel=OUTPUT,
            callback=new_folder,
        ),
    ] = None,
    context: Context = None,
    retrieval_heads: RetrievalHeads = 0,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    device: Device = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Find the smallest cache that keeps the quality on your text."""
    from dofla.integration.directions import WINDOWS
    from dofla.report import write_page_beside
    from dofla.runs.frontier import ADAPTERS, FRONTIER
    from dofla.runs.frontier import frontier as measure
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of

    view, lengths = current_view(), list(dict.fromkeys(lengths or [512]))
    teacher, tokenizer = load_teacher(model, dtype, device)
    tokens = windows_of(DataSpec(data, 512, WINDOWS), teacher, tokenizer, seed=seed, view=view)
    texts = {}
    for name, source in _named(text or [data]).items():
        # Calibration reads another part of the data, and nothing of other texts.
        split = "validation" if Path(source).resolve() == Path(data).resolve() else "all"
        specs = [DataSpec(source, length, windows, split=split) for length in lengths]
        texts[name] = [windows_of(spec, teacher, tokenizer, seed=seed, view=view) for spec in specs]
    with view.progress("frontier") as bar:
        found = measure(
            teacher,
            tokens,
            texts,
            sizes=sizes,
            target=target,
            batch_size=batch_size,
            context=context,
            retrieval_heads=retrieval_heads,
            tokenizer=tokenizer,
            out=out,
            progress=bar.stage,
        )
    view.show(found)
    if out is not None:
        view.say(f"\nwritten to {out}: {FRONTIER}{''.join(f', {ADAPTERS}/{size}' for size in found.kept)}")
        write_page_beside(out, view)
    elif target is not None:
        options = f"--data {shlex.quote(data)} --seed {seed}" + (f" --dtype {dtype}" if dtype else "")
        options += f" --context {context}" if context else ""
        options += f" --retrieval-heads {retrieval_heads}" if retrieval_heads else ""
        for size in found.kept:
            view.say(f"dofla compress {shlex.quote(model)} --size {size} {options} --out compressed-{size}")
    return found.to_dict()


def _named(texts: list[str]) -> dict[str, str]:
    """The texts by the names of their files, or by themselves if two of the names are equal."""
    names = [Path(text).name.partition(".")[0] or text for text in texts]
    return dict(zip(names if len(set(names)) == len(set(texts)) else texts, texts, strict=True))
