"""Keys without what quantization spends its levels on: a constant vector, and channels larger than others."""

import torch
from torch import Tensor, nn

from dofla.attention.coding.coder import Moments
from dofla.attention.state import accumulable

_OUTLIER = 4.0
"""Standard deviation of an outlier channel, over the median of its head's channels. To scale all channels costs
queries, which are in int8 where tokens are chosen, more than it gains keys."""


class KeySmoothing(nn.Module):
    """A mean for each channel of the keys of a layer, and a scale for outlier channels: keys become
    ``(key - mean) / scale``, queries ``query * scale``.

    Softmax attention stays the same. What is subtracted from all keys adds one number to all scores of a query, and the
    scales cancel in the product (SmoothQuant, Xiao et al. 2023, arXiv 2211.10438). But a vector in int8 has one
    scale, and without this a large key bias or an outlier channel takes all of its levels. Powers of two round nothing.

    The mean and scale are undefined until :meth:`reset` or :meth:`calibrate`, or a checkpoint, sets them.

    Args:
        heads: KV heads.
        dim: channels of a key.

    Attributes:
        mean: [Hkv, d], float32.
        scale: [Hkv, d], float32, powers of two.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(heads, dim, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(heads, dim, dtype=torch.float32))

    @torch.no_grad()
    def reset(self) -> None:
        """Leave keys and queries as they are."""
        self.mean.zero_()
        self.scale.fill_(1)

    @property
    def is_calibrated(self) -> bool:
        """True if a mean has been measured."""
        return bool(self.mean.any())

    @torch.no_grad()
    def calibrate(self, keys: Moments) -> None:
        """Set the mean of each channel, and the scale of outlier channels, from the moments of all heads' keys."""
        size = keys.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        usual = _OUTLIER * size.median(-1, keepdim=True).values
        excess = torch.where(usual > 0, size / usual, 1.0).clamp_min(1)
        self.mean.copy_(keys.mean)
        self.scale.copy_(torch.exp2(excess.log2().floor()))

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] in their own dtype and keys [B, Hkv, L, d] in float32, or float64 if they have it."""
        mean, scale = self.mean.unsqueeze(1), self.scale.unsqueeze(1)
        heads = len(self.mean)
        query = (query.unflatten(1, (heads, -1)) * scale.unsqueeze(1).to(query.dtype)).flatten(1, 2)
        return query, (accumulable(key) - mean) / scale

    def moments(self, queries: Moments, keys: Moments) -> tuple[Moments, Moments]:
        """Moments of the queries and keys that :meth:`forward` returns, of those that it gets."""
        scale, mean = self.scale.double().cpu(), self.mean.double().cpu()
        pairs = scale.unsqueeze(-1) * scale.unsqueeze(-2)
        moved = mean.unsqueeze(-1) * keys.total.unsqueeze(-2)
        square = keys.square - moved - moved.mT + keys.count * mean.unsqueeze(-1) * mean.unsqueeze(-2)
        return (
            Moments(queries.count, queries.total * scale, queries.square * pairs),
            Moments(keys.count, (keys.total - keys.count * mean) / scale, square / pairs),
        )
