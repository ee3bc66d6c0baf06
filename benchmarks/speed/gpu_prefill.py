"""Milliseconds of the prefill of a whole model on a GPU, compressed and not, and the memory it takes.

    python benchmarks/speed/gpu_prefill.py --shape llama-1b --length 2048 --length 8192 --length 32768

Random weights in bfloat16, one sequence, the cache of 64 features per KV head, head budgets even. *Exact* is the
default on a GPU; *stream* reads token by token. Ratios are to softmax attention (torch's scaled_dot_product_attention)
in the same run; the least of some repeats counts."""

from __future__ import annotations

import json
import time
from typing import Annotated

import torch
import typer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import dofla
from dofla.integration.cache import CACHE_ARGUMENT
from dofla.integration.compressed import feature_bytes
from dofla.integration.student import Student

_SMALL = {"head_dim": 64, "num_key_value_heads": 3, "hidden_size": 576, "num_attention_heads": 9}
SHAPES = {
    "smollm2": {**_SMALL, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
    "llama-1b": {
        **{"head_dim": 64, "num_key_value_heads": 8, "hidden_size": 2048, "num_attention_heads": 32},
        **{"intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256},
    },
    "llama-8b": {
        **{"head_dim": 128, "num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32},
        **{"intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256},
    },
}
POSITIONS, BUDGET = 131_072, 64


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-1b",
    length: Annotated[list[int] | None, typer.Option(help="Tokens; repeatable; default 2048, 8192, 32768.")] = None,
    streamed: Annotated[int, typer.Option(help="Longest prompt that is also read token by token.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="Prefills, after one that compiles.")] = 3,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    lengths, rows = length or [2048, 8192, 32768], []
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=POSITIONS)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}, torch {torch.__version__}, {shape}")
    softmax = {n: prefill(model, n, repeats) for n in lengths}
    windows = torch.randint(config.vocab_size, (4, 512), device=device)
    size = BUDGET * feature_bytes(model, ())
    dofla.compress(model, windows, size, head_budgets="even", prefill="exact", progress=False)
    print(f"{'tokens':>7} {'softmax':>19} {'exact':>27} {'stream':>27}")
    for n in lengths:
        row = {"tokens": n, "softmax": softmax[n], "exact": prefill(model, n, repeats)}
        if n <= streamed:
            for layer in Student.of(model).layers.values():
                layer.prefill = "stream"
            row["stream"] = prefill(model, n, 1)
            for layer in Student.of(model).layers.values():
                layer.prefill = "exact"
        rows.append(row)
        base = row["softmax"]["ms"]
        cells = [f"{x['ms']:>8.1f} ms {x['ms'] / base:>5.2f} x {x['gib']:>5.1f} GiB" for x in list(row.values())[2:]]
        print(f"{n:>7} {base:>8.1f} ms {row['softmax']['gib']:>5.1f} GiB", *cells, flush=True)
    if out:
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"device": name, "torch": torch.__version__, "shape": shape, "rows": rows}, file, indent=2)


@torch.inference_mode()
def prefill(model: PreTrainedModel, length: int, repeats: int) -> dict[str, float]:
    """The least milliseconds of a prefill, and the peak memory of all of them."""
    ids, taken = torch.randint(model.config.vocab_size, (1, length), device=model.device), []
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(1 + repeats):
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: DynamicCache(config=model.config)})
        if on_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {"ms": 1e3 * min(taken[1:]), "gib": peak}


if __name__ == "__main__":
    typer.run(main)
