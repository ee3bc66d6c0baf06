"""Exact prefill: the tokens of a call attend exactly to what the cache holds and to one another, and those to retain
are selected once, at the end of the call.

The score of a token is the sum of its squared attention weights over the queries of the call, as in H2O (Zhang et al.
2023, arXiv 2306.14048) but for the square and for the queries right after the token, which see it in the local window
anyway. Without a prefill, token by token, the selection is that of :mod:`dofla.attention.coding.heavy_hitters`, which
decoding goes on with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dofla.attention.backend import Backend
from dofla.attention.backends import backend_for
from dofla.attention.carried import State
from dofla.attention.coding.heavy_hitters import ScoredTokens, chosen
from dofla.attention.constants import DECAY, FREE, GAIN, LOG_ZERO, MOST_SCORE
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.flat import FlatState, Layout
from dofla.attention.heads import query_heads, select, write
from dofla.attention.state import TokenBuffer, accumulable, weighted

MOST_TOKENS = 8192
"""Tokens at once: longer calls are read in several parts, in constant memory and linear time."""
NEIGHBORS = 64
"""Queries right after a token whose attention to it does not count, or those that see it in a smaller window."""
_LATER = 1e-30
"""Increase of the score from one position to the next: among tokens that drew no attention, the newest are retained."""
_LATELY = 512
"""Last queries of a call whose attention goes into the scores that decoding goes on with: earlier ones hardly count."""
_ELEMENTS = 2**23
"""Attention weights at once."""


def exact_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layouts: Sequence[Layout],
    states: Sequence[FlatState | None],
    *,
    scaling: float,
    weight: Tensor | None = None,
    backend: Backend | None = None,
) -> tuple[Tensor, list[FlatState]]:
    """Exact causal attention of a call, and the compressed caches after it.

    Args:
        query: [B, H, L, d].
        key: [B, Hkv, L, d].
        value: [B, Hkv, L, dv].
        layouts: of each group of KV heads, which together have all heads; one tier with heavy hitters, no features.
        states: of each group before the call, or None at the beginning.
        scaling: of the scores.
        weight: [B, L], 0 for padding, which only stands in front of a sequence's first token.
        backend: default the one of the table that takes these.

    Returns:
        Output [B, H, L, dv] in the dtype of ``value``, and the state of each group.
    """
    out = value.new_empty(*query.shape[:-1], value.shape[-1])
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    backend = backend or backend_for((query, key, value), () if weight is None else (weight,))
    held = [
        layout.empty(len(query), query.device) if state is None else state
        for layout, state in zip(layouts, states, strict=True)
    ]
    for start in range(0, length, MOST_TOKENS):
        part = slice(start, min(start + MOST_TOKENS, length))
        part_weight = None if weight is None else weight[:, part]
        for n, layout in enumerate(layouts):
            heads, state = query_heads(layout.heads, groups), layout.opened(held[n])
            new = weighted(select(key, layout.heads, part), select(value, layout.heads, part), part_weight)
            line = _line(layout, state, new)
            unseen = len(line) - len(new) if start == 0 and states[n] is None else 0
            piece, drawn = _attend(select(query, heads, part), line, unseen, scaling, layout, backend)
            write(piece.to(value.dtype), out, heads, part)
            held[n] = layout.flat(_retained(layout, state, line, new, drawn, backend))
    return out, held


@dataclass(frozen=True)
class _Line:
    """The cached tokens of a group followed by the new ones: ``key`` [B, Hkv, P, d] and ``value`` [B, Hkv, P, dv] as
    attention takes them, and ``real`` [B, P], False for free slots and padding, which are the same in all heads."""

    key: Tensor
    value: Tensor
    real: Tensor

    def __len__(self) -> int:
        return self.key.shape[2]


@dataclass(frozen=True)
class _Drawn:
    """Squared attention weights that tokens drew [B, Hkv, P], float32: in ``total``, summed over the call's queries; in
    ``lately``, as decoding goes on to count: weights among the tokens outside the local window and the sinks, each
    query for a 64th less than the next."""

    total: Tensor
    lately: Tensor


def _line(layout: Layout, state: State[PackedTokens], new: TokenBuffer) -> _Line:
    dtype = accumulable(new.key).dtype
    tier = layout.coded_tiers.unrotate(state.tiers[-1], 0)
    sinks, window = ([] if x is None else [x.unpacked(dtype)] for x in (state.sinks, state.window))
    parts = [*sinks, tier, *window, new]
    weights = [x.log_weight.amax(1) if x.log_weight.ndim == 3 else x.log_weight for x in parts]
    return _Line(
        torch.cat([accumulable(x.key) for x in parts], 2),
        torch.cat([accumulable(x.value) for x in parts], 2),
        torch.cat(weights, 1) > LOG_ZERO,
    )


def _attend(
    query: Tensor, line: _Line, unseen: int, scaling: float, layout: Layout, backend: Backend
) -> tuple[Tensor, _Drawn]:
    """Output [B, H, L, dv] of queries of the last L tokens of a line, of which the first ``unseen`` are free slots; and
    what they drew."""
    neighbors = min(NEIGHBORS, layout.window)
    found = backend.exact_attention(query, line.key, line.value, line.real, unseen, scaling, neighbors)
    out, total = found or _in_blocks(query, line, unseen, scaling, neighbors)
    return out, _Drawn(total, _lately(query[:, :, -_LATELY:], line, scaling, layout))


def _in_blocks(query: Tensor, line: _Line, unseen: int, scaling: float, neighbors: int) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, dv], and the sum of squared weights over queries but a token's neighbors [B, Hkv, P]."""
    before, length = len(line) - query.shape[2], query.shape[2]
    heads, value = query.shape[1], line.value[:, :, unseen:]
    out = value.new_empty(*query.shape[:3], value.shape[-1])
    total = value.new_zeros(*value.shape[:2], len(line), dtype=torch.float32)
    size = max(1, _ELEMENTS // (len(query) * heads * value.shape[2]))
    for start in range(0, length, size):
        rows, end = slice(start, min(start + size, length)), before + min(start + size, length)
        share, distance = _weights(query[:, :, rows], line, slice(unseen, end), before + start, scaling)
        out[:, :, rows] = (
            (share.flatten(2, 3) @ value[:, :, : end - unseen]).unflatten(2, share.shape[2:4]).flatten(1, 2)
        )
        total[:, :, unseen:end] += share.square_().masked_fill_(distance < neighbors, 0).sum((2, 3))
    return out * line.real[:, None, before:, None], total  # a query that is padding sees nothing


def _lately(query: Tensor, line: _Line, scaling: float, layout: Layout) -> Tensor:
    """Squared weights [B, Hkv, P] among tokens outside the local window and the sinks, from the line's last queries,
    each of which counts a 64th less than the next."""
    first = line.real & (line.real.cumsum(1) <= layout.sinks)
    share, distance = _weights(query, line, slice(None), len(line) - query.shape[2], scaling)
    share = share.masked_fill_((distance < layout.window) | first[:, None, None, None], 0)
    share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(share.dtype).tiny)
    decay = (1 - 1 / DECAY) ** torch.arange(query.shape[2] - 1, -1, -1, dtype=torch.float32, device=query.device)
    return (share.square_() * decay.unsqueeze(-1)).sum((2, 3))


