"""Eviction by attention score: heavy hitters of the last tier are retained whatever their age.

The score of a token is the attention it got lately from the queries that saw it in the tier. When a token enters, the
one with the lowest score is evicted, the newest excepted. Scores are integers computed in exact arithmetic
(:meth:`dofla.attention.Coder.rotate_query_integer`, powers of two from a table, sums of integers), so the same tokens
survive however a text is cut into calls. The idea is that of H2O (Zhang et al. 2023, arXiv 2306.14048); here attention
is normalized over the tokens of the tier alone, and scores decay by a 64th with every token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder
from dofla.attention.coding.levels import constant, placed
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import DECAY, FREE, GAIN, LEAST_STEPS, LOG_ZERO, MOST_SCORE, MOST_STEPS, NEVER, OCTAVE
from dofla.attention.state import Tensors

WEIGHTS = constant([round(2.0 ** (12 - n / OCTAVE)) for n in range(LEAST_STEPS)] + [0.0])
"""Weights by how many steps they are below the largest; beyond the last a weight is 0."""
_PIECE = 256


@dataclass(frozen=True)
class ScoredTokens(Tensors):
    """n tokens in the order in which they came, others in each head: codes and scales of keys and of values
    [B, Hkv, n, bytes], uint8; and ``score`` [B, Hkv, n], int16."""

    key: Tensor
    key_scale: Tensor
    value: Tensor
    value_scale: Tensor
    score: Tensor

    @classmethod
    def of(cls, tokens: CodedTokens) -> ScoredTokens:
        """Tokens without a score yet. They are padding or count in full, whatever their weights were."""
        log_weight = tokens.log_weight.unsqueeze(1).expand(tokens.key.shape[:3])
        score = torch.where(log_weight > LOG_ZERO, 0, FREE).to(torch.int16)
        return cls(tokens.key, tokens.key_scale, tokens.value, tokens.value_scale, score)

    @property
    def log_weight(self) -> Tensor:
        """The log-weights of the tokens [B, Hkv, n], float32: LOG_ZERO for free slots and padding, 0 for all others."""
        return torch.zeros_like(self.score, dtype=torch.float32).masked_fill(self.score == FREE, LOG_ZERO)

    def __len__(self) -> int:
        return self.score.shape[-1]

    def __getitem__(self, places: slice) -> ScoredTokens:
        return self.map(lambda x: x[:, :, places])

    def then(self, later: ScoredTokens) -> ScoredTokens:
        """These tokens followed by ``later``."""
        return ScoredTokens(*(torch.cat([getattr(x, field.name) for x in (self, later)], 2) for field in fields(self)))

    def chosen(self, places: Tensor) -> ScoredTokens:
        """The tokens at ``places`` [B, Hkv, m]."""
        return self.map(lambda x: chosen(x, places))

    def plain(self) -> CodedTokens:
        """The tokens as :class:`CodedTokens`, without scores. The weights 0 and 1 are shared by all heads, because the
        same number of tokens has entered and left in every head."""
        return CodedTokens(self.key, self.key_scale, self.value, self.value_scale, self.log_weight.amax(1))


def chosen(x: Tensor, places: Tensor) -> Tensor:
    """The entries of ``x`` [B, Hkv, n] or [B, Hkv, n, d] at ``places`` [B, Hkv, m], which differ between heads."""
    return x.gather(2, places if x.ndim == 3 else places.unsqueeze(-1).expand(-1, -1, -1, x.shape[-1]))


@torch.no_grad()
def select_survivors(
    query_integers: tuple[Tensor, Tensor],
    real: Tensor,
    line: ScoredTokens,
    newest: int,
    coder: Coder,
    scaling: float,
) -> tuple[ScoredTokens, Tensor, Tensor]:
    """Let tokens enter a tier one by one, and evict the one with the lowest score each time.

    Args:
        query_integers: queries [B, H, L, ...], as :meth:`dofla.attention.Coder.rotate_query_integer` gives them; query
            i attends once token i has entered.
        real: [B, L], which queries are not padding.
        line: the tokens that are there, and the L that enter: S tokens.
        newest: how many tokens cannot be evicted.
        coder: of the keys; its last tier.
        scaling: of the scores of attention.

    Returns:
        The tier after; the places in the line of the L evicted tokens, in that order [B, Hkv, L]; and for each token
        of the line the first query that sees it no more [B, Hkv, S], :data:`NEVER` of the survivors.
    """
    per_step, _ = weight_steps(scaling, real.device)
    last = len(coder.tiers) - 1
    steps = _steps(query_integers, coder.numbers(line.key, line.key_scale, last), per_step)
    index, score, left, evicted_at = _select_survivors(steps, real, line.score, newest)
    return replace(line.chosen(index), score=score), left, evicted_at


def weight_steps(scaling: float, device: torch.device) -> tuple[float, Tensor]:
    """Steps of the logarithm of a weight to one of a product of a query and a key, and weights by steps below the
    largest."""
    return scaling * math.log2(math.e) * OCTAVE, placed(WEIGHTS, device)


def seen(line: ScoredTokens, evicted_at: Tensor, length: int) -> Tensor:
    """Which tokens of a line each of ``length`` queries sees [B, Hkv, L, S], by the evictions of
    :func:`select_survivors`."""
    rows = torch.arange(length, device=evicted_at.device).unsqueeze(-1)
    entered = torch.arange(length - len(line), length, device=evicted_at.device)
    return (entered <= rows) & (rows < evicted_at.unsqueeze(-2)) & (line.score >= 0).unsqueeze(-2)


def _steps(query_integers: tuple[Tensor, Tensor], key_integers: tuple[Tensor, Tensor], per_step: float) -> Tensor:
    """Logarithms of the weights of all pairs, in whole steps [B, Hkv, G, L, S]; exact, but for single roundings."""
    keys, key_unit = key_integers
    numbers, unit = (x.unflatten(1, (keys.shape[1], -1)) for x in query_integers)
    scores = numbers.new_zeros(())
    for block in range(keys.shape[-2]):
        products = numbers[..., block, :] @ keys[..., block, :].mT.unsqueeze(2)
        scores = scores + products * unit[..., block, :] * key_unit[..., block, :].mT.unsqueeze(2)
    return (scores * per_step).round().clamp(-MOST_STEPS, MOST_STEPS)


def _select_survivors(steps: Tensor, real: Tensor, score: Tensor, newest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Places in the line of the survivors, and their scores; then as :func:`select_survivors` returns them,
    ``left`` and ``evicted_at``."""
    heads, length, places = score.shape[:2], real.shape[1], score.shape[2] - real.shape[1]
    weights, order = placed(WEIGHTS, steps.device), torch.arange(places + 1, device=steps.device)
    evicted_at = torch.full_like(score, NEVER, dtype=torch.int64)
    index, entering, score, left = order[:-1].expand(*heads, -1), score[:, :, places:], score[:, :, :places].int(), []
    for n in range(length):
        index = torch.cat([index, index.new_full((*heads, 1), places + n)], -1)
        score = torch.cat([score, entering[:, :, n : n + 1].int()], -1)
        rank = score.long() * (places + 1) + order  # no two alike
        least = rank[:, :, : places + 1 - newest].argmin(-1, keepdim=True)
        leaving = index.gather(-1, least)
        left.append(leaving)
        evicted_at.scatter_(-1, leaving, n)
        stay = order[:-1] + (order[:-1] >= least)
        index, score = index.gather(-1, stay), score.gather(-1, stay)
        score = torch.where(real[:, None, n : n + 1], _drawn(score, steps[:, :, :, n], index, weights), score)
    return index, score.to(torch.int16), torch.cat(left, -1), evicted_at


def _drawn(score: Tensor, steps: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Scores [B, Hkv, n] after a query with ``steps`` [B, Hkv, G, S] to all tokens, of which ``index`` are there."""
    there = steps.gather(-1, index.unsqueeze(2).expand(-1, -1, steps.shape[2], -1))
    there = there.masked_fill((score < 0).unsqueeze(2), -2 * MOST_STEPS)
    below = (there.amax(-1, keepdim=True) - there).clamp(max=len(weights) - 1)
    drawn = weights[below.long()].masked_fill((score < 0).unsqueeze(2), 0)
    share = drawn / drawn.sum(-1, keepdim=True).clamp_min(1)
    gain = (share * share * GAIN).round().sum(2).int()
    decayed = score - (score + DECAY - 1) // DECAY
    return torch.where(score < 0, score, (decayed + gain).clamp(max=MOST_SCORE))


def pieces(length: int) -> list[slice]:
    """Some tokens at a time, so that memory does not grow with the square of a call."""
    return [slice(start, min(start + _PIECE, length)) for start in range(0, length, _PIECE)]
