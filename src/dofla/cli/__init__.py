"""The command line: one verb per step, files in between.

Each verb imports what it works with when it is called: help, the version and a mistyped option need neither torch nor
transformers, and do not wait for them.
"""

import io
import sys
import traceback
from typing import Annotated, NoReturn

import typer
from typer import Option

from dofla import __version__
from dofla.cli.chat import chat
from dofla.cli.compression import calibrate, check, compress, frontier
from dofla.cli.memory import keep_memory
from dofla.cli.pipeline import allocate, curves, demo, distill, profile, report, run
from dofla.cli.reproduce import reproduce
from dofla.cli.using import evaluate, generate, serve
from dofla.cli.verb import VERBOSITY, Debug, Json, Quiet, Verb, Verbose, Verbosity
from dofla.cli.verb import verb as as_verb
from dofla.errors import DoflaError, ran_out_of_memory

app = typer.Typer(
    help="Give Hugging Face models a small key-value cache.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
GROUPS = {
    "Start": (check, calibrate, compress, frontier, evaluate, generate, chat, serve, demo, report, run),
    "Paper and training": (profile, curves, allocate, distill, reproduce),
}
for group, verbs in GROUPS.items():
    for verb in verbs:
        app.command(cls=Verb, rich_help_panel=group)(as_verb(verb))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    ctx: typer.Context,
    version: Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    ctx.obj = Verbosity(verbose, quiet, json, debug)


def main() -> None:
    """Entry point. Bad input is one line on standard error and exit code 2; a fault of dofla's own one line and 1."""
    keep_memory()
    VERBOSITY.set(Verbosity(debug="--debug" in sys.argv))  # until the command line is read, which may fail, too
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path or a terminal need not be able to say everything
    try:
        app()
    except (DoflaError, OSError) as error:
        _fail(error, str(error), 2)
    except Exception as error:
        if ran_out_of_memory(error):
            _fail(error, "not enough memory: give a smaller batch size or length, or a smaller model", 2)
        _fail(error, f"unexpected {type(error).__name__}: {error} (a bug in dofla: --debug shows where)", 1)


def _fail(error: Exception, message: str, code: int) -> NoReturn:
    if VERBOSITY.get().debug:
        traceback.print_exception(error)
    print("dofla:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(code)
