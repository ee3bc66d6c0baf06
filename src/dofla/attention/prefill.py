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

from dofla.attention import gpu
from dofla.attention.attend import _of_queries, _select, _tokens, _write
from dofla.attention.coding.heavy_hitters import DECAY, FREE, GAIN, MOST_SCORE, ScoredTokens, chosen
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.exact import merge
from dofla.attention.flat import FlatState, Layout
from dofla.attention.state import LOG_ZERO, State, TokenBuffer, accumulable

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

    Returns:
        Output [B, H, L, dv] in the dtype of ``value``, and the state of each group.
    """
    out, length, states = value.new_empty(*query.shape[:-1], value.shape[-1]), query.shape[2], list(states)
    for start in range(0, length, MOST_TOKENS):
        part = slice(start, start + MOST_TOKENS)
        weights = None if weight is None else weight[:, part]
        tokens = (x[:, :, part] for x in (query, key, value))
        states = _prefill(*tokens, layouts, states, scaling, weights, out[:, :, part])
    return out, states


def _prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layouts: Sequence[Layout],
    states: Sequence[FlatState | None],
    scaling: float,
    weight: Tensor | None,
    out: Tensor,
) -> list[FlatState]:
    """:func:`exact_prefill` of at most :data:`MOST_TOKENS` tokens, its output written to ``out``."""
    groups, after = query.shape[1] // key.shape[1], []
    for layout, flat in zip(layouts, states, strict=True):
        heads = _of_queries(layout.heads, groups)
        new = _tokens(_select(key, layout.heads), _select(value, layout.heads), weight)
        state = layout.opened(layout.empty(len(query), query.device) if flat is None else flat)
        line = _line(layout, state, new)
        unseen = 0 if flat is not None else len(line) - query.shape[2]
        piece, drawn = _attend(_select(query, heads), line, unseen, scaling, layout)
        _write(piece.to(value.dtype), out, heads)
        after.append(layout.flat(_retained(layout, state, line, new, drawn)))
    return after


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


def _line(layout: Layout, state: State, new: TokenBuffer) -> _Line:
    dtype = accumulable(new.key).dtype
    tier = layout.coded_tiers.unrotate(state.tiers[-1], 0)
    parts = [tier, state.window.unpacked(dtype), new]
    if state.sinks is not None:
        parts.insert(0, state.sinks.unpacked(dtype))
    weights = [x.log_weight.amax(1) if x.log_weight.ndim == 3 else x.log_weight for x in parts]
    return _Line(
        torch.cat([accumulable(x.key) for x in parts], 2),
        torch.cat([accumulable(x.value) for x in parts], 2),
        torch.cat(weights, 1) > LOG_ZERO,
    )


def _attend(query: Tensor, line: _Line, unseen: int, scaling: float, layout: Layout) -> tuple[Tensor, _Drawn]:
    """Output [B, H, L, dv] of queries of the last L tokens of a line, of which the first ``unseen`` are free slots; and
    what they drew."""
    before, neighbors = len(line) - query.shape[2], min(NEIGHBORS, layout.window)
    fused = gpu.usable(query) and query.dtype == torch.bfloat16 and bool(line.real[:, before:].all())
    if not fused:
        out, total = _in_blocks(query, line, unseen, scaling, neighbors)
    else:
        from dofla.attention.gpu.drawn import drawn

        out, normaliser = _flash(query, line, before, unseen, scaling)
        total = drawn(query, line.key.to(query.dtype), line.real, normaliser, neighbors, scaling)
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


def _flash(query: Tensor, line: _Line, before: int, unseen: int, scaling: float) -> tuple[Tensor, Tensor]:
    """Output [B, H, L, dv] and log-normaliser [B, H, L]: flash attention among the new tokens, merged with attention to
    what is held."""
    groups = query.shape[1] // line.key.shape[1]
    new = (x[:, :, before:].to(query.dtype).repeat_interleave(groups, 1) for x in (line.key, line.value))
    if query.is_cuda:
        out, normaliser, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, *new, 0.0, True, scale=scaling)
    else:
        out, normaliser = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, *new, 0.0, True, scale=scaling
        )
    if unseen == before:
        return out, normaliser
    outs, normalisers, hidden = [], [], ~line.real[:, None, None, None, :before]
    for rows in query.split(max(1, _ELEMENTS // (len(query) * query.shape[1] * before)), 2):
        scores = (rows * scaling).unflatten(1, (-1, groups)).flatten(2, 3) @ line.key[:, :, :before].to(rows.dtype).mT
        scores = scores.float().unflatten(2, (groups, -1)).masked_fill_(hidden, LOG_ZERO)
        normalisers.append(scores.logsumexp(-1).flatten(1, 2))
        share = scores.softmax(-1).flatten(2, 3).to(rows.dtype)
        outs.append((share @ line.value[:, :, :before].to(rows.dtype)).unflatten(2, (groups, -1)).flatten(1, 2))
    return merge((out, normaliser), (torch.cat(outs, 2), torch.cat(normalisers, 2)))


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


def _retained(layout: Layout, state: State, line: _Line, new: TokenBuffer, drawn: _Drawn) -> State:
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
        tokens = (chosen(x, at).masked_fill(free, 0) for x in (line.key, line.value))
        sinks = PackedTokens.of(TokenBuffer(*tokens, log_weight))
        left = left & (rank >= layout.sinks)
    window = PackedTokens.of(new[-layout.window :])
    if len(new) < layout.window:
        window = state.window.shifted(window)
    return State(None, window, sinks, (_tier(layout, state.tiers[-1], line, drawn, left, age),))


def _tier(layout: Layout, held: ScoredTokens, line: _Line, drawn: _Drawn, left: Tensor, age: Tensor) -> ScoredTokens:
    """The tier after the call, selected among the tokens that have ``left`` the window [B, P]."""
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
    vectors = (chosen(x, index).masked_fill(free.unsqueeze(-1), 0) for x in (line.key, line.value))
    entered = layout.coded_tiers.enter(TokenBuffer(*vectors, torch.zeros_like(index[:, 0], dtype=torch.float32)))
    coded, kept = ~free & (index >= before.start) & (index < before.stop), ScoredTokens.of(entered)
    retained = held.chosen((index - before.start).clamp(0, len(held) - 1))
    parts = [
        torch.where(coded.unsqueeze(-1), getattr(retained, name), getattr(kept, name))
        for name in ("key", "key_scale", "value", "value_scale")
    ]
    drawn_lately = chosen(lately, index).round().clamp(max=MOST_SCORE)
    return ScoredTokens(*parts, drawn_lately.masked_fill(free, FREE).to(torch.int16))
