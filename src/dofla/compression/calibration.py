"""Calibration: what was measured of a model, independent of the size of its cache. A file that can be kept and
shared."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from dofla.compression.directions import Directions, Symmetric
from dofla.compression.head_budgets import HeadBudgets
from dofla.compression.plan import BITS, compressed_plan
from dofla.compression.retrieval import Head, by_layer, count_of
from dofla.compression.target import Target
from dofla.display import Part, Result, table
from dofla.errors import DoflaError, malformed
from dofla.integration.converted import Converted
from dofla.integration.surgery import convert, restore
from dofla.plans.plan import Plan, held_out_line
from dofla.storage.tensors import read_tensors, write_tensors

logger = logging.getLogger(__name__)

SAME = 0.03
"""Relative difference of a few weights up to which models count as the same: eight bits change less (2.7 % of
Qwen2.5-Coder-0.5B, which has outliers in its rows), and fine-tuning of all weights more."""
_FORMAT = "3"
_SIDES, _MEANS, _IMPORTANCE = ("queries", "keys", "values"), ("key_mean", "value_mean"), "importance"


@dataclass(frozen=True)
class Calibration(Result):
    """The measurements of :func:`dofla.calibrate`.

    Attributes:
        directions: of each compressed module by name, from which rotations and key smoothing follow.
        shares: head budgets: by module and for each KV head, bytes relative to an even split; empty if not measured.
        costs: by module and for each KV head, the error of eviction where all have the same size, as a part of the
            residual stream (:mod:`dofla.compression.eviction_error`); empty if not measured.
        reading: by module and for each KV head, how much of a text it attends to on a second reading
            (:mod:`dofla.compression.reading_shares`); empty if not measured.
        importance: by module, weights by which the importance of tokens is predicted
            (:class:`dofla.layers.ImportancePredictor`); empty if not measured.
        retrieval: all KV heads, those that needle retrieval depends on most first; empty if not ranked.
        attention: of each of them to needles (:func:`dofla.compression.retrieval.rank_heads`).
        model: its name.
        fingerprint: of the shapes of its attention modules.
        weights: a few of them.
        made_by: source and tokens of the text, context, and as ``held_out`` the KL to the original on held-out windows
            with head budgets that are ``even``, by the cost of ``eviction``, and by ``reading`` beside it, of which the
            best are kept.
    """

    directions: Mapping[str, Directions] = field(repr=False)
    shares: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    costs: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    reading: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    importance: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    retrieval: Sequence[Head] = field(default=(), repr=False)
    attention: Sequence[float] = field(default=(), repr=False)
    model: str = ""
    fingerprint: str = ""
    weights: Sequence[float] = field(default=(), repr=False)
    made_by: Mapping[str, Any] = field(default_factory=dict)

    def head_budgets(self, retrieval_heads: int | str = 0) -> HeadBudgets | None:
        """The head budgets, with so many retrieval heads, or as many as there are for ``auto``; None for an even split
        without any."""
        count = count_of(self.attention) if isinstance(retrieval_heads, str) else retrieval_heads
        if not self.shares and not count:
            return None
        return HeadBudgets(self.shares, by_layer(self.retrieval[:count]), self.made_by.get("held_out"))

    def check(self, target: Target) -> None:
        """DoflaError if it is of a model with other attention modules; a warning if of other weights."""
        for site in target.compressed:
            own = self.directions.get(site.name)
            if own is None or own.shape != (site.kv_heads, site.head_dim, site.value_dim):
                raise DoflaError(
                    f"the calibration is of another model ({self.model or 'unnamed'}): layer {site.name} "
                    f"{'is not in it' if own is None else 'has other heads there'}; calibrate this one"
                )
        if self.weights and target.weights and difference(target.weights, self.weights) > SAME:
            logger.warning("the calibration was made with other weights of %s: quality may be lower", self.model)

    def compress(
        self,
        model: PreTrainedModel,
        target: Target,
        size: int | None,
        retrieval_heads: int | str = 0,
        prefill: str = "exact",
        bits: float = BITS,
    ) -> Converted:
        """Give a model a cache of so many bytes, or, for None, one in which all heads grow; in place and untried."""
        plan = self.plan(target, size, retrieval_heads, prefill, bits)
        converted = convert(model, plan, sites=target.sites)
        converted.record.add_calibration(self.made_by)
        try:
            self.apply(converted)
        except BaseException:
            restore(model)
            raise
        return converted

    def plan(
        self,
        target: Target,
        size: int | None,
        retrieval_heads: int | str = 0,
        prefill: str = "exact",
        bits: float = BITS,
    ) -> Plan:
        """The plan of that cache."""
        budgets = self.head_budgets(retrieval_heads)
        plan = compressed_plan(target, size, head_budgets=budgets, prefill=prefill, bits=bits)
        for layer in plan.compressed:
            if layer.name in self.importance and not all(map(math.isinf, layer.slots)):
                layer.input_width = self.importance[layer.name].shape[1] - 1
        return plan

    def apply(self, converted: Converted) -> None:
        """Calibrate the coders of a model that has a compressed cache."""
        for name, layer in converted.layers.items():
            own = self.directions[name]
            own.calibrate(layer, own.weighing(converted.model))
            if layer.predictor is not None:
                layer.predictor.weight.copy_(self.importance[name])

    def parts(self) -> Iterator[Part]:
        """Head budgets of each module, and what eviction in it costs."""
        if self.costs:
            shown = table("layer", "mean", "least", "most", "error", gap=2, widest=40)
            total = sum(map(sum, self.costs.values()))
            for name, own in self.shares.items():
                figures = (sum(own) / len(own), min(own), max(own))
                shown.add_row(name, *(f"{x:.2f}" for x in figures), f"{total and sum(self.costs[name]) / total:.1%}")
            yield shown
            yield "mean, least, most: bytes of the KV heads relative to an even split;"
            yield "error: of eviction in the layer at an even split, of that in all layers"
        if "held_out" in self.made_by:
            yield held_out_line(self.made_by["held_out"])
        if self.retrieval:
            first = ", ".join(f"{name} {head}" for name, head in self.retrieval[:10])
            yield f"retrieval heads: {count_of(self.attention)}; the first ten in rank: {first}"
        yield f"calibrated on {self.made_by.get('tokens', 0):,} tokens of {self.made_by.get('source', 'unknown text')}"

    def save(self, path: str | Path) -> None:
        """Write it as one safetensors file, replacing what was there."""
        tensors = {f"{name}:{part}": tensor for name, own in self.directions.items() for part, tensor in _parts(own)}
        tensors |= {f"{name}:{_IMPORTANCE}": weight for name, weight in self.importance.items()}
        names = "shares", "costs", "reading", "retrieval", "attention", "model", "fingerprint", "weights", "made_by"
        plain = {name: getattr(self, name) for name in names}
        plain["outputs"] = {name: own.output for name, own in self.directions.items()}
        write_tensors(path, tensors, {"format": _FORMAT, "calibration": json.dumps(plain)})

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read what :meth:`save` wrote; DoflaError naming the file if it is missing, damaged or of another kind."""
        tensors, metadata = read_tensors(path, "calibrate again")
        if metadata.get("format") != _FORMAT or "calibration" not in metadata:
            raise DoflaError(f"{path} is no calibration of this version of dofla: calibrate again")
        with malformed(f"{path} holds no calibration", "calibrate again"):
            plain = json.loads(metadata["calibration"])
            directions = {}
            for name, output in plain.pop("outputs").items():
                parts = [[tensors[f"{name}:{side}.{part}"] for part in Symmetric._fields] for side in _SIDES]
                queries, keys, values = (Symmetric(*own) for own in parts)
                key_mean, value_mean = (tensors[f"{name}:{mean}"] for mean in _MEANS)
                directions[name] = Directions(queries, keys, values, key_mean, value_mean, output)
            plain["retrieval"] = [(name, head) for name, head in plain["retrieval"]]
            importance = {x: tensors[own] for x in directions if (own := f"{x}:{_IMPORTANCE}") in tensors}
            return cls(directions, importance=importance, **plain)


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square difference of weights over that of ``other``; infinite where they are none, or not as many."""
    if len(one) != len(other) or not any(other):
        return math.inf
    return math.dist(one, other) / math.hypot(*other)


def _parts(directions: Directions) -> Iterator[tuple[str, Tensor]]:
    """The tensors of directions, by their names in a file."""
    for side in _SIDES:
        yield from ((f"{side}.{part}", tensor) for part, tensor in getattr(directions, side)._asdict().items())
    yield from ((mean, getattr(directions, mean)) for mean in _MEANS)
