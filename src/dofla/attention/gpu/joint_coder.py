"""The coders of several groups of KV heads as one, as one launch of a Triton kernel takes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dofla.attention.coding import Coder
from dofla.attention.rows import Rows


class JointCoder:
    """The coders of one side of several groups, with vectors of one size and one number of bits, as one of all their
    heads. Blocks have bits of their own in each head."""

    def __init__(self, coders: Sequence[Coder]) -> None:
        self.coders, self.dim, self.block = list(coders), coders[0].dim, coders[0].block
        self.bytes_per_token = coders[0].bytes_per_token
        self._made_of: list[tuple[Tensor, int]] = []
        self.constants = torch.empty(0)

    def update(self) -> None:
        """Take the coders' constants, if they are others than before, or were written since; where there is room for
        them in the same place, because CUDA graphs read there."""
        # As an attribute it takes ten times as long to find; torch's type says that a buffer may be None.
        found: list[Tensor] = [coder._buffers["constants"] for coder in self.coders]  # type: ignore[misc]
        now = [(x, 0 if x.is_inference() else x._version) for x in found]
        if self._made_of and all(x is y and n == m for (x, n), (y, m) in zip(now, self._made_of, strict=True)):
            return
        bits = [coder.bits.expand(coder.heads, -1) for coder in self.coders]
        names = ("rotation", "fineness", "back", "mean", "middle")
        parts = [torch.cat([getattr(coder, name) for coder in self.coders]) for name in names]
        parts.append(torch.cat(bits))
        rows = Rows([(part.shape, part.dtype) for part in parts])
        constants, self.starts, self._made_of = rows.joined(parts), rows.starts, now
        if constants.shape == self.constants.shape and constants.device == self.constants.device:
            with torch.inference_mode():
                self.constants.copy_(constants)
        else:
            self.constants = constants
