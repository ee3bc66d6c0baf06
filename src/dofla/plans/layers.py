"""Results of converting an attention module: a compressed cache, feature maps, or nothing else than it was."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self

from dofla.attention import HeadSizes, tier_bytes
from dofla.attention.constants import MOST_BITS
from dofla.errors import DoflaError, about, is_integer
from dofla.feature_maps import feature_map_class
from dofla.feature_maps.cost import TOKEN_DTYPES, HeadCost

MOST_TOKENS = 2**24
"""Tokens or features that a KV head has at most."""
_MOST_DIM, _MOST_HEADS, _MOST_WIDTH = 2**14, 2**12, 2**20


@dataclass
class LayerPlan:
    """One attention module.

    Attributes:
        kind: which of the classes below it is.
        name: of the module in the model.
        kv_heads, head_dim, value_dim: its shape, so that a plan made for another model is noticed.
    """

    kind: ClassVar[str] = ""

    name: str
    kv_heads: int
    head_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        for what, most in (("kv_heads", _MOST_HEADS), ("head_dim", _MOST_DIM), ("value_dim", _MOST_DIM)):
            value = getattr(self, what)
            if not is_integer(value) or not 1 <= value <= most:
                raise self._error(f"{what} is {value!r}: give an integer, 1 or more, {most} at most")

    def softmax_bytes(self, length: int, itemsize: int) -> int:
        """Bytes of the softmax key-value cache for ``length`` tokens, at ``itemsize`` bytes a number."""
        return length * self.kv_heads * itemsize * (self.head_dim + self.value_dim)

    def cache_bytes(self, length: int, itemsize: int) -> int:
        """Bytes of what it keeps of a sequence of ``length`` tokens, at ``itemsize`` bytes a number."""
        return self.softmax_bytes(length, itemsize)

    @property
    def largest(self) -> int:
        """The most tokens, or features, that a KV head has."""
        return 0

    @property
    def ranges(self) -> dict[str, str]:
        """Its sizes in words, least and most over the KV heads, by what they are of."""
        return {}

    def to_dict(self) -> dict[str, Any]:
        """Plain data without the name."""
        entry = asdict(self)
        del entry["name"]
        return {"kind": self.kind, **entry}

    def _per_head(self, what: str, least: int) -> list[int]:
        """A field of one number for all KV heads or one for each, as a list; DoflaError unless it is such."""
        value = getattr(self, what)
        numbers = value if isinstance(value, list) else [value] * self.kv_heads
        if len(numbers) != self.kv_heads:
            raise self._error(
                f"{what} has {len(numbers)} numbers for {self.kv_heads} KV heads: give one each, or an int"
            )
        if not all(is_integer(number) and least <= number <= MOST_TOKENS for number in numbers):
            bounds = f"{least} or more, {MOST_TOKENS} at most"
            raise self._error(f"{what} is {value!r}: every KV head needs an integer, {bounds}")
        return numbers

    def _error(self, text: str) -> DoflaError:
        return DoflaError(f"layer {self.name}: {text}")


@dataclass
class SoftmaxLayer(LayerPlan):
    """A module that stays as it is."""

    kind: ClassVar[str] = "softmax"


@dataclass
class CompressedLayer(LayerPlan):
    """A module with a compressed cache.

    Attributes:
        window, sinks, newest, heavy_hitters: tokens of each KV head, as in :class:`dofla.attention.HeadSizes`; or one
            number for all.
        bits: per number of the tier, 1 to 5.
        input_width: numbers of a token in the module's input, by which its importance is predicted; 0 if it is not.
    """

    kind: ClassVar[str] = "compressed"

    window: int | list[int]
    sinks: int | list[int]
    newest: int | list[int]
    heavy_hitters: int | list[int]
    bits: float = 3.0
    input_width: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sizes  # its errors
        if not isinstance(self.bits, (int, float)) or not 1 <= self.bits <= MOST_BITS:
            raise self._error(f"bits is {self.bits!r}: give 1 to {MOST_BITS}")
        if not is_integer(self.input_width) or not 0 <= self.input_width <= _MOST_WIDTH:
            raise self._error(f"input_width is {self.input_width!r}: give an integer, 0 to {_MOST_WIDTH}")
        if self.head_dim % 8 or self.value_dim % 8:
            raise self._error(
                f"heads have {self.head_dim} and {self.value_dim} numbers: a compressed cache needs multiples of 8"
            )

    @property
    def sizes(self) -> list[HeadSizes]:
        """The sizes of each KV head."""
        least = {"window": 1, "sinks": 0, "newest": 1, "heavy_hitters": 0}
        return [HeadSizes(*own) for own in zip(*(self._per_head(*each) for each in least.items()), strict=True)]

    @property
    def slots(self) -> list[float]:
        """Tokens that each KV head holds at most; infinity in those that hold every one."""
        return [math.inf if size.grows else sum(size) for size in self.sizes]

    @property
    def largest(self) -> int:
        return max(sum(size) for size in self.sizes)

    @property
    def ranges(self) -> dict[str, str]:
        sizes = [(x.window, x.sinks, math.inf if x.grows else x.newest + x.heavy_hitters) for x in self.sizes]
        columns = zip(*sizes, strict=True)
        return dict(zip(("window", "sinks", f"{self.bits:.10g}-bit"), map(_range, columns), strict=True))

    def of_heads(self, heads: Sequence[int]) -> Self:
        """The plan of some of its KV heads, as of a layer of its own."""
        sizes = self.sizes
        columns = zip(*(sizes[head] for head in heads), strict=True)
        own: dict[str, Any] = {name: list(column) for name, column in zip(HeadSizes._fields, columns, strict=True)}
        return replace(self, kv_heads=len(heads), **own)

    def cache_bytes(self, length: int, itemsize: int) -> int:
        return sum(head_bytes(size, self.head_dim, self.value_dim, self.bits, length) for size in self.sizes)


def head_bytes(size: HeadSizes, head_dim: int, value_dim: int, bits: float, length: int = 0) -> int:
    """Bytes of the compressed cache of a KV head: those of a constant size; and of a head that grows, the tokens of a
    sequence of ``length``, without the free slots for those to come."""
    if size.grows:
        size = size._replace(newest=max(0, length - size.window - size.sinks))
    exact = (size.window + size.sinks) * HeadCost.of(head_dim, value_dim, 0, "int8").token
    return exact + (size.newest + size.heavy_hitters) * tier_bytes(head_dim, value_dim, bits)


@dataclass
class FeatureLayer(LayerPlan):
    """A module with feature maps.

    Attributes:
        features: per KV head, or one number for all; so are ``window`` and ``sinks``.
        window: local window: last tokens with exact scores, the query's own included.
        sinks: attention sinks: first tokens with exact scores.
        feature_map: a name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        token_dtype: how window and sinks are stored, one of :data:`dofla.feature_maps.cost.TOKEN_DTYPES`.
        smooth_keys: take a calibrated mean and scale of each channel off the keys first
            (:class:`dofla.attention.KeySmoothing`).
    """

    kind: ClassVar[str] = "features"

    features: int | list[int] = 0
    window: int | list[int] = 0
    sinks: int | list[int] = 0
    feature_map: str = "prf"
    token_dtype: str = "model"
    smooth_keys: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.smooth_keys, bool):
            raise self._error(f"smooth_keys is {self.smooth_keys!r}: give true or false")
        with about(f"layer {self.name}"):
            feature_map_class(self.feature_map)
        if self.token_dtype not in TOKEN_DTYPES:
            raise self._error(f"token_dtype is {self.token_dtype!r}: choose one of {', '.join(TOKEN_DTYPES)}")
        sizes = self.sizes  # and its errors
        if self.feature_map == "none" and not all(window or sinks for _, window, sinks in sizes):
            raise self._error("feature_map 'none' requires window > 0 or sinks > 0")

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """Features, window and sinks of each KV head."""
        least = {"features": int(self.feature_map != "none"), "window": 0, "sinks": 0}
        return list(zip(*(self._per_head(*each) for each in least.items()), strict=True))

    @property
    def features_per_head(self) -> list[int]:
        """The number of features of each KV head."""
        return [features for features, _, _ in self.sizes]

    @property
    def largest(self) -> int:
        return max(max(features, window + sinks) for features, window, sinks in self.sizes)

    @property
    def ranges(self) -> dict[str, str]:
        columns = map(_range, zip(*self.sizes, strict=True))
        return dict(zip(("features", "window", "sinks"), columns, strict=True))

    def cost(self, itemsize: int) -> HeadCost:
        """The bytes of one of its features and tokens, in a model whose numbers have ``itemsize`` bytes."""
        return HeadCost.of(self.head_dim, self.value_dim, itemsize, self.token_dtype)

    def cache_bytes(self, length: int, itemsize: int) -> int:
        return sum(self.cost(itemsize).total(*size) for size in self.sizes)


KINDS: dict[str, type[LayerPlan]] = {x.kind: x for x in (SoftmaxLayer, CompressedLayer, FeatureLayer)}


def layer_from_dict(name: str, entry: Any) -> LayerPlan:
    """The reverse of :meth:`LayerPlan.to_dict`; DoflaError naming the layer and the field if something is off."""
    if not isinstance(entry, dict) or entry.get("kind") not in KINDS:
        kind = entry.get("kind") if isinstance(entry, dict) else entry
        raise DoflaError(f"layer {name}: kind is {kind!r}: choose one of {', '.join(KINDS)}")
    made, given = KINDS[entry["kind"]], {key: value for key, value in entry.items() if key != "kind"}
    known = {spec.name for spec in fields(made)}
    if unknown := given.keys() - known:
        raise DoflaError(f"layer {name}: unknown field {min(unknown)!r}: choose from {', '.join(sorted(known))}")
    try:
        return made(name=name, **given)
    except TypeError as error:
        raise DoflaError(f"layer {name} has wrong fields: {error}") from error


def alike(numbers: Sequence[int]) -> int | list[int]:
    """One number if all are equal, for a field that takes either."""
    return numbers[0] if len(set(numbers)) == 1 else list(numbers)


def _range(numbers: Sequence[float]) -> str:
    low, high = ("all" if end == math.inf else f"{end}" for end in (min(numbers), max(numbers)))
    return low if low == high else f"{low}-{high}"
