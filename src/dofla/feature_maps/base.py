"""The base classes of feature maps."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from dofla.attention import Affine, accumulable


class FeatureMap(nn.Module, ABC):
    """M positive features for the queries and keys of ``heads`` KV heads, given as their logarithms.

    Attention depends on the features only through ``logsumexp_m(log_query[i, m] + log_key[j, m])``, and a constant
    added to all log-features of one query changes nothing. They are float64 for vectors in float64, else float32.

    What training changes is a parameter; what is drawn and not trained is a persistent buffer. Both are float32 and
    saved with the model, and neither means anything before :meth:`reset_parameters` or loading.

    Attributes:
        heads: KV heads; the query heads of a group share the features of their KV head.
        head_dim: size d of queries and keys.
        features: M.
        learning_rates: the rate each parameter, by name, is trained with by default (Adam).
        betas: of Adam.
        wants_data: whether :meth:`calibrate` is still to come; most maps do not look at data.
    """

    learning_rates: ClassVar[dict[str, float]] = {}
    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.features = heads, head_dim, features

    @property
    def wants_data(self) -> bool:
        """Most maps do not look at data."""
        return False

    def add_sides(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Parameters of queries and of keys: ``query`` and ``key`` with each suffix of ``shapes``, [heads, *shape]."""
        for side in ("query", "key"):
            for suffix, shape in shapes.items():
                empty = torch.empty(self.heads, *shape, dtype=torch.float32)
                self.register_parameter(side + suffix, nn.Parameter(empty))

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw parameters and buffers anew, from ``generator`` (a CPU generator) where there is chance in it."""

    @abstractmethod
    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        """Log-features [B, H, L, M] of vectors ``x`` [B, H, L, d] of a side, ``query`` or ``key``."""

    def log_query(self, x: Tensor, scaling: float) -> Tensor:
        """Log-features of queries, H a multiple of ``heads``."""
        return self.log_features(x, scaling, "query")

    def log_key(self, x: Tensor, scaling: float) -> Tensor:
        """Log-features of keys, H = ``heads``."""
        return self.log_features(x, scaling, "key")

    def calibrate(self, query: Tensor, key: Tensor) -> None:
        """Start from a sample of the vectors that the heads will see: ``query`` and ``key`` [heads, n, d]."""

    def shift(self, level: Tensor) -> None:
        """Multiply the kernel of each head by ``exp(level)`` [heads], to meet the exact scores beside it."""

    def extra_repr(self) -> str:
        return f"heads={self.heads}, head_dim={self.head_dim}, features={self.features}"


class DrawnFeatureMap(FeatureMap):
    """A feature map whose directions ``z`` [heads, M, d] are drawn and not trained: a buffer, saved with the model."""

    z: Tensor

    def __init__(self, heads: int, head_dim: int, features: int) -> None:
        super().__init__(heads, head_dim, features)
        self.register_buffer("z", torch.empty(heads, features, head_dim, dtype=torch.float32))


class AffineFeatureMap(FeatureMap):
    """A feature map whose log-features are :class:`dofla.attention.Affine`; it says which, and the rest follows."""

    @abstractmethod
    def affine(self, scaling: float, dtype: torch.dtype) -> tuple[Affine, Affine]:
        """The maps of queries and of keys, in ``dtype``."""

    def log_features(self, x: Tensor, scaling: float, side: str) -> Tensor:
        x = accumulable(x)
        query, key = self.affine(scaling, x.dtype)
        return query(x) if side == "query" else key(x)
