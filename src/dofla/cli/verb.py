"""The common part of all verbs: options for how much they print, and a result that a program can read."""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer import Option
from typer.core import TyperCommand

from dofla.cli.options import OUTPUT
from dofla.cli.settings import Function, Sections, Settings
from dofla.errors import DoflaError
from dofla.storage.files import plain
from dofla.storage.rank import is_main_process

if TYPE_CHECKING:
    from dofla.runs.view import View

_TALKATIVE = "torchao", "torch.utils._pytree"
"""Loggers that warn, whenever torchao is imported, of libraries that it does without."""
Verbose = Annotated[bool, Option("--verbose", "-v", help="Log every step.", rich_help_panel=OUTPUT)]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Only print errors and requested text.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, Option("--json", help="Only print the result, as JSON.", rich_help_panel=OUTPUT)]
Debug = Annotated[bool, Option("--debug", help="Log everything; show tracebacks of errors.", rich_help_panel=OUTPUT)]


@dataclass(frozen=True)
class Verbosity:
    """Options for how much a command prints and logs, and for a person or a program."""

    verbose: Verbose = False
    quiet: Quiet = False
    json: Json = False
    debug: Debug = False

    def __or__(self, other: Verbosity) -> Verbosity:
        return Verbosity(*(getattr(self, field.name) or getattr(other, field.name) for field in fields(self)))

    @property
    def level(self) -> int:
        """The level from which on messages are logged."""
        if self.debug:
            return logging.DEBUG
        return logging.INFO if self.verbose else logging.ERROR if self.quiet else logging.WARNING


_MOST = 2**31 - 1
OPTIONS = get_type_hints(Verbosity, include_extras=True)
VERBOSITY: ContextVar[Verbosity] = ContextVar("manner")
"""Verbosity of the running command."""
_VIEW: ContextVar[View] = ContextVar("view")


def current_view() -> View:
    """The view that the running command prints on."""
    return _VIEW.get()


Set = Annotated[list[str] | None, Option("--set", help="One of the fields below: field=value; repeatable.")]


class Verb(TyperCommand):
    """A verb whose help ends with the fields that ``--set`` takes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if fields := str(getattr(self.callback, "fields", "")):
            self.epilog = f"Fields of --set: {fields}."
        super().format_help(ctx, formatter)


class No(dict[str, Any]):
    """A result which says that something is not so: the command prints it, and exits with 1."""


def verb(function: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    """A function as a verb: it gets :data:`OPTIONS`, and what it returns is what ``--json`` prints.

    A parameter whose default is a :class:`~dofla.cli.settings.Function` gets as a dict what ``--set`` says of it; one
    whose default are :class:`~dofla.cli.settings.Sections` gets the changes as they are.
    """
    parameters = inspect.signature(function).parameters
    functions = {name: p.default for name, p in parameters.items() if isinstance(p.default, Function)}
    sections = {name: p.default for name, p in parameters.items() if isinstance(p.default, Sections)}
    settings = Settings(functions, [name for name in parameters if name not in functions])

    @wraps(function)
    def command(ctx: typer.Context, **given: Any) -> None:
        manner = Verbosity(**{name: given.pop(name) for name in OPTIONS}) | ctx.obj
        VERBOSITY.set(manner)
        for name, value in given.items():
            _check(name.replace("_", "-"), value)
        changes = given.pop("set", None) or []
        given |= dict.fromkeys(sections, changes) if sections else settings.read(changes, _check)
        try:
            with _showing(manner):
                result = function(**given)
        except KeyboardInterrupt:
            if is_main_process():
                print("dofla: interrupted", *_kept(given), file=sys.stderr)
            raise typer.Exit(130) from None
        if manner.json and is_main_process():
            print(json.dumps(plain(result), indent=2, ensure_ascii=False, allow_nan=False))
        if isinstance(result, No):
            raise typer.Exit(1)

    hints = get_type_hints(function, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    own = [
        p.replace(annotation=hints[p.name], kind=kind)
        for p in parameters.values()
        if p.name not in {*functions, *sections}
    ]
    added = ({"set": Set} if functions or sections else {}) | OPTIONS
    common = [
        inspect.Parameter(name, kind, default=None if name == "set" else False, annotation=hint)
        for name, hint in added.items()
    ]
    first = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__signature__ = inspect.Signature([first, *own, *common])  # type: ignore[attr-defined] # inspect reads it
    command.__annotations__ = {"ctx": typer.Context} | {p.name: p.annotation for p in (*own, *common)}
    if functions or sections:
        command.fields = next(iter(sections.values()), settings)  # type: ignore[attr-defined] # Verb reads it
    return command


def _kept(given: Mapping[str, Any]) -> Iterator[str]:
    """Words on what an interrupted verb has written; none of one that writes nothing."""
    view = _VIEW.get(None)  # none while libraries are imported
    resumes = None if view is None else view.resumes
    places = [path for name in ("out", "adapter") if (path := given.get(name)) and path.exists()]
    if resumes is not None and resumes.exists():
        yield f"({resumes} has what was finished: the same command goes on from there)"
    elif written := [str(path) for path in places if path.is_file() or any(path.iterdir())]:
        yield f"({' and '.join(written)} was written already)"
    elif {"out", "adapter"} & given.keys():
        yield "(nothing was written)"


def _check(name: str, value: Any) -> None:
    """DoflaError for what no verb can do anything with."""
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, int) and abs(one) > _MOST:
            raise DoflaError(f"{name} is {one}: give {_MOST} at most")
        if isinstance(one, (str, Path)) and not str(one).isascii() and re.search("[\ud800-\udfff]", str(one)):
            raise DoflaError(f"{name} is {str(one)!r}, which is no UTF-8: give other characters")


@contextmanager
def _showing(manner: Verbosity) -> Iterator[None]:
    """Within the block there is a view, and what is logged is shown on it."""
    for name in () if manner.verbose or manner.debug else _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    from dofla.runs.view import View

    _VIEW.set(View(quiet=manner.quiet or not is_main_process(), results=not manner.json))
    logger, handler = logging.getLogger("dofla"), _Lines()
    handler.setLevel(manner.level)
    logger.addHandler(handler)
    before = logger.level
    logger.setLevel(manner.level)
    transformers_logging.set_verbosity(logging.WARNING if manner.verbose or manner.debug else logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


class _Lines(logging.Handler):
    """Shows what is logged between the bars."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        current_view().note(self.format(record))
