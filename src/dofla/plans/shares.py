"""How much of the bytes of a memory that fades each KV head gets, by what its forgetting does to the model."""

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
(``docs/quality/fading.md``)."""

WHOLE_AT_MOST = 0.5
"""Of all bytes, what heads that hold every token may take: the others do worse with what is left to them."""

_FORMAT = 2
"""1 had one share for all heads of a layer."""
_EXACT = 1e-9
"""So that a third of 96 is 32."""


@dataclass
class Shares(Result):
    """How the bytes of a memory that fades are shared. JSON that a person can read.

    Attributes:
        layers: by name and for each KV head, bytes over those of an even split.
        costs: by name and for each KV head, what its forgetting and rounding did to the model's loss where all had the
            same size: nats of KL of the next-token distribution, to first order.
        model: its name.
        made_by: budget and text it was measured with; as ``held_out``, the KL to the original on windows that they were
            not measured on, with ``measured`` shares and with ``even`` ones, of which the better are kept.
        whole: by name, the KV heads that hold every token whatever their share: those that facts are looked up with.
    """

    layers: dict[str, list[float]]
    costs: dict[str, list[float]] = field(default_factory=dict, repr=False)
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)
    whole: dict[str, list[int]] = field(default_factory=dict)

    def budgets(self, layer: str, heads: int, budget: float) -> list[int]:
        """Of each KV head of a layer, in features, where all of the model have ``budget`` in the mean.

        Raises:
            DoflaError: the layer has other heads than those that were measured.
        """
        own = self.layers.get(layer, [1.0] * heads)
        if len(own) != heads:
            raise DoflaError(f"layer {layer} has {heads} KV heads, its shares are of {len(own)}: measure them again")
        return [math.floor(share * budget + _EXACT) for share in own]

    def at_most(self, most: Mapping[str, float], sizes: Mapping[str, float]) -> Shares:
        """These shares where no KV head has more than ``most`` of its layer, and whole ones have as much: what that
        leaves goes to all others, in proportion to what they have. Where all have that much, the rest goes to them in
        proportion to it.

        Args:
            most: by name of the layer.
            sizes: by name, bytes of one of its KV heads in an even split.

        Raises:
            DoflaError: whole heads would take more than :data:`WHOLE_AT_MOST` of the bytes.
        """
        found = {name: list(own) for name, own in self.layers.items()}
        heads = [(share / most[name], name, n) for name in sizes for n, share in enumerate(found.get(name, ()))]
        whole = {(name, n) for name in sizes for n in self.whole.get(name, ())}
        left = wanted = sum(found[name][n] * sizes[name] for _, name, n in heads)
        beyond = max(left / sum(most[name] * sizes[name] for _, name, _ in heads), 1) if heads else 1
        if sum(most[name] * sizes[name] for name, _ in whole) > WHOLE_AT_MOST * left * (1 + _EXACT):
            raise DoflaError(
                f"{len(whole)} of the KV heads to hold every token would take more than {WHOLE_AT_MOST:.0%} of the "
                "bytes: give more, fewer of them, or a smaller reach"
            )
        # Those that reach their most first.
        for _, name, n in sorted(heads, key=lambda x: (x[1:] in whole, x), reverse=True):
            share, bound = found[name][n], beyond * most[name]
            found[name][n] = left / wanted * share
            if found[name][n] > bound or (name, n) in whole:
                found[name][n] = bound
                left, wanted = left - bound * sizes[name], wanted - share * sizes[name]
        return replace(self, layers=found)

    def parts(self) -> Iterator[Part]:
        """Shares of each layer, and what forgetting does in it."""
        shown = table("layer", "share", "least", "most", "cost", gap=2, widest=40)
        for name, own in self.layers.items():
            figures = (sum(own) / len(own), min(own), max(own))
            shown.add_row(name, *(f"{x:.2f}" for x in figures), f"{sum(self.costs.get(name, [math.nan])):+.4f}")
        yield shown
        yield "share: bytes over those of an even split; least, most: of the KV heads;"
        yield "cost: what forgetting does to the model's KL where all have the same, in nats"
        if "held_out" in self.made_by:
            yield held_out_line(self.made_by["held_out"])
        if self.whole:
            yield named(self.whole)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": _FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing what was there."""
        write_json(Path(path), self.to_dict(), sealed=True)

    @classmethod
    def load(cls, path: str | Path) -> Shares:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing, damaged, or of an older version,
        which had shares of layers."""
        data = read_json(Path(path), "shares")
        try:
            layers = {name: [float(share) for share in own] for name, own in data["layers"].items()}
            if not layers or not all(own and all(0 < share < math.inf for share in own) for own in layers.values()):
                raise ValueError("a share that is no positive number")
            whole = {name: [int(head) for head in own] for name, own in data.get("whole", {}).items()}
            if not all(0 <= head < len(layers[name]) for name, own in whole.items() for head in own):
                raise ValueError("a head that holds every token and is none")
            costs, made_by = (dict(data.get(part, {})) for part in ("costs", "made_by"))
            return cls(layers, costs, data.get("model", ""), made_by, whole)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no shares of KV heads ({what}): measure them again") from error


def shared(sizes: Mapping[str, int], costs: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Shares of KV heads whose bytes are those of an even split.

    From :data:`LEAST` to :data:`MOST` in steps of a :data:`RUNG`, where what a head forgets is taken to cost the less
    the more it holds, as one over its bytes n. The next byte is then worth cost / n², and sizes go by the root of what
    was measured, as nearly as rungs do.

    Args:
        sizes: by name of the layer, bytes of one of its KV heads in an even split.
        costs: by name, of each KV head, as of :class:`Shares`.
    """
    choices = {
        (name, head): lower_hull([_Size(share, share * sizes[name], cost / share) for share in _SHARES])
        for name, own in costs.items()
        for head, cost in enumerate(own)
    }
    total = sum(sizes[name] for name, _ in choices)
    chosen = spend(choices, total)
    spare = total / sum(size.bytes for size in chosen.values())  # what was too little for another rung
    return {name: [spare * chosen[name, head].share for head in range(len(own))] for name, own in costs.items()}


def named(whole: Mapping[str, Sequence[int]]) -> str:
    """A line that names the KV heads that hold every token, by layer."""
    return "KV heads that hold every token: " + "; ".join(
        f"{name} {', '.join(map(str, own))}" for name, own in whole.items()
    )


def held_out_line(held_out: Mapping[str, float]) -> str:
    """A line that says how measured and even shares compare on held-out windows."""
    measured, even = held_out["measured"], held_out["even"]
    kept = "even" if measured > even else "measured"
    return f"KL on held-out windows: {measured:.4f} measured, {even:.4f} even: {kept} shares are kept"


def shares_of_heads(layers: Mapping[str, list[float] | float]) -> list[float]:
    """Those of all layers in one list. Plans of older versions have one number for all heads of a layer."""
    return [share for own in layers.values() for share in (own if isinstance(own, list) else [own])]


@dataclass(frozen=True)
class _Size:
    share: float
    bytes: float
    loss: float


_SHARES = [LEAST * RUNG**rung for rung in range(round(math.log(MOST / LEAST, RUNG)) + 1)]
