"""Calibration: what was measured of a model, independent of the size of its cache. A file that can be kept and
shared."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dofla.attention import Moments
from dofla.compression.directions import Directions
from dofla.compression.head_budgets import HeadBudgets
from dofla.compression.retrieval import Head, by_layer
from dofla.compression.target import Target
from dofla.display import Part, Result, table
from dofla.errors import DoflaError
from dofla.integration.attaching import AttachedLayer
from dofla.plans.plan import held_out_line
from dofla.storage.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

_FORMAT = "1"
_MOMENTS = ("queries", "keys", "values")


@dataclass(frozen=True)
class Calibration(Result):
    """The measurements of :func:`dofla.calibrate`.

    Attributes:
        directions: of each compressed module by name, from which rotations and key smoothing follow.
        shares: head budgets: by module and for each KV head, bytes relative to an even split; empty if not measured.
        costs: by module and for each KV head, what eviction costs where all have the same size: nats of KL of the
            next-token distribution, to first order; empty if not measured.
        retrieval: all KV heads, those that needle retrieval depends on most first; empty if not ranked.
        model: its name.
        fingerprint: of its attention modules and weights.
        made_by: source and tokens of the text, context, and as ``held_out`` the KL to the original on held-out windows,
            with ``measured`` budgets and with ``even`` ones, of which the better are kept.
    """

    directions: Mapping[str, Directions] = field(repr=False)
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    costs: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    retrieval: Sequence[Head] = field(default=(), repr=False)
    model: str = ""
    fingerprint: str = ""
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def head_budgets(self, retrieval_heads: int = 0) -> HeadBudgets | None:
        """The head budgets, with so many retrieval heads; None for an even split without any."""
        if not self.shares and not retrieval_heads:
            return None
        shares = self.shares or {name: [1.0] * len(own.keys.total) for name, own in self.directions.items()}
        return HeadBudgets(shares, by_layer(self.retrieval[:retrieval_heads]), self.made_by.get("held_out"))

    def check(self, target: Target) -> None:
        """DoflaError if it is of a model with other attention modules; a warning if of other weights."""
        for site in target.compressed:
            own = self.directions.get(site.name)
            if own is None or own.shape != (site.kv_heads, site.head_dim, site.value_dim):
                raise DoflaError(
                    f"the calibration is of another model ({self.model or 'unnamed'}): layer {site.name} "
                    f"{'is not in it' if own is None else 'has other heads there'}; calibrate this one"
                )
        if self.fingerprint and self.fingerprint != target.fingerprint:
            logger.warning("the calibration was made with other weights of %s: quality may be lower", self.model)

    def apply(self, layers: Mapping[str, AttachedLayer]) -> None:
        """Calibrate the coders and the key smoothing of compressed layers."""
        for name, layer in layers.items():
            self.directions[name].calibrate(layer)

    def parts(self) -> Iterator[Part]:
        """Head budgets of each module, and what eviction in it costs."""
        if self.costs:
            shown = table("layer", "mean", "least", "most", "cost", gap=2, widest=40)
            for name, own in self.shares.items():
                figures = (sum(own) / len(own), min(own), max(own))
                shown.add_row(name, *(f"{x:.2f}" for x in figures), f"{sum(self.costs[name]):+.4f}")
            yield shown
            yield "mean, least, most: bytes of the KV heads relative to an even split;"
            yield "cost: KL of the model in nats, from eviction in the layer at an even split"
        if "held_out" in self.made_by:
            yield held_out_line(self.made_by["held_out"])
        if self.retrieval:
            first = ", ".join(f"{name} {head}" for name, head in self.retrieval[:10])
            yield f"retrieval heads, the first ten: {first}"
        yield f"calibrated on {self.made_by.get('tokens', 0):,} tokens of {self.made_by.get('source', 'unknown text')}"

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, replacing what was there."""
        tensors: dict[str, Tensor] = {}
        for name, own in self.directions.items():
            for side in _MOMENTS:
                moments: Moments = getattr(own, side)
                tensors |= {f"{name}:{side}.total": moments.total, f"{name}:{side}.square": moments.square}
            if own.weighing is not None:
                tensors[f"{name}:weighing"] = own.weighing
        names = "shares", "costs", "retrieval", "model", "fingerprint", "made_by"
        plain = {name: getattr(self, name) for name in names}
        counts = {name: [getattr(own, side).count for side in _MOMENTS] for name, own in self.directions.items()}
        write_tensors(path, tensors, {"format": _FORMAT, "calibration": json.dumps({**plain, "counts": counts})})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing, damaged or of another kind."""
        tensors, metadata = read_tensors(path, "calibrate again")
        if metadata.get("format") != _FORMAT or "calibration" not in metadata:
            raise DoflaError(f"{path} is no calibration of this version of dofla: calibrate again")
        try:
            plain = json.loads(metadata["calibration"])
            directions = {}
            for name, counts in plain.pop("counts").items():
                queries, keys, values = (
                    Moments(count, tensors[f"{name}:{side}.total"], tensors[f"{name}:{side}.square"])
                    for side, count in zip(_MOMENTS, counts, strict=True)
                )
                directions[name] = Directions(queries, keys, values, tensors.get(f"{name}:weighing"))
            plain["retrieval"] = [(name, head) for name, head in plain["retrieval"]]
            return cls(directions, **plain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise DoflaError(f"{path} holds no calibration ({what}): calibrate again") from error
