"""One layer's linear attention: its feature maps, and how its heads are grouped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from dofla.attention import (
    LOG_ZERO,
    Carried,
    CodedTiers,
    CompressedHeads,
    FlatState,
    KeySmoothing,
    Layout,
    Tier,
    accumulable,
    attend,
    exact_prefill,
    exact_scores,
    log_kernel,
    packed,
    rounded,
    unpacked,
)
from dofla.attention.backend import Backend
from dofla.attention.backends import backend_for
from dofla.attention.state import gradients_asked
from dofla.feature_maps import FeatureMap, feature_map_class
from dofla.feature_maps.containers import ModuleDict, ModuleList
from dofla.feature_maps.padding import without_padding

Layer = TypeVar("Layer", bound=nn.Module)
P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(method: Callable[Concatenate[Layer, Tensor, P], R]) -> Callable[Concatenate[Layer, Tensor, P], R]:
    """For methods that take exponents: mixed-precision training would halve the precision of the products in them."""

    @wraps(method)
    def call(self: Layer, query: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        device = "cpu" if query.is_cpu else query.device.type
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return method(self, query, *args, **kwargs)
        with torch.autocast(device, enabled=False):
            return method(self, query, *args, **kwargs)

    return call


class LinearAttention(nn.Module):
    """The feature maps of one attention layer, and attention through them.

    KV heads of equal size (features, window, sinks, tiers) are one group: a single feature map, a single state, one
    call of :func:`dofla.attention.attend`. A layer with the same size everywhere has one group; ragged layers have
    several, and no head is padded to the size of another.

    Args:
        feature_map: name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        features: number of features of each KV head.
        head_dim: size of queries and keys.
        window: last tokens with exact scores, of each KV head or one number for all.
        sinks: first tokens with exact scores, likewise.
        token_dtype: ``int8``, window and sinks are kept in eight bits (all keys and values are rounded to it on
            entering, so that it does not matter which of them are kept); or ``model``, as they come.
        tiers: of each KV head, tokens and bits of the tiers between window and features (:class:`CodedTiers`).
        heavy_hitters: of each KV head, slots of the last tier for tokens that are retained while they draw attention.
        value_dim: size of values, if there are tiers; default that of keys.
        smooth_keys: whether keys and queries go through a :class:`KeySmoothing` first.
    """

    def __init__(
        self,
        feature_map: str,
        features: Sequence[int],
        head_dim: int,
        window: int | Sequence[int] = 0,
        sinks: int | Sequence[int] = 0,
        token_dtype: str = "model",
        tiers: Sequence[Sequence[Tier]] = (),
        heavy_hitters: Sequence[int] = (),
        value_dim: int | None = None,
        smooth_keys: bool = False,
    ) -> None:
        super().__init__()
        self.smoothing = KeySmoothing(len(features), head_dim) if smooth_keys else None
        self.features, self.token_dtype, self.hides_tokens = list(features), token_dtype, False
        window, sinks = ([x] * len(features) if isinstance(x, int) else x for x in (window, sinks))
        coded = [tuple((count, bits) for count, bits in own) for own in tiers] or [()] * len(features)
        sizes = list(zip(features, window, sinks, coded, heavy_hitters or [0] * len(features), strict=True))
        kinds = list(dict.fromkeys(sizes))
        self.sizes = [size[:3] for size in kinds]
        self.groups = [[head for head, own in enumerate(sizes) if own == kind] for kind in kinds]
        make = feature_map_class(feature_map)
        self.maps: ModuleList[FeatureMap] = ModuleList(
            make(len(group), head_dim, size[0]) for group, size in zip(self.groups, self.sizes, strict=True)
        )
        self.coded_tiers: ModuleDict[CodedTiers] = ModuleDict()
        for n, (group, kind) in enumerate(zip(self.groups, kinds, strict=True)):
            if kind[3]:
                self.coded_tiers[str(n)] = CodedTiers(len(group), head_dim, value_dim or head_dim, kind[3], kind[4])
        self._layouts: dict[int, Layout] = {}
        if self.keeps_eight_bits:
            for n, coded_tiers in ((int(name), coded_tiers) for name, coded_tiers in self.coded_tiers.items()):
                own_features, own_window, own_sinks = self.sizes[n]
                if own_window:
                    self._layouts[n] = Layout(coded_tiers, self.groups[n], own_features, own_window, own_sinks)
        self._compressed: CompressedHeads | None = None
        if self._layouts:
            self._compressed = CompressedHeads(list(self._layouts.values()), [self.maps[n] for n in self._layouts])
        self._all_compressed = len(self._layouts) == len(self.groups)

    @property
    def exact_tokens(self) -> list[tuple[int, int]]:
        """Window and sinks of each group; none while :attr:`hides_tokens` is set."""
        return [(0, 0) if self.hides_tokens else size[1:] for size in self.sizes]

    def coded_tiers_of(self, group: int) -> CodedTiers | None:
        """The tiers of a group, if it has any and they are not hidden."""
        coded_tiers, name = self.coded_tiers, str(group)
        return coded_tiers[name] if name in coded_tiers and not self.hides_tokens else None

    def layout_of(self, group: int) -> Layout | None:
        """The layout of a group's state between calls, if that is in one piece: a window in int8 and tiers."""
        return None if self.hides_tokens else self._layouts.get(group)

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the groups that have one (:meth:`layout_of`)."""
        return [] if self.hides_tokens else list(self._layouts.values())

    @property
    def only_forgets(self) -> bool:
        """True if all heads keep tokens in tiers and sum up none."""
        return not any(self.features) and all(self.coded_tiers_of(n) is not None for n in range(len(self.groups)))

    @property
    def retains(self) -> bool:
        """True if all heads have a local window in int8, one tier with heavy hitters, and no features."""
        return self._all_compressed and not self.hides_tokens and all(x.retains for x in self._layouts.values())

    @property
    def is_hybrid(self) -> bool:
        """True if any head sees tokens exactly."""
        return any(window or sinks for window, sinks in self.exact_tokens)

    @property
    def keeps_eight_bits(self) -> bool:
        """True if there are exact tokens and they are kept in eight bits."""
        return self.token_dtype == "int8" and self.is_hybrid

    def traceable(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        weight: Tensor | None,
        states: Sequence[Carried] | None,
        causal: bool,
    ) -> bool:
        """True if torch.compile can take such a call of :meth:`forward` into its graph: where the compiled kernels do
        it, no shape and no branch depends on numbers, but for padding among several tokens that continue a sequence."""
        if weight is not None and states and query.shape[-2] > 1:
            return False
        if any(self.coded_tiers_of(n) is not None and self.layout_of(n) is None for n in range(len(self.groups))):
            return False
        tokens = query.shape[-2]
        return causal and tokens > 0 and backend_for((query, key, value)).traceable(tokens, self.retains)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew, in the order of the groups."""
        for feature_map in self.maps:
            feature_map.reset_parameters(generator)
        for coded_tiers in self.coded_tiers.values():
            coded_tiers.reset()
        if self.smoothing is not None:
            self.smoothing.reset()

    def smoothed(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] and keys [B, Hkv, L, d] as all of the layer's arithmetic takes them."""
        return (query, key) if self.smoothing is None else self.smoothing(query, key)

    @without_autocast
    @without_padding
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        weight: Tensor | None = None,
        states: Sequence[Carried] | None = None,
        causal: bool = True,
        exact: bool = False,
        in_place: bool = False,
    ) -> tuple[Tensor, Sequence[Carried]]:
        """Attention of the new tokens.

        Args:
            query: [B, H, L, d].
            key: [B, Hkv, L, d].
            value: [B, Hkv, L, dv].
            scaling: of the scores.
            weight: key weights [B, L], 0 for padding, which may stand anywhere. Where tokens are kept by the attention
                they draw, those of any weight above 0 count in full.
            states: one per group, or None at the beginning of a sequence.
            causal: whether queries see only earlier keys (and themselves).
            exact: whether several tokens attend exactly to one another and those to retain are selected at the end of
                the call (:func:`dofla.attention.exact_prefill`), where the layer :attr:`retains` tokens alone.
            in_place: whether ``states`` may be overwritten with those after the call.
            keeps_states: whether the states after the call are used; where they are not, some padding is left where
                it is.

        Returns:
            Output [B, H, L, dv], and the states after the last token (empty unless causal).
        """
        query, key = self.smoothed(query, key)
        backend = backend_for((query, key, value), () if weight is None else (weight,))
        held: Sequence[Carried | None] = states or [None] * len(self.groups)
        flat = [x for x in (held[n] for n in self._layouts) if x is None or isinstance(x, FlatState)]  # they all are
        if exact and query.shape[-2] > 1 and causal and self.retains and not gradients_asked(query, key, value):
            return exact_prefill(query, key, value, self.layouts, flat, scaling=scaling, weight=weight, backend=backend)
        found = None
        if causal and self._compressed is not None and not self.hides_tokens:
            found = self._compressed.attend(
                query, key, value, scaling=scaling, weight=weight, states=flat, backend=backend, in_place=in_place
            )
            if found is not None and self._all_compressed:
                return found
        key, value = self._as_kept(key, value)
        attend_group = partial(self._attend, scaling=scaling, weight=weight, causal=causal, backend=backend)
        if len(self.groups) == 1:
            out, state = attend_group(0, query, key, value, state=held[0])
            return out, [] if state is None else [state]
        after: dict[int, Carried] = {}
        if found is None:
            out = value.new_empty(*query.shape[:-1], value.shape[-1])
        else:
            out, after = found[0], dict(zip(self._layouts, found[1], strict=True))
        for n, heads in enumerate(self.groups):
            if n not in after:
                _, state = attend_group(n, query, key, value, state=held[n], heads=heads, out=out)
                if state is not None:
                    after[n] = state
        return out, [after[n] for n in range(len(after))]

    def _as_kept(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return (rounded(key), rounded(value)) if self.keeps_eight_bits else (key, value)

    def _attend(
        self,
        group: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        weight: Tensor | None,
        state: Carried | None,
        causal: bool,
        backend: Backend,
        heads: list[int] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Carried | None]:
        """:func:`attend` from a state to a state as they are kept."""
        if isinstance(state, FlatState):
            state = self._layouts[group].opened(state)
        window, sinks = self.exact_tokens[group]
        out, after = attend(
            query,
            key,
            value,
            self.maps[group],
            scaling=scaling,
            weight=weight,
            state=None if state is None else unpacked(state, torch.promote_types(key.dtype, torch.float32)),
            window=window,
            sinks=sinks,
            coded_tiers=self.coded_tiers_of(group) if causal else None,
            causal=causal,
            heads=heads,
            out=out,
            backend=backend,
        )
        if after is None or not self.keeps_eight_bits:
            return out, after
        kept, layout = packed(after, state, key.shape[-2]), self.layout_of(group)
        return out, kept if layout is None else layout.flat(kept)

    @without_autocast
    def log_scores(
        self, query: Tensor, key: Tensor, rows: Tensor, *, scaling: float, weight: Tensor | None, causal: bool
    ) -> Tensor:
        """Log of the unnormalized attention weights of some rows, before masking: what the losses compare.

        Args:
            query: queries of the rows [B, H, R, d].
            key: all keys [B, Hkv, L, d].
            rows: positions of the rows [R].
            scaling, weight, causal: as in :meth:`forward`.

        Returns:
            [B, H, R, L]: exact scores in the window and at sinks, the log of the approximate kernel elsewhere.
        """
        query, key = self.smoothed(query, key)
        if self.keeps_eight_bits:
            key = rounded(key)
        scores, length = [], key.shape[-2]
        for n, (q, k, _) in enumerate(self.split(query, key, key)):
            scores.append(self._far_scores(n, q, k, _ages(rows, length, weight if causal else None), scaling))
        share = query.shape[1] // key.shape[1]
        approximate = self.join(scores, share)
        if not self.is_hybrid:
            return approximate
        near = self.seen_exactly(rows, length, share=share, weight=weight, causal=causal)
        return torch.where(near, exact_scores(query, key, scaling), approximate)

    def _far_scores(self, group: int, query: Tensor, key: Tensor, age: Tensor, scaling: float) -> Tensor:
        """Scores of a group's queries [B, H, R, L]: keys within a tier, by ``age`` [B or 1, R, L], as the tier decodes
        them, all others by the features. Heavy hitters are taken to be the newest tokens, because their selection
        depends on all queries before."""
        feature_map, coded_tiers, coded = self.maps[group], self.coded_tiers_of(group), []
        if coded_tiers is not None:
            coded = backend_for((key,)).chain(coded_tiers.key, key)
            key = coded[-1].to(key.dtype)
        if feature_map.features:
            scores = log_kernel(feature_map.log_query(query, scaling), feature_map.log_key(key, scaling))
        else:
            scores = accumulable(query).new_full((*query.shape[:-1], key.shape[-2]), LOG_ZERO)
        if coded_tiers is not None:
            age = age.unsqueeze(1)
            start = self.exact_tokens[group][0]
            for count, keys in zip(coded_tiers.slots, coded, strict=True):
                seen = (age >= start) & (age < start + count)
                scores = torch.where(seen, exact_scores(query, keys.to(query.dtype), scaling), scores)
                start += count
        return scores

    def seen_exactly(self, rows: Tensor, length: int, *, share: int, weight: Tensor | None, causal: bool) -> Tensor:
        """Which of ``length`` keys the query ``rows`` [R] see in the window or as sinks, with ``share`` query heads per
        KV head: [B or 1, H, R, length], or one head for all if they agree."""
        distance = _ages(rows, length, weight) if causal else _ages(rows, length, None).abs()
        real = torch.ones_like(distance[:, 0], dtype=torch.bool) if weight is None else weight > 0
        seen = []
        for (window, sinks), group in zip(self.exact_tokens, self.groups, strict=True):
            first = real & (real.cumsum(-1) <= sinks)
            near = ((distance < window) | first.unsqueeze(1)).unsqueeze(1)
            seen.append(near if len(self.groups) == 1 else near.expand(-1, len(group) * share, -1, -1))
        return self.join(seen, share)

    def split(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each group of heads."""
        if len(self.groups) == 1:
            return [(query, key, value)]
        share = query.shape[1] // key.shape[1]
        parts = []
        for group in self.groups:
            of_queries = [head * share + n for head in group for n in range(share)]
            parts.append((query[:, of_queries], key[:, group], value[:, group]))
        return parts

    def join(self, outputs: list[Tensor], share: int) -> Tensor:
        """Outputs of the groups put back in the order of the heads; ``share`` query heads per KV head."""
        if len(outputs) == 1:
            return outputs[0]
        order = torch.tensor([head * share + n for group in self.groups for head in group for n in range(share)])
        return torch.cat(outputs, dim=1)[:, order.argsort().to(outputs[0].device)]


def _ages(rows: Tensor, length: int, weight: Tensor | None) -> Tensor:
    """The age of each of ``length`` keys at the query ``rows`` [R], in real tokens [B or 1, R, length]; negative for
    keys after the query."""
    places = torch.arange(length, device=rows.device)[None] if weight is None else (weight > 0).cumsum(-1)
    return places[:, rows].unsqueeze(-1) - places.unsqueeze(1)
