"""The levels of attention/coding/trellis.py: which number each window of bits stands for.

    python scripts/trellis_levels.py

Lloyd's algorithm for trellis codes (Stewart, Gray, Linde 1982): blocks of normal numbers of one length are coded as
well as the levels of the moment allow, and each level becomes the mean of the numbers coded by it. What comes out
depends on the start, so the best of many is taken, by the squared error of other blocks. Printed are the levels of
windows whose first bit is 0, in the unit of coding (those of the other windows are their negatives), and the error.
"""

from __future__ import annotations

import torch
import typer
from torch import Tensor

from dofla.attention.coding.trellis import search, windows
from dofla.attention.constants import FINE, MOST_BITS, UNIT, WINDOW

BLOCK = 16
FINER = 8  # for training: whole numbers of this part of the unit


def main(starts: int = 60, blocks: int = 3000, rounds: int = 15, best: int = 3) -> None:
    torch.set_num_threads(1)
    others = draw(20000, torch.Generator().manual_seed(-1))
    for bits in range(1, MOST_BITS + 1):
        found = [trained(start(bits, seed), bits, blocks, rounds, seed) for seed in range(starts)]
        found = sorted(found, key=lambda levels: error(others, levels, bits))[:best]
        found = [trained(levels, bits, 10 * blocks, 2 * rounds, 0) for levels in found]
        found = [FINER * (levels / FINER).round() for levels in found]
        levels = min(found, key=lambda levels: error(others, levels, bits))
        print(f"{bits} bits, error {error(others, levels, bits):.5f}")
        print(", ".join(f"{x / FINER:.0f}" for x in levels[: len(levels) // 2].tolist()), flush=True)


def draw(blocks: int, generator: torch.Generator) -> Tensor:
    """Blocks [n, 16] of one length."""
    x = torch.randn(blocks, BLOCK, generator=generator)
    return FINER * UNIT * x / x.square().mean(1, keepdim=True).sqrt()


def coded(x: Tensor, levels: Tensor, bits: int) -> Tensor:
    """Windows [n, 16]."""
    return windows(search((FINE * x).round(), levels.round(), bits), bits)


def start(bits: int, seed: int) -> Tensor:
    """Quantiles of a normal variable: the newest bits say in which of as many parts, a draw which there."""
    quantiles = FINER * UNIT * 2**0.5 * torch.erfinv((torch.arange(2**WINDOW) + 0.5) / 2 ** (WINDOW - 1) - 1)
    window, states = torch.arange(2**WINDOW), 2 ** (WINDOW - bits)
    order = torch.randperm(states, generator=torch.Generator().manual_seed(seed))
    levels = quantiles[window % 2**bits * states + order[window >> bits]]
    return (levels - levels.flip(0)) / 2


def trained(levels: Tensor, bits: int, blocks: int, rounds: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rounds):
        x = draw(blocks, generator)
        found = coded(x, levels, bits).flatten()
        total = torch.zeros_like(levels).index_add_(0, found, x.flatten())
        count = torch.bincount(found, minlength=len(levels)).float()
        mean = (total - total.flip(0)) / (count + count.flip(0)).clamp_min(1)
        levels = torch.where(count + count.flip(0) > 0, mean, levels)
    return levels


def error(x: Tensor, levels: Tensor, bits: int) -> float:
    """Mean squared error, of a variance of 1, where what codes stand for is made as long as the block is."""
    found = levels[coded(x, levels, bits)]
    cosine = (x * found).sum(1) / (x.square().sum(1) * found.square().sum(1)).sqrt()
    return (2 - 2 * cosine).mean().item()


if __name__ == "__main__":
    typer.run(main)
