"""The verb ``dofla check``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.options import Context, KeepSoftmax, ModelArgument, Ratio
from dofla.cli.verb import current_view


def check(
    model: ModelArgument,
    size: Annotated[list[str] | None, typer.Option(help="Size of the compressed cache, as 1.5MiB; repeatable.")] = None,
    ratio: Ratio = None,
    context: Context = None,
    keep_softmax: KeepSoftmax = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the model's repository.")
    ] = False,
) -> dict[str, Any]:
    """Say whether a model can be compressed, and what that saves.

    Reads its config, not its weights.
    """
    from dofla.runs.check import check as look

    found = look(
        model,
        size or (),
        ratio=ratio,
        context=context,
        keep_softmax=keep_softmax or (),
        trust_remote_code=trust_remote_code,
    )
    current_view().show(found)
    return found.to_dict()
