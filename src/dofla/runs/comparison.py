"""The results of a run as tables: students down, figures across."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from dofla.display import rounded, size, table

_COLUMNS = {
    "student_loss": "loss",
    "loss_increase": "increase",
    "kl": "KL",
    "top1_agreement": "top-1",
    "cosine": "cosine",
    "spearman": "Spearman",
    "attention_kl": "attn KL",
    "attention_output_error": "out err",
}


_FIGURE, _SPREAD, _SIZE = len("-0.000"), len("±0.00"), len("1000.0 KiB")


def student_row(row: dict[str, Any], names: Sequence[str], seeds: Sequence[int]) -> Iterator[Table | str]:
    """A student of a run, as soon as it is known; the first with what stands above all of them.

    Args:
        row: of the results.
        names: of all students, for the width of their column.
        seeds: of the run.
    """
    first, several = row["name"] == names[0], len(seeds) > 1
    if first:
        yield ""
    keys = [key for key in _COLUMNS if key in row]
    shown = table("student", *(_COLUMNS[key] for key in keys), "state", gap=1, show_header=first)
    # In columns as wide as for any other.
    widths = [_FIGURE + (_SPREAD if several and key == "loss_increase" else 0) for key in keys]
    for column, width in zip(shown.columns, (max(map(len, names)), *widths, _SIZE), strict=True):
        column.min_width = max(width, len(str(column.header)))
    cells = [
        rounded(row[k]["mean"]) + (f"±{row[k]['spread']:.2f}" if several and k == "loss_increase" else "") for k in keys
    ]
    shown.add_row(row["name"], *cells, size(row["state_bytes"]))
    yield shown


def closing(results: dict[str, Any]) -> Iterator[Text | str]:
    """What stands below the students of a run, and what the best of them writes."""
    if "teacher_loss" in results["students"][0]:
        yield f"teacher loss {results['students'][0]['teacher_loss']:.4f} nats per token"
    if len(results["seeds"]) > 1:
        yield f"mean of {len(results['seeds'])} seeds ± half their range"
    best = min(results["students"], key=lambda row: row.get("loss_increase", row["attention_kl"])["mean"])
    for sample in best["runs"][0].get("samples", []):
        yield ""
        for who in ("prompt", "teacher", "student"):
            name = f"student ({best['name']})" if who == "student" else who
            yield Text.assemble((f"{name}: ", "bold"), " ".join(sample[who].split()))
