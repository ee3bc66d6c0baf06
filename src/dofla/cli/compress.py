"""The verb ``dofla compress``."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from dofla.cli.endings import following, held_out, written
from dofla.cli.options import (
    DATA,
    ORIGINAL,
    Device,
    Given,
    ModelArgument,
    Ratio,
    Size,
    existing,
    new_folder,
    source,
    text_of,
)
from dofla.cli.settings import Function
from dofla.cli.verb import current_view
from dofla.errors import DoflaError


def compress(
    model: ModelArgument,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the whole model, as from_pretrained opens it; new.", callback=new_folder),
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder for an adapter instead, which names its base; new.", callback=new_folder)
    ] = None,
    size: Size = None,
    ratio: Ratio = None,
    calibration: Annotated[
        Path | None, typer.Option(help="File from dofla calibrate.", callback=existing("a calibration"))
    ] = None,
    data: Annotated[str | None, typer.Option(help=f"Calibration text: {DATA}; default: self.", callback=source)] = None,
    device: Device = None,
    opening: Given = ORIGINAL,
    text: Given = text_of(windows=12),
    settings: Given = Function("compression/compress.py", "compress", ("progress",)),
) -> dict[str, Any]:
    """Compress the cache of a model to a constant size; no training."""
    from dofla import Calibration
    from dofla import compress as make
    from dofla.cli.texts import windows_from
    from dofla.integration.checkpoint import warn_of_local_base, write_adapter
    from dofla.integration.converted import Converted
    from dofla.runs.opening import open_original
    from dofla.storage.files import new_folder

    if out is None and adapter is None:
        raise DoflaError("nowhere to write: give --out FOLDER for a whole model, or --adapter FOLDER")
    if calibration is not None and data is not None:
        raise DoflaError(f"--calibration {calibration} and --data {data} are both given: give one of them")
    view, kinds = current_view(), {"compressed model": out, "adapter": adapter}
    measured = None if calibration is None else Calibration.load(calibration)
    with ExitStack() as stack:
        folders = {kind: stack.enter_context(new_folder(path)) for kind, path in kinds.items() if path is not None}
        compressed, tokenizer = open_original(model, device=device, **opening)
        windows = None if measured else windows_from(data or "self", compressed, tokenizer, text)
        options = {"ratio": ratio, "calibration": measured, "tokenizer": tokenizer, **settings}
        with view.progress("compress") as bar:
            make(compressed, windows, size, progress=bar.stage, **options)
        for kind, folder in folders.items():
            if kind == "adapter":
                write_adapter(compressed, folder)
            else:
                compressed.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    if adapter is not None:
        warn_of_local_base(compressed, adapter)
    plan = Converted.of(compressed).plan
    view.show(plan)
    held_out(plan.made_by)
    if heads := plan.made_by.get("retrieval_heads"):
        view.say(f"retrieval heads: {', '.join(f'{name} {head}' for name, own in heads.items() for head in own)}")
    for kind, path in kinds.items():
        if path is not None:
            written(kind, path)
    following("evaluate", out or adapter, "--data", data or "sample")
    return {"folder": out, "adapter": adapter, "state_bytes": plan.state_bytes(compressed.dtype), **plan.to_dict()}
