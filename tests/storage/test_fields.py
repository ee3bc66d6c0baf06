"""Plain data into dataclasses."""

from __future__ import annotations  # kinds of fields are strings, as they are everywhere in dofla

import math
from dataclasses import dataclass, field

import pytest

from dofla.errors import DoflaError
from dofla.storage.fields import build


@dataclass
class Inner:
    a: int = 1


@dataclass
class Outer:
    name: str
    count: int | None = None
    share: float = 0.5
    flag: bool = False
    names: list[str] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    others: list[Inner] = field(default_factory=list)


def test_what_fits_is_taken():
    data = {"name": "x", "count": 3, "share": 1, "flag": True, "names": ["a"], "rates": {"a": 1}, "inner": {"a": 2}}
    assert build(Outer, data, "it") == Outer("x", 3, 1, True, ["a"], {"a": 1}, Inner(2))
    assert build(Outer, {"name": "x", "count": None}, "it") == Outer("x")
    assert build(Outer, {"name": "x", "others": [{"a": 3}, Inner(4)]}, "it").others == [Inner(3), Inner(4)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"it: expected fields, got \[\]"),
        ({}, "it: 'name' is missing"),
        ({"name": "x", "nmae": 1}, "it: unknown field 'nmae': choose from name, count, share"),
        ({"name": 3}, "it: name is 3: expected str"),
        ({"name": "x", "count": True}, "it: count is True: expected int | None"),
        ({"name": "x", "count": 1.5}, "it: count is 1.5"),
        ({"name": "x", "count": 10**20}, "it: count is 10000"),
        ({"name": "x", "share": math.nan}, "it: share is nan: expected float"),
        ({"name": "x", "share": "0.5"}, "it: share is '0.5'"),
        ({"name": "x", "flag": 1}, "it: flag is 1: expected bool"),
        ({"name": "x", "names": ["a", 1]}, "it: names is"),
        ({"name": "x", "rates": {"a": "b"}}, "it: rates is"),
        ({"name": "x", "inner": None}, "it: inner: expected fields, got None"),
        ({"name": "x", "inner": {"b": 1}}, "it: inner: unknown field 'b'"),
        ({"name": "x", "others": {}}, "it: others is {}"),
        ({"name": "x", "others": [{}, {"b": 1}]}, "it: others[1]: unknown field 'b'"),
    ],
)
def test_what_does_not_fit_is_named(data, message):
    with pytest.raises(DoflaError) as error:
        build(Outer, data, "it")
    assert message.replace("\\", "") in str(error.value)
