"""Linear attention one token after the other: decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from dofla.attention.state import FeatureState


def recurrent(
    a: Tensor, b: Tensor, value: Tensor, *, state: FeatureState, causal: bool = True
) -> tuple[Tensor, Tensor, FeatureState]:
    """Same arguments and results as :func:`dofla.attention.chunked`; made for L = 1, right for any L."""
    if not causal:
        state = state.absorb(b, value)
        return *state.read(a), state
    outputs, normalizers = [], []
    for i in range(a.shape[-2]):
        state = state.absorb(b[:, :, i : i + 1], value[:, :, i : i + 1])
        out, normalizer = state.read(a[:, :, i : i + 1])
        outputs.append(out)
        normalizers.append(normalizer)
    return torch.cat(outputs, dim=-2), torch.cat(normalizers, dim=-1), state
