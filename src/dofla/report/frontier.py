"""The section on what ``dofla frontier`` found: quality by bytes of the cache."""

import shlex
from pathlib import Path
from typing import Any

from dofla.report import charts
from dofla.report.charts import Chart
from dofla.report.comparison import model_title
from dofla.report.page import Section
from dofla.report.runs import naming
from dofla.runs.frontier import ADAPTERS, FRONTIER, Frontier


def is_frontier(folder: str | Path) -> bool:
    """True if ``dofla frontier`` has written the folder."""
    return (Path(folder) / FRONTIER).exists()


def frontier_section(folder: str | Path) -> Section:
    """The section on a frontier; DoflaError naming the file, if it is damaged."""
    folder, found = Path(folder), Frontier.load(folder)
    with naming(folder):
        model, made = found.model, found.made_from
        return Section(
            title=model_title(model["name"]),
            verdict=found.verdict(),
            evaluated=[
                f"{model['class']}, {model['parameters']:,} parameters; calibrated on {made['tokens']:,} "
                f"tokens: {made['source']}",
                "evaluated on " + "; ".join(f"{text}: {source}" for text, source in found.evaluated.items()),
            ],
            parts=list(found.parts())[1:],  # the first is the verdict
            charts=_charts(found),
            commands=[f"dofla chat {shlex.quote(str(folder / ADAPTERS / str(size)))}" for size in found.kept],
        )


def _charts(found: Frontier) -> list[Chart]:
    rows = [
        {"text": x.text, "bytes": x.bytes, "length": x.length, "loss": x.loss_increase, "kl": x.kl}
        | charts.ends(x.loss_increase_interval)
        for x in found.points
    ]
    shown: dict[str, Any] = {"by": "text", "caches": found.cache.values(), "target": found.target}
    return [charts.loss_against_bytes(rows, found.texts, field=field, **shown) for field in ("loss", "kl")]
