"""KV heads with a feature map, and a local window and attention sinks beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention import Call, HeadGroup, HybridState, PackedTokens, TokenBuffer, attend, packed, rounded, unpacked
from dofla.feature_maps import FeatureMap, feature_map_class

State = HybridState[TokenBuffer | PackedTokens]


class FeatureHeads(HeadGroup[State]):
    """Attention of KV heads of one size through one feature map.

    Args:
        heads: KV heads of the layer.
        feature_map: name in :data:`dofla.feature_maps.FEATURE_MAPS`.
        features: of each head.
        head_dim, value_dim: sizes of keys and values.
        window: last tokens with exact scores.
        sinks: first tokens with exact scores.
        token_dtype: storage of window and sinks, one of :data:`dofla.feature_maps.cost.TOKEN_DTYPES`. For ``int8`` all
            keys and values are rounded on entering, so that it does not matter which of them are kept.
    """

    def __init__(
        self,
        heads: Sequence[int],
        feature_map: str,
        features: int,
        head_dim: int,
        value_dim: int,
        window: int = 0,
        sinks: int = 0,
        token_dtype: str = "model",
    ) -> None:
        super().__init__(heads)
        self.map: FeatureMap = feature_map_class(feature_map)(len(heads), head_dim, features)
        self.features, self.window, self.sinks = features, window, sinks
        self.int8 = token_dtype == "int8" and bool(window or sinks)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        self.map.reset_parameters(generator)

    def step(self, call: Call, state: State | None) -> tuple[Tensor, State | None]:
        call = call.smoothed()
        if self.int8:
            call = call._replace(key=rounded(call.key), value=rounded(call.value))
        dtype = torch.promote_types(call.key.dtype, torch.float32)
        before = None if state is None else unpacked(state, dtype)
        out, after = attend(call, self.map, before, window=self.window, sinks=self.sinks)
        if after is None or not self.int8:
            return out, after
        return out, packed(after, state, call.key.shape[-2])
