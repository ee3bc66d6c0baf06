"""Error curves: how much of each head's attention is lost at which size, what that costs the model, and the best way
to spend a number of bytes on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from dofla.display import Part, Result, table
from dofla.errors import DoflaError, malformed
from dofla.feature_maps.cost import HeadCost
from dofla.plans.hybrid import TOKEN_SHARE, split
from dofla.plans.knapsack import lower_hull, spend
from dofla.storage.fields import build
from dofla.storage.files import read_json, write_json

_FORMAT = 2
_LEVELS = 20
"""Sizes between the smallest and the largest that was measured, at equal ratios, among which a head's is chosen."""

Size = tuple[int, int, int]
"""(features, window, sinks) of a KV head."""


@dataclass(frozen=True)
class Point:
    """A layer whose heads have one size, briefly trained.

    Attributes:
        share: of the bytes, what was meant for exact tokens; see :func:`dofla.plans.hybrid.split`.
        bytes: of state per KV head.
        errors: per KV head, mean KL(softmax ‖ student) of the rows of attention, nats.
    """

    share: float
    bytes: int
    errors: list[float]


@dataclass
class LayerCurve:
    """One layer.

    Attributes:
        name: of the module.
        effects: per KV head, what one unit of its error does to the model, all other heads softmax: nats of KL of the
            next-token distribution (an encoder: relative squared error of the last hidden states).
        points: sizes that were measured.
    """

    name: str
    effects: list[float]
    points: list[Point]

    def error(self, head: int, share: float, size: float) -> float:
        """The error of a KV head at ``size`` bytes, by a power law between measured sizes; beyond them, the error of
        the nearest."""
        points = sorted((p for p in self.points if p.share == share), key=lambda p: p.bytes)
        size = min(max(size, points[0].bytes), points[-1].bytes)
        for a, b in pairwise(points):
            if a.bytes <= size <= b.bytes and a.bytes < b.bytes:
                part = math.log(size / a.bytes) / math.log(b.bytes / a.bytes)
                ends = (math.log(max(p.errors[head], 1e-9)) for p in (a, b))
                return math.exp(sum(weight * end for weight, end in zip((1 - part, part), ends, strict=True)))
        return points[0].errors[head]


@dataclass
class Curves(Result):
    """The curves of all layers, of which model and how they were measured. JSON that a person can read."""

    layers: list[LayerCurve] = field(repr=False)
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        """Error of each layer at the sizes tried with the usual share of exact tokens, and what it does."""
        sizes = sorted({p.bytes for layer in self.layers for p in layer.points if p.share == TOKEN_SHARE})
        shown = table("layer", *map(str, sizes), "effect", gap=1, widest=30)
        for layer in self.layers:
            errors = {p.bytes: f"{fmean(p.errors):.3f}" for p in layer.points if p.share == TOKEN_SHARE}
            shown.add_row(layer.name, *(errors.get(n, "") for n in sizes), f"{sum(layer.effects):.3f}")
        yield "attention KL by bytes per KV head"
        yield shown
        yield "effect: harm to the model's answer (KL; an encoder's relative error) per nat of its heads'"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing what was there."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Curves:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing or damaged."""
        data = read_json(Path(path), "error curves")
        with malformed(f"{path} holds no error curves", "measure them again"):
            if data.get("format", _FORMAT) != _FORMAT:
                raise DoflaError(f"format {data['format']!r}, this version of dofla reads {_FORMAT}")
            found = build(cls, {key: value for key, value in data.items() if key != "format"}, "it")
            found.check()
            return found

    def check(self) -> None:
        """DoflaError unless all numbers can be reckoned with."""
        if not self.layers or not all(layer.points for layer in self.layers):
            raise DoflaError("a layer without points")
        for layer in self.layers:
            if not layer.effects or any(len(point.errors) != len(layer.effects) for point in layer.points):
                raise DoflaError(f"layer {layer.name}: effects and errors of different heads")
            if not all(0 <= point.share <= 1 and point.bytes >= 1 for point in layer.points):
                raise DoflaError(f"layer {layer.name}: a share outside of 0 to 1, or no bytes")
        if not isinstance(self.made_by.get("feature_map", ""), str):
            raise DoflaError(f"feature_map is {self.made_by['feature_map']!r}")


