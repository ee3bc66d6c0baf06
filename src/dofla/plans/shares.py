"""How much of the bytes of a memory that fades each layer gets, by what more or fewer of them do to the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.plans.knapsack import lower_hull, spend
from dofla.storage.files import read_json, write_json

FACTORS = (1.0, 0.7, 1.4)
"""Sizes of a layer that are tried, over the one it has."""

_EXACT = 1e-9
"""So that a third of 96 is 32."""


@dataclass
class Shares(Result):
    """How the bytes of a memory that fades are shared. JSON that a person can read.

    Attributes:
        layers: by name, bytes over those of an even split.
        effects: by name and for each of :data:`FACTORS`, what the model's loss changes by if that layer alone has so
            many times the bytes it had when this was last measured: nats of KL of the next-token distribution, to first
            order.
        model: its name.
        made_by: budget and text it was measured with.
    """

    layers: dict[str, float]
    effects: dict[str, list[float]] = field(default_factory=dict, repr=False)
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)

    def better(self, effects: Mapping[str, list[float]], sizes: Mapping[str, int]) -> Shares:
        """A step from here to less loss: each layer's share times one of :data:`FACTORS`, the bytes of all those of an
        even split.

        Args:
            effects: as above, measured with these shares.
            sizes: by name, bytes of the layer in an even split.
        """
        held = {name: self.layers[name] * sizes[name] for name in effects}
        total = sum(sizes[name] for name in effects)
        hulls = {
            name: lower_hull([_Choice(factor, factor * held[name], x) for factor, x in _tried(own)])
            for name, own in effects.items()
        }
        chosen = spend(hulls, sum(held.values()))
        spare = total / sum(choice.bytes for choice in chosen.values())  # the last step that did not fit leaves some
        layers = {name: spare * choice.factor * self.layers[name] for name, choice in chosen.items()}
        return replace(self, layers=layers, effects=dict(effects))

    def budget(self, layer: str, budget: float) -> int:
        """Of a layer, in features per KV head, where all have ``budget`` in the mean."""
        return math.floor(self.layers.get(layer, 1.0) * budget + _EXACT)

    def parts(self) -> Iterator[Part]:
        """Share of each layer, and what fewer or more bytes did."""
        shown = table("layer", "share", *(f"{factor:g} ×" for factor in FACTORS[1:]), gap=2, widest=40)
        for name, share in self.layers.items():
            own = self.effects.get(name, [])[1:]
            shown.add_row(name, f"{share:.2f}", *(f"{x:+.4f}" for x in own or [math.nan] * 2))
        yield shown
        yield "share: bytes over those of an even split; then, before the last step, the change of the model's"
        yield "KL, in nats, if this layer alone had so many times its bytes"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"format": 1, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write as JSON, replacing what was there."""
        write_json(Path(path), self.to_dict(), sealed=True)

    @classmethod
    def load(cls, path: str | Path) -> Shares:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing or damaged."""
        data = read_json(Path(path), "shares")
        try:
            layers = {name: float(share) for name, share in data["layers"].items()}
            if not layers or not all(0 < share < math.inf for share in layers.values()):
                raise ValueError("a share that is no positive number")
            return cls(layers, dict(data.get("effects", {})), data.get("model", ""), dict(data.get("made_by", {})))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no shares ({what}): measure them again") from error


@dataclass(frozen=True)
class _Choice:
    factor: float
    bytes: float
    loss: float


def _tried(effects: list[float]) -> Iterator[tuple[float, float]]:
    return zip(FACTORS, effects, strict=True)
