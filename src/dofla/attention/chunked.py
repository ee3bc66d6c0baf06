"""Linear attention over many tokens at once: prefill and training, O(L); and token by token: decoding."""

import torch
from torch import Tensor

from dofla.attention.constants import SMALLEST_TRUSTED_MASS
from dofla.attention.state import FeatureState


def chunked(
    a: Tensor, b: Tensor, value: Tensor, *, state: FeatureState, causal: bool = True, chunk: int = 128
) -> tuple[Tensor, Tensor, FeatureState]:
    """Linear attention in chunks: each chunk reads the state of all earlier ones, and sees its own keys by a product.

    Args:
        a: log-features of queries [B, H, L, M].
        b: log-features of keys [B, Hkv, L, M], the log of the key weight (LOG_ZERO for padding) included.
        value: values [B, Hkv, L, dv]; those of padding must be zero.
        state: what came before.
        causal: query i sees keys up to i; otherwise all keys (and all of ``state``).
        chunk: tokens per chunk. Results do not depend on it beyond rounding.

    Returns:
        Output [B, H, L, dv], log-normalizer [B, H, L] (LOG_ZERO where no key was visible, and the output zero), and
        the state after the last token.
    """
    if not causal:
        for piece, values in zip(b.split(chunk, dim=-2), value.split(chunk, dim=-2), strict=True):
            state = state.absorb(piece, values)
        return *state.read(a), state
    outputs, normalizers = [], []
    for pieces in zip(a.split(chunk, dim=-2), b.split(chunk, dim=-2), value.split(chunk, dim=-2), strict=True):
        out, normalizer, state = _one_chunk(*pieces, state)
        outputs.append(out)
        normalizers.append(normalizer)
    return torch.cat(outputs, dim=-2), torch.cat(normalizers, dim=-1), state


def _one_chunk(a: Tensor, b: Tensor, value: Tensor, state: FeatureState) -> tuple[Tensor, Tensor, FeatureState]:
    batch, heads, length, features = a.shape
    kv_heads = b.shape[1]
    # Every exponent below is at most 0: features are measured from the largest key of the chunk or of the past,
    # queries from their own best feature at that level.
    top = torch.maximum(state.log_mass.to(b.dtype), b.amax(dim=-2)).detach()
    past = torch.exp(state.log_mass - top).to(b.dtype)
    keys = torch.exp(b - top.unsqueeze(-2))
    levelled = a.reshape(batch, kv_heads, -1, features) + top.unsqueeze(-2)
    best = levelled.amax(dim=-1, keepdim=True).detach()
    queries = torch.exp(levelled - best)

    pairs = (queries @ keys.mT).view(batch, kv_heads, -1, length, length).tril()
    pairs = pairs.view(batch, kv_heads, -1, length)
    to_past = queries * past.unsqueeze(-2)
    mass = pairs.sum(dim=-1) + to_past.sum(dim=-1)

    # A key far above all earlier ones pushes the level so high that rows before it underflow. Then half the chunk
    # at a time: at length 1 the best feature of the row is present in full, so the recursion ends.
    if length > 1 and bool((mass < SMALLEST_TRUSTED_MASS).any()):
        half = length // 2
        first = _one_chunk(a[:, :, :half], b[:, :, :half], value[:, :, :half], state)
        second = _one_chunk(a[:, :, half:], b[:, :, half:], value[:, :, half:], first[2])
        return torch.cat([first[0], second[0]], -2), torch.cat([first[1], second[1]], -1), second[2]

    out = (pairs @ value + to_past @ state.mean) / mass.unsqueeze(-1)
    normalizer = best.squeeze(-1) + mass.log()
    state = state.absorb_levelled(top, keys, value)
    return out.view(batch, heads, length, -1), normalizer.view(batch, heads, length), state


def recurrent(a: Tensor, b: Tensor, value: Tensor, *, state: FeatureState) -> tuple[Tensor, Tensor, FeatureState]:
    """:func:`chunked`, causal, one token after the other; made for L = 1, right for any L."""
    outputs, normalizers = [], []
    for i in range(a.shape[-2]):
        state = state.absorb(b[:, :, i : i + 1], value[:, :, i : i + 1])
        out, normalizer = state.read(a[:, :, i : i + 1])
        outputs.append(out)
        normalizers.append(normalizer)
    return torch.cat(outputs, dim=-2), torch.cat(normalizers, dim=-1), state
