"""Plan: what each attention layer becomes, and what it costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from dofla.errors import DoflaError
from dofla.feature_maps import feature_map_class
from dofla.files import read_json, write_json
from dofla.hybrid import FEATURE_BYTES


@dataclass
class LayerPlan:
    """One attention module.

    Attributes:
        name: of the module in the model.
        kv_heads, head_dim, value_dim: its shape, so that a plan made for another model is noticed.
        features: per KV head, or one number for all.
        window: last tokens kept with exact scores, the query's own included.
        sinks: first tokens kept with exact scores.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        keep_softmax: leave the layer as it is; the fields above it then play no part.
    """

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    features: int | list[int] = 0
    window: int = 0
    sinks: int = 0
    feature_map: str = "prf"
    keep_softmax: bool = False

    def __post_init__(self) -> None:
        self._check_whole("kv_heads", "head_dim", "value_dim", least=1)
        if not isinstance(self.keep_softmax, bool):
            raise DoflaError(f"layer {self.name}: keep_softmax is {self.keep_softmax!r}: give true or false")
        if self.keep_softmax:
            return
        try:
            feature_map_class(self.feature_map)
        except DoflaError as error:
            raise DoflaError(f"layer {self.name}: {error}") from None
        counts = self.features if isinstance(self.features, list) else [self.features]
        if isinstance(self.features, list) and len(counts) != self.kv_heads:
            raise DoflaError(
                f"layer {self.name}: {len(counts)} feature numbers for {self.kv_heads} KV heads: "
                "give one each, or an int"
            )
        if not all(is_whole(count) and count >= 1 for count in counts):
            raise DoflaError(f"layer {self.name}: features is {self.features!r}: every KV head needs at least 1")
        self._check_whole("window", "sinks", least=0)
        if self.feature_map == "none" and not (self.window or self.sinks):
            raise DoflaError(f"layer {self.name}: feature_map none sees nothing without a window or sinks: give one")

    def _check_whole(self, *fields: str, least: int) -> None:
        for what in fields:
            value = getattr(self, what)
            if not is_whole(value) or value < least:
                raise DoflaError(f"layer {self.name}: {what} is {value!r}: give a whole number, {least} or more")

    @property
    def features_per_head(self) -> list[int]:
        """The number of features of each KV head."""
        return list(self.features) if isinstance(self.features, list) else [self.features] * self.kv_heads

    @property
    def feature_numbers(self) -> int:
        """Numbers of feature state per sequence: a mean value and a log-mass, of double size, per feature."""
        return 0 if self.keep_softmax else sum(self.features_per_head) * (self.value_dim + 2)

    @property
    def token_numbers(self) -> int:
        """Numbers of window and sinks per sequence: a key and a value per token and KV head."""
        return 0 if self.keep_softmax else (self.window + self.sinks) * self.kv_heads * (self.head_dim + self.value_dim)


@dataclass
class Plan:
    """All attention layers of a model, and how the plan came about. JSON that a person can edit."""

    layers: list[LayerPlan]
    model: str = ""
    made_by: dict[str, Any] = field(default_factory=dict)  # strategy, budget, lambda, ...: a record, not an input

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of state per sequence, whatever its length, of the linear layers.

        M features take M·(dv+2) numbers per KV head, always in float32; a window or sink token takes d + dv numbers
        per KV head in the model's ``dtype``.
        """
        features = sum(layer.feature_numbers for layer in self.layers)
        return features * FEATURE_BYTES + sum(layer.token_numbers for layer in self.layers) * dtype.itemsize

    def softmax_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the key-value cache that softmax attention would keep for ``length`` tokens in these layers.

        Layers kept softmax are counted here and not in :meth:`state_bytes`.
        """
        return sum(length * x.kv_heads * (x.head_dim + x.value_dim) * dtype.itemsize for x in self.layers)

    def kept_softmax_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the key-value cache of the layers kept softmax, for ``length`` tokens."""
        return Plan([x for x in self.layers if x.keep_softmax]).softmax_bytes(length, dtype)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, one short entry per layer."""
        layers = {}
        for layer in self.layers:
            entry = asdict(layer)
            layers[entry.pop("name")] = entry
        return {"format": 1, "model": self.model, "made_by": self.made_by, "layers": layers}

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the plan") -> Plan:
        """The reverse of :meth:`to_dict`; DoflaError naming ``where`` and the field if something is off."""
        layers = data.get("layers")
        if not isinstance(layers, dict) or not layers:
            raise DoflaError(f"{where} has no layers: a plan lists its attention modules by name under 'layers'")
        plans = []
        for name, entry in layers.items():
            try:
                plans.append(LayerPlan(name=name, **entry))
            except DoflaError as error:
                raise DoflaError(f"{where}: {error}") from None
            except TypeError as error:
                raise DoflaError(f"{where}: layer {name} has wrong fields: {error}") from error
        made_by = data.get("made_by") or {}
        if not isinstance(made_by, dict):
            raise DoflaError(f"{where}: made_by is {made_by!r}: give an object, or leave it out")
        return cls(plans, str(data.get("model", "")), made_by)

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


def is_whole(value: object) -> bool:
    """Whether ``value`` is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)
