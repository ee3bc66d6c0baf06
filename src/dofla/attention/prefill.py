"""Exact prefill: the tokens of a call attend exactly to what the cache holds and to one another, and those to retain
are selected once, at the end of the call.

The score of a token is the sum of its squared attention weights over the queries of the call, as in H2O (Zhang et al.
2023, arXiv 2306.14048) but for the square and for the queries right after the token; and over the last queries once
more, as decode counts (:mod:`dofla.attention.coding.heavy_hitters`). The scores that decode goes on with are what a
token drew from a query in the mean of the whole call: by the last queries alone, what the selection retained would soon
be evicted.

All KV heads with one local window are done at once, whatever the sizes of their tiers, and in the order of their
groups: on a GPU a prompt of some thousand tokens takes as long as its kernels are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.backend import Backend
from dofla.attention.call import Call
from dofla.attention.coding import CodedTokens, Tier
from dofla.attention.coding.tokens import gather_tokens
from dofla.attention.constants import DECAY, FREE, GAIN, LOG_ZERO, MOST_SCORE
from dofla.attention.drawn import NEIGHBORS, Drawn, Line
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.heads import on_device
from dofla.attention.layout import Contents
from dofla.attention.state import TokenBuffer, accumulable, masked

MOST_TOKENS = 8192
"""Tokens at once: longer calls are read in several parts, in constant memory and linear time."""
_LATER = 1e-30
"""Increase of the score from one position to the next: among tokens that drew no attention, the newest are retained."""
_REMEMBERED = 4 * DECAY
"""Queries whose mean attention a score is, which decode goes on with: so many as decays leave of equal ones, times what
weights are larger among the tokens of the tier alone (benchmarks/quality/prefill.py)."""


def exact_prefill(
    call: Call, tiers: Sequence[Tier], held: Sequence[Contents], fresh: bool, backend: Backend
) -> tuple[Tensor, list[Contents]]:
    """Exact causal attention of a call of KV heads whose caches have one window and one number of sinks.

    The tiers and what the caches hold are those of each group of heads, in their order; ``fresh`` caches hold nothing
    yet. Returns output [B, H, L, dv] in the dtype of the values, and what the caches hold after.
    """
    (query, key, value), outs = call.vectors, []
    window, sinks = len(held[0].window), len(held[0].sinks)
    past = None if fresh else _Held.of(tiers, held, backend)
    importance = call.importance if fresh else None
    most = MOST_TOKENS if importance is None else query.shape[2]
    for start in range(0, query.shape[2], most):
        part = slice(start, start + most)
        log_weight = None if call.log_weight is None else call.log_weight[:, part]
        new = masked(key[:, :, part], value[:, :, part], log_weight)
        line = _line(past, new, padded=log_weight is not None and not bool((log_weight == 0).all()))
        out, drawn = backend.exact_causal(query[:, :, part], line, window, sinks, call.scaling)
        outs.append(out.to(value.dtype))
        held = _retained(tiers, held, past, line, new, drawn, importance, backend)
        if part.stop < query.shape[2]:
            past = _Held.of(tiers, held, backend)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), list(held)


@dataclass(frozen=True)
class _Held:
    """Contents of the caches of a layer, all KV heads together, oldest tokens first. Tiers that are smaller than others
    have free slots in front, so that the heads' tokens stand side by side."""

    contents: Sequence[Contents]  # of each group
    sinks: PackedTokens
    window: PackedTokens
    key: Tensor  # [B, Hkv, S, d], of the tiers' tokens, decoded
    value: Tensor  # [B, Hkv, S, dv], likewise
    score: Tensor  # [B, Hkv, S], of the tiers' tokens, FREE for free slots

    @classmethod
    def of(cls, tiers: Sequence[Tier], contents: Sequence[Contents], backend: Backend) -> _Held:
        contents = [replace(own, tier=own.tier.oldest_first()) for own in contents]
        slots = max(len(own.tier) for own in contents)
        pairs = list(zip(tiers, (own.tier for own in contents), strict=True))
        keys = [backend.decode(tier.key, (x.key, x.key_scale)) for tier, x in pairs]
        values = [backend.decode(tier.value, (x.value, x.value_scale)) for tier, x in pairs]
        key, value = (torch.cat([F.pad(x, (0, 0, slots - x.shape[2], 0)) for x in side], 1) for side in (keys, values))
        score = torch.cat([F.pad(x.score, (slots - len(x), 0), value=FREE) for _, x in pairs], 1)
        sinks = PackedTokens.of_all([own.sinks for own in contents])
        return cls(contents, sinks, PackedTokens.of_all([own.window for own in contents]), key, value, score)

    @property
    def real(self) -> Tensor:
        """Which slots have a token [B, Hkv, sinks + S + window]."""
        parts = (x.log_weight > LOG_ZERO for x in (self.sinks, self.window))
        sinks, window = (x.unsqueeze(1).expand(-1, self.score.shape[1], -1) for x in parts)
        return torch.cat([sinks, self.score != FREE, window], 2)


def _line(held: _Held | None, new: TokenBuffer, *, padded: bool) -> Line:
    real = (new.log_weight > LOG_ZERO).unsqueeze(1).expand(-1, new.key.shape[1], -1)
    if held is None:
        return Line(new.key, new.value, real, padded)
    dtype = accumulable(new.key).dtype
    sinks, window = (x.unpacked(dtype) for x in (held.sinks, held.window))
    parts = [(x.key, x.value) for x in (sinks, held, window, new)]
    key, value = (torch.cat([x.to(dtype) for x in side], 2) for side in zip(*parts, strict=True))
    return Line(key, value, torch.cat([held.real, real], 2), padded)


