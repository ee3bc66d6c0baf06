"""Error curves: how much of each layer's attention is lost at which size, what that costs the model, and the best
way to spend a number of bytes on them."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from dofla.errors import DoflaError
from dofla.files import read_json, write_json
from dofla.hybrid import HeadCost, split

_LEVELS = 48
"""Sizes between the smallest and the largest that was measured, at equal ratios, among which a layer's is chosen."""


@dataclass(frozen=True)
class Point:
    """A layer of one size, briefly trained.

    Attributes:
        share: of the bytes, what was meant for exact tokens; see :func:`dofla.hybrid.split`.
        bytes: of state per KV head.
        error: mean KL(softmax ‖ student) of its rows of attention, nats.
    """

    share: float
    bytes: int
    error: float


@dataclass
class LayerCurve:
    """One layer.

    Attributes:
        name: of the module.
        effect: what one unit of its error does to the model, all other layers softmax: nats of KL of the next-token
            distribution (an encoder: relative squared error of the last hidden states).
        points: sizes that were measured.
    """

    name: str
    effect: float
    points: list[Point]

    def error(self, share: float, size: float) -> float:
        """At ``size`` bytes per KV head, by a power law between measured sizes; beyond them, that of the nearest."""
        points = sorted((p for p in self.points if p.share == share), key=lambda p: p.bytes)
        size = min(max(size, points[0].bytes), points[-1].bytes)
        for a, b in pairwise(points):
            if a.bytes <= size <= b.bytes and a.bytes < b.bytes:
                part = math.log(size / a.bytes) / math.log(b.bytes / a.bytes)
                return math.exp((1 - part) * math.log(_positive(a.error)) + part * math.log(_positive(b.error)))
        return points[0].error


def _positive(error: float) -> float:
    return max(error, 1e-9)


@dataclass
class Curves:
    """The curves of all layers, of which model and how they were measured. JSON that a person can read."""

    layers: list[LayerCurve]
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing what was there."""
        write_json(Path(path), {"format": 1, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> Curves:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing or damaged."""
        data = read_json(Path(path), "error curves")
        try:
            layers = [
                LayerCurve(x["name"], float(x["effect"]), [_point(**point) for point in x["points"]])
                for x in data["layers"]
            ]
            if not layers or not all(layer.points and math.isfinite(layer.effect) for layer in layers):
                raise ValueError("a layer without points or with an endless effect")
            return cls(layers, data["model"], data["made_by"])
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no error curves ({what}): measure them again") from error


def _point(share: float, bytes: int, error: float) -> Point:
    """A point of a file, whose numbers can be reckoned with."""
    if not (0 <= share <= 1 and bytes >= 1 and math.isfinite(error)):
        raise ValueError(f"share {share}, {bytes} bytes, error {error}")
    return Point(share, bytes, error)


@dataclass(frozen=True)
class Shape:
    """What a layer's bytes buy: its KV heads, and what one of them costs."""

    kv_heads: int
    cost: HeadCost


@dataclass(frozen=True)
class Choice:
    """A layer of some size: bytes of all its heads, the loss expected of it, and ``size``, None for softmax."""

    bytes: int
    loss: float
    size: tuple[int, int, int] | None


def choose(
    curves: Sequence[LayerCurve], shapes: Mapping[str, Shape], total: int, context: int | None = None
) -> dict[str, Choice]:
    """The sizes of least expected loss, summed over layers, that cost ``total`` bytes at most.

    A knapsack, solved as a linear relaxation would: from the smallest sizes up, always the step that gains most per
    byte, along the lower convex hull of each layer's choices, passing by the steps that no longer fit.

    Args:
        curves: of the layers.
        shapes: by layer name.
        total: bytes of state per sequence.
        context: if given, layers may stay softmax, at the price of their cache at so many tokens.

    Raises:
        DoflaError: the smallest sizes measured cost more than ``total``.
    """
    hulls = {curve.name: _hull(_choices(curve, shapes[curve.name], context)) for curve in curves}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = total - sum(choice.bytes for choice in chosen.values())
    if left < 0:
        raise DoflaError(
            f"the smallest layers that were measured take {total - left} bytes together, the budget is {total}: "
            "measure the curves at this budget"
        )
    steps = [(-_slope(*pair), name, n) for name, hull in hulls.items() for n, pair in enumerate(pairwise(hull))]
    heapq.heapify(steps)
    stuck = set()
    while steps:
        _, name, n = heapq.heappop(steps)
        before, after = hulls[name][n], hulls[name][n + 1]
        price = after.bytes - before.bytes
        if name in stuck or price > left:
            stuck.add(name)  # its later steps cost more still
            continue
        chosen[name], left = after, left - price
    return chosen


def _choices(curve: LayerCurve, shape: Shape, context: int | None) -> list[Choice]:
    choices = []
    for share, group in groupby(sorted(curve.points, key=lambda p: p.share), key=lambda p: p.share):
        sizes = [p.bytes for p in group]
        ratio = max(sizes) / min(sizes)
        for n in range(_LEVELS):
            size = split(round(min(sizes) * ratio ** (n / (_LEVELS - 1))), shape.cost, share)
            spent = shape.cost.total(*size)
            choices.append(Choice(spent * shape.kv_heads, curve.effect * curve.error(share, spent), size))
    if context is not None:
        choices.append(Choice(context * shape.cost.token * shape.kv_heads, 0.0, None))
    return choices


def _hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of a byte, from the cheapest up."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bytes, c.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-1], choice) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: Choice, b: Choice) -> float:
    """Loss gained per byte."""
    return (a.loss - b.loss) / (b.bytes - a.bytes) if b.bytes > a.bytes else math.inf