def _weights(query: Tensor, line: _Line, seen: slice, first: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention weights [B, Hkv, G, L, n] of queries of the tokens from ``first`` on to those ``seen``, and how far
    these are behind them [L, n]."""
    place = torch.arange(len(line), device=query.device)
    distance = place[first : first + query.shape[2], None] - place[seen]
    hidden = (distance < 0) | ~line.real[:, None, seen]
    asked = (accumulable(query) * scaling).unflatten(1, (line.key.shape[1], -1))
    scores = (asked.flatten(2, 3) @ line.key[:, :, seen].mT).unflatten(2, asked.shape[2:4])
    return scores.masked_fill_(hidden[:, None, None], LOG_ZERO).softmax(-1), distance


def _retained(
    layout: Layout, state: State[PackedTokens], line: _Line, new: TokenBuffer, drawn: _Drawn, backend: Backend
) -> State[PackedTokens]:
    """The state after the call: the first tokens as attention sinks, the last in the window, and in the tier, besides
    the newest that leave the window, those with the highest scores."""
    age = line.real.flip(1).cumsum(1).flip(1) - 1
    rank = line.real.cumsum(1) - 1
    left = line.real & (age >= layout.window)
    sinks = None
    if state.sinks is not None:
        places = torch.arange(layout.sinks, device=rank.device)
        arrives = (left & (rank < layout.sinks)).unsqueeze(1) & (rank.unsqueeze(1) == places.unsqueeze(-1))  # [B, s, P]
        filled, source = arrives.max(-1)
        at = source.unsqueeze(1).expand(-1, line.key.shape[1], -1)
        log_weight = torch.zeros_like(state.sinks.log_weight).masked_fill_(~filled, LOG_ZERO)
        free = ~filled[:, None, :, None]
        key, value = (chosen(x, at).masked_fill(free, 0) for x in (line.key, line.value))
        sinks = PackedTokens.of(TokenBuffer(key, value, log_weight))
        left = left & (rank >= layout.sinks)
    window = PackedTokens.of(new[-layout.window :])
    if state.window is not None and len(new) < layout.window:
        window = state.window.shifted(window)
    held = state.tiers[-1]
    assert isinstance(held, ScoredTokens)
    return State(None, window, sinks, (_tier(layout, held, line, drawn, left, age, backend),))


def _tier(
    layout: Layout, held: ScoredTokens, line: _Line, drawn: _Drawn, left: Tensor, age: Tensor, backend: Backend
) -> ScoredTokens:
    """Tokens of the tier after the call, from the tokens that have ``left`` the window [B, P]."""
    newest, length = layout.coded_tiers.counts[0], len(line) - layout.window - layout.sinks - len(held)
    before = slice(layout.sinks, layout.sinks + len(held))
    old = held.score.clamp_min(0) * (1 - 1 / DECAY) ** length
    score, lately = drawn.total + _LATER * torch.arange(len(line), device=left.device), GAIN * drawn.lately
    score[:, :, before] += held.score.clamp_min(0) / GAIN
    lately[:, :, before] += old
    score = score.masked_fill((left & (age < layout.window + newest)).unsqueeze(1), torch.inf)
    score = score.masked_fill(~left.unsqueeze(1), -1.0)
    found = score.topk(len(held), -1, sorted=False)
    # In their order, behind the free slots.
    order = torch.where(found.values >= 0, found.indices, found.indices - len(line)).sort(-1).values
    index, free = order % len(line), order < 0
    k, v = (chosen(x, index).masked_fill(free.unsqueeze(-1), 0) for x in (line.key, line.value))
    entered = layout.coded_tiers.enter(TokenBuffer(k, v, torch.zeros_like(index[:, 0], dtype=torch.float32)), backend)
    coded, kept = ~free & (index >= before.start) & (index < before.stop), ScoredTokens.of(entered)
    retained = held.chosen((index - before.start).clamp(0, len(held) - 1))
    key, key_scale, value, value_scale = (
        torch.where(coded.unsqueeze(-1), getattr(retained, name), getattr(kept, name))
        for name in ("key", "key_scale", "value", "value_scale")
    )
    drawn_lately = chosen(lately, index).round().clamp(max=MOST_SCORE).masked_fill(free, FREE)
    return ScoredTokens(key, key_scale, value, value_scale, drawn_lately.to(torch.int16))
