"""Exact prefill: the tokens of a call attend exactly to what the cache holds and to one another, and those to retain
are selected once, at the end of the call.

The score of a token is the sum of its squared attention weights over the queries of the call, as in H2O (Zhang et al.
2023, arXiv 2306.14048) but for the square and for the queries right after the token; and over the last queries once
more, as decode counts (:mod:`dofla.attention.coding.heavy_hitters`). The scores that decode goes on with are what a
token drew from a query in the mean of the whole call: by the last queries alone, what the selection retained would soon
be evicted.

All KV heads of a layer are done at once, whatever their sizes, and in the order of their groups: on a GPU a prompt of
some thousand tokens takes as long as its kernels are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.backend import Backend
from dofla.attention.backends import backend_for
from dofla.attention.carried import State
from dofla.attention.coding.heavy_hitters import ScoredTokens, chosen
from dofla.attention.constants import DECAY, FREE, GAIN, LOG_ZERO, MOST_SCORE
from dofla.attention.drawn import NEIGHBORS, Drawn, Line
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.flat import FlatState, Layout
from dofla.attention.heads import query_heads
from dofla.attention.state import TokenBuffer, accumulable, weighted

MOST_TOKENS = 8192
"""Tokens at once: longer calls are read in several parts, in constant memory and linear time."""
_LATER = 1e-30
"""Increase of the score from one position to the next: among tokens that drew no attention, the newest are retained."""
_REMEMBERED = 4 * DECAY
"""Queries whose mean attention a score is, which decode goes on with: so many as decays leave of equal ones, times what
weights are larger among the tokens of the tier alone (benchmarks/quality/prefill.py)."""


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
        layouts: of each group of KV heads, which together have all heads, one window and one number of sinks; one tier
            with heavy hitters, no features.
        states: of each group before the call, or None at the beginning.
        scaling: of the scores.
        weight: [B, L], 0 for padding, which only stands in front of a sequence's first token.
        backend: default the one of the table that takes these.

    Returns:
        Output [B, H, L, dv] in the dtype of ``value``, and the state of each group.
    """
    backend = backend or backend_for((query, key, value), () if weight is None else (weight,))
    heads, groups = [head for layout in layouts for head in layout.heads], query.shape[1] // key.shape[1]
    orders = tuple(heads), tuple(query_heads(heads, groups) or ())
    (key, value), query = (_reordered(x, orders[0]) for x in (key, value)), _reordered(query, orders[1])
    sinks, window, outs = layouts[0].sinks, layouts[0].window, []
    held = None if None in states else _Held.of(layouts, [state for state in states if state is not None], backend)
    after: list[FlatState] = []
    for start in range(0, query.shape[2], MOST_TOKENS):
        part = slice(start, start + MOST_TOKENS)
        new = weighted(key[:, :, part], value[:, :, part], None if weight is None else weight[:, part])
        line = _line(held, new, padded=weight is not None and not bool((new.log_weight == 0).all()))
        out, drawn = backend.exact_causal(query[:, :, part], line, window, sinks, scaling)
        outs.append(out.to(value.dtype))
        after = _retained(layouts, held, line, new, drawn, backend)
        if part.stop < query.shape[2]:
            held = _Held.of(layouts, after, backend)
    whole = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    return _reordered(whole, tuple(sorted(range(len(orders[1])), key=orders[1].__getitem__))), after


