"""History: what a training did."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from dofla.display import Part, Result, table


@dataclass
class History(Result):
    """The outcome of a distillation: its losses, settings and duration.

    With a loss that all layers share, there is one column, called after it.

    Attributes:
        layers: names of the columns.
        losses: [steps, layers].
        seconds: it took.
        settings: it was called with.
    """

    layers: list[str]
    losses: Tensor = field(repr=False)
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)

    def parts(self) -> Iterator[Part]:
        """Loss of each layer at the start and at the end (means over a tenth of the steps)."""
        tenth = max(1, len(self.losses) // 10)
        shown = table("layer", *(f"{title} {self.settings.get('loss', '')} loss" for title in ("first", "last")))
        means = zip(self.layers, self.losses[:tenth].mean(0), self.losses[-tenth:].mean(0), strict=True)
        for name, first, last in means:
            shown.add_row(name, f"{first:.4f}", f"{last:.4f}")
        yield shown
        yield f"means of the first and the last {tenth} of {len(self.losses)} steps"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**vars(self), "losses": self.losses.tolist()}
