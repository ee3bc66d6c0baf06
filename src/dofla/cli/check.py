"""The verb ``dofla check``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.endings import following
from dofla.cli.options import Given, ModelArgument, Ratio
from dofla.cli.settings import Function
from dofla.cli.verb import current_view


def check(
    model: ModelArgument,
    size: Annotated[list[str] | None, typer.Option(help="Size of the compressed cache, as 1.5MiB; repeatable.")] = None,
    ratio: Ratio = None,
    settings: Given = Function("runs/check.py", "check", ("sizes",)),
) -> dict[str, Any]:
    """Say whether a model can be compressed, and what that saves.

    Reads its config, not its weights.
    """
    from dofla.runs.check import check as look

    found = look(model, size or (), ratio=ratio, **settings)
    current_view().show(found)
    if found.supported:
        asked = ["--size", size[0]] if size else ["--ratio", f"{ratio or 16:g}"]
        following("compress", model, *asked, "--out", "compressed")
    return found.to_dict()
