"""Feature maps that start from data: inputs standardized per head, the level of the features set, both measured."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from dofla.feature_maps.base import FeatureMap


class StandardizedMap(FeatureMap):
    """Queries and keys enter as ``(x - mean) / std``, per coordinate, with statistics of the head's own vectors.

    The statistics are buffers and not folded into the weights: so Adam, whose steps are alike in all coordinates, sees
    coordinates that are alike. Real heads need it: after rotary positions some coordinates are ten times as large as
    others. (Folded, the same map ends with a tenth more attention KL; ``docs/research/features.md``.)

    Attributes:
        query_mean, query_std, key_mean, key_std: [heads, d]; 0 and 1 before :meth:`calibrate`.
        log_scale: [heads, 1], the level of the features against the exact scores of a window and sinks.
    """

    learning_rates: ClassVar[dict[str, float]] = {"log_scale": 0.02}
    betas: ClassVar[tuple[float, float]] = (0.9, 0.95)
    query_mean: Tensor
    query_std: Tensor
    key_mean: Tensor
    key_std: Tensor

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        for side in ("query", "key"):
            self.register_buffer(f"{side}_mean", torch.empty(heads, head_dim, dtype=torch.float32))
            self.register_buffer(f"{side}_std", torch.empty(heads, head_dim, dtype=torch.float32))
        self.log_scale = nn.Parameter(torch.empty(heads, 1, dtype=torch.float32))

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for side in ("query", "key"):
            getattr(self, f"{side}_mean").zero_()
            getattr(self, f"{side}_std").fill_(1)
        self.log_scale.zero_()

    @property
    def wants_data(self) -> bool:
        """Until it has been calibrated; then the weights have learned to live with the statistics they got."""
        return bool((self.query_std == 1).all())

    @torch.no_grad()
    def calibrate(self, query: Tensor, key: Tensor) -> None:
        for side, x in (("query", query.float()), ("key", key.float())):
            std, mean = torch.std_mean(x, dim=1, correction=0)
            getattr(self, f"{side}_mean").copy_(mean)
            # A coordinate that never moves says nothing, at any scale; that of the others keeps it from dividing by 0.
            floor = 1e-3 * std.square().mean(dim=-1, keepdim=True).sqrt() + 1e-6
            getattr(self, f"{side}_std").copy_(std.clamp_min(floor))

    @torch.no_grad()
    def shift(self, level: Tensor) -> None:
        self.log_scale.add_(level.unsqueeze(-1))

    def standardized(self, x: Tensor, side: str) -> Tensor:
        """``x`` [B, H, L, d], H a multiple of ``heads``, as [B, heads, H / heads · L, d]."""
        batch, _, _, head_dim = x.shape
        x = x.reshape(batch, self.heads, -1, head_dim)
        mean, std = (getattr(self, f"{side}_{what}").to(x.dtype).unsqueeze(-2) for what in ("mean", "std"))
        return (x - mean) / std
