"""Degrees of freedom and their standard errors as a table that fits 80 columns."""

from collections.abc import Iterator, Sequence
from textwrap import shorten

from rich.text import Text

from dofla.display import Part, table
from dofla.display.tables import WIDTH

DOUBT = 0.25
"""Share of a value above which its standard error is worth a warning."""

Rows = Sequence[Sequence[float]]
"""[layer][KV head]"""

_HEADS_PER_TABLE = {True: 6, False: 13}  # with standard errors, and without
_SHADES = ("grey50", "blue", "cyan", "green", "yellow", "red")


def degrees_tables(kind: str, dof: Rows, errors: Rows) -> Iterator[Part]:
    """Layers down and KV heads across, in several tables where there are many heads; ``kind`` says how measured."""
    heads, top = max(len(row) for row in dof), max(max(row) for row in dof)
    known = any(error == error for row in errors for error in row)
    width = -(-heads // -(-heads // _HEADS_PER_TABLE[known]))
    for start in range(0, heads, width):
        shown = range(start, min(start + width, heads))
        made = table("layer", *map(str, shown), gap=1)
        for n, row in enumerate(dof):
            made.add_row(str(n), *(_shaded(row[h], errors[n][h], top) if h < len(row) else "" for h in shown))
        yield f"\nDegrees of freedom, layer × KV head ({kind})"
        yield made


def doubtful(dof: Rows, errors: Rows) -> list[str]:
    """A warning, in two lines at most, of the heads whose standard error is above a quarter of the value."""
    heads = {
        n: [h for h, (value, error) in enumerate(zip(*rows, strict=True)) if error > DOUBT * value]
        for n, rows in enumerate(zip(dof, errors, strict=True))
    }
    heads = {layer: own for layer, own in heads.items() if own}
    if not heads:
        return []
    count, total = sum(map(len, heads.values())), sum(map(len, dof))
    named = [
        f"layer {layer} head{'s' if len(own) > 1 else ''} {', '.join(map(str, own[:4]))}{', …' if len(own) > 4 else ''}"
        for layer, own in heads.items()
    ]
    first = f"not to be trusted, standard error above a quarter of the value: {count} of {total} heads"
    return [first, "  " + shorten("; ".join(named), WIDTH - 2, placeholder=" …")]


def _shaded(value: float, error: float, top: float) -> Text:
    shade = _SHADES[min(len(_SHADES) - 1, int(len(_SHADES) * value / top))]
    shown = f"{value:.1f}" if value < 100 else f"{value:.0f}"
    if error == error:
        shown += f" ± {error:.1f}" if error < 100 else f" ± {error:.0f}"
    return Text(shown, style=shade)
