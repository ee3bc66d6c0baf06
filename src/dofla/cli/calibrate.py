"""The verb ``dofla calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.endings import following, written
from dofla.cli.options import ORIGINAL, Device, Given, ModelArgument, SelfData, new_file, text_of
from dofla.cli.settings import Function
from dofla.cli.verb import current_view


def calibrate(
    model: ModelArgument,
    data: SelfData = "self",
    out: Annotated[Path, typer.Option(help="File to write; it must be new.", callback=new_file)] = Path(
        "calibration.safetensors"
    ),
    retrieval_heads: Annotated[
        bool, typer.Option("--retrieval-heads", help="Rank retrieval heads as well: a minute more.")
    ] = False,
    device: Device = None,
    opening: Given = ORIGINAL,
    text: Given = text_of(windows=12),
    settings: Given = Function("compression/calibrate.py", "calibrate", ("progress",)),
) -> dict[str, Any]:
    """Measure what compress needs to know of a model, for any size."""
    from dofla import calibrate as measure
    from dofla.cli.texts import windows_from
    from dofla.runs.opening import open_original

    view = current_view()
    opened, tokenizer = open_original(model, device=device, **opening)
    windows = windows_from(data, opened, tokenizer, text)
    with view.progress("calibrate") as bar:
        found = measure(
            opened, windows, tokenizer=tokenizer if retrieval_heads else None, progress=bar.stage, **settings
        )
    found.save(out)
    view.show(found)
    written("calibration", out)
    following("compress", model, "--calibration", out, "--ratio", 16, "--out", "compressed")
    return {"calibration": out, "model": found.model, **found.made_by}
