"""Linear attention beside softmax attention: prefill, decoding from a state beside a key-value cache, ragged heads,
windows and sinks, memory, and how far the machine allows to go.

    python benchmarks/speed/attention.py --out attention.json

12 heads, d = M = 64, computing the features included, against torch's scaled_dot_product_attention in the same run.
Ratios above 1 mean that linear attention is faster. Best of several runs each. `DOFLA_KERNELS=0` times plain torch
instead of the compiled kernels.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from dofla.feature_maps.layer import LinearAttention

from dofla.attention import attend, compiled
from dofla.feature_maps import PRF

HEADS, DIM, FEATURES, CHUNK = 12, 64, 64, 64
SCALING = DIM**-0.5
RAGGED = [16, 16, 32, 32, 48, 48, 64, 64, 96, 96, 128, 128]
WINDOW, SINKS = 32, 4
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(
    lengths: Annotated[list[int] | None, typer.Option(help="Context lengths.")] = None,
    softmax_up_to: Annotated[int, typer.Option(help="Longest prefill of softmax attention; it takes L².")] = 16384,
    repeats: int = 5,
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    torch.manual_seed(0)
    lengths = lengths or [1024, 2048, 4096, 8192, 16384, 32768, 65536]
    form = compiled.obstacle() or "used"
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, compiled kernels: {form}")
    with torch.inference_mode():
        figures: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "compiled_kernels": form,
            "machine": machine_rates(),
            "prefill": prefill(lengths, softmax_up_to, repeats),
            "layers": layers(16384, repeats),
            "decode": decode(lengths, repeats),
            "memory": memory(max(lengths)),
        }
        figures["roofline"] = roofline(16384, figures)
    if out:
        Path(out).write_text(json.dumps(figures, indent=2), encoding="utf-8")


def machine_rates() -> dict[str, float]:
    """What the machine does at best: products, exponentials in the cache, and copying memory that is not in it."""
    rates = {}
    for name, dtype in DTYPES.items():
        a, b = torch.randn(2, 2048, 2048).to(dtype).unbind(0)
        rates[f"matmul_{name}_flops_per_second"] = 2 * 2048**3 / best(lambda a=a, b=b: a @ b, 5)
    x, y = torch.randn(2, 2**17).unbind(0)
    rates["exponentials_per_second"] = x.numel() / best(lambda: torch.exp(x, out=y), 50)
    x, y = torch.randn(2, 2**26).unbind(0)
    rates["copied_bytes_per_second"] = 2 * 4 * x.numel() / best(lambda: y.copy_(x), 3)
    print(
        f"matrix products {rates['matmul_float32_flops_per_second'] / 1e9:.0f} GFLOP/s in float32, "
        f"{rates['matmul_bfloat16_flops_per_second'] / 1e9:.0f} in bfloat16; "
        f"{rates['exponentials_per_second'] / 1e9:.1f} G exponentials/s; "
        f"memory {rates['copied_bytes_per_second'] / 1e9:.1f} GB/s"
    )
    return rates


def prefill(lengths: list[int], softmax_up_to: int, repeats: int) -> list[dict[str, Any]]:
    prf = feature_map()
    rows = []
    for name, dtype in DTYPES.items():
        print(f"\nprefill, {name}\n{'tokens':>7} {'linear':>10} {'per token':>10} {'softmax':>10} {'ratio':>7}")
        for length in lengths:
            q, k, v = vectors(1, length, dtype)
            seconds = best(lambda q=q, k=k, v=v: attend(q, k, v, prf, scaling=SCALING), repeats)
            row = {"dtype": name, "tokens": length, "linear": seconds}
            line = f"{length:>7} {seconds * 1e3:>7.1f} ms {seconds / length * 1e6:>7.2f} us"
            if length <= softmax_up_to:
                softmax = best(lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), 3)
                row |= {"softmax": softmax, "ratio": softmax / seconds}
                line += f" {softmax * 1e3:>7.1f} ms {softmax / seconds:>6.2f}x"
            rows.append(row)
            print(line, flush=True)
    return rows


def layers(length: int, repeats: int) -> dict[str, float]:
    """Whole layers of 12 KV heads: uniform, ragged with the same total, and with a window and sinks. The cases take
    turns, so that a machine that changes its speed meanwhile does so for all."""
    cases = {
        "uniform": LinearAttention("prf", [FEATURES] * HEADS, DIM),
        "ragged": LinearAttention("prf", RAGGED, DIM),
        "window and sinks": LinearAttention("prf", [FEATURES] * HEADS, DIM, WINDOW, SINKS),
    }
    q, k, v = vectors(1, length, torch.float32)
    seconds = {name: float("inf") for name in cases}
    for layer in cases.values():
        layer.reset_parameters()
    for _ in range(2 * repeats):
        for name, layer in cases.items():
            seconds[name] = min(seconds[name], best(lambda x=layer: x(q, k, v, scaling=SCALING), 1))
    print(f"\none layer, {length} tokens, float32")
    for name, value in seconds.items():
        print(f"{name:>16} {value * 1e3:>7.1f} ms {value / seconds['uniform'] - 1:>+6.0%}")
    return {"tokens": length} | seconds


def decode(lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    prf = feature_map()
    rows = []
    for batch in (1, 16):
        print(f"\ndecoding, float32, batch {batch}\n{'cache':>7} {'linear':>10} {'softmax':>11} {'ratio':>7}")
        for length in lengths:
            k, v = torch.randn(2, batch, HEADS, length, DIM).unbind(0)
            _, state = attend(*vectors(batch, 128, torch.float32), prf, scaling=SCALING)
            new = vectors(batch, 1, torch.float32)
            step = best(lambda n=new, s=state: attend(*n, prf, scaling=SCALING, state=s), 40 * repeats)
            cached = best(lambda q=new[0], k=k, v=v: F.scaled_dot_product_attention(q, k, v), 2 * repeats)
            rows.append({"batch": batch, "tokens": length, "linear": step, "softmax": cached, "ratio": cached / step})
            print(f"{length:>7} {step * 1e6:>7.0f} us {cached * 1e6:>8.0f} us {cached / step:>6.1f}x", flush=True)
    return rows


def memory(length: int) -> dict[str, float] | None:
    """Peak memory of a prefill beyond its inputs, in units of the inputs (queries, keys and values)."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        print("\nmemory: not measured, this system has no /proc")
        return None
    prf = feature_map()
    figures = {}
    for name, options in {"features": {}, "window and sinks": {"window": WINDOW, "sinks": SINKS}}.items():
        q, k, v = vectors(1, length, torch.float32)
        inputs = 3 * q.numel() * 4
        reset.write_text("5", encoding="utf-8")
        before = resident(status)
        attend(q, k, v, prf, scaling=SCALING, **options)
        figures[name] = (resident(status) - before) / inputs
    print(f"\npeak memory of a prefill of {length} tokens, beyond its inputs and in units of them")
    print("  " + ", ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    return {"tokens": length} | figures


def resident(status: Path) -> int:
    """Highest resident memory since the last reset, in bytes."""
    line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def roofline(length: int, figures: dict[str, Any]) -> dict[str, float]:
    """What a prefill would take if each of its resources alone were the limit."""
    measured = next(
        (x["linear"] for x in figures["prefill"] if (x["tokens"], x["dtype"]) == (length, "float32")),
        float("nan"),
    )
    rates = figures["machine"]
    features = 2 * 2 * DIM * FEATURES  # of a query and of a key
    pairs = 2 * CHUNK * (FEATURES + DIM)
    state = 2 * 2 * FEATURES * DIM  # read and made
    products = HEADS * length * (features + pairs + state) / rates["matmul_float32_flops_per_second"]
    exponentials = HEADS * length * 2 * FEATURES / rates["exponentials_per_second"]
    traffic = 4 * HEADS * length * 4 * DIM / rates["copied_bytes_per_second"]
    shares = {"measured": measured, "products": products, "exponentials": exponentials, "memory": traffic}
    print(f"\nroofline, {length} tokens, float32: measured {measured * 1e3:.1f} ms; at full rate")
    print(
        f"  products {products * 1e3:.1f} ms ({products / measured:.0%} of the matrix-multiply rate is reached), "
        f"exponentials {exponentials * 1e3:.1f} ms, inputs and output through memory {traffic * 1e3:.1f} ms"
    )
    return shares


def feature_map() -> PRF:
    prf = PRF(HEADS, DIM, FEATURES)
    prf.reset_parameters()
    return prf


def vectors(batch: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, batch, HEADS, length, DIM).to(dtype).unbind(0)


def best(call: Callable[[], Any], repeats: int) -> float:
    call()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    typer.run(main)
