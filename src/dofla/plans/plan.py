"""Plan: what each attention layer becomes, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.text import Text

from dofla.attention import stage_bytes
from dofla.attention.coding.levels import MOST_BITS
from dofla.display import Part, Result, size, table
from dofla.errors import DoflaError
from dofla.feature_maps import feature_map_class
from dofla.plans.hybrid import TOKEN_DTYPES, HeadCost
from dofla.storage.files import read_json, write_json

_MOST = 2**31 - 1
_FORMAT = 2
"""1 had coarser scales of coded tokens, which nothing in an adapter's tensors would tell."""


PREFILLS = ("auto", "exact", "stream")
"""How several tokens enter a compressed cache: ``exact``, they attend exactly to the cache and to one another, and
those to retain are selected at the end of the call; ``stream``, one after the other, as decoding goes on; ``auto``,
exact on a GPU, where it is faster, and stream on a CPU."""


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
        window: last tokens kept with exact scores, the query's own included.
        sinks: first tokens kept with exact scores.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        token_dtype: how window and sinks are kept, one of :data:`dofla.plans.hybrid.TOKEN_DTYPES`.
        keep_softmax: leave the layer as it is; the other fields but its shape then play no part.
        stages: of a fading memory, between window and features, newest first: ``[tokens, bits]`` of each, bits per
            number falling from 5 at most to 1; or such a list for each KV head.
        kept: tokens of the last stage beyond those, per KV head or one number for all, that stay whatever their age
            while they draw more attention than others.
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
    stages: list[list] = field(default_factory=list)
    kept: int | list[int] = 0
    smooth_keys: bool = False

    def __post_init__(self) -> None:
        self._check_whole("kv_heads", "head_dim", "value_dim", least=1)
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
        self._check_stages()
        self._check_per_head("kept", 0)
        if any(kept and not stages for kept, stages in zip(self.kept_per_head, self.stages_per_head, strict=True)):
            raise DoflaError(f"layer {self.name}: kept is {self.kept!r} without stages: give stages, or leave it out")
        if self.token_dtype not in TOKEN_DTYPES:
            raise DoflaError(
                f"layer {self.name}: token_dtype is {self.token_dtype!r}: choose one of {', '.join(TOKEN_DTYPES)}"
            )
        if self.feature_map == "none" and not all(
            window or sinks or any(self.stages) for _, window, sinks in self.sizes
        ):
            raise DoflaError(f"layer {self.name}: feature_map none sees nothing without a window or sinks: give one")

    def _check_whole(self, *fields: str, least: int) -> None:
        for what in fields:
            value = getattr(self, what)
            if not is_whole(value) or not least <= value <= _MOST:
                raise DoflaError(
                    f"layer {self.name}: {what} is {value!r}: give a whole number, {least} or more, {_MOST} at most"
                )

    def _check_per_head(self, what: str, least: int) -> None:
        value = getattr(self, what)
        numbers = value if isinstance(value, list) else [value]
        if isinstance(value, list) and len(value) != self.kv_heads:
            raise DoflaError(
                f"layer {self.name}: {what} has {len(value)} numbers for {self.kv_heads} KV heads: "
                "give one each, or an int"
            )
        if not all(is_whole(number) and least <= number <= _MOST for number in numbers):
            raise DoflaError(
                f"layer {self.name}: {what} is {value!r}: every KV head needs a whole number, {least} or more, "
                f"{_MOST} at most"
            )

    def _check_stages(self) -> None:
        per_head = self.stages_per_head
        if len(per_head) != self.kv_heads:
            raise DoflaError(
                f"layer {self.name}: stages has {len(per_head)} lists for {self.kv_heads} KV heads: give one each"
            )
        for stages in per_head:
            numbers = [number for stage in stages for number in (stage if isinstance(stage, (list, tuple)) else [None])]
            whole = all(is_whole(count) and 1 <= count <= _MOST for count in numbers[::2])
            bits = numbers[1::2]
            good = len(numbers) == 2 * len(stages) and whole and all(isinstance(x, (int, float)) for x in bits)
            if not good or bits != sorted(bits, reverse=True) or not all(1 <= x <= MOST_BITS for x in bits):
                raise DoflaError(
                    f"layer {self.name}: stages is {stages!r}: give [tokens, bits] of each, bits falling from "
                    f"{MOST_BITS} at most to 1"
                )
        if any(per_head) and (self.head_dim % 8 or self.value_dim % 8):
            raise DoflaError(f"layer {self.name}: stages need heads whose size is a multiple of 8: leave them out")

    @property
    def stages_per_head(self) -> list[list]:
        """The stages of each KV head."""
        alike = not self.stages or not isinstance(self.stages[0], (list, tuple)) or not _is_nested(self.stages[0])
        return [self.stages] * self.kv_heads if alike else self.stages

    @property
    def kept_per_head(self) -> list[int]:
        """The kept tokens of each KV head."""
        return self.kept if isinstance(self.kept, list) else [self.kept] * self.kv_heads

    @property
    def coded_per_head(self) -> list[list]:
        """The stages of each KV head, kept tokens counted with the last."""
        return [
            [*stages[:-1], [stages[-1][0] + kept, stages[-1][1]]] if stages else []
            for stages, kept in zip(self.stages_per_head, self.kept_per_head, strict=True)
        ]

    @property
    def stages_in_words(self) -> str:
        """``40 @ 4 bits, 32 @ 3 bits, 170 kept``; with several such lists where KV heads differ."""
        words = [
            ", ".join([f"{count} @ {bits:g} bits" for count, bits in stages] + [f"{kept} kept"] * bool(kept))
            for stages, kept in zip(self.stages_per_head, self.kept_per_head, strict=True)
        ]
        return "; ".join(words if len(set(words)) > 1 else words[:1])

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Features, window and sinks of each KV head."""
        fields = (self.features, self.window, self.sinks)
        return list(zip(*(x if isinstance(x, list) else [x] * self.kv_heads for x in fields), strict=True))

    @property
    def places_per_head(self) -> list[int]:
        """Tokens that each KV head holds at most: window, sinks and stages."""
        return [
            window + sinks + sum(count for count, _ in stages)
            for (_, window, sinks), stages in zip(self.sizes, self.coded_per_head, strict=True)
        ]

    @property
    def features_per_head(self) -> list[int]:
        """The number of features of each KV head."""
        return [features for features, _, _ in self.sizes]

    def cost(self, itemsize: int) -> HeadCost:
        """What its features and tokens cost in a model whose numbers have ``itemsize`` bytes."""
        return HeadCost.of(self.head_dim, self.value_dim, itemsize, self.token_dtype)

    def bytes_by_kind(self, itemsize: int) -> tuple[int, int, dict[float, int]]:
        """Bytes of state per sequence: of features, of window and sinks, and of stages by their bits; none if it is
        kept softmax."""
        if self.keep_softmax:
            return 0, 0, {}
        cost, coded = self.cost(itemsize), Counter()
        for stages, kept in zip(self.stages_per_head, self.kept_per_head, strict=True):
            for number, (count, bits) in enumerate(stages, 1):
                held = kept if number == len(stages) else 0
                coded[bits] += (count + held) * stage_bytes(self.head_dim, self.value_dim, bits, scored=held > 0)
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
        """What each layer becomes, with bars, and the bytes of all."""
        linear = [x for x in self.layers if not x.keep_softmax]
        most = max((max(x.features_per_head) for x in linear), default=0)
        fading = any(any(x.stages_per_head) for x in linear)
        titles = ("features", "window", *(("stages @ bits",) if fading else ()), "sinks")
        shown = table("layer", *titles, gap=1, widest=30)
        if not fading:  # stages leave no room for bars in 80 columns
            shown.add_column("")
        for layer in self.layers:
            if layer.keep_softmax:
                shown.add_row(layer.name, "softmax")
                continue
            sizes = [_range(x) for x in zip(*layer.sizes, strict=True)]
            if fading:
                shown.add_row(layer.name, *sizes[:2], _stages(layer.coded_per_head), sizes[2])
                continue
            bar = Text("━" * round(24 * max(layer.features_per_head) / max(most, 1)), style="cyan")
            shown.add_row(layer.name, *sizes, bar)
        yield shown
        context = "whatever the context" if self.context is None else f"for up to {self.context:,} tokens"
        yield f"state per sequence: {size(self.state_bytes())} in float32, {context}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, one short entry per layer."""
        layers = {}
        for layer in self.layers:
            entry = asdict(layer)
            if not layer.stages:
                del entry["stages"]  # as before there were any
            if not layer.kept:
                del entry["kept"]
            if not layer.smooth_keys:
                del entry["smooth_keys"]
            layers[entry.pop("name")] = entry
        head = {"format": _FORMAT, "model": self.model, "made_by": self.made_by}
        head |= {} if self.context is None else {"context": self.context}
        return head | ({} if self.prefill == "auto" else {"prefill": self.prefill}) | {"layers": layers}

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
        if data.get("format") == 1 and any(plan.stages for plan in plans):
            raise DoflaError(
                f"{where}: its tokens were coded by an earlier version: make the student again (dofla compress)"
            )
        made_by = data.get("made_by") or {}
        if not isinstance(made_by, dict):
            raise DoflaError(f"{where}: made_by is {made_by!r}: give an object, or leave it out")
        context = data.get("context")
        if context is not None and not (is_whole(context) and context > 0):
            raise DoflaError(f"{where}: context is {context!r}: give a number of positions, or leave it out")
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


def _is_nested(stages: list) -> bool:
    return not stages or isinstance(stages[0], (list, tuple))


def _range(numbers: Sequence[float]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:.10g}" if low == high else f"{low:.10g}-{high:.10g}"


def _stages(per_head: list[list]) -> str:
    """In few characters: each stage, over KV heads; all tokens together where heads have stages of other bits."""
    if len({tuple(bits for _, bits in stages) for stages in per_head}) == 1:
        kinds = [([count for count, _ in each], each[0][1]) for each in zip(*per_head, strict=True)]
        return ", ".join(f"{_range(counts)} @ {bits:g}" for counts, bits in kinds)
    tokens = [sum(count for count, _ in stages) for stages in per_head]
    return f"{_range(tokens)} @ {_range([bits for stages in per_head for _, bits in stages])}"


def is_whole(value: object) -> bool:
    """Whether ``value`` is an integer, which True is not."""
    return isinstance(value, int) and not isinstance(value, bool)
