"""Plain data, as YAML and JSON hold it, into dataclasses. What does not fit is named."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, get_args, get_origin, get_type_hints

from dofla.errors import DoflaError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Made = TypeVar("_Made", bound="DataclassInstance")

_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
_MOST = 2**43  # whole numbers end here, well below those that no tensor and no seed can be made of


def build(cls: type[_Made], data: Any, where: str, *, strict: bool = True) -> _Made:
    """An instance of a dataclass; fields that are dataclasses, or lists or dicts of them, are built likewise. Unknown
    fields are passed over unless ``strict``.

    Raises:
        DoflaError: naming ``where`` and the field: unknown, missing, or of the wrong kind.
    """
    if not isinstance(data, dict):
        raise DoflaError(f"{where}: expected fields, got {data!r}")
    known, kinds = {f.name: f for f in dataclasses.fields(cls)}, get_type_hints(cls)
    values = {}
    for key, value in data.items():
        if key not in known and not strict:
            continue
        if key not in known:
            names = ", ".join("lambda" if name == "lam" else name for name in known)
            raise DoflaError(f"{where}: unknown field {key!r}: choose from {names}")
        if not _is_section(kinds[key]) and not _fits(value, str(known[key].type)):
            raise DoflaError(f"{where}: {key} is {value!r}: expected {known[key].type}")
        values[key] = _inside(kinds[key], value, f"{where}: {key}", strict)
    for name, one in known.items():
        if name not in values and one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            raise DoflaError(f"{where}: {name!r} is missing")
    return cls(**values)


def sections(cls: type[DataclassInstance]) -> dict[str, type[DataclassInstance]]:
    """The fields of a dataclass that are dataclasses themselves, with their classes."""
    return {name: kind for name, kind in get_type_hints(cls).items() if _is_section(kind)}


def _is_section(kind: Any) -> TypeGuard[type[DataclassInstance]]:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _inside(kind: Any, value: Any, where: str, strict: bool) -> Any:
    """A value in which what is to be a dataclass is built, unless the caller has made it."""
    if _is_section(kind):
        return value if isinstance(value, kind) else build(kind, value, where, strict=strict)
    if get_origin(kind) is list:
        return [_inside(get_args(kind)[0], item, f"{where}[{n}]", strict) for n, item in enumerate(value)]
    if get_origin(kind) is dict:
        return {name: _inside(get_args(kind)[1], item, f"{where}: {name}", strict) for name, item in value.items()}
    return value


def _fits(value: Any, annotation: str) -> bool:
    for option in annotation.split(" | "):
        if option == "None" and value is None:
            return True
        if option.startswith("list[") and isinstance(value, list):
            inner = option[5:-1]
            if inner not in _KINDS or all(_fits(item, inner) for item in value):
                return True
        if option.startswith("dict[") and isinstance(value, dict):
            return all(_fits(item, option[5:-1].rpartition(", ")[2]) for item in value.values())
        if option in _KINDS and isinstance(value, _KINDS[option]) and (option == "bool" or not isinstance(value, bool)):
            return not isinstance(value, (int, float)) or abs(value) < _MOST  # nor infinity nor NaN
        if option not in (*_KINDS, "None") and "[" not in option:
            return True  # what the caller made
    return False


def known_prefill(prefill: Any) -> Any:
    """The way to read prompts that a file names; earlier versions had ``auto``, which was ``exact`` on a GPU."""
    return "exact" if prefill == "auto" else prefill
