"""The results of a run as tables: students down, figures across."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from dofla.display import size, table

_COLUMNS = {
    "student_loss": "loss",
    "gap": "gap",
    "kl": "KL",
    "top1_agreement": "top-1",
    "cosine": "cosine",
    "spearman": "Spearman",
    "attention_kl": "attn KL",
    "attention_output_error": "out err",
}


def comparison(results: dict[str, Any]) -> Iterator[Table | Text | str]:
    """The students of a run side by side, and what the best of them writes."""
    yield ""
    yield _table(results)
    if "teacher_loss" in results["students"][0]:
        yield f"teacher loss {results['students'][0]['teacher_loss']:.4f} nats per token"
    if len(results["seeds"]) > 1:
        yield f"mean of {len(results['seeds'])} seeds ± half their range"
    best = min(results["students"], key=lambda row: row.get("gap", row["attention_kl"])["mean"])
    for sample in best["runs"][0].get("samples", []):
        yield ""
        for who in ("prompt", "teacher", "student"):
            name = f"student ({best['name']})" if who == "student" else who
            yield Text.assemble((f"{name}: ", "bold"), " ".join(sample[who].split()))


def _table(results: dict[str, Any]) -> Table:
    """Students down, figures across."""
    keys = [key for key in _COLUMNS if key in results["students"][0]]
    shown = table("student", *(_COLUMNS[key] for key in keys), "state", gap=1)
    several = len(results["seeds"]) > 1
    for row in results["students"]:
        cells = [_figure(row[k]["mean"]) + (f"±{row[k]['spread']:.2f}" if several and k == "gap" else "") for k in keys]
        shown.add_row(row["name"], *cells, size(row["state_bytes"]))
    return shown


def _figure(value: float) -> str:
    """Three decimals; where no key beyond a window is seen, KL(teacher ‖ student) has no end."""
    return f"{value:.3f}" if value < 1e4 else "∞"
