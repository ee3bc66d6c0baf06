"""Plan: what each attention layer becomes, and what it costs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from dofla.display import Part, Result, size, table
from dofla.errors import DoflaError, about, is_integer
from dofla.plans.layers import CompressedLayer, FeatureLayer, LayerPlan, SoftmaxLayer, layer_from_dict
from dofla.storage.fields import known_prefill
from dofla.storage.files import read_json, write_json

_FORMAT = 4  # 3 had one kind of layers, with several tiers


LENGTHS = (2048, 8192, 32768, 131072)
"""Tokens of which the bytes of caches that grow are shown."""
PREFILLS = ("exact", "sequential", "twice")
"""Ways in which several tokens enter a compressed cache: ``exact``, they attend exactly to the cache and to one
another, and those to retain are selected at the end of the call, by importance that is predicted
(:class:`dofla.layers.ImportancePredictor`) where it can be; ``sequential``, one after the other, as decoding goes on;
``twice``, a prompt is read by softmax attention and then once more, which tells what is needed later
(:mod:`dofla.integration.second_reading`), and later calls are exact."""


def held_out_line(held_out: Mapping[str, float]) -> str:
    """A line that says how head budgets compare on held-out windows: by what each go, and their KL."""
    found = (f"{kl:.2g} {way}" + " (kept)" * (way == kept_way(held_out)) for way, kl in held_out.items())
    return f"KL on held-out windows: {', '.join(found)}"


def kept_way(held_out: Mapping[str, float]) -> str:
    """The way of the least KL, of several the last."""
    return min(reversed([*held_out]), key=held_out.__getitem__)


def check_prefill(prefill: str) -> None:
    """DoflaError unless it is one of :data:`PREFILLS`."""
    if prefill not in PREFILLS:
        raise DoflaError(f"prefill is {prefill!r}: choose one of {', '.join(PREFILLS)}")


@dataclass
class Plan(Result):
    """All attention layers of a model, and how the plan came about. JSON that a person can edit.

    Attributes:
        layers: one each.
        model: name of the one it is for.
        made_by: strategy, budget, λ, ...: a record, not an input.
        context: tokens that the cache is calibrated for, where these are not all positions of the model.
        prefill: how compressed layers read several tokens into a cache, one of :data:`PREFILLS`.
    """

    layers: list[LayerPlan]
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    prefill: str = "exact"

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    @property
    def converted(self) -> list[LayerPlan]:
        """The layers that do not stay softmax."""
        return [layer for layer in self.layers if not isinstance(layer, SoftmaxLayer)]

    @property
    def compressed(self) -> list[CompressedLayer]:
        """The layers with a compressed cache."""
        return [layer for layer in self.layers if isinstance(layer, CompressedLayer)]

    @property
    def linear(self) -> list[FeatureLayer]:
        """The layers with feature maps."""
        return [layer for layer in self.layers if isinstance(layer, FeatureLayer)]

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes per sequence that do not grow with it.

        Features take float32 numbers, exact tokens eight bits or the model's ``dtype``, a tier its bits.
        """
        return self.cache_bytes(0, dtype)

    def cache_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of what all layers keep of a sequence of ``length`` tokens: constant, but for KV heads that hold every
        token and layers that stay softmax."""
        return sum(layer.cache_bytes(length, dtype.itemsize) for layer in self.layers)

    @property
    def growing(self) -> int:
        """KV heads that hold every token in a compressed cache."""
        return sum(size.grows for layer in self.compressed for size in layer.sizes)

    @property
    def evicts(self) -> bool:
        """True if any token is ever evicted from a compressed cache."""
        return self.growing < sum(layer.kv_heads for layer in self.compressed)

    def softmax_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the key-value cache that softmax attention would keep for ``length`` tokens in all layers."""
        return sum(layer.softmax_bytes(length, dtype.itemsize) for layer in self.layers)

    def parts(self) -> Iterator[Part]:
        """The sizes of the layers as tables, those with equal compressed caches in one row, and the bytes of all."""
        if self.compressed:
            tier = "3-bit tier" if all(layer.bits == 3 for layer in self.compressed) else "tier"
            shown = table("attention", "layers", "window", "sinks", tier, widest=30)
            shown.columns[1].no_wrap = False
            for name, numbers, layer in _alike(self.compressed):
                shown.add_row(name, numbers, *layer.ranges.values())
            yield shown
            yield "tokens per KV head, from least to most; the window and the sinks are in int8"
        if self.linear:
            most = max(max(x.features_per_head) for x in self.linear)
            shown = table("layer", "features", "window", "sinks", "", gap=1, widest=30)
            shown.columns[-1].justify = "left"
            for linear in self.linear:
                bar = Text("━" * round(24 * max(linear.features_per_head) / max(most, 1)), style="cyan")
                shown.add_row(linear.name, *linear.ranges.values(), bar)
            yield shown
        if kept := [layer.name for layer in self.layers if isinstance(layer, SoftmaxLayer)]:
            yield f"softmax attention stays in {len(kept)} layers: {', '.join(kept)}"
        context = "at any context length" if self.context is None else f"for up to {self.context:,} tokens"
        # Exact tokens of feature layers may be in the model's dtype, which a plan does not know.
        depends = any(layer.token_dtype == "model" and any(w or s for _, w, s in layer.sizes) for layer in self.linear)
        yield f"KV cache per sequence: {size(self.state_bytes())}{' in float32' if depends else ''}, {context}"
        if self.growing:
            each = ", ".join(f"{size(self.cache_bytes(n) - self.state_bytes())} at {n:,}" for n in LENGTHS)
            yield f"and of {self.growing} KV heads that hold every token: {each} tokens"
        if self.compressed and "held_out" in self.made_by:
            yield held_out_line(self.made_by["held_out"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data, one short entry per layer."""
        head = {"format": _FORMAT, "model": self.model, "made_by": self.made_by}
        head |= {} if self.context is None else {"context": self.context}
        head |= {} if self.prefill == "exact" else {"prefill": self.prefill}
        return head | {"layers": {layer.name: layer.to_dict() for layer in self.layers}}

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the plan") -> Plan:
        """The reverse of :meth:`to_dict`; DoflaError naming ``where`` and the field if something is off."""
        if data.get("format", _FORMAT) != _FORMAT:
            raise DoflaError(
                f"{where} was made by another version of dofla: compress the model again, or allocate its plan again"
            )
        layers = data.get("layers")
        if not isinstance(layers, dict) or not layers:
            raise DoflaError(f"{where} has no layers: a plan lists its attention modules by name under 'layers'")
        with about(where):
            plans = [layer_from_dict(name, entry) for name, entry in layers.items()]
        made_by = data.get("made_by") or {}
        if not isinstance(made_by, dict):
            raise DoflaError(f"{where}: made_by is {made_by!r}: give an object, or leave it out")
        context = data.get("context")
        if context is not None and not (is_integer(context) and context > 0):
            raise DoflaError(f"{where}: context is {context!r}: give a number of tokens, or leave it out")
        prefill = known_prefill(data.get("prefill", "exact"))
        with about(where):
            check_prefill(prefill)
        return cls(plans, str(data.get("model", "")), made_by, context, prefill)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, replacing what was there."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; DoflaError naming the file if it is missing or damaged."""
        path = Path(path)
        if path.is_dir():
            path = path / "plan.json"
        return cls.from_dict(read_json(path, "a plan"), str(path))


def _alike(layers: Sequence[CompressedLayer]) -> Iterator[tuple[str, str, CompressedLayer]]:
    """One of the layers of equal sizes, with what their names have in common and the numbers in these."""
    groups: dict[tuple, list[CompressedLayer]] = {}
    for layer in layers:
        name = re.sub(r"\d+", "*", layer.name)
        groups.setdefault((name if name.count("*") == 1 else layer.name, *layer.ranges.items()), []).append(layer)
    for (name, *_), own in groups.items():
        numbers = re.findall(r"\d+", " ".join(layer.name for layer in own)) if "*" in name else []
        yield name, _spans([int(number) for number in numbers]), own[0]


def _spans(numbers: Sequence[int]) -> str:
    """Rising numbers, those that follow one another by the first and last of them: ``1, 4, 10-13``."""
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)
