"""The protocol of a group of KV heads: how a layer asks its heads for attention."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from dofla.attention.backends import backend_for
from dofla.attention.call import Call
from dofla.attention.state import Tensors, side_by_side

S = TypeVar("S", bound=Tensors)


class HeadGroup(nn.Module, ABC, Generic[S]):
    """Some KV heads of a layer, and the query heads that read them, which attend in one way.

    Args:
        heads: the KV heads.

    Attributes:
        compressed: whether they have a compressed cache, or features.
    """

    compressed = False

    def __init__(self, heads: Sequence[int]) -> None:
        super().__init__()
        self.heads = list(heads)

    @abstractmethod
    def step(self, call: Call, state: S | None) -> tuple[Tensor, S | None]:
        """Attention of new tokens of these heads.

        Args:
            call: the new tokens.
            state: what the heads carry; None at the beginning of a sequence.

        Returns:
            Output [B, H, L, dv] in the dtype of the values, and the state after the call (None unless causal).
        """

    def traceable(self, call: Call, has_state: bool) -> bool:
        """True if torch.compile can take such a call into its graph: no shape and no branch depends on numbers."""
        tokens = call.query.shape[-2]
        if call.log_weight is not None and has_state and tokens > 1:
            return False
        return call.causal and tokens > 0 and backend_for(call.vectors).traceable(tokens, self.compressed)

    def resized(self, state: S, tokens: int) -> S:
        """The state with room for so many tokens, where it grows with them."""
        return state

    def joined(self, states: Sequence[S]) -> S:
        """States of several sequences as one, in this order."""
        return side_by_side(states)

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters anew."""
