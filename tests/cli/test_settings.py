"""``--set``: the fields are the parameters of the functions that a verb calls, as Python has them."""

import importlib
import inspect
from pathlib import Path

import pytest
import typer
from command_line import call
from hypothesis import given, settings
from hypothesis import strategies as st

from dofla import DoflaError
from dofla.cli import app
from dofla.cli.settings import Field, Function, Settings

SETTINGS = {
    name: command.callback.fields
    for name, command in typer.main.get_command(app).commands.items()
    if isinstance(getattr(command.callback, "fields", None), Settings)
}
FUNCTIONS = [(verb, one) for verb, settings in SETTINGS.items() for one in settings.functions.values()]


def found(function: Function):
    """The function itself."""
    here = importlib.import_module("dofla." + function.file.removesuffix(".py").replace("/", "."))
    for name in function.name.split("."):
        here = getattr(here, name)
    return here


@pytest.mark.parametrize(("verb", "function"), FUNCTIONS, ids=lambda x: getattr(x, "name", x))
def test_fields_are_parameters_and_every_simple_parameter_is_a_field(verb, function):
    parameters = inspect.signature(found(function)).parameters
    assert function.fields
    for name, one in function.fields.items():
        default = parameters[name].default if name not in function.defaults else function.defaults[name]
        assert one.value(one.default) in (default, [] if default == () else default)
        assert one.help or (verb, name) in {("evaluate", "layers"), ("distill", "steps")}
        assert "`" not in one.help
    simple = {
        name
        for name, own in parameters.items()
        if str(own.annotation) in ("int", "bool", "str", "float") and own.default is not own.empty
    }
    assert simple - set(function.without) <= function.fields.keys()


def some_settings(**defaults) -> Settings:
    text = Function("integration/self_samples.py", "token_windows", ("split", "progress"), defaults)
    return Settings({"text": text, "opening": Function("runs/opening.py", "open_original")}, ["device"])


def read(*changes: str, **defaults) -> dict:
    return some_settings(**defaults).read(changes, lambda *_: None)


def test_each_function_gets_its_own_fields_and_the_defaults_of_the_verb():
    given = read("length=64", "dtype=float16", "padded=true", "offload=a/b", "holdout=1e-1", windows=12)
    assert given["text"] == {"windows": 12, "length": 64, "padded": True, "holdout": 0.1}
    assert given["opening"] == {"dtype": "float16", "offload": Path("a/b")}
    assert read("windows=none", windows=12)["text"] == {"windows": None}
    assert "windows=12" in str(some_settings(windows=12))
    assert "device" not in str(some_settings())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("lenght=3", ["there is no field 'lenght'", "choose from dtype, holdout, length, offload"]),
        ("device=cpu", ["there is no field 'device'"]),
        ("", ["there is no field ''"]),
        ("length", ["length has no value: write length=VALUE, int (default 512): tokens per window"]),
        ("length=long", ["length=long: expected int (default 512): tokens per window"]),
        ("length=", ["expected int"]),
        ("padded=1", ["expected bool"]),
        ("holdout=nan", ["expected float"]),
    ],
)
def test_a_wrong_name_or_value_lists_what_there_is(change, words):
    with pytest.raises(DoflaError, match=r"^--set ") as caught:
        read(change)
    for word in words:
        assert word in str(caught.value)


@settings(max_examples=40)
@given(st.sampled_from(["length", "holdout", "padded", "dtype", "offload"]), st.text())
def test_any_value_is_of_the_kind_or_refused_in_one_line(name, text):
    kinds = {"length": int, "holdout": float, "padded": bool, "dtype": (str, type(None)), "offload": (Path, type(None))}
    try:
        given, message = read(f"{name}={text}"), ""
    except DoflaError as error:
        given, message = {}, str(error)
    values = [value for own in given.values() for value in own.values()]
    assert message.startswith(f"--set {name}") if message else isinstance(values[0], kinds[name])


def test_lists_and_objects():
    kinds = ("Sequence[str]", "Mapping[str, float]", "None")
    one = Field("x", kinds[:1], "none", "")
    assert one.value("a, b") == one.value("[a,b]") == ["a", "b"]
    assert Field("x", kinds[1:], "none", "").value('{"a": 1e-3}') in ({"a": 0.001}, {"a": "1e-3"})
    with pytest.raises(DoflaError, match=r"expected Mapping\[str, float\] or None"):
        Field("x", kinds[1:], "none", "").value("[4096]")


def test_a_number_that_is_too_large_is_refused(capsys):
    assert call("compress", "demo", "--set", f"length={2**40}", "--out", "new") == 2
    assert capsys.readouterr().err == f"dofla: length is {2**40}: give {2**31 - 1} at most\n"
