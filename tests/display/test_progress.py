"""Bars: who sees one, and never two."""

import re
from contextlib import redirect_stderr
from functools import partial
from io import StringIO

import pytest
from students import student_of

import dofla
from dofla.display import Bar, reporting, showing
from dofla.runs.view import View

LENGTH = 16


class Terminal(StringIO):
    def isatty(self):
        return True


def seen_of(work, *arguments, **options):
    """What a terminal shows meanwhile, without the seconds."""
    with redirect_stderr(Terminal()) as shown:
        work(*arguments, **options)
    return re.sub(r" \[[\d:?]+<[\d:?]+\]", "", shown.getvalue())


def outer(*, progress=True):
    with reporting("outer", progress, Bar.__call__) as report:
        if report:
            report(1, 2, "outside")
        inner()
        if report:
            report(2, 2, "outside")


def inner(*, progress=True):
    with reporting("inner", progress, Bar.__call__) as report:
        if report:
            report(1, 1, "inside")


def test_a_terminal_shows_one_bar_whatever_is_called_within():
    shown = seen_of(outer)
    assert "outer" in shown
    assert "1/2, outside" in shown
    assert "inner" not in shown
    assert "1/1, inside" in seen_of(inner)


def test_a_bar_can_be_switched_off_and_only_the_first_process_shows_one_on_a_terminal(monkeypatch):
    for progress in (False, None):
        assert seen_of(outer, progress=progress) == ""
    with redirect_stderr(StringIO()) as shown:
        outer()
    assert shown.getvalue() == ""
    monkeypatch.setattr("dofla.display.progress.is_main_process", lambda: False)
    assert seen_of(outer) == ""


def test_a_function_is_called_instead():
    reports = []
    assert seen_of(outer, progress=lambda *report: reports.append(report)) == ""
    assert reports == [(1, 2, "outside"), (2, 2, "outside")]


@pytest.mark.parametrize("quiet", [False, True])
def test_a_view_shows_its_own_and_no_other(quiet):
    def verb():
        with View(quiet=quiet).progress("verb") as bar:
            bar(1, 3)
            outer()
            bar(3, 3)

    shown = seen_of(verb)
    assert ("1/3" in shown) != quiet
    assert "outside" not in shown


def test_a_bar_that_failed_is_gone_and_the_next_is_shown():
    def work():
        with pytest.raises(ZeroDivisionError), showing("broken", True) as bar:
            bar(1 / 0, 2)
        outer()

    assert "1/2, outside" in seen_of(work)


def test_stages_come_and_go():
    def work():
        with reporting("curves", True, Bar.stage) as report:
            for stage in (("sizes", 7, 9), ("effects", 1, 30), ("effects", 2, 30), ("sizes", 8, 9)):
                report(*stage)

    shown = seen_of(work)
    assert all(text in shown for text in ("7/9, sizes", "1/30, effects", "8/9, sizes"))
    assert "None" not in shown


def calls(tiny):
    """The functions of the library that show a bar, and its label."""
    tokens = tiny.tokens(4, LENGTH)
    yield "profile", lambda **options: dofla.linear.profile(tiny.llama(), tokens, samples=8, **options)
    curves = {"budget": 4, "steps": 1, "batch_size": 1, "held_out": 1, "rows": 4}
    yield "error curves", lambda **options: dofla.linear.measure_curves(tiny.llama(), tokens, **curves, **options)
    yield "distill", lambda **options: dofla.linear.distill(student_of(tiny), tokens, steps=2, **options)
    whole = partial(dofla.linear.distill_end_to_end, steps=2, weights="maps")
    yield "distill end to end", lambda **options: whole(student_of(tiny), tokens, **options)
    yield "evaluate", lambda **options: dofla.evaluate(student_of(tiny), tokens, **options)


def test_what_takes_minutes_shows_one_bar_and_none_when_asked(tiny):
    for label, call in calls(tiny):
        labels = {line.split("  ")[0].strip() for line in seen_of(call).split("\r") if "/" in line}
        assert {text[: len(label)] for text in labels} == {label}
        assert seen_of(call, progress=False) == ""
