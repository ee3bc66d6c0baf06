"""Whole models on a GPU, compressed and not: prefill, decode in CUDA graphs, generate, and sequences that memory holds.

    python benchmarks/speed/gpu.py
    python benchmarks/speed/gpu.py --shape llama-8b --out gpu-8b.json

Random weights in bfloat16, a compressed cache of some 16 to 32 KiB per KV head, even head budgets. Softmax attention is
torch's scaled_dot_product_attention in the same run, with a KV cache that is written in place. The least of some
repeats counts; ratios are times softmax attention. What the time left does not allow is left out.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicLayer

import dofla
from dofla.display import table
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.converted import Converted
from dofla.serving import CompiledModel

_SMALL = {"head_dim": 64, "num_key_value_heads": 3, "hidden_size": 576, "num_attention_heads": 9}
SHAPES = {
    "tiny": {
        **{"head_dim": 16, "num_key_value_heads": 2, "hidden_size": 64, "num_attention_heads": 4},
        **{"intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
    },
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
SIZES = {"tiny": "16KiB", "smollm2": "1.5MiB", "llama-1b": "2MiB", "llama-8b": "8MiB"}
"""Of the compressed caches."""
POSITIONS, PROMPT = 262_144, 512
LONG = 32_768
"""Tokens of the sequences that are counted in memory."""


class Filled(DynamicLayer):
    """Keys and values of a long text, random, with a place for one more token, which every step takes."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.is_initialized = keys, values, True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.keys[:, :, -1:], self.values[:, :, -1:] = key_states, value_states
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return int(self.keys.shape[2]) - 1


