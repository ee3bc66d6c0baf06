"""Gap against bytes of state as a picture, of a compressed cache and of a window, by length and kind of text; and
pairs of words that are found, where they were asked for.

    python benchmarks/quality/compressed_plot.py compressed-512.json compressed-2048.json --out
    docs/quality-compressed.svg

Reads what benchmarks/quality/compressed.py wrote with --out (and --recall). Needs matplotlib (`pip install
matplotlib`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import matplotlib.pyplot as plt
import typer

from dofla.storage.files import read_json

COLOURS = ("#0b6e99", "#b3541e", "#7a5fa8", "#2f7d4f")
LEAST = 1e-3  # nats that are shown: intervals reach down to nothing, which a logarithm cannot
LINES = {"compressed": ("-", "o"), "window": (":", "s")}


def main(
    results: Annotated[list[Path], typer.Argument(help="Files of benchmarks/quality/compressed.py.")],
    out: Annotated[Path, typer.Option(help="SVG file to write.")] = Path("compressed.svg"),
) -> None:
    rows = [row for path in results for row in read_json(path, "figures of benchmarks/quality/compressed.py")["rows"]]
    lengths = sorted({row["length"] for row in rows})
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["texts"]))
    pairs = [row for row in rows if "pairs" in row]
    plt.rcParams |= {"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    panels = len(lengths) + bool(pairs)
    figure, axes = plt.subplots(1, panels, figsize=(3.6 * panels, 3.4), layout="constrained", squeeze=False)
    gaps = axes[0][: len(lengths)]
    for length, axis in zip(lengths, gaps, strict=True):
        axis.sharey(gaps[0])
        axis.tick_params(labelleft=axis is gaps[0])
        _draw_gaps(axis, [row for row in rows if row["length"] == length], kinds)
        axis.set(yscale="log", ylim=(LEAST, None), title=f"{length:,} tokens")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.minorticks_off()
    gaps[0].set_ylabel("gap, nats per token (squares: a window)")
    if pairs:
        _draw_pairs(axes[0][-1], pairs)
    handles, labels = gaps[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(out, metadata={"Date": None})
    print(f"written to {out}")


def _draw_gaps(axis: plt.Axes, rows: list[dict[str, Any]], kinds: list[str]) -> None:
    for kind, colour in zip(kinds, COLOURS, strict=False):
        for student, (line, marker) in LINES.items():
            points = sorted(_points(rows, student, kind))
            if points:
                sizes, *gaps = zip(*points, strict=True)
                label = kind if student == "compressed" else None
                _draw(axis, sizes, gaps, color=colour, ls=line, marker=marker, label=label)
    _sizes(axis, rows)


def _draw_pairs(axis: plt.Axes, rows: list[dict[str, Any]]) -> None:
    for length, colour in zip(sorted({row["length"] for row in rows}), COLOURS, strict=False):
        here = [row for row in rows if row["length"] == length]
        for student, (line, marker) in LINES.items():
            points = sorted(
                (row["bytes"] / 2**20, row["pairs"][0]["student"]) for row in here if row["student"] == student
            )
            if points:
                label = f"{length:,} tokens" if student == "compressed" else None
                axis.plot(*zip(*points, strict=True), color=colour, ls=line, marker=marker, ms=3.5, lw=1.2, label=label)
        axis.axhline(here[0]["pairs"][0]["teacher"], color=colour, lw=0.6, ls="--")
    axis.set(ylim=(0, 1), title="pairs of words found (dashed: the original)")
    axis.legend(frameon=False)
    _sizes(axis, rows)


def _sizes(axis: plt.Axes, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({row["bytes"] / 2**20 for row in rows if row["student"] == "compressed"})
    axis.set(xscale="log", xlabel="state per sequence, MiB")
    axis.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
    axis.minorticks_off()
    axis.grid(True, lw=0.3, color="#ccc")


def _points(rows: list[dict[str, Any]], student: str, kind: str):
    """(MiB, gap, lower and upper end of its interval)."""
    for row in rows:
        if row["student"] == student and kind in row["texts"]:
            first = row["texts"][kind][0]
            yield row["bytes"] / 2**20, first["gap"], *first["gap_interval"]


def _draw(axis: plt.Axes, sizes: tuple, gaps: list[tuple], **style: Any) -> None:
    means, lows, highs = gaps
    beside = [[m - low for m, low in zip(means, lows, strict=True)], [h - m for m, h in zip(means, highs, strict=True)]]
    axis.errorbar(sizes, means, beside, ms=3.5, lw=1.2, elinewidth=0.6, **style)


if __name__ == "__main__":
    typer.run(main)
