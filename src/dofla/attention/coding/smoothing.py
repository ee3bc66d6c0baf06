"""Keys without what quantization spends its levels on: a constant vector, and channels larger than others."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dofla.attention.coding.coder import Moments

_OUTLIER = 4.0
"""Standard deviation of an outlier channel, over the median of its head's channels. To scale all channels costs
queries, which are in int8 where tokens are chosen, more than it gains keys."""
_POWER, _GAIN = 0.75, 4.0
"""Where that leaves an error of scores so many times as large, every channel is scaled, to so much of keys' size as
a power, and to the rest of one over queries': SmoothQuant has 0.5, but here keys are rounded for all attention, queries
only where tokens are chosen. The first layer of Qwen2.5 needs it: nearly all of its keys is a bias that turns with the
position (``docs/research/cache.md``)."""


class KeySmoothing(nn.Module):
    """A mean and a scale for each channel of the keys of a layer: keys become ``(key - mean) / scale``, queries
    ``query * scale``. Only outlier channels are scaled, unless the errors of scores are far smaller otherwise.

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

    @torch.no_grad()
    def take(self, other: "KeySmoothing", heads: Sequence[int]) -> None:
        """Take the mean and scale of some KV heads of another one."""
        self.mean.copy_(other.mean[list(heads)])
        self.scale.copy_(other.scale[list(heads)])

    @property
    def is_calibrated(self) -> bool:
        """True if a mean has been measured."""
        return bool(self.mean.any())

    @torch.no_grad()
    def calibrate(self, keys: Moments, queries: Moments | None = None) -> None:
        """Set the mean and the scale of each channel from the moments of all heads' keys, and of the queries of each KV
        head; without queries, outlier channels are scaled and no others."""
        size = keys.covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        usual = _OUTLIER * size.median(-1, keepdim=True).values
        scale = torch.exp2(torch.where(usual > 0, size / usual, 1.0).clamp_min(1).log2().floor())
        if queries is not None:
            asked = queries.second.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
            every = torch.exp2((size.pow(_POWER) / asked.pow(1 - _POWER)).log2().round())
            better = _error(size, asked, every) * _GAIN < _error(size, asked, scale)  # False for NaN
            scale = torch.where(better, every, scale)
        self.mean.copy_(keys.mean)
        self.scale.copy_(scale)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, H, L, d] in their own dtype and keys [B, Hkv, L, d] in float32, or float64 if they have it."""
        mean, scale = self.mean.unsqueeze(1), self.scale.unsqueeze(1)
        heads = len(self.mean)
        query = (query.unflatten(1, (heads, -1)) * scale.unsqueeze(1).to(query.dtype)).flatten(1, 2)
        return query, (key - mean) / scale  # of float32 or wider, as the mean is

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


def _error(key: Tensor, query: Tensor, scale: Tensor) -> Tensor:
    """The squared error of scores [Hkv, 1] that int8 makes of keys, and of queries, up to a factor: of channels of such
    sizes [Hkv, d], the largest one sets the step for all."""
    key, query = key / scale, query * scale
    steps = key.amax(-1, keepdim=True), query.amax(-1, keepdim=True)
    return ((query * steps[0]) ** 2 + (key * steps[1]) ** 2).sum(-1, keepdim=True)