def _reordered(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Heads of ``x`` [B, H, L, d] in another order."""
    return x if order == tuple(range(len(order))) else x.index_select(1, _index(order, x.device))


@lru_cache
def _index(order: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(order, device=device)


@dataclass(frozen=True)
class _Held:
    """Contents of the caches of a layer, all KV heads together. Tiers that are smaller than others have free slots in
    front, so that the heads' tokens stand side by side.

    Attributes:
        sinks: attention sinks, or None.
        window: the local window.
        tiers: tokens in codes, of each group.
        key, value: [B, Hkv, S, d] and [B, Hkv, S, dv], of the tiers' tokens, decoded.
        score: [B, Hkv, S], of the tiers' tokens, :data:`FREE` for free slots.
    """

    sinks: PackedTokens | None
    window: PackedTokens
    tiers: list[ScoredTokens]
    key: Tensor
    value: Tensor
    score: Tensor

    @classmethod
    def of(cls, layouts: Sequence[Layout], states: Sequence[FlatState], backend: Backend) -> _Held:
        opened = [layout.opened(state) for layout, state in zip(layouts, states, strict=True)]
        tiers = [tier for state in opened if isinstance(tier := state.tiers[-1], ScoredTokens)]
        slots = max(map(len, tiers))
        pairs = list(zip((layout.coded_tiers for layout in layouts), tiers, strict=True))
        keys = [backend.unrotated(own.key, (x.key, x.key_scale), 0) for own, x in pairs]
        values = [backend.unrotated(own.value, (x.value, x.value_scale), 0) for own, x in pairs]
        key, value = (torch.cat([F.pad(x, (0, 0, slots - x.shape[2], 0)) for x in side], 1) for side in (keys, values))
        score = torch.cat([F.pad(x.score, (slots - len(x), 0), value=FREE) for x in tiers], 1)
        window = _all_heads([state.window for state in opened if state.window is not None])
        sinks = [state.sinks for state in opened if state.sinks is not None]
        return cls(_all_heads(sinks) if sinks else None, window, tiers, key, value, score)

    @property
    def real(self) -> Tensor:
        """Which slots have a token [B, Hkv, sinks + S + window]."""
        parts = [x if x is None else x.log_weight > LOG_ZERO for x in (self.sinks, self.window)]
        sinks, window = (x if x is None else x.unsqueeze(1).expand(-1, self.score.shape[1], -1) for x in parts)
        return torch.cat([x for x in (sinks, self.score != FREE, window) if x is not None], 2)


def _all_heads(groups: Sequence[PackedTokens]) -> PackedTokens:
    vectors = [field.name for field in fields(PackedTokens) if field.name != "log_weight"]
    joined = {name: torch.cat([getattr(group, name) for group in groups], 1) for name in vectors}
    return PackedTokens(**joined, log_weight=groups[0].log_weight)


def _line(held: _Held | None, new: TokenBuffer, *, padded: bool) -> Line:
    real = (new.log_weight > LOG_ZERO).unsqueeze(1).expand(-1, new.key.shape[1], -1)
    if held is None:
        return Line(new.key, new.value, real, padded)
    dtype = accumulable(new.key).dtype
    sinks, window = (None if x is None else x.unpacked(dtype) for x in (held.sinks, held.window))
    parts = [(x.key, x.value) for x in (sinks, held, window, new) if x is not None]
    key, value = (torch.cat([x.to(dtype) for x in side], 2) for side in zip(*parts, strict=True))
    return Line(key, value, torch.cat([held.real, real], 2), padded)


def _retained(
    layouts: Sequence[Layout], held: _Held | None, line: Line, new: TokenBuffer, drawn: Drawn, backend: Backend
) -> list[FlatState]:
    """The states after the call: the first tokens as attention sinks, the last in the window, and in the tier, besides
    the newest that leave the window, those with the highest scores."""
    layout = layouts[0]
    age = line.real.flip(2).cumsum(2).flip(2) - 1
    rank = line.real.cumsum(2) - 1
    left = line.real & (age >= layout.window)
    sinks = None
    if layout.sinks:
        places = torch.arange(layout.sinks, device=rank.device)
        arrives = left.unsqueeze(2) & (rank.unsqueeze(2) == places.unsqueeze(-1))  # [B, Hkv, s, P]
        filled, at = arrives.max(-1)
        key, value = (chosen(x, at).masked_fill(~filled.unsqueeze(-1), 0) for x in (line.key, line.value))
        log_weight = torch.zeros_like(filled[:, 0], dtype=torch.float32).masked_fill(~filled[:, 0], LOG_ZERO)
        sinks = PackedTokens.of(TokenBuffer(key, value, log_weight), backend.pack)
        left = left & (rank >= layout.sinks)
    window = PackedTokens.of(new[-layout.window :], backend.pack)
    if len(new) < layout.window:
        before = held.window if held else _all_heads([_empty_window(x, len(new.key), new.key.device) for x in layouts])
        window = before.shifted(window)
    tiers = _tiers(layouts, held, line, drawn, left, age, len(new), backend)
    borders = list(pairwise(accumulate((len(x.heads) for x in layouts), initial=0)))
    return [
        layout.flat(State(None, _heads(window, *own), None if sinks is None else _heads(sinks, *own), (tier,)))
        for layout, tier, own in zip(layouts, tiers, borders, strict=True)
    ]


def _empty_window(layout: Layout, batch: int, device: torch.device) -> PackedTokens:
    window = layout.opened(layout.empty(batch, device)).window
    assert window is not None
    return window


def _heads(tokens: PackedTokens, first: int, end: int) -> PackedTokens:
    """Tokens of some heads side by side."""
    vectors = {x.name: getattr(tokens, x.name)[:, first:end] for x in fields(tokens) if x.name != "log_weight"}
    return PackedTokens(**vectors, log_weight=tokens.log_weight)


def _tiers(
    layouts: Sequence[Layout],
    held: _Held | None,
    line: Line,
    drawn: Drawn,
    left: Tensor,
    age: Tensor,
    new: int,
    backend: Backend,
) -> list[ScoredTokens]:
    """Tokens of each group's tier after the call, from the tokens that have ``left`` the window [B, Hkv, P], of which
    ``new`` are this call's."""
    window, sinks, device = layouts[0].window, layouts[0].sinks, left.device
    slots = [layout.coded_tiers.slots[-1] for layout in layouts]
    newest, room = (
        _per_head(tuple((n, len(layout.heads)) for n, layout in zip(own, layouts, strict=True)), device)
        for own in ([layout.coded_tiers.counts[0] for layout in layouts], slots)
    )
    position = torch.arange(len(line), device=device)
    queries = (len(line) - NEIGHBORS - position).clamp(1, new)
    score, later = drawn.total + drawn.lately + _LATER * position, GAIN * _REMEMBERED * drawn.total / queries
    if held is not None:
        before = slice(sinks, sinks + held.score.shape[2])
        score[:, :, before] += held.score.clamp_min(0) / GAIN
        later[:, :, before] += held.score.clamp_min(0) * (1 - 1 / DECAY) ** new
    score = score.masked_fill(left & (age < window + newest), torch.inf).masked_fill(~left, -1.0)
    best = score.topk(min(max(slots), len(line)), -1)
    fits = (best.values >= 0) & (torch.arange(best.values.shape[2], device=device) < room)
    # In their order, behind the free slots.
    order = torch.where(fits, best.indices, best.indices - len(line)).sort(-1).values
    order = F.pad(order, (max(slots) - order.shape[2], 0), value=-1)
    index, free = order % len(line), order < 0
    after = chosen(later, index).round().clamp(max=MOST_SCORE).masked_fill(free, FREE).to(torch.int16)
    k, v = (accumulable(chosen(x, index)).masked_fill(free.unsqueeze(-1), 0) for x in (line.key, line.value))
    borders = list(accumulate((len(layout.heads) for layout in layouts), initial=0))
    spans = zip(pairwise(borders), slots, strict=True)
    own = [(slice(None), slice(first, end), slice(max(slots) - n, None)) for (first, end), n in spans]
    coders = [coder for layout in layouts for coder in (layout.coded_tiers.key, layout.coded_tiers.value)]
    codes = iter(backend.encode(coders, [x[place] for place in own for x in (k, v)]))
    found = [ScoredTokens(*next(codes), *next(codes), after[place]) for place in own]
    if held is None:
        return found
    return [
        _with_codes_of(tier, tokens, index[place] - (before.stop - len(tier)), free[place])
        for tier, tokens, place in zip(held.tiers, found, own, strict=True)
    ]


def _with_codes_of(held: ScoredTokens, tokens: ScoredTokens, places: Tensor, free: Tensor) -> ScoredTokens:
    """Tokens of a tier, of which those at ``places`` [B, Hkv, n] that ``held`` has keep their codes."""
    kept = ~free & (places >= 0) & (places < len(held))
    retained = held.chosen(places.clamp(0, len(held) - 1))
    codes = {
        name: torch.where(kept.unsqueeze(-1), getattr(retained, name), getattr(tokens, name))
        for name in ("key", "key_scale", "value", "value_scale")
    }
    return ScoredTokens(**codes, score=tokens.score)


@lru_cache
def _per_head(numbers: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Numbers [Hkv, 1], each of so many heads."""
    return torch.tensor([n for n, heads in numbers for _ in range(heads)], device=device).unsqueeze(-1)
