"""The verb ``dofla check``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dofla.cli.options import KeepSoftmax, ModelArgument
from dofla.cli.verb import current_view


def check(
    model: ModelArgument,
    budget: Annotated[
        list[int] | None, typer.Option(help="Cache size, in features per KV head; repeatable; default 64.")
    ] = None,
    keep_softmax: KeepSoftmax = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow code from the model's repository.")
    ] = False,
) -> dict[str, Any]:
    """Say whether a model can be compressed, and what that saves.

    Reads its config, not its weights.
    """
    from dofla.runs.check import check as look

    budgets = list(dict.fromkeys(budget or [64]))
    found = look(model, budgets, keep_softmax=keep_softmax or (), trust_remote_code=trust_remote_code)
    current_view().show(found)
    return found.to_dict()
