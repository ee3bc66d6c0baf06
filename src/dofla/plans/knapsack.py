"""The best way to spend a number of bytes on layers, or heads, that each have a few choices."""

import heapq
import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from dofla.errors import DoflaError


class Priced(Protocol):
    """The interface of a choice for a layer or head: its bytes, and the loss expected."""

    @property
    def bytes(self) -> float: ...

    @property
    def loss(self) -> float: ...


Choice = TypeVar("Choice", bound=Priced)
Key = TypeVar("Key", bound=Hashable)


def spend(hulls: Mapping[Key, Sequence[Choice]], total: float) -> dict[Key, Choice]:
    """One choice for each layer or head, of least summed loss, that together take ``total`` bytes at most, from the
    :func:`lower_hull` of each; DoflaError if the smallest take more.

    A knapsack, solved as a linear relaxation would: from the smallest choices up, always the step that gains most per
    byte, passing by the steps that no longer fit.
    """
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


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of loss over bytes: what is best for some price of a byte, from the cheapest up."""
    hull: list[Choice] = []
    for choice in sorted(choices, key=lambda c: (c.bytes, c.loss)):
        if hull and choice.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _slope(hull[-1], choice) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(choice)
    return hull


def _slope(a: Priced, b: Priced) -> float:
    """Loss gained per byte."""
    return (a.loss - b.loss) / (b.bytes - a.bytes) if b.bytes > a.bytes else math.inf
