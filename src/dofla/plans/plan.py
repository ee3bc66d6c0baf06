"""Plan: what each attention layer becomes, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from dofla.attention import tier_bytes
from dofla.attention.constants import MOST_BITS
from dofla.display import Part, Result, size, table
from dofla.errors import DoflaError
from dofla.feature_maps import feature_map_class
from dofla.plans.hybrid import TOKEN_DTYPES, HeadCost
from dofla.storage.files import read_json, write_json

TIERS = "tiers @ bits"
_MOST = 2**31 - 1
_FORMAT = 3
"""2 had other names of fields; 1 had coarser scales of coded tokens, which nothing in an adapter's tensors would
tell."""


PREFILLS = ("auto", "exact", "stream")
"""Ways in which several tokens enter a compressed cache: ``exact``, they attend exactly to the cache and to one
another, and those to retain are selected at the end of the call; ``stream``, one after the other, as decoding goes on;
``auto``, exact on a GPU, where it is faster, and stream on a CPU."""


def check_prefill(prefill: str) -> None:
    """DoflaError unless it is one of :data:`PREFILLS`."""
    if prefill not in PREFILLS:
        raise DoflaError(f"prefill is {prefill!r}: choose one of {', '.join(PREFILLS)}")


@dataclass
class LayerPlan:
    """One attention module.

    Attributes:
        name: of the module in the model.
        kv_heads, head_dim, value_dim: its shape, so that a plan made for another model is noticed.
        features: per KV head, or one number for all; so are ``window`` and ``sinks``.
        window: local window: last tokens with exact scores, the query's own included.
        sinks: attention sinks: first tokens with exact scores.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        token_dtype: how window and sinks are stored, one of :data:`dofla.plans.hybrid.TOKEN_DTYPES`.
        keep_softmax: leave the layer as it is; all other fields but its shape are then ignored.
        tiers: of a compressed cache, between window and features, newest first: ``[tokens, bits]`` of each, bits per
            number falling from 5 at most to 1; or such a list for each KV head.
        heavy_hitters: slots of the last tier for tokens that are retained whatever their age while they draw more
            attention than others, per KV head or one number for all.
        smooth_keys: take a calibrated mean and scale of each channel off the keys first
            (:class:`dofla.attention.KeySmoothing`).
    """

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int
    features: int | list[int] = 0
    window: int | list[int] = 0
    sinks: int | list[int] = 0
    feature_map: str = "prf"
    token_dtype: str = "model"
    keep_softmax: bool = False
    tiers: list[list] = field(default_factory=list)
    heavy_hitters: int | list[int] = 0
    smooth_keys: bool = False

    def __post_init__(self) -> None:
        self._check_integer("kv_heads", "head_dim", "value_dim", least=1)
        for what in ("keep_softmax", "smooth_keys"):
            if not isinstance(getattr(self, what), bool):
                raise DoflaError(f"layer {self.name}: {what} is {getattr(self, what)!r}: give true or false")
        if self.keep_softmax:
            return
        try:
            feature_map_class(self.feature_map)
        except DoflaError as error:
            raise DoflaError(f"layer {self.name}: {error}") from None
        for what, least in (("features", self.feature_map != "none"), ("window", 0), ("sinks", 0)):
            self._check_per_head(what, int(least))
        self._check_tiers()
        self._check_per_head("heavy_hitters", 0)
        if any(n and not tiers for n, tiers in zip(self.heavy_hitters_per_head, self.tiers_per_head, strict=True)):
            raise DoflaError(
                f"layer {self.name}: heavy_hitters is {self.heavy_hitters!r} without tiers: give tiers, or leave it out"
            )
        if self.token_dtype not in TOKEN_DTYPES:
            raise DoflaError(
                f"layer {self.name}: token_dtype is {self.token_dtype!r}: choose one of {', '.join(TOKEN_DTYPES)}"
            )
        if self.feature_map == "none" and not all(
            window or sinks or any(self.tiers) for _, window, sinks in self.sizes
        ):
            raise DoflaError(f"layer {self.name}: feature_map 'none' requires window > 0 or sinks > 0")

    def _check_integer(self, *fields: str, least: int) -> None:
        for what in fields:
            value = getattr(self, what)
            if not is_integer(value) or not least <= value <= _MOST:
                raise DoflaError(
                    f"layer {self.name}: {what} is {value!r}: give an integer, {least} or more, {_MOST} at most"
                )

    def _check_per_head(self, what: str, least: int) -> None:
        value = getattr(self, what)
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(value) != self.kv_heads:
            raise DoflaError(
                f"layer {self.name}: {what} has {len(value)} numbers for {self.kv_heads} KV heads: "
                "give one each, or an int"
            )
        if not all(is_integer(number) and least <= number <= _MOST for number in numbers):
            raise DoflaError(
                f"layer {self.name}: {what} is {value!r}: every KV head needs an integer, {least} or more, "
                f"{_MOST} at most"
            )

    def _check_tiers(self) -> None:
        per_head = self.tiers_per_head
        if len(per_head) != self.kv_heads:
            raise DoflaError(
                f"layer {self.name}: tiers has {len(per_head)} lists for {self.kv_heads} KV heads: give one each"
            )
        for tiers in per_head:
            numbers: list[Any] = [x for tier in tiers for x in (tier if isinstance(tier, (list, tuple)) else [None])]
            integers = all(is_integer(count) and 1 <= count <= _MOST for count in numbers[::2])
            bits = numbers[1::2]
            good = len(numbers) == 2 * len(tiers) and integers and all(isinstance(x, (int, float)) for x in bits)
            if not good or bits != sorted(bits, reverse=True) or not all(1 <= x <= MOST_BITS for x in bits):
                raise DoflaError(
                    f"layer {self.name}: tiers is {tiers!r}: give [tokens, bits] of each, bits falling from "
                    f"{MOST_BITS} at most to 1"
                )
        if any(per_head) and (self.head_dim % 8 or self.value_dim % 8):
            raise DoflaError(f"layer {self.name}: tiers need heads whose size is a multiple of 8: leave them out")

    def arguments(self) -> dict[str, Any]:
        """Arguments of the layer's :class:`dofla.feature_maps.layer.LinearAttention`."""
        features, window, sinks = zip(*self.sizes, strict=True)
        return {
            "feature_map": self.feature_map,
            "features": features,
            "head_dim": self.head_dim,
            "window": window,
            "sinks": sinks,
            "token_dtype": self.token_dtype,
            "tiers": self.tiers_per_head,
            "heavy_hitters": self.heavy_hitters_per_head,
            "value_dim": self.value_dim,
            "smooth_keys": self.smooth_keys,
        }

    @property
    def tiers_per_head(self) -> list[list]:
        """The tiers of each KV head."""
        alike = not self.tiers or not isinstance(self.tiers[0], (list, tuple)) or not _is_nested(self.tiers[0])
        return [self.tiers] * self.kv_heads if alike else self.tiers

    @property
    def heavy_hitters_per_head(self) -> list[int]:
        """Slots for heavy hitters of each KV head."""
        return self.heavy_hitters if isinstance(self.heavy_hitters, list) else [self.heavy_hitters] * self.kv_heads

    @property
    def coded_per_head(self) -> list[list]:
        """The tiers of each KV head, heavy hitters counted with the last."""
        return [
            [*tiers[:-1], [tiers[-1][0] + hitters, tiers[-1][1]]] if tiers else []
            for tiers, hitters in zip(self.tiers_per_head, self.heavy_hitters_per_head, strict=True)
        ]

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Features, window and sinks of each KV head."""
        fields = (self.features, self.window, self.sinks)
        return list(zip(*(x if isinstance(x, list) else [x] * self.kv_heads for x in fields), strict=True))

    @property
    def slots_per_head(self) -> list[int]:
        """Tokens that each KV head holds at most: window, sinks and tiers."""
        return [
            window + sinks + sum(count for count, _ in tiers)
            for (_, window, sinks), tiers in zip(self.sizes, self.coded_per_head, strict=True)
        ]

    @property
    def features_per_head(self) -> list[int]:
        """The number of features of each KV head."""
        return [features for features, _, _ in self.sizes]

    @property
    def ranges(self) -> dict[str, str]:
        """Its sizes in words, by what they are of, over KV heads."""
        features, window, sinks = map(_range, zip(*self.sizes, strict=True))
        return {"features": features, "window": window, TIERS: _tiers(self.coded_per_head), "sinks": sinks}

    def cost(self, itemsize: int) -> HeadCost:
        """The bytes of one of its features and tokens, in a model whose numbers have ``itemsize`` bytes."""
        return HeadCost.of(self.head_dim, self.value_dim, itemsize, self.token_dtype)

    def bytes_by_kind(self, itemsize: int) -> tuple[int, int, dict[float, int]]:
        """Bytes of state per sequence: of features, of window and sinks, and of tiers by their bits; none if it is
        kept softmax."""
        if self.keep_softmax:
            return 0, 0, {}
        cost, coded = self.cost(itemsize), Counter[float]()
        for tiers, hitters in zip(self.tiers_per_head, self.heavy_hitters_per_head, strict=True):
            for number, (count, bits) in enumerate(tiers, 1):
                held = hitters if number == len(tiers) else 0
                coded[bits] += (count + held) * tier_bytes(self.head_dim, self.value_dim, bits, scored=held > 0)
        features, window, sinks = map(sum, zip(*self.sizes, strict=True))
        return features * cost.feature, (window + sinks) * cost.token, dict(sorted(coded.items(), reverse=True))

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of state per sequence; 0 if it is kept softmax."""
        features, exact, coded = self.bytes_by_kind(itemsize)
        return features + exact + sum(coded.values())


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
    prefill: str = "auto"

    def __getitem__(self, name: str) -> LayerPlan:
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise KeyError(name)

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of state per sequence, whatever its length, of the linear layers.

        M features take M·(dv+2) numbers per KV head, always in float32; a window or sink token takes d + dv numbers
        per KV head in the model's ``dtype``, or d + dv + 2 bytes in eight bits.
        """
        return sum(layer.state_bytes(dtype.itemsize) for layer in self.layers)

    def softmax_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the key-value cache that softmax attention would keep for ``length`` tokens in these layers.

        Layers kept softmax are counted here and not in :meth:`state_bytes`.
        """
        return sum(length * x.kv_heads * x.cost(dtype.itemsize).cached for x in self.layers)

    def kept_softmax_bytes(self, length: int, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of the key-value cache of the layers kept softmax, for ``length`` tokens."""
        return Plan([x for x in self.layers if x.keep_softmax]).softmax_bytes(length, dtype)

    def parts(self) -> Iterator[Part]:
        """The sizes of each layer as a table with bars, and the bytes of all layers."""
        linear = [x for x in self.layers if not x.keep_softmax]
        most = max((max(x.features_per_head) for x in linear), default=0)
        compressed = any(any(x.tiers_per_head) for x in linear)
        titles = ("features", "window", *((TIERS,) if compressed else ()), "sinks")
        shown = table("layer", *titles, gap=1, widest=30)
        if not compressed:  # tiers leave no room for bars in 80 columns
            shown.add_column("")
        for layer in self.layers:
            if layer.keep_softmax:
                shown.add_row(layer.name, "softmax")
                continue
            sizes = [layer.ranges[title] for title in titles]
            bar = Text("━" * round(24 * max(layer.features_per_head) / max(most, 1)), style="cyan")
            shown.add_row(layer.name, *sizes, *([] if compressed else [bar]))
        yield shown
        context = "whatever the context" if self.context is None else f"for up to {self.context:,} tokens"
        yield f"state per sequence: {size(self.state_bytes())} in float32, {context}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, one short entry per layer."""
        layers = {}
        for layer in self.layers:
            entry = asdict(layer)
            if not layer.tiers:
                del entry["tiers"]
            if not layer.heavy_hitters:
                del entry["heavy_hitters"]
            if not layer.smooth_keys:
                del entry["smooth_keys"]
            layers[entry.pop("name")] = entry
        head = {"format": _FORMAT, "model": self.model, "made_by": self.made_by}
        head |= {} if self.context is None else {"context": self.context}
        return head | ({} if self.prefill == "auto" else {"prefill": self.prefill}) | {"layers": layers}

    @classmethod
    def from_dict(cls, data: dict[str, Any], where: str = "the plan") -> Plan:
        """The reverse of :meth:`to_dict`; DoflaError naming ``where`` and the field if something is off."""
        if data.get("format", _FORMAT) != _FORMAT:
            raise DoflaError(f"{where} was made by an older version of dofla: make it again")
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
        context = data.get("context")
        if context is not None and not (is_integer(context) and context > 0):
            raise DoflaError(f"{where}: context is {context!r}: give a number of tokens, or leave it out")
        prefill = data.get("prefill", "auto")
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


def _is_nested(tiers: list) -> bool:
    return not tiers or isinstance(tiers[0], (list, tuple))


def _range(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.10g}" if low == high else f"{low:.10g}-{high:.10g}"


def _tiers(per_head: list[list]) -> str:
    """In few characters: each tier, over KV heads; all tokens together where heads have tiers of other bits."""
    if len({tuple(bits for _, bits in tiers) for tiers in per_head}) == 1:
        kinds = [([count for count, _ in each], each[0][1]) for each in zip(*per_head, strict=True)]
        return ", ".join(f"{_range(counts)} @ {bits:g}" for counts, bits in kinds)
    tokens = [sum(count for count, _ in tiers) for tiers in per_head]
    return f"{_range(tokens)} @ {_range([bits for tiers in per_head for _, bits in tiers])}"


def is_integer(value: object) -> bool:
    """True if ``value`` is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)
