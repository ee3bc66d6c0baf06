"""Eviction by attention score: heavy hitters are retained whatever their age.

The score of a token is the attention it got lately from the queries that saw it in the tier. When a token enters, the
one with the lowest score is evicted, the newest excepted. Scores are integers computed in exact arithmetic
(:meth:`dofla.attention.Coder.rotate_query_integer`, powers of two from a table, sums of integers), so the same tokens
survive however a text is cut into calls. The idea is that of H2O (Zhang et al. 2023, arXiv 2306.14048); here attention
is normalized over the tokens of the tier alone, and scores decay by a 256th with every token.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dofla.attention.coding.coder import Coder, Numbers
from dofla.attention.coding.levels import constant, placed
from dofla.attention.coding.tokens import CodedTokens
from dofla.attention.constants import DECAY, GAIN, LEAST_STEPS, MOST_SCORE, MOST_STEPS, NEVER, OCTAVE

WEIGHTS = constant([round(2.0 ** (12 - n / OCTAVE)) for n in range(LEAST_STEPS)] + [0.0])
"""Weights by how many steps they are below the largest; beyond the last a weight is 0."""


@torch.no_grad()
def select_survivors(
    coder: Coder, query_integers: Numbers, real: Tensor, line: CodedTokens, newest: int, scaling: float
) -> tuple[CodedTokens, Tensor]:
    """Let tokens enter a tier one by one, and evict the one with the lowest score each time, the ``newest`` excepted.

    Args:
        coder: of the keys.
        query_integers: queries [B, H, L, ...], as :meth:`dofla.attention.Coder.rotate_query_integer` gives them; query
            i attends once token i has entered.
        real: [B, L], which queries are not padding.
        line: the slots of the tier, free ones and the newest tokens first, and the L tokens that enter: S in all.

    Returns:
        The tier after; and the first query that sees each token of the line no more [B, Hkv, S], or :data:`NEVER`.
    """
    per_step, _ = weight_steps(scaling, real.device)
    steps = _steps(query_integers, coder.numbers(line.key, line.key_scale), per_step)
    index, score, evicted_at = _select_survivors(steps, real, line.score, newest)
    return replace(line.take(index), score=score), evicted_at


def weight_steps(scaling: float, device: torch.device) -> tuple[float, Tensor]:
    """Steps of a weight's logarithm per unit of a product of query and key; and weights by steps below the largest."""
    return scaling * math.log2(math.e) * OCTAVE, placed(WEIGHTS, device)


def visible(line: CodedTokens, evicted_at: Tensor, length: int) -> Tensor:
    """Which tokens of a line each of ``length`` queries sees [B, Hkv, L, S], as :func:`select_survivors` evicts."""
    rows = torch.arange(length, device=evicted_at.device).unsqueeze(-1)
    entered = torch.arange(length - len(line), length, device=evicted_at.device)
    return (entered <= rows) & (rows < evicted_at.unsqueeze(-2)) & (line.score >= 0).unsqueeze(-2)


def _steps(query_integers: Numbers, key_integers: Numbers, per_step: float) -> Tensor:
    """Logarithms of the weights of all pairs, in whole steps [B, Hkv, G, L, S]; exact, but for single roundings."""
    keys, key_unit = key_integers
    numbers, unit = (x.unflatten(1, (keys.shape[1], -1)) for x in query_integers)
    scores = numbers.new_zeros(())
    for block in range(keys.shape[-2]):
        products = numbers[..., block, :] @ keys[..., block, :].mT.unsqueeze(2)
        scores = scores + products * unit[..., block, :] * key_unit[..., block, :].mT.unsqueeze(2)
    return (scores * per_step).round().clamp(-MOST_STEPS, MOST_STEPS)


def _select_survivors(steps: Tensor, real: Tensor, score: Tensor, newest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Index in the line of the survivors, their scores, and which query sees each token of the line no more."""
    heads, length, places = score.shape[:2], real.shape[1], score.shape[2] - real.shape[1]
    weights, order = placed(WEIGHTS, steps.device), torch.arange(places + 1, device=steps.device)
    slot, fresh = order[:-1], (order < newest - 1) | (order == places)  # once no slot is free
    evicted_at = torch.full_like(score, NEVER, dtype=torch.int64)
    index, entering, score = slot.expand(*heads, -1), score[:, :, places:], score[:, :, :places].int()
    for n in range(length):
        index = torch.cat([index, index.new_full((*heads, 1), places + n)], -1)
        score = torch.cat([score, entering[:, :, n : n + 1].int()], -1)
        rank = score.long().masked_fill(fresh & (score >= 0), MOST_SCORE + 1) * (places + 1) - order  # no two alike
        least = rank.argmin(-1, keepdim=True)
        evicted_at.scatter_(-1, index.gather(-1, least), n)
        enters = least * (score.gather(-1, least) < 0)  # the last free slot, or the first of all
        stay = torch.where(slot == enters, places, slot - ((slot > enters) & (slot <= least)).long())
        index, score = index.gather(-1, stay), score.gather(-1, stay)
        score = torch.where(real[:, None, n : n + 1], _drawn(score, steps[:, :, :, n], index, weights), score)
    return index, score.to(torch.int16), evicted_at


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