@dataclass(frozen=True)
class Shape:
    """The shape of a layer: the number of its KV heads, and the costs of one of them in bytes."""

    kv_heads: int
    cost: HeadCost


@dataclass(frozen=True)
class Choice:
    """A layer with heads of some sizes: bytes of all of them, the loss expected, and ``sizes`` per KV head, None for
    softmax."""

    bytes: int
    loss: float
    sizes: list[Size] | None


def choose(
    curves: Sequence[LayerCurve],
    shapes: Mapping[str, Shape],
    total: int,
    context: int | None = None,
    *,
    per_head: bool = True,
) -> dict[str, Choice]:
    """The sizes of least expected loss, summed over layers, that cost ``total`` bytes at most.

    A knapsack (:func:`dofla.plans.knapsack.spend`). A step to softmax may be so large that it never fits, and hides
    smaller ones: it is done without as well, and the better kept.

    Args:
        curves: of the layers.
        shapes: by layer name.
        total: bytes of state per sequence.
        context: if given, layers may stay softmax, at the price of their cache at so many tokens.
        per_head: whether the heads of a layer may differ. They have two sizes at most, since each is a call of its own
            when the model runs.

    Raises:
        DoflaError: the smallest sizes measured cost more than ``total``.
    """
    ways: list[dict[str, Choice]] = []
    for at in dict.fromkeys((context, None)):
        hulls = {curve.name: best_sizes(curve, shapes[curve.name], at, per_head) for curve in curves}
        if not ways or sum(hull[0].bytes for hull in hulls.values()) <= total:  # a short cache may be all that fits
            ways.append(spend(hulls, total))
    return min(ways, key=lambda chosen: sum(choice.loss for choice in chosen.values()))


def best_sizes(curve: LayerCurve, shape: Shape, context: int | None = None, per_head: bool = True) -> list[Choice]:
    """The candidates of :func:`choose` for a layer: what is best for some price of a byte, from the cheapest up, of one
    size for all heads; the larger of two for any number of them, those that gain most by it; and softmax."""
    losses = _losses(curve, shape)
    heads, cost = range(shape.kv_heads), shape.cost
    choices = [Choice(cost.total(*size) * len(heads), sum(own), [size] * len(heads)) for size, own in losses.items()]
    if per_head:
        choices += _two_sizes(losses, shape)
    if context is not None:
        choices.append(Choice(context * cost.cached * len(heads), 0.0, None))
    return lower_hull(choices)


def _two_sizes(losses: Mapping[Size, Sequence[float]], shape: Shape) -> list[Choice]:
    heads, cost = range(shape.kv_heads), shape.cost
    # Only sizes that are best for some head at some price of a byte: of all pairs there would be too many.
    alone = ([Choice(cost.total(*size), own[head], [size]) for size, own in losses.items()] for head in heads)
    best = {size for own in alone for choice in lower_hull(own) for size in choice.sizes or ()}
    choices = []
    for small, large in combinations(sorted(best, key=lambda size: cost.total(*size)), 2):
        gains = [a - b for a, b in zip(losses[small], losses[large], strict=True)]
        first = sorted(heads, key=lambda head: -gains[head])[:-1]  # all of them is a choice above
        base, price = sum(losses[small]), cost.total(*large) - cost.total(*small)
        for count, gain in enumerate(accumulate(gains[head] for head in first), start=1):
            sizes = [large if head in first[:count] else small for head in heads]
            choices.append(Choice(cost.total(*small) * len(heads) + count * price, base - gain, sizes))
    return choices


def _losses(curve: LayerCurve, shape: Shape) -> dict[Size, list[float]]:
    """The expected loss of each KV head, for each size that a head may have."""
    losses: dict[Size, list[float]] = {}
    for share in sorted({p.share for p in curve.points}):
        measured = [p.bytes for p in curve.points if p.share == share]
        ratio = max(measured) / min(measured)
        for n in range(_LEVELS):
            size = split(round(min(measured) * ratio ** (n / (_LEVELS - 1))), shape.cost, share)
            spent = shape.cost.total(*size)
            losses[size] = [effect * curve.error(head, share, spent) for head, effect in enumerate(curve.effects)]
    return losses
