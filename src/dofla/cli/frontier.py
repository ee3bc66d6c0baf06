"""The verb ``dofla frontier``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.options import BatchSize, Context, Data, Dtype, ModelArgument, RetrievalHeads, Seed
from dofla.cli.verb import current_view


def frontier(
    model: ModelArgument,
    data: Data,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to evaluate on, likewise; repeatable; default the held-out part of the data."),
    ] = None,
    lengths: Annotated[list[int] | None, typer.Option(help="Tokens per window; repeatable; default 512.")] = None,
    sizes: Annotated[list[str] | None, typer.Option(help="Sizes to try, as 1.5MiB; repeatable; default five.")] = None,
    target: Annotated[
        float | None, typer.Option(help="Nats per token that may be lost of each text: find the smallest within.")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows to evaluate on, of each text and length.")] = 12,
    out: Annotated[Path | None, typer.Option(help="New folder for the adapters, figures and a report page.")] = None,
    context: Context = None,
    retrieval_heads: RetrievalHeads = 0,
    batch_size: BatchSize = 1,
    dtype: Dtype = None,
    seed: Seed = 0,
) -> dict[str, Any]:
    """Find the bytes that a model needs on your text: quality by cache size and length."""
    from dofla.integration.directions import WINDOWS
    from dofla.report import REPORT, write_report
    from dofla.runs.frontier import ADAPTERS
    from dofla.runs.frontier import frontier as measure
    from dofla.runs.recipe import DataSpec
    from dofla.runs.teacher import load_teacher, windows_of

    view, lengths = current_view(), list(dict.fromkeys(lengths or [512]))
    teacher, tokenizer = load_teacher(model, dtype)
    tokens = windows_of(DataSpec(data, 512, WINDOWS), teacher, tokenizer, seed=seed)
    texts = {}
    for name, source in _named(text or [data]).items():
        # Calibration reads another part of the data, and nothing of other texts.
        split = "validation" if Path(source).resolve() == Path(data).resolve() else "all"
        specs = [DataSpec(source, length, windows, split=split) for length in lengths]
        texts[name] = [windows_of(spec, teacher, tokenizer, seed=seed) for spec in specs]
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
        write_report([out], out / REPORT, view=view)
        view.say(f"\nwritten to {out}: {REPORT}{''.join(f', {ADAPTERS}/{size}' for size in found.kept)}")
    elif target is not None:
        options = f"--data {shlex.quote(data)} --seed {seed}" + (f" --dtype {dtype}" if dtype else "")
        options += f" --context {context}" if context else ""
        options += f" --retrieval-heads {retrieval_heads}" if retrieval_heads else ""
        for size in found.kept:
            view.say(f"dofla compress {shlex.quote(model)} --size {size} {options} --out compressed-{size}")
    return found.to_dict()


def _named(texts: list[str]) -> dict[str, str]:
    """By the names of their files, if those differ."""
    names = [Path(text).name.partition(".")[0] or text for text in texts]
    return dict(zip(names if len(set(names)) == len(set(texts)) else texts, texts, strict=True))
