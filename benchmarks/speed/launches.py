"""Kernel launches of a layer on a GPU, counted on the CPU, and the bytes that a decoded token moves: what prefill and
decode of short prompts take time by.

    python benchmarks/speed/launches.py

Kernels are not run: every operation of torch that is no view counts as one launch, and so does every Triton kernel.
Shape of a layer of Llama-3.2-1B: 32 query heads, 8 KV heads of 64. *Sizes* is the number of different sizes that its
KV heads have; head budgets that were measured give most heads a size of their own. Bytes are of one sequence, where the
token that is evicted stands in the middle; the least that any kernel can do is to read the cache once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Annotated, Any
from unittest.mock import patch

import torch
import triton.runtime.jit
import typer
from dofla.feature_maps.layer import LinearAttention
from rich.console import Console
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dofla.attention import Moments, gpu
from dofla.display import table

HEADS, GROUPS, DIM, SLOTS, SCALING = 8, 4, 64, 300, 0.125
MEMORY = {"empty", "empty_like", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"}
"""Operations without a kernel beside views."""
TRITON = "Triton: "


class _Counting(TorchDispatchMode):
    def __init__(self, by_name: Counter[str]) -> None:
        super().__init__()
        self.by_name = by_name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not func.is_view and name not in MEMORY:
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def launches(work: Callable[[], object]) -> Counter[str]:
    """The launches of some work, by name. Triton kernels do nothing."""
    by_name: Counter[str] = Counter()

    def kernel_of(kernel: Any, grid: object) -> Callable[..., None]:
        return lambda *args, **options: by_name.update([f"{TRITON}{kernel.fn.__name__}"])

    with (
        torch.no_grad(),
        patch.object(gpu, "usable", lambda *tensors: True),
        patch.object(triton.runtime.jit.KernelInterface, "__getitem__", kernel_of),
        _Counting(by_name),
    ):
        work()
    return by_name


def layer_of(sizes: int) -> LinearAttention:
    retained = [SLOTS - 8 * (head % sizes) for head in range(HEADS)]
    layer = LinearAttention("none", [0] * HEADS, DIM, 31, 4, "int8", [[(16, 3.0)]] * HEADS, retained, DIM)
    generator = torch.Generator().manual_seed(0)
    layer.reset_parameters(generator)
    for tiers in layer.coded_tiers.values():
        for coder in (tiers.key, tiers.value):
            coder.calibrate(Moments.of(torch.randn(coder.heads, 200, DIM, generator=generator)))
    return layer.requires_grad_(False)


def inputs(length: int) -> list[Tensor]:
    return [torch.randn(1, heads, length, DIM).bfloat16() for heads in (HEADS * GROUPS, HEADS, HEADS)]


def calls_of(layer: LinearAttention, length: int) -> dict[str, Callable[[], object]]:
    prompt, token, states = inputs(length), inputs(1), []
    return {
        "prompt": lambda: states.__setitem__(slice(None), layer(*prompt, scaling=SCALING, exact=True)[1]),
        "later prompt": lambda: layer(*prompt, scaling=SCALING, states=states, exact=True),
        "token": lambda: layer(*token, scaling=SCALING, states=states, in_place=True),
    }


def bytes_moved(layer: LinearAttention) -> tuple[int, int]:
    """Bytes of the cache, and those that the kernels of a decoded token read and write beside reading it once: tokens
    that move up, and what the first kernel hands to the second."""
    held = moved = 0
    for layout in layer.layouts:
        tiers, heads, slots = layout.coded_tiers, len(layout.heads), layout.coded_tiers.slots[-1]
        held += layout.bytes
        coded = tiers.key.bytes_per_token(0) + tiers.value.bytes_per_token(0)
        window = layout.window * (tiers.key.dim + tiers.value.dim + 2)
        shared = 4 * GROUPS * (2 * tiers.key.dim + slots)  # queries, and steps of the scores
        moved += 2 * heads * (slots // 2 * coded + window + shared)
    return held, moved


def main(
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 512,
    sizes: Annotated[list[int] | None, typer.Option(help="Sizes of the heads; repeatable; default 1, 4, 8.")] = None,
    names: Annotated[bool, typer.Option("--names", help="Show the most frequent launches of each row.")] = False,
) -> None:
    shown, counted = table("sizes", "call", "launches", "of Triton"), []
    for each in sizes or [1, 4, 8]:
        for call, work in calls_of(layer_of(each), length).items():
            launches(work)  # tables are on the device then
            found = launches(work)
            of_triton = sum(n for name, n in found.items() if name.startswith(TRITON))
            shown.add_row(str(each), call, str(found.total()), str(of_triton))
            counted.append((f"{each} sizes, {call}", found))
    console = Console()
    console.print(shown)
    held, moved = bytes_moved(layer_of(1))
    print(
        f"a token: a layer's cache has {held:,} bytes, {held + moved:,} are moved, {1 + moved / held:.1f} times as many"
    )
    for what, found in counted if names else ():
        console.print(what, dict(found.most_common(12)))


if __name__ == "__main__":
    typer.run(main)
