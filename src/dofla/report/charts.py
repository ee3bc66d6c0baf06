"""Charts of the report: Vega-Lite specifications, made by altair. Each is as wide as the page lets it be."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dofla.profiles.profile import Profile
from dofla.storage.extras import extra
from dofla.storage.files import plain

alt: Any = extra("altair", "report", "a report")

ORIGINAL = "original"
Row = dict[str, Any]

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")
_GRAY = "#888888"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_LOSSES = {"loss": "loss increase", "kl": "KL divergence"}
_TICKS = [0, *(sign * size for size in (0.01, 0.03, 0.1, 0.3, 1, 3, 10) for sign in (1, -1))]


@dataclass(frozen=True)
class Chart:
    """A title and a Vega-Lite specification."""

    title: str
    spec: dict[str, Any]


def ends(interval: Sequence[float] | None) -> Row:
    """The ends of the interval of a loss increase, as a part of a row; empty without one."""
    return {} if interval is None else {"low": interval[0], "high": interval[1]}


def loss_against_bytes(
    rows: Sequence[Row],
    labels: Sequence[str],
    *,
    field: str = "loss",
    by: str = "model",
    caches: Collection[int] = (),
    target: float | None = None,
) -> Chart:
    """Loss increase with its interval, or KL divergence, on a scale that is linear below 0.01 nats and logarithmic
    above.

    Args:
        rows: ``bytes``, ``length`` in tokens, and what ``field`` and ``by`` name; with ``loss``, its :func:`ends`.
        labels: all values of ``by``, in order.
        field: ``loss`` or ``kl``.
        by: the field that has a color for each of its values.
        caches: bytes of the original's cache, at each length.
        target: nats per token.
    """
    unit, rows = _in_units(rows, caches)
    originals = [{"bytes": count / _UNITS[unit]} for count in caches]
    title = _LOSSES[field]
    across = alt.X("bytes:Q", title=f"cache, {unit}", scale=_scale("log"), axis=_axis())
    up = {"title": f"{title}, nats per token", "scale": _scale("symlog", constant=0.01), "axis": _axis(values=_TICKS)}
    base = alt.Chart(_data(rows)).encode(x=across, color=_color(rows, labels, by))
    tooltip = [f"{by}:N", _tip("length", "tokens", ",.0f"), _tip("bytes", f"cache, {unit}"), _tip(field, title)]
    marks = base.encode(y=alt.Y(f"{field}:Q", **up))
    layers = [marks.mark_line().encode(strokeDash=_dash("length:O", "tokens"))]
    if field == "loss" and any("low" in row for row in rows):
        layers.append(base.mark_rule().encode(y=alt.Y("low:Q", **up), y2="high:Q"))
        tooltip += [_tip("low", "95 % interval from"), _tip("high", "to")]
    layers.append(marks.mark_point(filled=True, size=70, opacity=1).encode(tooltip=tooltip))
    beside = alt.Chart(_data(originals)).encode(x=across)
    layers.append(beside.mark_rule(color=_GRAY, strokeDash=[4, 3]))
    layers.append(beside.mark_text(text=ORIGINAL, color=_GRAY, align="right", dx=-4).encode(y=alt.value(8)))
    if target is not None:
        wanted = alt.Chart(_data([{"target": target}])).encode(y=alt.Y("target:Q", **up))
        layers.append(wanted.mark_rule(color=_GRAY, strokeDash=[2, 3]))
        layers.append(wanted.mark_text(text="target", color=_GRAY, align="left", dx=4, dy=-7).encode(x=alt.value(0)))
    return _chart(f"{title[0].upper()}{title[1:]} against bytes of the cache", alt.layer(*layers))


def error_per_layer(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    """Relative error of attention outputs; ``rows`` of ``model``, ``layer``, ``name`` and ``error``."""
    lines = alt.Chart(_data(rows)).encode(
        x=alt.X("layer:Q", scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1, format="d")),
        y=alt.Y("error:Q", title="relative error"),
        color=_color(rows, labels),
        tooltip=["model:N", _text("name", "layer"), _tip("error", "relative error")],
    )
    return _chart("Error of each layer's attention output", lines.mark_line(point={"size": 50}))


def bytes_per_layer(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    """Bytes of each layer; ``rows`` of ``model``, ``layer``, ``name``, ``bytes`` and ``sizes``, which says of what."""
    unit, rows = _in_units(rows)
    cells = alt.Chart(_data(rows)).encode(
        x=_layer_axis(),
        y=alt.Y("model:N", title=None, sort=list(labels), axis=alt.Axis(labelLimit=150)),
        color=alt.Color("bytes:Q", title=unit, scale=alt.Scale(scheme="blues", zero=True), legend=_gradient()),
        tooltip=["model:N", _text("name", "layer"), _tip("bytes", unit), "sizes:N"],
    )
    height = 26 * len({row["model"] for row in rows})
    return _chart("Bytes of each layer", cells.mark_rect(stroke="white"), height)


def degrees_of_freedom(profile: Profile, lam: float) -> Chart:
    """Degrees of freedom of every KV head at the tolerance ``lam``."""
    measured = zip(profile.layers, profile.dof(lam), profile.dof_errors(lam), strict=True)
    rows = [
        {"layer": n, "head": head, "name": layer.name, "dof": value, "error": error}
        for n, (layer, values, errors) in enumerate(measured)
        for head, (value, error) in enumerate(zip(values, errors, strict=True))
    ]
    title = "degrees of freedom"
    cells = alt.Chart(_data(rows)).encode(
        x=_layer_axis(),
        y=alt.Y("head:O", title="KV head"),
        color=alt.Color("dof:Q", title=title, scale=alt.Scale(scheme="viridis"), legend=_gradient()),
        tooltip=[_text("name", "layer"), "head:O", _tip("dof", title), _tip("error", "standard error")],
    )
    height = min(20 * max(layer.kv_heads for layer in profile.layers), 400)
    return _chart(f"Degrees of freedom of each KV head (λ = {lam:.3g})", cells.mark_rect(stroke="white"), height)


def training_losses(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    """Mean loss over layers, relative to the first, as losses of different kinds have no common unit; ``rows`` of
    ``model``, ``training`` (layerwise or end to end, and its loss), ``step`` and ``share``."""
    lines = alt.Chart(_data(rows)).encode(
        x=alt.X("step:Q", title="optimizer step", axis=_axis()),
        y=alt.Y("share:Q", title="loss, relative to its start", axis=alt.Axis(format=".0%")),
        color=_color(rows, labels),
        strokeDash=_dash("training:N"),
        tooltip=["model:N", "training:N", _tip("step", "step", ",.0f"), alt.Tooltip("share:Q", format=".1%")],
    )
    return _chart("Training losses", lines.mark_line())


def speed(rows: Sequence[Row], labels: Sequence[str]) -> Chart:
    """Milliseconds per token against the context, at best; ``rows`` of ``model``, ``work``, ``tokens`` and ``ms``."""
    points = alt.Chart(_data(rows)).encode(
        x=alt.X("tokens:Q", title="context, tokens", scale=alt.Scale(type="log", base=2), axis=_axis()),
        y=alt.Y("min(ms):Q", title="milliseconds per token", scale=_scale("log"), axis=_axis()),
        color=_color(rows, labels),
        tooltip=["model:N", "work:N", _tip("tokens", "tokens", ",.0f"), _tip("min(ms)", "ms per token")],
    )
    lines = points.encode(strokeDash=_dash("work:N"))
    return _chart("Speed", alt.layer(lines.mark_line(), points.mark_point(filled=True, opacity=1)))


def _chart(title: str, chart: Any, height: int = 280) -> Chart:
    font = {"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"}
    chart = chart.properties(width="container", height=max(height, 60), description=title)
    chart = chart.configure_axis(**font, gridColor="#eee").configure_legend(**font, labelLimit=130)
    return Chart(title, chart.to_dict(validate=False))


def _data(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """JSON knows no infinity: such a point is left out."""
    return {"values": plain(rows)}


def _in_units(rows: Sequence[Row], others: Collection[int] = ()) -> tuple[str, list[Row]]:
    """The largest unit that any of the bytes reach, and the rows in it."""
    most = max([1, *others, *(row["bytes"] for row in rows)])
    unit = next(name for name, size in _UNITS.items() if size <= most)
    return unit, [row | {"bytes": row["bytes"] / _UNITS[unit]} for row in rows]


def _scale(kind: str, **options: Any) -> Any:
    return alt.Scale(type=kind, nice=False, padding=15, **options)


def _axis(**options: Any) -> Any:
    return alt.Axis(format=",~r", labelOverlap="greedy", labelSeparation=5, **options)


def _layer_axis() -> Any:
    return alt.X("layer:O", axis=alt.Axis(labelAngle=0, labelOverlap="parity", labelSeparation=5))


def _color(rows: Sequence[Row], labels: Sequence[str], by: str = "model") -> Any:
    """The same color for a label in each chart."""
    colors = {label: _COLORS[n % len(_COLORS)] for n, label in enumerate(labels)} | {ORIGINAL: _GRAY}
    shown = {row[by] for row in rows}
    domain = [label for label in colors if label in shown]
    scale = alt.Scale(domain=domain, range=[colors[label] for label in domain])
    return alt.Color(f"{by}:N", title=None, scale=scale, legend=_legend("top"))


def _dash(field: str, title: str | None = None) -> Any:
    return alt.StrokeDash(field, title=title, legend=_legend("bottom"))


def _legend(side: str) -> Any:
    return alt.Legend(orient=side, columns=2, symbolType="stroke", symbolStrokeWidth=3)


def _gradient() -> Any:
    return alt.Legend(orient="top", gradientLength=160, gradientThickness=10)


def _tip(field: str, title: str, digits: str = ",.3~r") -> Any:
    """The tooltip of a number, in three digits or another format."""
    return alt.Tooltip(f"{field}:Q", title=title, format=digits)


def _text(field: str, title: str) -> Any:
    return alt.Tooltip(f"{field}:N", title=title)
