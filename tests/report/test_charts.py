"""Charts: Vega-Lite draws each, with the numbers it was given."""

import json
import math
import re
from itertools import chain

import pytest
import vl_convert

import dofla
from dofla.report import charts

LABELS = ["near", "far"]
LOSS = [
    {"model": "near", "bytes": 2048, "length": 64, "loss": -0.001, "low": -0.01, "high": 0.01, "kl": 0.0},
    {"model": "far", "bytes": 3072, "length": 64, "loss": 2.5, "low": 2.0, "high": 3.0, "kl": 2.25},
]
LAYERS = [
    {"model": label, "layer": n, "name": f"layers.{n}", "error": n + 0.5, "bytes": 1024 * n, "sizes": "window 4"}
    for label in LABELS
    for n in range(3)
]
TRAINING = [
    {"model": "near", "training": kind, "step": n, "share": 1 / n} for kind in ("layerwise", "end") for n in (1, 2)
]
SPEED = [
    {"model": label, "work": "decode", "tokens": 128 * n, "ms": 0.25 * n}
    for label in ("original", "near")
    for n in (1, 2)
]


def drawn(chart):
    return vl_convert.vegalite_to_svg(chart.spec)


def rows_of(chart):
    return list(chain.from_iterable(chart.spec["datasets"].values()))


@pytest.mark.parametrize(
    ("chart", "words", "points"),
    [
        (
            charts.loss_against_bytes(LOSS, LABELS, caches=[9 * 2**20], target=0.02),
            [*LABELS, "cache, MiB", "loss increase, nats per token", "original", "tokens", "64"],
            2,
        ),
        (charts.loss_against_bytes(LOSS, LABELS, field="kl"), ["cache, KiB", "KL divergence, nats per token"], 2),
        (charts.error_per_layer(LAYERS, LABELS), [*LABELS, "layer", "relative error"], 6),
        (charts.bytes_per_layer(LAYERS, LABELS), [*LABELS, "layer", "KiB"], 6),
        (charts.training_losses(TRAINING, LABELS), ["near", "layerwise", "end", "optimizer step", "100%"], 0),
        (charts.speed(SPEED, LABELS), ["near", "original", "decode", "context, tokens", "milliseconds per token"], 4),
    ],
    ids=lambda value: value.title if isinstance(value, charts.Chart) else "",
)
def test_a_chart_has_its_axes_its_legend_and_all_points(chart, words, points):
    svg = drawn(chart)
    assert set(words) <= set(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    assert len(re.findall(r'<path aria-label="[^"]*: ', svg)) >= points
    assert chart.spec["width"] == "container"


def test_the_target_is_between_the_loss_that_misses_it_and_the_one_that_meets_it():
    svg = drawn(charts.loss_against_bytes(LOSS, LABELS, target=0.5))
    near, far = map(float, re.findall(r'roledescription="point" transform="translate\([^,]*,([^)]*)\)', svg))
    (target,) = map(float, re.findall(r"translate\([^,]*,([^)]*)\)[^>]*>target<", svg))
    assert far < target < near


def test_without_intervals_there_are_none_in_the_tooltip():
    few = [{name: value for name, value in row.items() if name not in ("low", "high")} for row in LOSS]
    specs = [json.dumps(charts.loss_against_bytes(rows, LABELS).spec) for rows in (LOSS, few)]
    assert ["95 % interval" in spec for spec in specs] == [True, False]


def test_a_figure_without_an_end_is_left_out():
    rows = [row | {"loss": loss} for row, loss in zip(LOSS, (math.nan, -math.inf), strict=True)]
    chart = charts.loss_against_bytes([*rows, *LOSS], LABELS)
    json.dumps(chart.spec, allow_nan=False)
    assert [row["loss"] for row in rows_of(chart) if "loss" in row] == [None, None, -0.001, 2.5]


def test_models_of_many_layers_and_heads():
    rows = [row | {"layer": n} for row in LAYERS for n in range(1000)]
    assert len(rows_of(charts.error_per_layer(rows, LABELS))) == 6000


def test_degrees_of_freedom_have_the_standard_errors_that_are_known(tiny):
    model, tokens = tiny.llama(), tiny.tokens(9, 40)
    for windows, known in ((tokens, True), (tokens[:1], False)):
        profile = dofla.linear.profile(model, windows, samples=40)
        chart = charts.degrees_of_freedom(profile, 0.03)
        rows, errors = rows_of(chart), list(chain.from_iterable(profile.dof_errors(0.03)))
        assert [row["dof"] for row in rows] == list(chain.from_iterable(profile.dof(0.03)))
        assert [row["error"] for row in rows] == (errors if known else [None] * len(rows))
        assert "KV head" in drawn(chart)
