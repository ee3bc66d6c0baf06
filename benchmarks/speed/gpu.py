"""Seconds of linear attention beside softmax attention on a GPU: prefill, and decoding beside a long key-value cache.

    python benchmarks/speed/gpu.py

12 heads, d = M = 64, bfloat16, computing the features included, against torch's scaled_dot_product_attention (its flash
kernel) in the same run. Ratios above 1 mean that linear attention is faster. Times are between CUDA events around many
calls, so that a call too short for Python to keep up with counts as long as Python takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dofla.attention import attend, gpu
from dofla.feature_maps import PRF

HEADS, DIM, FEATURES = 12, 64, 64
SCALING = DIM**-0.5


def main(
    lengths: Annotated[list[int] | None, typer.Option(help="Context lengths of the prefill.")] = None,
    cache: Annotated[int, typer.Option(help="Tokens in the key-value cache when decoding.")] = 65536,
    batch: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 64,
    repeats: int = 20,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing was measured.")
        return
    torch.manual_seed(0)
    prf = PRF(HEADS, DIM, FEATURES)
    prf.reset_parameters()
    prf.cuda()
    kernels = gpu.obstacle()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("kernels: Triton" if kernels is None else f"kernels: plain torch, because {kernels}")
    with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        print(f"{'tokens':>7} {'prefill':>10} {'softmax':>10} {'ratio':>7}")
        rows = [prefill(prf, length, repeats) for length in lengths or [2**n for n in range(10, 17)]]
        step = decode(prf, batch, cache, repeats)
    if out:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "obstacle": kernels,
            "prefill": rows,
            "decode": step,
        }
        with open(out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def prefill(prf: PRF, length: int, repeats: int) -> dict[str, float]:
    q, k, v = vectors(1, length), vectors(1, length), vectors(1, length)
    linear = seconds(lambda: attend(q, k, v, prf, scaling=SCALING), repeats)
    softmax = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), repeats)
    print(f"{length:>7} {linear * 1e3:>7.3f} ms {softmax * 1e3:>7.3f} ms {softmax / linear:>6.2f}x", flush=True)
    return {"tokens": length, "seconds": linear, "softmax_seconds": softmax, "ratio": softmax / linear}


def decode(prf: PRF, batch: int, cache: int, repeats: int) -> dict[str, float]:
    """One token for each sequence."""
    # The state is as large after a thousand tokens as after all of them.
    _, state = attend(vectors(batch, 1024), vectors(batch, 1024), vectors(batch, 1024), prf, scaling=SCALING)
    q, k, v = vectors(batch, 1), vectors(batch, 1), vectors(batch, 1)
    linear = seconds(lambda: attend(q, k, v, prf, scaling=SCALING, state=state), 10 * repeats)
    keys, values = vectors(batch, cache), vectors(batch, cache)
    softmax = seconds(lambda: F.scaled_dot_product_attention(q, keys, values), repeats)
    held = keys.nbytes + values.nbytes
    print(f"\ndecoding {batch} sequences, one token each, {cache} tokens before it")
    print(f"  state {linear * 1e6:.0f} us, KV cache {softmax * 1e6:.0f} us: {softmax / linear:.2f}x")
    print(f"  state {state.bytes / 2**20:.1f} MiB, KV cache {held / 2**20:.1f} MiB: {held / state.bytes:.1f}x")
    return (
        {"batch": batch, "cache_tokens": cache, "seconds": linear, "softmax_seconds": softmax}
        | {"ratio": softmax / linear}
        | {"state_bytes": state.bytes, "cache_bytes": held, "bytes_ratio": held / state.bytes}
    )


def vectors(batch: int, length: int) -> Tensor:
    return torch.randn(batch, HEADS, length, DIM, device="cuda", dtype=torch.bfloat16)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Of one call, on average, once the kernels are compiled."""
    for _ in range(3):
        call()
    started, stopped = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    started.record()
    for _ in range(repeats):
        call()
    stopped.record()
    torch.cuda.synchronize()
    return started.elapsed_time(stopped) / 1e3 / repeats


if __name__ == "__main__":
    typer.run(main)
