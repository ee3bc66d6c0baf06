"""Seconds of linear attention beside softmax attention: prefill, and decoding from a state beside a key-value cache.

    python benchmarks/attention.py

12 heads, d = M = 64, float32, computing the features included, against torch's scaled_dot_product_attention in the same
run. Ratios above 1 mean that linear attention is faster. Also printed: the share of the machine's matrix-multiply rate
that prefill reaches.
"""

from __future__ import annotations

import sys

sys.path.pop(0)  # this folder, whose profile.py would hide the standard library's

import json
import time
from typing import Annotated

import torch
import torch.nn.functional as F
import typer

from dofla.attention import attend
from dofla.feature_maps import PRF

HEADS, DIM, FEATURES, CHUNK = 12, 64, 64, 128


def main(
    lengths: Annotated[list[int] | None, typer.Option(help="Context lengths.")] = None,
    repeats: int = 3,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    torch.manual_seed(0)
    prf = PRF(HEADS, DIM, FEATURES)
    prf.reset_parameters()
    rate = matmul_rate()
    print(f"matrix multiply: {rate / 1e9:.0f} GFLOP/s in float32, {torch.get_num_threads()} threads")
    titles = ("tokens", "prefill", "softmax", "ratio", "of rate", "decode", "KV cache", "ratio")
    print("{:>7} {:>9} {:>9} {:>6} {:>8} {:>9} {:>9} {:>6}".format(*titles))
    rows = []
    with torch.inference_mode():
        for length in lengths or [1024, 2048, 4096, 8192, 16384]:
            q, k, v = torch.randn(3, 1, HEADS, length, DIM).unbind(0)
            linear = best(lambda q=q, k=k, v=v: attend(q, k, v, prf, scaling=DIM**-0.5), repeats)
            softmax = best(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), repeats)
            _, state = attend(q, k, v, prf, scaling=DIM**-0.5)
            new = torch.randn(3, 1, HEADS, 1, DIM).unbind(0)
            step = best(lambda new=new, state=state: attend(*new, prf, scaling=DIM**-0.5, state=state), 20 * repeats)
            cached = best(lambda new=new, k=k, v=v: F.scaled_dot_product_attention(new[0], k, v), 20 * repeats)
            share = flops(length) / linear / rate
            rows.append(
                {"tokens": length, "prefill": linear, "softmax_prefill": softmax, "share_of_matmul_rate": share}
                | {"decode": step, "softmax_decode": cached}
            )
            print(
                f"{length:>7} {linear * 1e3:>6.1f} ms {softmax * 1e3:>6.1f} ms {softmax / linear:>5.2f}x {share:>8.0%} "
                f"{step * 1e6:>6.0f} us {cached * 1e6:>6.0f} us {cached / step:>5.2f}x",
                flush=True,
            )
    if out:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(
                {"threads": torch.get_num_threads(), "matmul_flops_per_second": rate, "rows": rows}, file, indent=2
            )


def flops(length: int) -> float:
    """Multiplications and additions of a prefill: features, pairs within a chunk, state read and made."""
    features = 2 * 2 * DIM * FEATURES
    pairs = 2 * CHUNK * (FEATURES + DIM)
    state = 2 * 2 * FEATURES * DIM
    return HEADS * length * (features + pairs + state)


def matmul_rate() -> float:
    """Floating-point operations per second of a large matrix product."""
    a, b = torch.randn(2, 2048, 2048).unbind(0)
    return 2 * 2048**3 / best(lambda: a @ b, 5)


def best(call, repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    typer.run(main)
