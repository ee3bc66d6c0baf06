"""Where the time of a decoded token goes: weights, attention, kernels of the compressed cache, Python.

    python benchmarks/speed/parts.py models/smollm2-135m
    python benchmarks/speed/parts.py models/qwen2.5-coder-0.5b --size 3.1MiB --compile

A part is what a token takes less without it: attention that returns its queries, layers that do, kernels that compute
nothing. All take turns at every token, and of each the least time is taken. The bound is the time in which all weights
are read once by as many threads. With ``--compile`` tokens stand there under torch.compile too, with packed
weights and, of softmax attention, a static cache.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import torch
import transformers
import typer
from latency import COMPILED, once, pack_weights, products, token
from model import machine
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from turns import least

import dofla
from dofla.attention.compiled import backend
from dofla.integration import interface
from dofla.runs.opening import open_original

LINEAR = "linear layers"
PARTS = {
    "softmax": {
        "linear layers": (LINEAR, ""),
        "attention": ("softmax", "softmax, no attention"),
    },
    "compressed": {
        "linear layers": (LINEAR, ""),
        "attention": ("compressed", "compressed, no attention"),
        "  of it kernels": ("compressed", "compressed, no kernels"),
        "  Python and torch on the way to them": ("compressed, no kernels", "compressed, no layers"),
        "  what transformers calls": ("compressed, no layers", "compressed, no attention"),
    },
    "softmax" + COMPILED: {},
    "compressed" + COMPILED: {},
}
"""Of each token its parts: what it takes, less what it takes without them."""


def main(
    model: Annotated[str, typer.Argument(help="A folder or a name on the hub.")],
    size: Annotated[str, typer.Option(help="Of the compressed cache, constant.")] = "1.5MiB",
    context: Annotated[int, typer.Option(help="Tokens before.")] = 512,
    dtype: str = "bfloat16",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded.")] = 48,
    compile: Annotated[bool, typer.Option("--compile", help="Under torch.compile as well.")] = False,
) -> None:
    transformers.logging.set_verbosity_error()
    pack_weights()
    print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    softmax, compressed = (open_original(model, dtype=dtype)[0].eval() for _ in range(2))
    dofla.compress(compressed, size=size, retrieval_heads=0, progress=False)
    taken = timed(softmax, compressed, context, new_tokens, compile)
    weights, bound = sum(x.nbytes for x in softmax.parameters()), once(softmax)
    print(f"weights: {weights / 2**20:.0f} MiB, read once in {1e3 * bound:.1f} ms, {weights / bound / 1e9:.1f} GB/s\n")
    print(f"{f'a token after {context}, ms':<44}{'':8}  share")
    for whole, parts in PARTS.items():
        if whole in taken:
            print(f"{whole:<44}{1e3 * taken[whole]:>8.1f}  {taken[whole] / taken['softmax']:.2f} x softmax")
            for part, (more, less) in parts.items():
                spent = taken[more] - taken.get(less, 0)
                print(f"  {part:<42}{1e3 * spent:>8.1f}  {spent / taken[whole]:.0%}", flush=True)


def timed(
    softmax: PreTrainedModel, compressed: PreTrainedModel, context: int, new_tokens: int, compile: bool
) -> dict[str, float]:
    """Seconds of a token, by what is left of it."""

    def step(own: PreTrainedModel, without: Callable[[], AbstractContextManager[Any]] = nullcontext, way: str = ""):
        read = token(own, way, 1, context, new_tokens)[0]

        def run() -> None:
            with without():
                read()

        return run

    calls = {
        "softmax": step(softmax),
        "softmax, no attention": step(softmax, partial(no_attention, "sdpa")),
        "compressed": step(compressed),
        "compressed, no attention": step(compressed, partial(no_attention, interface.LINEAR)),
        "compressed, no layers": step(compressed, no_layers),
        "compressed, no kernels": step(compressed, no_kernels),
        LINEAR: products(softmax, 1, 1),
    }
    if compile:
        calls |= {"softmax" + COMPILED: step(softmax, way=COMPILED)}
        calls |= {"compressed" + COMPILED: step(compressed, way=COMPILED)}
    with torch.inference_mode():
        return least(calls, new_tokens)


def no_attention(name: str) -> AbstractContextManager[Any]:
    """Attention that returns its queries."""

    def attention(_: Any, query: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
        return query.transpose(1, 2).contiguous(), None

    return patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {name: attention})


def no_layers() -> AbstractContextManager[Any]:
    """Layers of dofla that return their queries, and leave their states."""
    return patch.object(interface, "_run", lambda layer, entry, query, *rest, **more: query)


def no_kernels() -> AbstractContextManager[Any]:
    """Kernels that return the queries, and are given what they need."""
    arguments = backend._of_layer

    def read(self: Any, heads: Any, call: Any, state: Any) -> tuple[Tensor, Any]:
        arguments(heads, call, state.rows)
        return call.query, state

    return patch.object(backend.Compiled, "read_compressed", read)


if __name__ == "__main__":
    typer.run(main)
