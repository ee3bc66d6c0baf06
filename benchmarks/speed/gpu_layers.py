"""Seconds of one layer on a GPU, linear attention and a compressed cache, beside softmax attention: prefill, and decode
beside a long KV cache.

    python benchmarks/speed/gpu_layers.py

12 heads, d = M = 64, bfloat16, computing the features included, and as many heads that remember what `budget=64` does
(docs/maths/compressed-cache.md), against torch's scaled_dot_product_attention (its flash kernel) in the same run.
Ratios above 1 mean that softmax attention is slower. Times are between CUDA events around many calls, so that a call
too short for Python to keep up with counts as long as Python takes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from dofla.feature_maps.layer import LinearAttention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dofla.attention import gpu

HEADS, DIM, FEATURES = 12, 64, 64
MEMORY = {
    "window": 31,
    "sinks": 2,
    "token_dtype": "int8",
    "tiers": [[(58, 3.0)]] * HEADS,
    "heavy_hitters": [159] * HEADS,
}
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
    layers = {
        "linear": LinearAttention("prf", [FEATURES] * HEADS, DIM),
        "compressed": LinearAttention("none", [0] * HEADS, DIM, **MEMORY),
    }
    for layer in layers.values():
        layer.reset_parameters()
        layer.cuda()
    kernels = gpu.obstacle()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("kernels: Triton" if kernels is None else f"kernels: plain torch, because {kernels}")
    with torch.inference_mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        print(f"{'tokens':>7} {'softmax':>10}" + "".join(f" {name:>10} {'ratio':>7}" for name in layers))
        rows = [prefill(layers, length, repeats) for length in lengths or [2**n for n in range(10, 17)]]
        steps = decode(layers, batch, cache, repeats)
    if out:
        report = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "obstacle": kernels,
            "prefill": rows,
            "decode": steps,
        }
        with open(out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


def prefill(layers: dict[str, LinearAttention], length: int, repeats: int) -> dict[str, object]:
    q, k, v = vectors(1, length), vectors(1, length), vectors(1, length)
    softmax = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), repeats)
    print(f"{length:>7} {softmax * 1e3:>7.3f} ms", end="", flush=True)
    row: dict[str, object] = {"tokens": length, "softmax_seconds": softmax}
    for name, layer in layers.items():
        taken = seconds(lambda layer=layer: layer(q, k, v, scaling=SCALING), repeats)
        print(f" {taken * 1e3:>7.3f} ms {softmax / taken:>6.2f}x", end="", flush=True)
        row[name] = {"seconds": taken, "ratio": softmax / taken}
    print()
    return row


def decode(layers: dict[str, LinearAttention], batch: int, cache: int, repeats: int) -> dict[str, object]:
    """One token for each sequence."""
    q, k, v = vectors(batch, 1), vectors(batch, 1), vectors(batch, 1)
    keys, values = vectors(batch, cache), vectors(batch, cache)
    softmax = seconds(lambda: F.scaled_dot_product_attention(q, keys, values), repeats)
    held = keys.nbytes + values.nbytes
    row: dict[str, object] = {"batch": batch, "cache_tokens": cache, "softmax_seconds": softmax, "cache_bytes": held}
    print(f"\ndecoding {batch} sequences, one token each, {cache} tokens before it")
    print(f"  KV cache {softmax * 1e6:.0f} us, {held / 2**20:.1f} MiB")
    for name, layer in layers.items():
        # The state is as large after a thousand tokens as after all of them.
        _, states = layer(vectors(batch, 1024), vectors(batch, 1024), vectors(batch, 1024), scaling=SCALING)
        taken = seconds(lambda layer=layer, states=states: layer(q, k, v, scaling=SCALING, states=states), 10 * repeats)
        size = sum(state.bytes for state in states)
        print(f"  {name} {taken * 1e6:.0f} us, {softmax / taken:.2f}x; {size / 2**20:.1f} MiB, {held / size:.1f}x")
        row[name] = {"seconds": taken, "ratio": softmax / taken, "state_bytes": size, "bytes_ratio": held / size}
    return row


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
