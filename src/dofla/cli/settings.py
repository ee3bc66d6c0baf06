"""``--set field=value``: parameters of the functions that a verb calls, with their types, defaults and help.

Functions are read off the source, without importing it: help and a wrong name need neither torch nor transformers.
"""

import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError
from dofla.storage.fields import sections

_ROOT = Path(__file__).parent.parent
_LISTS = ("Collection[str]", "Sequence[str]", "list[str]")
_OBJECTS = ("Mapping[str, Any]", "Mapping[str, float]", "dict[str, float]")


@dataclass(frozen=True)
class Field:
    """A parameter: its name as written (λ is none in Python), types, default as text, and what the docstring says."""

    name: str
    kinds: tuple[str, ...]
    default: str
    help: str

    def value(self, text: str) -> Any:
        """The value that ``text`` stands for; DoflaError if it is of none of the kinds."""
        for kind in sorted(self.kinds, key=lambda kind: kind in ("str", "Path")):
            try:
                return _READERS[kind](text)
            except (ValueError, KeyError, SyntaxError):
                continue
        raise DoflaError(f"--set {self.name}={text}: expected {self}")

    def __str__(self) -> str:
        return f"{' or '.join(self.kinds)} (default {self.default}){self.help and f': {self.help}'}"


@dataclass(frozen=True)
class Function:
    """A function, or a class, whose parameters with a default can be set.

    Args:
        file: its module, below the package.
        name: its name; of a method behind that of its class.
        without: parameters that the verb decides.
        defaults: of the verb, where they differ.
    """

    file: str
    name: str
    without: Sequence[str] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Field]:
        """The fields, by parameter."""
        found = {}
        for name, one in _parameters(self.file, self.name).items():
            if name not in self.without:
                default = str(self.defaults.get(name, one.default))
                found[name] = replace(one, default=default)
        return found


@dataclass(frozen=True)
class Settings:
    """The functions of a verb, by the name of the verb's parameter that gets what was set of them."""

    functions: Mapping[str, Function]
    options: Sequence[str]

    @property
    def fields(self) -> dict[str, Field]:
        """All fields by name, but for what an option of the verb says."""
        functions = [*self.functions.values()][::-1]  # the first says the default of what several have
        found = {own: one for function in functions for own, one in function.fields.items() if own not in self.options}
        return {one.name: one for one in sorted(found.values(), key=lambda one: one.name)}

    def read(self, changes: Sequence[str], check: Callable[[str, Any], None]) -> dict[str, dict[str, Any]]:
        """Values of the fields, by the function that has them; DoflaError for a wrong name or value."""
        values = {where: dict(function.defaults) for where, function in self.functions.items()}
        if not changes:  # then no source is read
            return values
        fields, given = self.fields, {}
        for change in changes:
            name, equals, text = change.partition("=")
            if name not in fields:
                raise DoflaError(f"--set {change!r}: there is no field {name!r}: choose from {', '.join(fields)}")
            if not equals:
                raise DoflaError(f"--set {name} has no value: write {name}=VALUE, {fields[name]}")
            check(name, text)
            given[name] = fields[name].value(text)
            check(name, given[name])
        for where, function in self.functions.items():
            values[where] |= {own: given[x.name] for own, x in function.fields.items() if x.name in given}
        return values

    def __str__(self) -> str:
        return ", ".join(f"{one.name}={one.default}" for one in self.fields.values())


@dataclass(frozen=True)
class Sections:
    """The dataclasses of a YAML file, whose fields ``section.field=value`` changes.

    Args:
        kinds: the dataclasses, one of which the file is.
        before: names of several such files, one of which stands before each field.
    """

    kinds: Sequence[type]
    before: Sequence[str] = ()

    def __str__(self) -> str:
        start = f"{' or '.join(f'{name}.' for name in self.before)} before " if self.before else ""
        return start + ", ".join(dict.fromkeys(name for kind in self.kinds for name in _names_in(kind)))


def _names_in(kind: type) -> Iterator[str]:
    inner = sections(kind)
    for one in fields(kind):
        if one.name in inner:
            yield from (f"{one.name}.{x.name}" for x in fields(inner[one.name]))
        else:
            yield _written(one.name)


@cache
def _module(file: str) -> ast.Module:
    return ast.parse((_ROOT / file).read_text(encoding="utf-8"))


def _named(tree: ast.Module | ast.ClassDef, name: str) -> Any:
    return next(x for x in tree.body if isinstance(x, (ast.FunctionDef, ast.ClassDef)) and x.name == name)


@cache
def _parameters(file: str, name: str) -> dict[str, Field]:
    outer, _, inner = name.partition(".")
    node = _named(_module(file), outer)
    helps = _helps(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        node = _named(node, inner or "__init__")
    args, found = node.args, dict[str, Field]()
    given = [*zip(args.args[::-1], args.defaults[::-1], strict=False)][::-1]
    for arg, default in [*given, *zip(args.kwonlyargs, args.kw_defaults, strict=True)]:
        kinds = tuple(_kinds(arg.annotation))
        if default is not None and set(kinds) <= _READERS.keys() and set(kinds) != {"None"}:
            found[arg.arg] = Field(_written(arg.arg), kinds, _text(file, default), helps.get(arg.arg, ""))
    return found


def _written(name: str) -> str:
    return "lambda" if name == "lam" else name


def _text(file: str, default: ast.expr) -> str:
    """A default as it is written behind ``--set``; of a constant, the one that the module has or imports."""
    if isinstance(default, ast.Name):
        for one in _module(file).body:
            if isinstance(one, ast.Assign) and default.id in map(ast.unparse, one.targets):
                return _text(file, one.value)
            if isinstance(one, ast.ImportFrom) and default.id in (x.name for x in one.names):
                return _text(f"{str(one.module).removeprefix('dofla.').replace('.', '/')}.py", default)
    text = ast.unparse(default).strip("'\"")
    return {"None": "none", "()": "none", "True": "true", "False": "false"}.get(text, text)


def _kinds(node: ast.expr | None) -> Iterator[str]:
    if isinstance(node, ast.BinOp):
        yield from _kinds(node.left)
        yield from _kinds(node.right)
    elif node is not None:
        yield ast.unparse(node)


def _helps(docstring: str) -> dict[str, str]:
    """The section Args, by parameter."""
    section = re.search(r"^Args:\n((?:    .*\n?|\n)*)", inspect.cleandoc(docstring), re.MULTILINE)
    found: dict[str, str] = {}
    for names, text in re.findall(r"^    ([\w, ]+): (.*(?:\n {8,}.*)*)", section[1] if section else "", re.MULTILINE):
        words = re.sub(r":\w+:`~?([\w.]+)`", r"\1", " ".join(text.split())).replace("``", "").rstrip(".")
        found |= dict.fromkeys(names.split(", "), words)
    return found


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError
    return number


def _object(text: str) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(text)
    except Exception as error:  # the parser lets errors of all kinds through
        raise ValueError from error
    if not isinstance(found, dict):
        raise ValueError
    return found


def _list(text: str) -> list[str]:
    return [] if text == "none" else [word.strip() for word in text.strip("[]").split(",") if word.strip()]


_READERS: dict[str, Callable[[str], Any]] = {
    "None": {"none": None, "None": None, "null": None}.__getitem__,
    "bool": {"true": True, "True": True, "false": False, "False": False}.__getitem__,
    "int": int,
    "float": _number,
    **dict.fromkeys(_LISTS, _list),
    **dict.fromkeys(_OBJECTS, _object),
    "str": str,
    "Path": Path,
}
