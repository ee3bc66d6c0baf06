"""Exact prefill: the tokens of a call attend exactly to what the cache holds and to one another, and those to retain
are selected once, at the end of the call.

The score of a token is its importance, measured or predicted, and the sum of its squared attention weights over the
last queries, as decode counts (:mod:`dofla.attention.coding.heavy_hitters`). Where importance is not known, the sum
over all queries of the call stands in its place, as in H2O (Zhang et al. 2023, arXiv 2306.14048) but for the square and
for the queries right after the token. Then the scores that decode goes on with are what a token drew from a query in
the mean of the whole call: by the last queries alone, what the selection retained would soon be evicted.

Where every head holds every token, there is nothing to select. Where a sequence begins and importance is known, a
backend may have kernels for all of it (:meth:`Backend.retain_important`).

All KV heads with one local window are done at once, whatever the sizes of their tiers, and in the order of their
groups: on a GPU a prompt of some thousand tokens takes as long as its kernels are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from dofla.attention.backend import Backend
from dofla.attention.call import Call
from dofla.attention.coding import CodedTokens, Tier
from dofla.attention.coding.tokens import gather_tokens
from dofla.attention.constants import DECAY, FREE, GAIN, LATELY_WEIGHT, LOG_ZERO, MOST_SCORE
from dofla.attention.drawn import NEIGHBORS, Drawn, Line
from dofla.attention.eight_bits import PackedTokens
from dofla.attention.heads import on_device, places
from dofla.attention.layout import Contents, Group
from dofla.attention.state import TokenBuffer, accumulable, masked

MOST_TOKENS = 8192
"""Tokens at once: longer calls are read in several parts, in constant memory and linear time."""
_LATER = 1e-30
"""Increase of the score from one position to the next: among tokens that drew no attention, the newest are retained."""
HALF_LIFE = 8192
"""Tokens that are read at once after which importance is halved: text without end is not known by its beginning."""
LEAST_AT_ONCE = 64
"""Tokens of a call that goes on from a cache, from which on importance decides."""
LEAST_ON_CPU = 256
"""Likewise on a CPU, where fewer come one by one: to decode what is held for all at once takes longer, and turns of a
conversation leave fewer facts if each of them selects (docs/research/cache.md)."""
LAST = 128
"""Last queries whose attention counts beside importance."""
_REMEMBERED = 4 * DECAY
"""Queries whose mean attention a score is, which decode goes on with: so many as decays leave of equal ones, times what
weights are larger among the tokens of the tier alone (benchmarks/quality/prefill.py)."""


def exact_prefill(
    call: Call,
    tiers: Sequence[Tier],
    groups: Sequence[Group],
    held: Sequence[Contents] | None,
    backend: Backend,
    attends: bool,
) -> tuple[Tensor, list[Contents]]:
    """Exact causal attention of a call of KV heads whose caches have one window and one number of sinks.

    The tiers and what the caches hold are those of each group of heads, in their order; None: nothing yet. Returns
    output [B, H, L, dv] in the dtype of the values, and what the caches hold after. Where the call only ``attends`` to
    select, by importance that is known, there may be the last queries or none, and the output means nothing.
    """
    (query, key, value), outs, contents = call.vectors, [], list(held or ())
    grow, length = all(tier.grows for tier in tiers), key.shape[2]
    most = MOST_TOKENS if query.shape[2] and not grow else length
    for start in range(0, length, most):
        part = slice(start, min(start + most, length))
        log_weight = None if call.log_weight is None else call.log_weight[:, part]
        padded = log_weight is not None and not bool((log_weight == 0).all())
        new = masked(key[:, :, part], value[:, :, part], log_weight if padded else None)
        past = _Held.of(tiers, contents, backend) if contents else None
        line = _line(past, new, padded)
        near, drawn = (groups[0].window, groups[0].sinks, call.scaling), None
        if attends:
            asks = query[:, :, part]
        else:  # those of the last part's own tokens
            asks = query[:, :, max(0, query.shape[2] - len(new)) :] if part.stop == length else query[:, :, :0]
        if call.importance is None and not grow:
            out, drawn = backend.exact_causal(asks, line, *near)
        elif attends:
            out = backend.softmax(asks, *line.vectors, call.scaling, None if line.whole(len(new)) else line.rank >= 0)
        else:
            out = call.new_output()
        if call.importance is not None and not grow:
            lately = backend.drawn_lately(asks[:, :, -LAST:], line, *near) if asks.shape[2] else None
            drawn = Drawn(_importance(call.importance, part, past, len(line)), lately)
        outs.append(out.to(value.dtype))
        contents = _retained(tiers, groups, past, line, new, drawn, call.importance is not None, backend)
    return outs[0] if len(outs) == 1 else torch.cat(outs, 2), contents


def _importance(importance: Tensor, part: slice, past: _Held | None, tokens: int) -> Tensor:
    """The importance of a line's tokens [B, Hkv, P], of which some are those of a part of the call, whose importance
    [B, Hkv, L] is known. Of tokens that are in the window since earlier calls it is not: they have the mean."""
    before = 0 if past is None else len(past.window)
    known = importance[:, :, max(0, part.start - before) : part.stop].float()
    unknown = max(0, before - part.start)
    mean = known.mean(-1, keepdim=True).expand(-1, -1, unknown)
    return F.pad(torch.cat([mean, known], 2), (tokens - unknown - known.shape[2], 0))


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


def _line(held: _Held | None, new: TokenBuffer, padded: bool) -> Line:
    if held is None and not padded:
        return Line(new.key, new.value, places(len(new), new.key.device).expand(new.key.shape[:3]), padded)
    real = (new.log_weight > LOG_ZERO).unsqueeze(1).expand(new.key.shape[:3])
    key, value = new.key, new.value
    if held is not None:
        dtype = accumulable(key).dtype
        sinks, window = (x.unpacked(dtype) for x in (held.sinks, held.window))
        parts = [(x.key, x.value) for x in (sinks, held, window, new)]
        key, value = (torch.cat([x.to(dtype) for x in side], 2) for side in zip(*parts, strict=True))
        real = torch.cat([held.real, real], 2)
    return Line(key, value, (real.cumsum(2) - 1).masked_fill(~real, -1), padded)


def _retained(
    tiers: Sequence[Tier],
    groups: Sequence[Group],
    past: _Held | None,
    line: Line,
    new: TokenBuffer,
    drawn: Drawn | None,
    important: bool,
    backend: Backend,
) -> list[Contents]:
    """The contents after the call: the first tokens as attention sinks, the last in the window, and in the tier,
    besides the newest that leave the window, those with the highest scores."""
    window_size, count = groups[0].window, groups[0].sinks
    behind = line.rank[:, :, -1:] - window_size - line.rank  # the last token is no padding, if any is not
    if past is None and not line.padded:
        first = new[: min(count, max(0, len(new) - window_size))]
        first = first if len(first) == count else first.then(TokenBuffer.empty(*line.vectors, count - len(first)))
    else:
        first = _first(line, behind >= 0, count)
    last = new[-window_size:]
    if past is None and len(new) < window_size:
        last = TokenBuffer.empty(*line.vectors, window_size - len(new)).then(last)
    sinks, window = (PackedTokens.of(tokens, backend.pack) for tokens in (first, last))
    if len(window) < window_size and past is not None:
        window = past.window.shifted(window)
    behind = behind.masked_fill(line.rank < count, -1)
    coded = _select(tiers, [own.slots for own in groups], past, line, drawn, important, behind, len(new), backend)
    return [
        Contents(window.of_heads(own), sinks.of_heads(own), tokens)
        for tokens, own in zip(coded, _spans(tiers), strict=True)
    ]


def _first(line: Line, left: Tensor, count: int) -> TokenBuffer:
    """The first tokens of a line, as far as they have ``left`` the window [B, Hkv, P], and free places behind them."""
    at = places(count, left.device).unsqueeze(-1)
    filled, index = ((line.rank.unsqueeze(2) == at) & left.unsqueeze(2)).max(-1)  # [B, Hkv, s]
    key, value = (gather_tokens(x, index).masked_fill(~filled.unsqueeze(-1), 0) for x in line.vectors)
    return TokenBuffer(key, value, torch.where(filled[:, 0], 0.0, LOG_ZERO))


def _spans(tiers: Sequence[Tier]) -> list[slice]:
    """The heads of each group."""
    return [slice(*ends) for ends in pairwise(accumulate((tier.key.heads for tier in tiers), initial=0))]


def _select(
    tiers: Sequence[Tier],
    slots: Sequence[int],
    past: _Held | None,
    line: Line,
    drawn: Drawn | None,
    important: bool,
    behind: Tensor,
    new: int,
    backend: Backend,
) -> list[CodedTokens]:
    """Tokens of each group's tier, of so many ``slots``, after the call, of which ``new`` are the call's. ``behind``
    [B, Hkv, P] is how many tokens left the window after each that did, and negative of those that did not. What was
    ``drawn`` in all may be their importance."""
    device, most, tokens = behind.device, max(slots), len(line)
    sizes = [tier.key.heads for tier in tiers]
    newest = _of_heads([tier.newest for tier in tiers], sizes, device)
    recency, queries = _by_position(tokens, new, device)
    left = 0.5 ** (new / HALF_LIFE) if important else (1 - 1 / DECAY) ** new  # of the scores that tokens have
    if drawn is None:
        score, later = recency.expand(behind.shape), torch.zeros_like(behind, dtype=torch.float32)
    else:
        score, later = drawn.total + recency, drawn.total * GAIN if important else drawn.total / queries
        if drawn.lately is not None:
            score = score + drawn.lately * (LATELY_WEIGHT if important else 1)
            later = later + drawn.lately * (GAIN if important else 0)
    held = 0 if past is None else len(past.sinks) + past.score.shape[2]
    if past is not None and drawn is not None:
        before, scored = slice(len(past.sinks), held), past.score.clamp_min(0)
        score[:, :, before] += scored / GAIN
        later[:, :, before] += scored * left
    score = score.masked_fill(behind < newest, torch.inf).masked_fill(behind < 0, -1.0)
    best = score.topk(min(most, tokens), -1)
    fits = best.values >= 0
    if min(slots) < most:
        fits = fits & (places(fits.shape[2], device) < _of_heads(slots, sizes, device))
    # The newest first, behind the free slots.
    order = torch.where(fits, best.indices, best.indices + tokens).sort(-1, descending=True).values
    if order.shape[2] < most:
        order = F.pad(order, (most - order.shape[2], 0), value=tokens)
    index, free = order % tokens, order >= tokens
    if any(tier.grows for tier in tiers):
        later = later.masked_fill(_of_heads([tier.grows for tier in tiers], sizes, device) > 0, 0)
    after = gather_tokens(later, index).round().clamp(max=MOST_SCORE).masked_fill(free, FREE).to(torch.int16)
    scores = [after[:, heads, most - n :] for heads, n in zip(_spans(tiers), slots, strict=True)]
    if past is None:
        codes = _codes(tiers, line, index, free, slots, backend)
        return [CodedTokens(*own, score) for own, score in zip(codes, scores, strict=True)]
    # Only the newest have no codes yet. They are coded the oldest first, before zeros for the places that are free.
    fresh, empty, slot = min(most, tokens - held), free.sum(-1, keepdim=True), places(most, device)
    newest_last = F.pad(index.gather(-1, (empty + slot[:fresh].flip(0)).clamp(max=most - 1)), (0, 1))
    counts, found = [min(n, fresh) + 1 for n in slots], []
    codes = _codes(tiers, line, newest_last, places(fresh + 1, device) == fresh, counts, backend)
    for contents, own, count, score, heads in zip(past.contents, codes, counts, scores, _spans(tiers), strict=True):
        at, n = index[:, heads, most - len(score[0, 0]) :], len(contents.tier)
        coded = contents.tier.then(CodedTokens(*own, torch.empty_like(score[:, :, :1]).expand(-1, -1, count)))
        fresh_at = n + count - 2 + empty[:, heads] - slot[most - at.shape[2] :]
        at = torch.where(at < held, at + n - held, fresh_at).masked_fill(score == FREE, len(coded) - 1)
        found.append(replace(coded.take(at), score=score))
    return found


def _codes(
    tiers: Sequence[Tier], line: Line, index: Tensor, free: Tensor, counts: Sequence[int], backend: Backend
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Codes and scales of keys and values of each group, of the last ``counts`` of a line's tokens at ``index``
    [B, Hkv, n]. Places that are ``free`` have those of zeros."""
    k, v = (accumulable(gather_tokens(x, index)).masked_fill(free.unsqueeze(-1), 0) for x in line.vectors)
    coders = [coder for tier in tiers for coder in (tier.key, tier.value)]
    vectors = [x[:, heads] for heads in _spans(tiers) for x in (k, v)]
    codes = iter(backend.encode_last(coders, vectors, [n for n in counts for _ in range(2)]))
    return [(*next(codes), *next(codes)) for _ in tiers]


def _of_heads(numbers: Sequence[int], sizes: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of groups of so many heads, for each head [Hkv, 1]."""
    return on_device(tuple(n for n, size in zip(numbers, sizes, strict=True) for _ in range(size)), device).unsqueeze(1)


@lru_cache(maxsize=4)
def _by_position(tokens: int, new: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two numbers for each token of a line: an addend of its score, and the divisor, by the queries that it can have
    drawn attention from, that gives the score that decode goes on with. All layers read lines of one length after
    another."""
    position = places(tokens, device)
    return _LATER * position, (tokens - NEIGHBORS - position).clamp(1, new) / (GAIN * _REMEMBERED)
