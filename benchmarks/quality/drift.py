"""How far a float32 state drifts from the same sums in float64 over many single decoding steps.

python benchmarks/quality/drift.py
"""

from __future__ import annotations

import torch
import typer

from dofla.attention.state import FeatureState


def main(steps: int = 100_000, features: int = 8, spread: float = 3.0) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    a, b = (spread * torch.randn(1, 1, steps, features, generator=generator, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 1, steps, 4, generator=generator, dtype=torch.float64)
    exact = FeatureState.empty(1, 1, features, 4, dtype=torch.float64).absorb(b, v)
    state = FeatureState.empty(1, 1, features, 4)
    for key, value in zip(b.float().split(1, dim=-2), v.float().split(1, dim=-2), strict=True):
        state = state.absorb(key, value)
    expected, _ = exact.read(a[:, :, -1:])
    out, _ = state.read(a[:, :, -1:].float())
    print(f"{steps} steps, log-features of spread {spread}")
    print(f"log-mass off by {(state.log_mass - exact.log_mass).abs().max():.2g}")
    print(f"outputs off by {((out - expected).abs() / expected.abs()).max():.2g} (relative)")


if __name__ == "__main__":
    typer.run(main)
