"""How much of the bytes of a memory that fades each layer gets, by what more or fewer of them do to the model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.plans.knapsack import lower_hull, spend
from dofla.storage.files import read_json, write_json

RUNG = 1.4
"""From one size of a layer to the next."""
FACTORS = (1.0, 1 / RUNG, RUNG)
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

    def budget(self, layer: str, budget: float) -> int:
        """Of a layer, in features per KV head, where all have ``budget`` in the mean."""
        return math.floor(self.layers.get(layer, 1.0) * budget + _EXACT)

    def parts(self) -> Iterator[Part]:
        """Share of each layer, and what fewer or more bytes did."""
        shown = table("layer", "share", *(f"{factor:.2g} ×" for factor in FACTORS[1:]), gap=2, widest=40)
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


class Ladder:
    """What is known so far of all layers' sizes, each :data:`RUNG` times the one below: an even split at first.

    What a step is worth changes with where all others stand, and chance has a part in it. So each rung that was
    measured counts, from below and from above, and a layer that was given bytes does not lose them because it does well
    with them.

    Args:
        sizes: by name, bytes of the layer in an even split.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._rungs = sizes, dict.fromkeys(sizes, 0)
        # By layer and rung, what the loss changes by from there to the next.
        self._changes: dict[str, dict[int, list[float]]] = {name: {} for name in sizes}

    def climb(self, effects: Mapping[str, list[float]]) -> dict[str, float]:
        """Shares of least loss, as far as it is known; the bytes of all are those of an even split.

        Args:
            effects: by name and for each of :data:`FACTORS`, as of :class:`Shares`, measured with what was returned
                last.
        """
        for name, (_, less, more) in effects.items():
            rung, changes = self._rungs[name], self._changes[name]
            changes.setdefault(rung - 1, []).append(-less)
            changes.setdefault(rung, []).append(more)
        total = sum(self._sizes.values())
        chosen = spend({name: lower_hull(list(self._known(name))) for name in self._sizes}, total)
        self._rungs = {name: choice.rung for name, choice in chosen.items()}
        spare = total / sum(choice.bytes for choice in chosen.values())  # the last step that did not fit leaves some
        return {name: spare * RUNG**rung for name, rung in self._rungs.items()}

    def _known(self, name: str) -> Iterator[_Choice]:
        steps = sorted(self._changes[name].items())
        losses = accumulate((fmean(changes) for _, changes in steps), initial=0.0)
        for rung, loss in enumerate(losses, start=steps[0][0]):
            yield _Choice(rung, RUNG**rung * self._sizes[name], loss)


@dataclass(frozen=True)
class _Choice:
    rung: int
    bytes: float
    loss: float
