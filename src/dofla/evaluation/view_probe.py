"""Tables of a probe that fit 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dofla.evaluation.generation import TEXTS


def probe_view(record: dict[str, Any]) -> Iterator[Group]:
    """A titled table for each part of a record of :func:`dofla.evaluation.probe.probe`.

    Print them one by one: ``for part in probe_view(record): console.print(part)``.
    """
    if "positions" in record:
        yield positions_view(record["positions"])
    if "generation" in record:
        yield texts_view(record["generation"])
        yield agreement_view(record["generation"])
    if "recall" in record:
        yield recall_view(record["recall"]["records"], f"Recall, {record['recall']['text']}", "nats")
    if "passkey" in record:
        yield recall_view(record["passkey"]["records"], "Recall, pass key", "nats/token")


def positions_view(figures: dict[str, Any]) -> Group:
    """Loss by position, a row per bin."""
    table = _table("positions", "tokens", "teacher", "student", "gap")
    for row in figures["bins"]:
        losses = (f"{row[name]:.3f}" for name in ("teacher_loss", "student_loss"))
        table.add_row(f"{row['first']}-{row['last']}", str(row["tokens"]), *losses, _with_error(row, "gap"))
    return _titled("Loss by position in the context, nats per token", table)


def texts_view(figures: dict[str, Any]) -> Group:
    """What either model thinks of each continuation, a row per continuation."""
    table = _table("continuation", "teacher's loss", "student's loss", "repeated")
    for name in TEXTS:
        row = figures["texts"][name]
        share = "" if row["repeated"] is None else f"{row['repeated']:.1%}"
        losses = (_with_error(row, who) for who in ("teacher_loss", "student_loss"))
        table.add_row(name.replace("_", ", "), *losses, share)
    size = f"{figures['prompts']} prompts, {figures['new_tokens']} new tokens"
    return _titled(f"Continuations ({size}), nats per token", table)


def agreement_view(figures: dict[str, Any]) -> Group:
    """Agreement of the greedy tokens at the 1st, 2nd, 4th, 8th, ... new token, a row per way of asking."""
    new = figures["new_tokens"]
    shown = [n for n in (2**k for k in range(new.bit_length())) if n < new] + [new]
    table = _table("new token", *map(str, shown))
    names = {"forced": "after the teacher's text", "token": "each after its own", "prefix": "the same until here"}
    for key, name in names.items():
        table.add_row(name, *(f"{figures['agreement'][key][n - 1]:.0%}" for n in shown))
    return _titled(f"Greedy tokens that agree; together for {figures['agreed_tokens']:.1f} tokens", table)


def recall_view(records: list[dict[str, Any]], title: str, unit: str) -> Group:
    """Recall by length and depth: right among the choices, written by greedy decoding, loss of the right answer."""
    each = ("right", "written", "loss")
    heads = [f"{who if n == 0 else ''}\n{name}" for who in ("teacher", "student") for n, name in enumerate(each)]
    table = _table("\nlength", "\ndepth", "\nn", "\nchance", *heads)
    for row in records:
        cells = []
        for figures in (row["teacher"], row["student"]):
            cells += [f"{figures['accuracy']:.0%}", f"{figures['greedy']:.0%}", f"{figures['loss']:.2f}"]
        table.add_row(str(row["length"]), f"{row['depth']:.2f}", str(row["n"]), f"{row['chance']:.0%}", *cells)
    return _titled(f"{title}: right among the choices, written greedily, loss in {unit}", table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _titled(title: str, table: Table) -> Group:
    return Group(Text(f"\n{title}"), table)


def _with_error(row: dict[str, Any], name: str) -> str:
    error = row[f"{name}_error"]
    return f"{row[name]:.3f}" if error is None else f"{row[name]:.3f} ± {error:.3f}"