def _retained(
    tiers: Sequence[Tier],
    before: Sequence[Contents],
    past: _Held | None,
    line: Line,
    new: TokenBuffer,
    drawn: Drawn,
    importance: Tensor | None,
    backend: Backend,
) -> list[Contents]:
    """The contents after the call: the first tokens as attention sinks, the last in the window, and in the tier,
    besides the newest that leave the window, those with the highest scores."""
    window_size, count = len(before[0].window), len(before[0].sinks)
    age = line.real.flip(2).cumsum(2).flip(2) - 1
    rank = line.real.cumsum(2) - 1
    left = line.real & (age >= window_size)
    slots = torch.arange(count, device=rank.device)
    arrives = left.unsqueeze(2) & (rank.unsqueeze(2) == slots.unsqueeze(-1))  # [B, Hkv, s, P]
    filled, at = arrives.max(-1)
    key, value = (gather_tokens(x, at).masked_fill(~filled.unsqueeze(-1), 0) for x in (line.key, line.value))
    log_weight = torch.zeros_like(filled[:, 0], dtype=torch.float32).masked_fill(~filled[:, 0], LOG_ZERO)
    sinks = PackedTokens.of(TokenBuffer(key, value, log_weight), backend.pack)
    window = PackedTokens.of(new[-window_size:], backend.pack)
    if len(new) < window_size:
        window = PackedTokens.of_all([own.window for own in before]).shifted(window)
    behind = torch.where(left & (rank >= count), age - window_size, -1)
    room = [len(own.tier) for own in before]
    coded = _select(tiers, room, past, line, drawn, importance, behind, len(new), backend)
    return [
        Contents(window.of_heads(own), sinks.of_heads(own), tokens)
        for tokens, own in zip(coded, _spans(tiers), strict=True)
    ]


def _spans(tiers: Sequence[Tier]) -> list[slice]:
    """The heads of each group."""
    return [slice(*ends) for ends in pairwise(accumulate((tier.key.heads for tier in tiers), initial=0))]


def _select(
    tiers: Sequence[Tier],
    slots: Sequence[int],
    past: _Held | None,
    line: Line,
    drawn: Drawn,
    importance: Tensor | None,
    behind: Tensor,
    new: int,
    backend: Backend,
) -> list[CodedTokens]:
    """Tokens of each group's tier, of so many ``slots``, after the call, of which ``new`` are the call's. ``behind``
    [B, Hkv, P] is how many tokens left the window after each that did, and negative of those that did not."""
    device, left, sizes = behind.device, behind >= 0, zip(tiers, slots, strict=True)
    per_head = [(tier.newest, room, tier.grows) for tier, room in sizes for _ in range(tier.key.heads)]
    newest, room, grows = (on_device(own, device).unsqueeze(-1) for own in zip(*per_head, strict=True))
    position = torch.arange(len(line), device=device)
    queries = (len(line) - NEIGHBORS - position).clamp(1, new)
    score, later = drawn.total + drawn.lately + _LATER * position, GAIN * _REMEMBERED * drawn.total / queries
    if importance is not None:
        score, later = score + importance, later + GAIN * importance
    if past is not None:
        before = slice(len(past.sinks), len(past.sinks) + past.score.shape[2])
        score[:, :, before] += past.score.clamp_min(0) / GAIN
        later[:, :, before] += past.score.clamp_min(0) * (1 - 1 / DECAY) ** new
    score = score.masked_fill(left & (behind < newest), torch.inf).masked_fill(~left, -1.0)
    best = score.topk(min(max(slots), len(line)), -1)
    fits = (best.values >= 0) & (torch.arange(best.values.shape[2], device=device) < room)
    # The newest first, behind the free slots.
    order = torch.where(fits, best.indices, best.indices + len(line)).sort(-1, descending=True).values
    order = F.pad(order, (max(slots) - order.shape[2], 0), value=len(line))
    index, free = order % len(line), order >= len(line)
    after = (
        gather_tokens(later * (1 - grows), index).round().clamp(max=MOST_SCORE).masked_fill(free, FREE).to(torch.int16)
    )
    k, v = (accumulable(gather_tokens(x, index)).masked_fill(free.unsqueeze(-1), 0) for x in (line.key, line.value))
    spans = zip(_spans(tiers), slots, strict=True)
    own = [(slice(None), heads, slice(max(slots) - n, None)) for heads, n in spans]
    coders = [coder for tier in tiers for coder in (tier.key, tier.value)]
    codes = iter(backend.encode(coders, [x[place] for place in own for x in (k, v)]))
    found = [CodedTokens(*next(codes), *next(codes), after[place]) for place in own]
    if past is None:
        return found
    return [
        _with_codes_of(contents.tier, tokens, index[place] - (before.stop - len(contents.tier)), free[place])
        for contents, tokens, place in zip(past.contents, found, own, strict=True)
    ]


def _with_codes_of(held: CodedTokens, tokens: CodedTokens, index: Tensor, free: Tensor) -> CodedTokens:
    """Tokens of a tier, of which those at ``index`` [B, Hkv, n] that ``held`` has keep their codes."""
    kept = ~free & (index >= 0) & (index < len(held))
    retained = held.take(index.clamp(0, len(held) - 1))
    codes = {
        name: torch.where(kept.unsqueeze(-1), getattr(retained, name), getattr(tokens, name))
        for name in ("key", "key_scale", "value", "value_scale")
    }
    return CodedTokens(**codes, score=tokens.score)
