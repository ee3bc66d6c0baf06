"""The verb ``dofla frontier``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.endings import following, written
from dofla.cli.options import IN_MEMORY, Device, Given, ModelArgument, SelfData, new_folder, sources, text_of
from dofla.cli.settings import Function
from dofla.cli.verb import current_view


def frontier(
    model: ModelArgument,
    data: SelfData = "self",
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation text, as --data; repeatable; default: the held-out part of --data.",
            callback=sources,
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option(help="Length of a window, in tokens; repeatable; default 512."),
    ] = None,
    sizes: Annotated[
        list[str] | None, typer.Option(help="Cache size to try, as 1.5MiB; repeatable; default: five sizes.")
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="Largest acceptable loss increase, in nats per token; default: none.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write adapters, figures and the report to; it must be new.",
            callback=new_folder,
        ),
    ] = None,
    device: Device = None,
    opening: Given = IN_MEMORY,
    cutting: Given = text_of(("length",), windows=12),
    settings: Given = Function("runs/frontier.py", "frontier", ("progress",)),
) -> dict[str, Any]:
    """Find the smallest cache that keeps the quality on your text."""
    from dofla.cli.texts import windows_from
    from dofla.compression.config import WINDOWS
    from dofla.report import write_page_beside
    from dofla.runs.frontier import ADAPTERS, FRONTIER
    from dofla.runs.frontier import frontier as measure
    from dofla.runs.opening import open_original

    view, lengths = current_view(), list(dict.fromkeys(lengths or [512]))
    opened, tokenizer = open_original(model, device=device, **opening)
    windows = windows_from(data, opened, tokenizer, {**cutting, "windows": WINDOWS})
    texts = {}
    for name, source in _named(text or [data]).items():
        # Calibration reads another part of the data, and nothing of other texts.
        split = "validation" if Path(source).resolve() == Path(data).resolve() else "all"
        cuts = [{**cutting, "length": length} for length in lengths]
        texts[name] = [windows_from(source, opened, tokenizer, cut, split) for cut in cuts]
    with view.progress("frontier") as bar:
        found = measure(
            opened,
            windows,
            texts,
            sizes=sizes,
            target=target,
            tokenizer=tokenizer,
            out=out,
            progress=bar.stage,
            **settings,
        )
    view.show(found)
    if out is not None:
        written("frontier", out / FRONTIER)
        for size in found.kept:
            written("adapter", out / ADAPTERS / str(size))
        write_page_beside(out, view)
        if found.kept:
            following("chat", out / ADAPTERS / str(found.kept[0]))
    elif target is not None:
        given = {**opening, **cutting, **settings}
        common = ["seed", "dtype", "context", "retrieval_heads"]
        changes = [word for name in common if name in given for word in ("--set", f"{name}={given[name]}")]
        for size in found.kept:
            following("compress", model, "--size", size, "--data", data, *changes, "--out", f"compressed-{size}")
    return found.to_dict()


def _named(texts: list[str]) -> dict[str, str]:
    """The texts by the names of their files, or by themselves if two of the names are equal."""
    names = [Path(text).name.partition(".")[0] or text for text in texts]
    return dict(zip(names if len(set(names)) == len(set(texts)) else texts, texts, strict=True))
