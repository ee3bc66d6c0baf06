"""A decoded token of caches that grow beside one of softmax attention, by the tokens before; or a turn of several.

    python benchmarks/speed/growing.py models/smollm2-135m
    python benchmarks/speed/growing.py models/smollm2-135m --tokens 128 --calls 5 --lengths 2048

All heads hold every token (``evict=False``), as many as the default has, or none (``retrieval_heads=0``). Caches hold
one token many times, or zeros, as to read a long prompt takes minutes; time does not depend on what they hold. All take
turns at every call, and of each the least time is taken, as others on the machine can only add to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import torch
import transformers
import typer
from model import machine
from transformers import Cache, DynamicCache, PreTrainedModel
from turns import least

import dofla
from dofla.integration.cache import CACHE_ARGUMENT, cache_bytes
from dofla.integration.converted import Converted, is_converted
from dofla.runs.opening import open_original


def main(
    model: Annotated[str, typer.Argument(help="A folder or a name on the hub.")],
    lengths: Annotated[list[int] | None, typer.Option(help="Tokens before; default 512 to 32768.")] = None,
    size: Annotated[str, typer.Option(help="Of the caches that evict.")] = "1.5MiB",
    dtype: str = "bfloat16",
    calls: Annotated[int, typer.Option(min=1, help="After each length.")] = 24,
    tokens: Annotated[int, typer.Option(min=1, help="Of a call; several at once are a turn of a conversation.")] = 1,
) -> None:
    transformers.logging.set_verbosity_error()
    print(", ".join(f"{key} {value}" for key, value in machine("cpu").items()))
    models = {"softmax": open_original(model, dtype=dtype)[0].eval()}
    for options in ({"evict": False}, {"size": size}, {"size": size, "retrieval_heads": 0}):
        name = ", ".join(f"{key}={value}" for key, value in options.items())
        models[name] = dofla.compress(open_original(model, dtype=dtype)[0].eval(), **options)
    for length in lengths or [512, 2048, 8192, 32768]:
        with torch.inference_mode():
            caches = {kind: filled(own, length, calls * tokens) for kind, own in models.items()}
            taken = least({kind: call(own, caches[kind], tokens) for kind, own in models.items()}, calls)
        print(f"\n{tokens} after {length:,}, ms, beside softmax attention, MiB")
        for kind, seconds in taken.items():
            beside, held = seconds / taken["softmax"], cache_bytes(caches[kind]) / 2**20
            print(f"{kind:<36}{1e3 * seconds:>8.1f}{beside:>8.2f}{held:>8.1f}", flush=True)


def call(model: PreTrainedModel, cache: Cache, tokens: int) -> Callable[[], object]:
    """Reading so many more tokens."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    return lambda: model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def filled(model: PreTrainedModel, length: int, room: int) -> Cache:
    """A cache that holds so many tokens, and has room for more."""
    cache = DynamicCache(config=model.config)
    call(model, cache, 1)()
    if not is_converted(model):
        for index, entry in enumerate(cache.layers):
            cache.update(*(x.repeat(1, 1, length - 1, 1) for x in (entry.keys, entry.values)), index)
        return cache
    for entry, layer in zip(cache.layers, Converted.of(model).layers.values(), strict=True):
        entry.states, entry.tokens = [state.copy() for state in layer.resized(entry.states, length + room)], length
        for contents in layer.compressed.layouts.of(entry.states[0].rows.shape[-1]).open(entry.states[0]):
            contents.tier.score[..., -length:] = 0
    return cache


if __name__ == "__main__":
    typer.run(main)
