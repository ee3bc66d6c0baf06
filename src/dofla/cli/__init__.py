"""The command line: one verb per step, files in between."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from transformers.utils import logging as transformers_logging

from dofla import __version__
from dofla.cli.finetune import finetune
from dofla.cli.judging import evaluate, probe
from dofla.cli.pipeline import allocate, curves, demo, distill, profile, run
from dofla.cli.reproduce import reproduce
from dofla.cli.using import generate
from dofla.errors import DoflaError

app = typer.Typer(
    help="Turn a softmax transformer into a linear-attention model: measure, allot, distil, judge.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for verb in (profile, curves, allocate, distill, evaluate, probe, generate, finetune, run, reproduce, demo):
    app.command()(verb)


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