class Bench:
    """Measurements of one model, as long as there is time.

    Args:
        model: in bfloat16.
        stop: when to stop, by ``time.monotonic``.
        repeats: of each measurement.
    """

    def __init__(self, model: PreTrainedModel, stop: float, repeats: int) -> None:
        self.model, self.stop, self.repeats, self.device = model, stop, repeats, model.device
        self.on_gpu = self.device.type == "cuda"

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _least(self, work: Callable[[], object], repeats: int | None = None) -> float | None:
        """Milliseconds, after a call that compiles; None if there is no time or memory."""
        if time.monotonic() > self.stop:
            return None
        with suppress(torch.cuda.OutOfMemoryError):
            taken = []
            for _ in range(1 + (repeats or self.repeats)):
                self._synchronize()
                start = time.perf_counter()
                work()
                self._synchronize()
                taken.append(time.perf_counter() - start)
            return 1e3 * min(taken[1:])
        return None

    def ids(self, batch: int, length: int) -> Tensor:
        return torch.randint(self.model.config.vocab_size, (batch, length), device=self.device)

    def _call(self, ids: Tensor, cache: Cache, **options: Any) -> Any:
        return self.model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}, **options)

    @torch.inference_mode()
    def prefill(self, length: int) -> dict[str, float | None]:
        """Milliseconds of a prompt, and the peak of memory in GiB."""
        ids = self.ids(1, length)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        taken = self._least(lambda: self._call(ids, DynamicCache(config=self.model.config)))
        return {"ms": taken, "gib": torch.cuda.max_memory_allocated() / 2**30 if self.on_gpu else 0.0}

    @torch.inference_mode()
    def token(self, cache: Cache, batch: int, position: int) -> float | None:
        """Milliseconds of a token of each sequence; on a GPU in a CUDA graph."""
        ids = self.ids(batch, 1)
        positions = torch.full_like(ids, position)

        def step() -> None:
            self._call(ids, cache, position_ids=positions)

        if not self.on_gpu or time.monotonic() > self.stop:
            return self._least(step)
        with suppress(torch.cuda.OutOfMemoryError):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            return self._least(graph.replay, 10 * self.repeats)
        return None

    @torch.inference_mode()
    def filled(self, batch: int, context: int) -> Cache | None:
        """A KV cache of so many tokens; None if it does not fit."""
        config, cache = self.model.config, DynamicCache(config=self.model.config)
        size = batch, config.num_key_value_heads, context + 1, config.head_dim
        with suppress(torch.cuda.OutOfMemoryError):
            make = {"device": self.device, "dtype": self.model.dtype}
            cache.layers = [Filled(torch.randn(size, **make), torch.randn(size, **make)) for _ in cache.layers]
            return cache
        return None

    @torch.inference_mode()
    def compressed(self, batch: int, prompt: int) -> Cache:
        """The compressed cache of prompts, which longer ones do not enlarge."""
        cache = DynamicCache(config=self.model.config)
        self._call(self.ids(batch, prompt), cache)
        return cache

    def generated(self, batch: int, prompt: int, tokens: int, writer: Any = None, **options: Any) -> float | None:
        """Milliseconds of a token in ``generate`` of the model, or of what writes with it."""
        ids = self.ids(batch, prompt)
        options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

        def write(count: int) -> float | None:
            limits = {"min_new_tokens": count, "max_new_tokens": count}
            return self._least(lambda: (writer or self.model).generate(ids, **limits, **options), 2)

        many, few = write(3 * tokens), write(tokens)  # the long one first: static caches keep its size
        return None if few is None or many is None else (many - few) / (2 * tokens)


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "llama-1b",
    length: Annotated[list[int] | None, typer.Option(help="Tokens of prompts, and of KV caches.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences at once.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens that generate writes at least.")] = 64,
    compiled: Annotated[bool, typer.Option(help="Also time generate from compiled graphs.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Of each measurement.")] = 3,
    seconds: Annotated[float, typer.Option(help="After which nothing more is begun.")] = 220,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the script.")] = "cuda",
    out: Annotated[str | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    begun = time.monotonic()
    prompts, contexts, batches = (
        length or [2048, 8192, 32_768, 131_072],
        length or [8, 2048, 8192, LONG],
        batch or [1, 32, 128],
    )
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=POSITIONS)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    name = torch.cuda.get_device_name() if device == "cuda" else device
    print(f"{name}, torch {torch.__version__}, {shape}")
    console, short = Console(), min(PROMPT, prompts[0])

    bench = Bench(model, begun + 0.45 * seconds, repeats)
    softmax: dict[str, Any] = {"prefill": {n: bench.prefill(n) for n in prompts}, "token": {}, "generate": {}}
    softmax["generate"] = {
        "eager": bench.generated(1, short, tokens, disable_compile=True),
        "compiled": bench.generated(1, short, tokens, cache_implementation="static") if compiled else None,
    }
    for size in batches:
        for context in contexts:
            cache = bench.filled(size, context)
            softmax["token"][size, context] = None if cache is None else bench.token(cache, size, context)
            del cache
            _free()
    kv_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * LONG * model.dtype.itemsize

    _forget_what_was_compiled(model)
    windows = torch.randint(config.vocab_size, (4, 256), device=device)
    dofla.compress(
        model, windows, SIZES[shape], head_budgets="even", retrieval_heads=0, prefill="exact", progress=False
    )
    bench = Bench(model, begun + seconds, repeats)
    ours: dict[str, Any] = {"prefill": {n: bench.prefill(n) for n in prompts}, "token": {}, "generate": {}}
    state_bytes = cache_bytes(bench.compressed(1, short))
    for size in batches:
        ours["token"][size] = bench.token(bench.compressed(size, short), size, short)
        _free()
    ours["generate"]["eager"] = bench.generated(1, short, tokens)
    ours["generate"]["compiled"] = None
    if compiled:
        ours["generate"]["compiled"] = bench.generated(1, short, tokens, CompiledModel(model))
    for layer in Converted.of(model).layers.values():
        layer.prefill = "sequential"
    sequential = bench.prefill(prompts[0])

    shown = table("prompt", "softmax", "exact prefill", 'prefill="sequential"')
    for n in prompts:
        base, own = softmax["prefill"][n], ours["prefill"][n]
        rest = _prompt(sequential, base) if n == prompts[0] else ""
        shown.add_row(f"{n:,} tokens", _prompt(base), _prompt(own, base), rest)
    console.print(shown)
    shown = table("sequences", *(f"softmax, {n:,} tokens" for n in contexts), "compressed", "of the last")
    for size in batches:
        times, own = [softmax["token"][size, n] for n in contexts], ours["token"][size]
        ratio = "–" if own is None or times[-1] is None else f"{own / times[-1]:.2f} x"
        shown.add_row(str(size), *map(_ms, times), _ms(own), ratio)
    console.print("a token in a CUDA graph" if device == "cuda" else "a token", shown)
    shown = table("generate, one sequence", "softmax", "compressed")
    for kind in ("eager", "compiled"):
        shown.add_row(kind, _ms(softmax["generate"][kind]), _ms(ours["generate"][kind]))
    console.print(shown)
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 80 * 2**30
    room = memory - sum(p.nbytes for p in model.parameters())
    fit = {"softmax": room // kv_bytes, "compressed": room // state_bytes}
    print(f"sequences of {LONG:,} tokens beside the weights in {memory / 2**30:.0f} GiB: {fit}")
    if out:
        found = {"device": name, "torch": torch.__version__, "shape": shape, "fit": fit, "sequential": sequential}
        for memory_name, times in (("softmax", softmax), ("compressed", ours)):
            found[memory_name] = {what: {str(key): x for key, x in rows.items()} for what, rows in times.items()}
        with open(out, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _forget_what_was_compiled(model: PreTrainedModel) -> None:
    """The graphs of softmax attention, and what they hold."""
    vars(model).pop("_compiled_call", None)
    torch._dynamo.reset()
    _free()


def _ms(taken: float | None) -> str:
    return "–" if taken is None else f"{taken:.2f} ms"


def _prompt(found: dict[str, float | None], base: dict[str, float | None] | None = None) -> str:
    taken, other = found["ms"], None if base is None else base["ms"]
    ratio = "" if taken is None or other is None else f", {taken / other:.2f} x"
    return f"{_ms(taken)}{ratio}, {found['gib']:.1f} GiB"


if __name__ == "__main__":
    typer.run(main)
