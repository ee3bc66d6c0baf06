"""Help of the command line: verbs in groups, each with the options that most calls need; --help-all shows all."""

from __future__ import annotations

from copy import copy
from typing import Annotated, Any

import typer
from typer.core import TyperArgument, TyperCommand

GROUPS = {
    "Start": {
        "check": "size ratio context keep_softmax trust_remote_code",
        "compress": "out size ratio data context retrieval_heads device",
        "frontier": "data text lengths sizes target out device",
        "evaluate": "data tasks windows length out base_model device",
        "generate": "prompt new_tokens sample chat document prompt_state device",
        "chat": "new_tokens sample system base_model dtype device",
        "serve": "host port sessions at_once compile api_key device",
        "demo": "out change device",
        "report": "out speed",
        "run": "out change track device",
    },
    "Paper and training": {
        "profile": "data out windows length samples lam device",
        "curves": "data out budget windows length steps device",
        "allocate": "out budget strategy curves feature_map context",
        "distill": "plan data out windows length epochs device",
        "reproduce": "model table seeds scale out device",
    },
}
"""The verbs of each group, with the options of their short help; --help is one more."""
_SHORT = {name: set(options.split()) for group in GROUPS.values() for name, options in group.items()}
_ALL = "dofla.help_all"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show this message with all options.")
]


class Verb(TyperCommand):
    """A verb whose help has two lengths."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if ctx.meta.get(_ALL):
            return super().format_help(ctx, formatter)
        short = copy(self)
        short.params = [x for x in self.params if isinstance(x, TyperArgument) or x.name in _SHORT[str(self.name)]]
        short.params = list(map(_without_panel, short.params))
        more = len(self.params) - len(short.params)
        short.epilog = f"{more} more options: {ctx.command_path} --help-all"
        return super(Verb, short).format_help(ctx, formatter)


def _without_panel(param: Any) -> Any:
    param = copy(param)
    param.rich_help_panel = None
    return param
