"""States of the far past that are written to in different ways, for trials: each reads all rows at once, by products of
all pairs, as a recurrence over the keys would read them one by one."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from far_past import FarPast
from torch import Tensor, nn

from dofla.attention import LOG_ZERO
from dofla.distillation.calibrate import calibrate_layer
from dofla.feature_maps import FEATURE_MAPS
from dofla.integration.recorder import AttentionCall


class Sum(nn.Module):
    """dofla's own: the average of the far values under positive weights, and the log of the sum of these."""

    learning_rates: ClassVar[dict[str, float]] = {}

    def __init__(self, layer: FarPast) -> None:
        super().__init__()
        self.layer = layer

    def start(self, call: AttentionCall, generator: torch.Generator) -> None:
        """Draw the features, and start them from a call of one window."""
        self.layer.reset_parameters(generator)
        calibrate_layer(call, self.layer, generator)

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, far: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """What queries [B, H, R, d] at ``rows`` [R] get of the keys [B, Hkv, L, d] and values [B, Hkv, L, dv] that are
        ``far`` [1, 1, R, L] for them: values [B, H, R, dv], and the log of their mass [B, H, R] or None."""
        scores = self.layer.far_scores(query, key, rows, scaling).masked_fill(~far, LOG_ZERO)
        values = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return torch.softmax(scores, dim=-1) @ values, scores.logsumexp(-1)


class Delta(nn.Module):
    """``S ← S + β φ(k)(v − Sᵀ φ(k))ᵀ``, read as ``c · Sᵀ φ(q)`` (DeltaNet, arXiv 2102.11174 and 2406.06484).

    φ is the perceptron of the map ``mlp`` without its exponential, at unit length, so features have signs. β is
    learned, one for each head or from the key; and S may decay between keys (arXiv 2412.06464), at one rate a head.
    The state has no mass.
    """

    learning_rates: ClassVar[dict[str, float]] = dict.fromkeys(("write", "write_bias", "log_decay", "log_size"), 0.05)

    def __init__(
        self, call: AttentionCall, features: int, *, corrects: bool = True, per_token: bool = True, decays: bool = False
    ) -> None:
        super().__init__()
        heads, head_dim = call.key.shape[1], call.key.shape[-1]
        self.corrects, self.per_token, self.decays = corrects, per_token, decays
        self.map = FEATURE_MAPS["mlp"](heads, head_dim, features)
        self.write = nn.Parameter(torch.zeros(heads, head_dim, 1))
        self.write_bias = nn.Parameter(torch.zeros(heads, 1))
        self.log_decay = nn.Parameter(torch.full((heads, 1), -7.0))
        self.log_size = nn.Parameter(torch.zeros(heads, 1, 1))

    def start(self, call: AttentionCall, generator: torch.Generator) -> None:
        """As :meth:`Sum.start`."""
        self.map.reset_parameters(generator)
        self.map.calibrate(call.query.reshape(call.key.shape[1], -1, call.query.shape[-1]), call.key[0])

    def read(
        self, query: Tensor, key: Tensor, value: Tensor, rows: Tensor, far: Tensor, scaling: float
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`Sum.read`; the keys enter in their order, those that are far for no row do not."""
        batch, heads, _, _ = query.shape
        phi = F.normalize(self.map.log_key(key, scaling), dim=-1)
        asked = F.normalize(self.map.log_query(query, scaling), dim=-1) * self.log_size.exp().repeat_interleave(
            heads // key.shape[1], dim=0
        )
        strength = self.write_bias + (self.map.standardised(key.float(), "key") @ self.write * self.per_token)[..., 0]
        strength = (strength.sigmoid() * far.any(-2)[:, 0, None]).unsqueeze(-1)  # [B, Hkv, L, 1]
        written = strength * value
        if self.corrects:  # what is written first is less what the earlier keys answer: a triangular system
            among = (strength * (phi @ phi.mT * self._left(torch.arange(key.shape[-2]), key.shape[-2]))).tril(-1)
            written = torch.linalg.solve_triangular(among, written, upper=False, unitriangular=True)
        left = (far * self._left(rows, key.shape[-2])).unsqueeze(2)
        weights = asked.view(batch, key.shape[1], -1, len(rows), phi.shape[-1]) @ phi.unsqueeze(2).mT * left
        return (weights @ written.unsqueeze(2)).view(batch, heads, len(rows), -1), None

    def _left(self, rows: Tensor, length: int) -> Tensor:
        """What is left of each key at each row [Hkv or 1, R, L]."""
        if not self.decays:
            return torch.ones(1, 1, 1)
        distance = (rows[:, None] - torch.arange(length)).clamp_min(0)
        return (-self.log_decay.exp().unsqueeze(-1) * distance).exp()
