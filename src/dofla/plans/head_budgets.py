"""Head budgets: how many bytes of a compressed cache each KV head gets, by what eviction in it costs the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.plans.knapsack import lower_hull, spend
from dofla.storage.files import read_json, write_json

RUNG = math.sqrt(2)
"""From one size of a KV head to the next: few heads of a layer then differ, and those of one size are one call."""
LEAST, MOST = 1 / RUNG, 4 * RUNG
"""Bytes of a KV head over those of an even split. With half of it, too many heads that seemed to need little missed it
(``docs/research/cache.md``)."""

MAX_FULL_FRACTION = 0.5
"""Fraction of all bytes that retrieval heads may take: the others do worse with what is left to them."""

_FORMAT = 3
"""2 had other names of fields, 1 one number for all heads of a layer."""
_EXACT = 1e-9
"""So that a third of 96 is 32."""


@dataclass
class HeadBudgets(Result):
    """The division of the bytes of a compressed cache among KV heads. JSON that a person can read.

    Attributes:
        layers: by name and for each KV head, bytes relative to an even split.
        costs: by name and for each KV head, what eviction and quantization in it cost where all had the same size:
            nats of KL of the next-token distribution, to first order.
        model: its name.
        made_by: size and text it was measured with; as ``held_out``, the KL to the original on held-out windows, with
            ``measured`` budgets and with ``even`` ones, of which the better are kept.
        full_heads: by name, the KV heads that hold every token whatever their budget: retrieval heads.
    """

    layers: dict[str, list[float]]
    costs: dict[str, list[float]] = field(default_factory=dict, repr=False)
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)
    full_heads: dict[str, list[int]] = field(default_factory=dict)

    def budgets(self, layer: str, heads: int, budget: float) -> list[int]:
        """Budgets of the KV heads of a layer, in features, where the mean of the model is ``budget``.

        Raises:
            DoflaError: the layer has other heads than those that were measured.
        """
        own = self.layers.get(layer, [1.0] * heads)
        if len(own) != heads:
            raise DoflaError(f"layer {layer} has {heads} KV heads, and head budgets for {len(own)}: measure them again")
        return [math.floor(share * budget + _EXACT) for share in own]

    def at_most(self, most: Mapping[str, float], sizes: Mapping[str, float]) -> HeadBudgets:
        """Head budgets of which none is above ``most`` of its layer, and those of full heads are at it. What that
        leaves goes to all others, in proportion to what they have. Where all have that much, the rest goes to them in
        proportion to it.

        Args:
            most: by name of the layer.
            sizes: by name, bytes of one of its KV heads in an even split.

        Raises:
            DoflaError: full heads would take more than :data:`MAX_FULL_FRACTION` of the bytes.
        """
        found = {name: list(own) for name, own in self.layers.items()}
        heads = [(share / most[name], name, n) for name in sizes for n, share in enumerate(found.get(name, ()))]
        full_heads = {(name, n) for name in sizes for n in self.full_heads.get(name, ())}
        left = wanted = sum(found[name][n] * sizes[name] for _, name, n in heads)
        beyond = max(left / sum(most[name] * sizes[name] for _, name, _ in heads), 1) if heads else 1
        if sum(most[name] * sizes[name] for name, _ in full_heads) > MAX_FULL_FRACTION * left * (1 + _EXACT):
            raise DoflaError(
                f"{len(full_heads)} retrieval heads would take more than {MAX_FULL_FRACTION:.0%} of the bytes: give a "
                "larger size, fewer of them, or a shorter context"
            )
        # Those that are at their most first.
        for _, name, n in sorted(heads, key=lambda x: (x[1:] in full_heads, x), reverse=True):
            share, bound = found[name][n], beyond * most[name]
            found[name][n] = left / wanted * share
            if found[name][n] > bound or (name, n) in full_heads:
                found[name][n] = bound
                left, wanted = left - bound * sizes[name], wanted - share * sizes[name]
        return replace(self, layers=found)

    def parts(self) -> Iterator[Part]:
        """Head budgets of each layer, and what eviction in it costs."""
        shown = table("layer", "mean", "least", "most", "cost", gap=2, widest=40)
        for name, own in self.layers.items():
            figures = (sum(own) / len(own), min(own), max(own))
            shown.add_row(name, *(f"{x:.2f}" for x in figures), f"{sum(self.costs.get(name, [math.nan])):+.4f}")
        yield shown
        yield "mean, least, most: bytes of the KV heads relative to an even split;"
        yield "cost: KL of the model in nats, from eviction in the layer at an even split"
        if "held_out" in self.made_by:
            yield held_out_line(self.made_by["held_out"])
        if self.full_heads:
            yield named(self.full_heads)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing what was there."""
        write_json(Path(path), self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> HeadBudgets:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing, damaged, or of an older
        version."""
        data = read_json(Path(path), "head budgets")
        if data.get("format") != _FORMAT:
            raise DoflaError(f"{path} was made by an older version of dofla: measure head budgets again")
        try:
            layers = {name: [float(share) for share in own] for name, own in data["layers"].items()}
            if not layers or not all(own and all(0 < share < math.inf for share in own) for own in layers.values()):
                raise ValueError("a budget that is no positive number")
            full_heads = {name: [int(head) for head in own] for name, own in data.get("full_heads", {}).items()}
            if not all(0 <= head < len(layers[name]) for name, own in full_heads.items() for head in own):
                raise ValueError("a full head that is none of the layer's")
            costs, made_by = (dict(data.get(part, {})) for part in ("costs", "made_by"))
            return cls(layers, costs, data.get("model", ""), made_by, full_heads)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no head budgets ({what}): measure them again") from error


def divide(sizes: Mapping[str, int], costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Head budgets whose bytes are those of an even split.

    They go from :data:`LEAST` to :data:`MOST` in steps of a :data:`RUNG`. The cost of eviction in a head is taken to be
    inversely proportional to its bytes n, so that the next byte is worth cost / n²: sizes go by the square root of the
    measured cost, as nearly as the steps allow.

    Args:
        sizes: by name of the layer, bytes of one of its KV heads in an even split.
        costs: by name, of each KV head, as of :class:`HeadBudgets`.
    """
    choices = {
        (name, head): lower_hull([_Size(share, share * sizes[name], cost / share) for share in _STEPS])
        for name, own in costs.items()
        for head, cost in enumerate(own)
    }
    total = sum(sizes[name] for name, _ in choices)
    chosen = spend(choices, total)
    spare = total / sum(size.bytes for size in chosen.values())  # too little for another step
    return {name: [spare * chosen[name, head].share for head in range(len(own))] for name, own in costs.items()}


def named(full_heads: Mapping[str, Sequence[int]]) -> str:
    """A line that names the KV heads that hold every token, by layer."""
    return "KV heads that hold every token: " + "; ".join(
        f"{name} {', '.join(map(str, own))}" for name, own in full_heads.items()
    )


def held_out_line(held_out: Mapping[str, float]) -> str:
    """A line that says how measured and even head budgets compare on held-out windows."""
    measured, even = held_out["measured"], held_out["even"]
    kept = "even" if measured > even else "measured"
    return f"KL on held-out windows: {measured:.4f} measured, {even:.4f} even: {kept} budgets are kept"


def flat_head_budgets(layers: Mapping[str, list[float]]) -> list[float]:
    """The head budgets of all layers in one list."""
    return [budget for own in layers.values() for budget in own]


@dataclass(frozen=True)
class _Size:
    share: float
    bytes: float
    loss: float


_STEPS = [LEAST * RUNG**rung for rung in range(round(math.log(MOST / LEAST, RUNG)) + 1)]
